"""Whom to take out of memory: against trying every choice."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from torch_uma.scheduling.victims import Fits, choose_victims
from torch_uma.tables import Int64Array


def fits_within(*limits: int) -> Fits:
    return lambda stages: bool((stages <= np.array(limits)).all())


def choose(
    fits: Fits,
    stages: list[list[int]],
    shares: list[list[list[int]]],
    priorities: list[int] | None = None,
    costs: list[float] | None = None,
    at_least: int = 0,
) -> list[int] | None:
    count = len(shares)
    return choose_victims(
        fits,
        np.array(stages),
        np.array(shares, np.int64).reshape(count, len(stages), len(stages[0])),
        np.array([0] * count if priorities is None else priorities, np.int64),
        np.array([1.0] * count if costs is None else costs, np.float64),
        np.arange(count),
        at_least,
    )


def test_nobody_goes_where_all_fits() -> None:
    assert choose(fits_within(9), [[9]], [[[4]], [[5]]]) == []


def test_nobody_goes_where_that_would_not_help() -> None:
    assert choose(fits_within(9, 0), [[9, 3]], [[[4, 1]], [[5, 1]]]) is None
    assert choose(fits_within(9), [[10]], []) is None


def test_who_frees_enough_on_the_side_that_is_short_goes_alone() -> None:
    shares = [[[9, 0]], [[1, 3]], [[1, 2]]]  # the first is the cheapest, and no help
    assert choose(fits_within(99, 4), [[20, 6]], shares, costs=[1.0, 3.0, 2.0]) == [2]
    assert choose(fits_within(99, 3), [[20, 6]], shares, costs=[1.0, 3.0, 2.0]) == [1]
    assert choose(fits_within(12, 9), [[20, 6]], shares, costs=[1.0, 3.0, 2.0]) == [0]


def test_of_equals_the_last_to_arrive_goes() -> None:
    assert choose(fits_within(9), [[10]], [[[1]], [[1]], [[1]]]) == [2]


def test_the_less_important_go_first_though_they_cost_more() -> None:
    shares = [[[2]], [[1]], [[1]]]
    assert choose(fits_within(9), [[11]], shares, priorities=[1, 0, 0], costs=[1.0, 5.0, 5.0]) == [2, 1]
    assert choose(fits_within(8), [[11]], shares, priorities=[1, 0, 0], costs=[1.0, 5.0, 5.0]) == [2, 0]


def test_who_did_not_have_to_go_stays() -> None:
    shares = [[[1, 0]], [[3, 0]], [[0, 4]]]  # by cost; the first is of no use beside the second
    assert set(choose(fits_within(7, 6), [[10, 10]], shares, costs=[1.0, 2.0, 3.0]) or []) == {1, 2}


def test_so_many_go_as_are_asked_for() -> None:
    shares = [[[1]], [[1]], [[3]]]
    assert choose(fits_within(9), [[9]], shares, costs=[3.0, 2.0, 1.0], at_least=1) == [2]
    assert len(choose(fits_within(9), [[9]], shares, at_least=2) or []) == 2
    assert choose(fits_within(9), [[9]], shares, at_least=4) is None
    assert choose(fits_within(9), [[9]], [], at_least=1) is None


def test_every_stage_has_to_fit() -> None:
    stages, shares = [[5], [9], [12]], [[[3], [1], [0]], [[0], [2], [4]]]
    assert choose(fits_within(10), stages, shares) == [1]


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_as_good_as_any(seed: int) -> None:
    """It fits; nobody could stay; none of a higher priority goes in vain; who costs least goes alone."""
    print("seed", seed)
    random = np.random.default_rng(seed)
    outcomes = dict.fromkeys(("none", "one", "several", "refused"), 0)
    for _ in range(400):
        count, num_stages, num_subpools = (int(random.integers(1, most)) for most in (7, 4, 4))
        shares: Int64Array = random.integers(0, 5, (count, num_stages, num_subpools))
        stages = shares.sum(axis=0) + random.integers(0, 4, (num_stages, num_subpools))
        limits = (stages.max(axis=0) * random.uniform(0.2, 1.1, num_subpools)).astype(np.int64)
        priorities, costs = random.integers(0, 3, count), random.integers(1, 9, count).astype(np.float64)
        arrivals, at_least = random.permutation(count), int(random.integers(0, 2))
        fits = fits_within(*limits.tolist())
        chosen = choose_victims(fits, stages, shares, priorities, costs, arrivals, at_least)
        possible = [
            set(some)
            for size in range(at_least, count + 1)
            for some in combinations(range(count), size)
            if fits(stages - shares[list(some)].sum(axis=0))
        ]
        if chosen is None:
            assert not possible
            outcomes["refused"] += 1
            continue
        victims = set(chosen)
        assert len(victims) == len(chosen) and victims in possible
        assert not any(some < victims for some in possible), "somebody went who could have stayed"
        if victims:
            highest = int(priorities[chosen].max())
            assert highest == min(int(priorities[list(some)].max()) for some in possible if some)
            alone = [some for (some,) in (tuple(s) for s in possible if len(s) == 1) if priorities[some] <= highest]
            if alone:
                assert chosen == [min(alone, key=lambda some: (costs[some], -arrivals[some]))]
            else:
                assert len(victims) > 1
        outcomes[("none", "one", "several")[min(len(victims), 2)]] += 1
    assert min(outcomes.values()) > 3, outcomes
