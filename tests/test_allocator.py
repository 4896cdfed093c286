"""What the allocator hands out, takes back, moves and refuses."""

from __future__ import annotations

import numpy as np
import pytest
from arenas import books, small_plan

from torch_uma.allocator import Allocator
from torch_uma.errors import PageError, PlanError


@pytest.mark.parametrize("demand", [[], [0], [1, 1], [0, 0, 0, 0], [1, -1, 0], [0, 0, -1]])
def test_a_demand_that_is_not_one_count_for_each_sub_pool_is_refused(demand: list[int]) -> None:
    allocator = Allocator(small_plan("one_float"))
    allocator.release(allocator.reserve([2, 2, 2])[::2])
    before = books(allocator)
    for act in (allocator.quote, allocator.reserve, lambda wrong: allocator.reserve(wrong, runs={0})):
        with pytest.raises(PageError, match="one number of pages, 0 or more, for each of state, window_8, full; got"):
            act(demand)
    assert books(allocator) == before


def test_hints_and_split_exclude_each_other() -> None:
    with pytest.raises(PlanError, match="give hints or split, not both"):
        Allocator(small_plan("one_float"), hints={"state": 0.1}, split={"state": 0.5})


@pytest.mark.parametrize(
    ("sources", "destinations"),
    [
        ([3], [6]),  # not live
        ([-1], [6]),
        ([19 + 22], [6]),  # live, but another sub-pool's
        ([10**6], [6]),
        ([0], [1]),  # not free
        ([0], [19]),
        ([0], [-1]),
        ([0, 1], [6]),
        ([0], [6, 7]),
        ([0, 0], [6, 7]),
        ([0, 1], [6, 6]),
        ([0, 0, 1], [6, 7, 7]),  # as many distinct on both sides
        ([2], [6]),  # pinned
    ],
)
def test_a_move_of_what_is_not_live_or_to_what_is_not_free_is_refused(
    sources: list[int], destinations: list[int]
) -> None:
    allocator = Allocator(small_plan("one_float"))
    pages = allocator.reserve([3, 4, 5])
    allocator.lease(pages[2:3], "a host copy")
    before = books(allocator)
    with pytest.raises(
        PageError, match=rf"move of {len(sources)} pages of 'state': sources must be live and not pinned"
    ):
        allocator.move(0, np.array(sources), np.array(destinations))
    assert books(allocator) == before
