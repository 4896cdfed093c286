"""`check()` finds each kind of damage to the books, whatever else is in order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from arenas import SHAPES, small_plan

from torch_uma.allocator import Allocator
from torch_uma.band import NO_PAGE
from torch_uma.errors import InvariantError, TorchUmaError

STATE, WINDOW, FULL = range(3)
Damage = Callable[[Allocator], None]


def busy() -> Allocator:
    """State (0, 3) live but for 1; window (22, 26) with 23 in quarantine and 24 free; full (123, 128), 126 leased."""
    allocator = Allocator(small_plan("one_float"))
    pages = allocator.reserve([3, 4, 5])
    allocator.lease(pages[[4, 10]], "a copy")
    allocator.release(pages[[1, 4, 5]])
    return allocator


def put(table: str, k: int, page: int, value: int) -> Damage:
    """Overwrite one cell of one sub-pool's part of a table."""

    def damage(allocator: Allocator) -> None:
        getattr(allocator.tables, table)[allocator.id_base[k] + page] = value

    return damage


def book(k: int, **changes: int) -> Damage:
    """Change numbers of one band."""

    def damage(allocator: Allocator) -> None:
        for name, change in changes.items():
            setattr(allocator.bands[k], name, getattr(allocator.bands[k], name) + change)

    return damage


def lose_an_id(allocator: Allocator) -> None:
    allocator.bands[FULL].num_free_ids -= 1


def double_an_id(allocator: Allocator) -> None:
    allocator.bands[FULL].ids[0] = allocator.bands[FULL].ids[1]


def free_a_live_id(allocator: Allocator) -> None:
    band = allocator.bands[FULL]
    band.ids[band.num_free_ids - 1] = 64


def swap_owners(allocator: Allocator) -> None:
    owner = allocator.tables.owner
    owner[19 + 22], owner[19 + 25] = owner[19 + 25], owner[19 + 22]


def own_across(allocator: Allocator) -> None:
    owner = allocator.tables.owner
    owner[0], owner[19 + 22] = owner[19 + 22], owner[0]


def end_a_lease_in_the_counts(allocator: Allocator) -> None:
    allocator.ledger.counts[61 + 126] = 0


def lose_a_lease(allocator: Allocator) -> None:
    allocator.ledger.leases.clear()
    allocator.ledger.counts[:] = 0


def unstack_a_hole(allocator: Allocator) -> None:
    allocator.bands[STATE].holes[allocator.tables.hole_at[1]] = 2


def lease_a_free_page(allocator: Allocator) -> None:
    lease = next(iter(allocator.ledger.leases))
    lease.places = np.array([5, *lease.places])
    allocator.ledger.counts[5] += 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (book(WINDOW, low=-15, high=-15), "sub-pool 'window_8' starts below byte 720, where the one before ends"),
        (book(STATE, high=10), "sub-pool 'window_8' starts below byte 2800"),
        (book(FULL, low=-1, high=1), "the last band ends at byte 4128, past the arena of 4096"),
        (book(WINDOW, high=1), r"'window_8': \(2, 1, 1\) do not fill the span \(22, 27\)"),
        (book(WINDOW, low=-1), r"'window_8': \(2, 1, 1\) do not fill the span \(21, 26\)"),
        (book(STATE, low=1), "'state': the low end starts at 1"),
        (book(FULL, high=-1), "'full': the high end ends at 127"),
        (book(FULL, low=1), r"'full': a held page lies outside the span \(124, 128\)"),
        (book(WINDOW, low=3), r"'window_8': a held page lies outside the span \(25, 26\)"),
        (book(WINDOW, high=-1), r"'window_8': a held page lies outside the span \(22, 25\)"),
        (put("hole_at", WINDOW, 26, 0), r"'window_8': a hole page lies outside the span \(22, 26\)"),
        (put("hole_at", WINDOW, 21, 0), r"'window_8': a hole page lies outside the span \(22, 26\)"),
        (put("occupied", STATE, 0, 0), "'state': a live page counts as free"),
        (put("occupied", STATE, 1, 1), "'state': a hole counts as held"),
        (put("occupied", WINDOW, 0, 1), "'window_8': a page of the sink was handed out"),
        (put("owner", FULL, 2, 100), "'full': a page of the sink was handed out"),
        (book(WINDOW, num_live=1), r"'window_8': \(live, holes, quarantined\) are \(2, 1, 1\), booked as \(3, 1, 1\)"),
        (book(WINDOW, num_holes=-1), r"are \(2, 1, 1\), booked as \(2, 0, 1\)"),
        (book(WINDOW, num_quarantined=1), r"are \(2, 1, 1\), booked as \(2, 1, 2\)"),
        (unstack_a_hole, "'state': the hole stack is off"),
        (book(STATE, top=-3), "'state': the hole stack is off"),
        (put("owner", FULL, 124, 64), "'full': one id owns two pages"),
        (own_across, "'state': a page is owned by an id of another sub-pool"),
        (swap_owners, "'window_8': v2p and its inverse disagree"),
        (put("v2p", FULL, 3, 124), "'full': v2p and its inverse disagree"),
        (put("v2p", FULL, 100, 124), "'full': v2p names pages that nobody owns"),
        (lose_an_id, "'full': ids were lost or doubled"),
        (double_an_id, "'full': ids were lost or doubled"),
        (free_a_live_id, "'full': ids were lost or doubled"),
        (end_a_lease_in_the_counts, "lease counts are not those of the open leases"),
        (lease_a_free_page, "a leased page counts as free"),
        (lose_a_lease, "a page is quarantined, but nobody leases it"),
    ],
)
def test_damage_is_found(damage: Damage, message: str) -> None:
    allocator = busy()
    allocator.check()
    damage(allocator)
    with pytest.raises(InvariantError, match=message):
        allocator.check()


def test_an_empty_band_has_an_empty_span() -> None:
    allocator = Allocator(small_plan("one_float"))
    allocator.bands[WINDOW].low = allocator.bands[WINDOW].high = 7
    with pytest.raises(InvariantError, match=r"'window_8': empty, but its span is \(7, 7\)"):
        allocator.check()


def test_a_span_stays_in_its_region() -> None:
    allocator = Allocator(small_plan("one_float"), split={"state": 0.5})
    allocator.reserve([0, 1, 0])
    allocator.bands[WINDOW].grid = allocator.bands[WINDOW].grid._replace(first_page=30)
    with pytest.raises(InvariantError, match=r"'window_8': span \(\d+, \d+\) leaves its grid"):
        allocator.check()


def test_damage_is_an_assertion_and_one_of_ours() -> None:
    assert issubclass(InvariantError, AssertionError) and issubclass(InvariantError, TorchUmaError)


@pytest.mark.parametrize("shape", SHAPES)
def test_new_and_used_arenas_are_in_order(shape: str) -> None:
    allocator = Allocator(small_plan(shape))
    allocator.check()
    pages = allocator.reserve([2] * len(allocator.bands))
    allocator.check()
    assert (allocator.tables.owner[allocator.tables.owner >= 0] != NO_PAGE).all()
    allocator.release(pages)
    allocator.check()
