"""Whether demands fit: the three-step answer, byte by byte, on one arena of state | window | full, of 208, 96 and 32
bytes a page; and pages more or fewer, beside a slow search in random arenas.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from arenas import SHAPES, books, small_plan
from worlds import World

from torch_uma.allocator import Allocator
from torch_uma.errors import OutOfMemory, PageError, PlanError
from torch_uma.placement import Grid, Quote
from torch_uma.room import Solution

STATE, WINDOW, FULL = range(3)


def crowded(**kwargs: object) -> tuple[Allocator, list[int]]:
    """State (0, 9) of which only page 8 is held, window (22, 26), full (78, 128); and the ids that are live."""
    allocator = Allocator(small_plan("one_float"), hints={"state": 0.5}, **kwargs)  # type: ignore[arg-type]
    states = allocator.reserve([9, 0, 0])
    others = allocator.reserve([0, 4, 0]).tolist() + allocator.reserve([0, 0, 50]).tolist()
    allocator.release(states[:8])
    assert [band.span for band in allocator.bands] == [(0, 9), (22, 26), (78, 128)]
    return allocator, [int(states[8]), *others]


def spans(allocator: Allocator) -> list[tuple[int, int]]:
    return [band.span for band in allocator.bands]


@pytest.mark.parametrize(
    ("demand", "how", "move_bytes", "after"),
    [
        ([0, 0, 0], "in_place", 0, [(0, 9), (22, 26), (78, 128)]),
        ([8, 0, 0], "in_place", 0, [(0, 9), (22, 26), (78, 128)]),
        ([9, 0, 0], "refused", 0, None),
        ([0, 1, 0], "in_place", 0, [(0, 9), (21, 26), (78, 128)]),
        ([8, 1, 0], "in_place", 0, [(0, 9), (21, 26), (78, 128)]),
        ([0, 2, 0], "compact", 208, [(0, 8), (20, 26), (78, 128)]),
        ([0, 5, 0], "compact", 208, [(0, 7), (17, 26), (78, 128)]),
        ([3, 5, 0], "compact", 208, [(0, 7), (17, 26), (78, 128)]),
        ([0, 18, 0], "compact", 208, [(0, 1), (4, 26), (78, 128)]),
        ([0, 19, 0], "refused", 0, None),
        ([0, 0, 1], "redistribute", 96, [(0, 9), (21, 25), (77, 128)]),
        ([0, 0, 3], "redistribute", 96, [(0, 9), (21, 25), (75, 128)]),
        ([0, 0, 20], "redistribute", 208 + 4 * 96, [(0, 6), (15, 19), (58, 128)]),
        ([0, 0, 54], "redistribute", 208 + 4 * 96, [(0, 1), (4, 8), (24, 128)]),
        ([0, 0, 55], "refused", 0, None),
    ],
)
def test_the_cheapest_step_that_fits(
    demand: list[int], how: str, move_bytes: int, after: list[tuple[int, int]] | None
) -> None:
    allocator, _ = crowded()
    before = books(allocator)
    quote = allocator.quote(demand)
    assert (quote.demand, quote.how, quote.move_bytes, quote.fits) == (
        tuple(demand),
        how,
        move_bytes,
        after is not None,
    )
    assert books(allocator) == before
    moved = sum(band.moved_pages * band.grid.page_bytes for band in allocator.bands)
    if after is None:
        with pytest.raises(OutOfMemory) as refused:
            allocator.reserve(demand)
        assert refused.value.quote == quote and books(allocator) == before
    else:
        assert len(allocator.reserve(demand)) == sum(demand)
        assert spans(allocator) == after
        assert sum(band.moved_pages * band.grid.page_bytes for band in allocator.bands) - moved == move_bytes
        allocator.check()


@pytest.mark.parametrize(
    ("demand", "binding", "relief", "fits_empty"),
    [
        ([0, 0, 55], "full", (1, 1, 1), True),
        ([0, 0, 60], "full", (1, 2, 6), True),
        ([0, 0, 63], "full", (1, 3, 9), True),
        ([0, 0, 64], "full", (None, 4, 10), True),
        ([0, 0, 73], "full", (None, None, 19), True),
        ([0, 0, 200], "full", (None, None, None), False),
        ([9, 0, 0], "state", (1, 1, 3), True),
        ([0, 19, 0], "window_8", (1, 1, 3), True),
        ([8, 14, 0], "window_8", (None, None, 39), True),
        ([100, 1, 0], "state", (None, None, None), False),
        ([0, 19, 99], "window_8", (None, None, None), False),
        ([1, 18, 99], "window_8", (None, None, None), False),
        ([0, 18, 1], "full", (1, 1, 1), True),
    ],
)
def test_a_refusal_names_what_binds_and_what_would_help(
    demand: list[int], binding: str, relief: tuple[int | None, ...], fits_empty: bool
) -> None:
    allocator, _ = crowded()
    expected = dict(zip(["state", "window_8", "full"], relief))
    assert allocator.quote(demand) == Quote(tuple(demand), "refused", 0, binding, expected, fits_empty)


def test_pinned_pages_are_no_relief_and_bound_what_can_be_done() -> None:
    allocator, pages = crowded()
    state, window = pages[0], pages[1]
    lease = allocator.lease([state], "a copy")
    assert allocator.room.pins() == [(8, 9), None, None] and allocator.room.pin(STATE) == (8, 9)
    # the window can go down to page 21 only, so that the high end can start at page 75
    assert allocator.quote([0, 0, 3]).how == "redistribute"
    refusal = allocator.quote([0, 0, 4])
    assert refusal.relief == {"state": None, "window_8": 1, "full": 1}
    second = allocator.lease([window, pages[5]], "a copy")  # window page 22, full page 78
    assert allocator.room.pins() == [(8, 9), (22, 23), (78, 79)]
    assert allocator.quote([0, 0, 4]).relief == {"state": None, "window_8": 1, "full": 1}
    assert allocator.quote([0, 0, 9]).relief == {"state": None, "window_8": 2, "full": 6}
    assert allocator.quote([0, 0, 10]).relief == {"state": None, "window_8": None, "full": 7}
    assert allocator.quote([0, 0, 52]).relief == {"state": None, "window_8": None, "full": 49}
    assert allocator.quote([0, 0, 53]).relief == {"state": None, "window_8": None, "full": None}
    lease.close()
    second.close()
    assert allocator.room.pins() == [None, None, None] and allocator.quote([0, 0, 54]).fits


def test_quarantined_pages_are_no_relief() -> None:
    allocator, pages = crowded()
    lease = allocator.lease(pages[1:3], "a copy")
    allocator.release(pages[1:3])
    assert allocator.room.pins() == [None, (22, 24), None]
    assert allocator.quote([0, 0, 7]).relief == {"state": None, "window_8": None, "full": 1}
    assert allocator.quote([0, 0, 6]).how == "redistribute"
    lease.close()
    assert allocator.room.pins() == [None, None, None]


def test_pages_of_open_steps_are_asked_for_by_moves_alone() -> None:
    allocator, pages = crowded()
    asked = []

    def pages_of_step() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        asked.append(1)
        return np.array([pages[4], pages[3]], np.int64)  # window pages 25 and 24

    handle = allocator.pin_while(pages_of_step)
    empty_step = allocator.pin_while(lambda: np.empty(0, np.int64))
    allocator.reserve([1, 1, 0])
    allocator.release(allocator.reserve([1, 0, 0]))
    allocator.release_one(allocator.reserve_one(STATE))
    assert allocator.quote([2, 0, 0]).fits and not asked
    lease = allocator.lease([pages[2]], "a copy")  # window page 23
    assert allocator.room.pins() == [None, (23, 26), None] and len(asked) == 1
    assert allocator.room.pinned_places(WINDOW).tolist() == [19 + 23, 19 + 24, 19 + 25]
    assert allocator.room.pinned_places(STATE).tolist() == [] and allocator.room.pin(FULL) is None
    assert allocator.room.pin(WINDOW) == (23, 26)
    assert not allocator.quote([0, 0, 1]).fits
    lease.close()
    assert allocator.room.pins() == [None, (24, 26), None]
    allocator.unpin(handle)
    allocator.unpin(empty_step)
    assert allocator.room.pins() == [None, None, None] and allocator.quote([0, 0, 1]).how == "redistribute"


def test_a_plan_of_moves_is_a_value() -> None:
    allocator, _ = crowded()
    assert allocator.room.solve([0, 5, 0]) == Solution("compact", [(0, 7), (17, 26), (78, 128)])
    assert allocator.room.solve([0, 0, 20]) == Solution("redistribute", [(0, 6), (15, 19), (58, 128)])
    assert allocator.room.solve([0, 0, 0]) == Solution("in_place", [(0, 9), (22, 26), (78, 128)])
    assert allocator.room.solve([0, 0, 55]) is None


def test_a_band_is_extended_by_a_page_where_there_is_a_gap() -> None:
    allocator, _ = crowded()
    assert not allocator.room.extend_by_one(STATE)  # page 9 ends at byte 2,176, the window starts at 2,112
    assert [allocator.room.extend_by_one(WINDOW) for _ in range(2)] == [True, False]
    assert not allocator.room.extend_by_one(FULL)  # the window ends where it starts
    assert spans(allocator) == [(0, 9), (21, 26), (78, 128)]
    assert allocator.bands[WINDOW].hole_pages().tolist() == [21]
    empty = Allocator(small_plan("one_float"))
    assert not any(empty.room.extend_by_one(k) for k in range(3))


def test_a_float_is_extended_upwards_first_and_to_the_last_byte() -> None:
    allocator = Allocator(small_plan("one_float"))
    allocator.reserve([0, 1, 0])
    low = allocator.bands[WINDOW].low
    while allocator.room.extend_by_one(WINDOW):
        assert allocator.bands[WINDOW].low == low or allocator.bands[WINDOW].high == 42
    assert spans(allocator) == [(0, 0), (1, 42), (0, 0)]
    allocator = Allocator(small_plan("one_float"))
    allocator.reserve([1, 1, 1])
    while allocator.room.extend_by_one(WINDOW):
        pass
    assert spans(allocator) == [(0, 1), (4, 42), (127, 128)]  # from byte 384 (the state ends at 304) to 4,032 of 4,064


def test_ends_are_extended_to_the_last_byte() -> None:
    allocator = Allocator(small_plan("state_full", page_size=1))
    allocator.reserve([1, 235])
    assert spans(allocator) == [(0, 1), (21, 256)] and allocator.bands[1].start_bytes() == 16 + 2 * 160
    assert [allocator.room.extend_by_one(0) for _ in range(2)] == [True, False]
    assert spans(allocator) == [(0, 2), (21, 256)]
    allocator = Allocator(small_plan("state_full", page_size=1))
    allocator.reserve([1, 1])
    assert allocator.bands[0].end_bytes() == 11 * 16
    while allocator.room.extend_by_one(1):
        pass
    assert spans(allocator) == [(0, 1), (11, 256)]


def test_an_end_alone_is_extended_over_the_whole_grid() -> None:
    for k, whole in ((STATE, (0, 19)), (FULL, (3, 128))):
        allocator = Allocator(small_plan("one_float"))
        allocator.reserve_one(k)
        while allocator.room.extend_by_one(k):
            pass
        assert allocator.bands[k].span == whole


def test_free_places_are_holes_and_the_gaps_beside() -> None:
    allocator, pages = crowded()
    allocator.release([pages[2], pages[6]])
    assert allocator.free_places(STATE).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert allocator.free_places(WINDOW).tolist() == [21, 23]
    assert allocator.free_places(FULL).tolist() == [79]
    allocator.release(pages[1:2])
    assert allocator.free_places(WINDOW).tolist() == [21, 22, 23]
    assert allocator.free_places(FULL).tolist() == [79]
    assert allocator.free_places(STATE).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9]
    allocator.release(pages[3:5])
    assert allocator.free_places(STATE).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 10]
    assert allocator.free_places(WINDOW).tolist() == [] and allocator.free_places(FULL).tolist() == [*range(62, 78), 79]
    assert Allocator(small_plan("one_float")).free_places(STATE).tolist() == []


# Runs


def run_of(allocator: Allocator, demand: list[int], runs: set[int]) -> list[int]:
    return [int(allocator.v2p[page]) for page in allocator.reserve(demand, runs=runs)]


def test_a_run_is_taken_from_holes_if_there_is_one() -> None:
    allocator = Allocator(small_plan("full"))
    pages = allocator.reserve([30])
    places = allocator.v2p[pages]
    allocator.release(pages[[3, 10, 11, 20, 21, 22, 29]])
    first = int(places[0])
    assert run_of(allocator, [3], {0}) == [first + 20, first + 21, first + 22]
    assert run_of(allocator, [2], {0}) == [first + 10, first + 11]
    assert run_of(allocator, [1], {0}) == [first + 3]


def test_a_run_is_taken_at_the_frontier_if_holes_hold_none() -> None:
    allocator = Allocator(small_plan("full"))  # grows down from page 128
    pages = allocator.reserve([30])
    allocator.release(pages[[3, 10, 20]])
    assert run_of(allocator, [3], {0}) == [95, 96, 97]
    assert allocator.bands[0].num_holes == 3
    assert run_of(allocator, [3], set()) == [98 + 20, 98 + 10, 98 + 3]  # without the wish the holes would do


def test_a_float_takes_its_run_on_the_side_with_more_room() -> None:
    allocator, pages = crowded()
    allocator.release([pages[2]])  # window page 23
    assert run_of(allocator, [0, 2, 0], {WINDOW}) == [21, 23]  # gap 21 and hole 23: no run anywhere, still served
    allocator = Allocator(small_plan("one_float"), hints={"state": 0.2})
    pages = allocator.reserve([1, 6, 1]).tolist()
    assert allocator.bands[WINDOW].span == (10, 16)
    allocator.release([pages[2], pages[4]])  # holes 11 and 13
    assert run_of(allocator, [0, 2, 0], {WINDOW}) == [16, 17]
    assert run_of(allocator, [2, 3, 2], {STATE, WINDOW, FULL}) == [1, 2, 18, 19, 20, 125, 126]
    allocator.check()


def test_a_float_grows_downwards_by_what_it_misses_or_by_a_whole_run() -> None:
    cases: list[tuple[int, set[int], int, set[int]]] = [
        (2, set(), 34, {34, 36}),
        (3, set(), 33, {33, 34, 36}),
        (3, {WINDOW}, 32, {32, 33, 34}),
    ]
    for count, runs, low, places in cases:
        allocator = Allocator(small_plan("one_float"), hints={"state": 0.8})
        pages = allocator.reserve([0, 4, 0])
        assert allocator.bands[WINDOW].span == (35, 39)
        allocator.release(pages[1:2])
        assert set(run_of(allocator, [0, count, 0], runs)) == places
        assert allocator.bands[WINDOW].span == (low, 39)


def test_a_float_grows_to_the_side_with_more_room() -> None:
    allocator = Allocator(small_plan("one_float"), hints={"state": 0.5})
    allocator.reserve([9, 4, 0])  # one page below, 16 above
    assert run_of(allocator, [0, 1, 0], set()) == [26]
    assert spans(allocator) == [(0, 9), (22, 27), (0, 0)]


def test_a_run_is_not_split_over_both_sides() -> None:
    allocator = Allocator(small_plan("one_float"), hints={"state": 0.5})
    pages = allocator.reserve([9, 6, 0])
    allocator.reserve([0, 0, 41])
    allocator.release(pages[[10, 12]])
    before = spans(allocator)
    assert before == [(0, 9), (22, 28), (87, 128)]  # one page on either side
    assert sorted(run_of(allocator, [0, 2, 0], {WINDOW})) == [23, 25] and spans(allocator) == before


def test_a_run_needs_room_for_nobody_else() -> None:
    allocator = Allocator(small_plan("one_float"), hints={"state": 0.5})
    allocator.release(allocator.reserve([9, 4, 0])[3:4])  # the state has a hole and cannot grow by a page
    pages = allocator.reserve([0, 0, 5])
    allocator.release(pages[[1, 3]])
    assert run_of(allocator, [0, 0, 2], {FULL}) == [121, 122]
    assert spans(allocator) == [(0, 9), (22, 26), (121, 128)]


def test_a_run_is_a_preference_never_a_condition() -> None:
    allocator = Allocator(small_plan("full"))
    pages = allocator.reserve([127])
    allocator.release(pages[[3, 10, 20]])
    places = run_of(allocator, [3], {0})
    assert sorted(places) == [1 + 3, 1 + 10, 1 + 20]
    with pytest.raises(OutOfMemory):
        allocator.reserve([1], runs={0})


# Hints and splits


@pytest.mark.parametrize(
    ("hints", "low"),
    [({"state": 0.5}, 22), ({"state": 0.25}, 12), ({"window_8": 0.5}, 12), ({"state": 1.0}, 41), ({"full": 0.0}, 22)],
)
def test_a_hint_says_where_a_float_starts(hints: dict[str, float], low: int) -> None:
    allocator = Allocator(small_plan("one_float"), hints=hints)
    allocator.reserve([0, 1, 0])
    assert allocator.bands[WINDOW].span == (low, low + 1)


def test_hints_limit_nothing() -> None:
    allocator = Allocator(small_plan("one_float"), hints={"state": 0.1, "window_8": 0.1})
    assert len(allocator.reserve([0, 41, 0])) == 41
    assert len(Allocator(small_plan("one_float"), hints={"state": 0.0}).reserve([19, 0, 0])) == 19


def test_a_split_freezes_the_frontiers() -> None:
    allocator = Allocator(small_plan("one_float"), split={"state": 0.5, "window_8": 0.25, "full": 0.25})
    assert allocator.room.grids == [
        Grid(96, 208, 0, 9, "up"),  # bytes 96 to 2,096
        Grid(0, 96, 22, 32, "float"),  # to 3,096
        Grid(0, 32, 97, 128, "down"),  # to 4,096
    ]
    pages = allocator.reserve([9, 0, 0])
    refusal = allocator.quote([1, 0, 0])  # although all else is empty
    assert refusal == Quote((1, 0, 0), "refused", 0, "state", {"state": 1, "window_8": None, "full": None}, True)
    with pytest.raises(OutOfMemory):
        allocator.reserve_one(STATE)
    assert len(allocator.reserve([0, 10, 31])) == 41
    assert not any(allocator.quote([int(k == index) for k in range(3)]).fits for index in range(3))
    allocator.check()
    allocator.release(pages[2:3])
    assert allocator.reserve_one(STATE) == pages[2]
    allocator.compact()
    allocator.check()


def test_shares_that_are_not_given_are_equal_parts_of_the_rest() -> None:
    even = Allocator(small_plan("one_float"), split={"state": 0.5}).room.grids
    assert even == Allocator(small_plan("one_float"), split={"state": 0.5, "window_8": 0.25, "full": 0.25}).room.grids
    nothing = Allocator(small_plan("one_float"), split={"state": 0.5, "window_8": 0.0}).room.grids
    assert [(grid.first_page, grid.num_pages) for grid in nothing] == [(0, 9), (22, 22), (66, 128)]
    assert (
        Allocator(small_plan("one_float"), split={"state": 0.5, "window_8": 0.0}).quote([0, 1, 0]).binding == "window_8"
    )
    all_given = Allocator(small_plan("one_float"), split={"state": 0.5, "window_8": 0.25, "full": 0.125}).room.grids
    assert [(grid.first_page, grid.num_pages) for grid in all_given] == [(0, 9), (22, 32), (97, 112)]


@pytest.mark.parametrize(
    "shares", [{"states": 0.5}, {"state": -0.1}, {"state": 1.1}, {"state": 0.6, "full": 0.5}, {"state": "a"}, 0.5]
)
def test_shares_that_make_no_sense_are_refused(shares: Any) -> None:
    makers: list[Callable[[], Allocator]] = [
        lambda: Allocator(small_plan("one_float"), hints=shares),
        lambda: Allocator(small_plan("one_float"), split=shares),
    ]
    for make in makers:
        with pytest.raises(
            PlanError, match="must be at least 0, at most 1 in all, and name sub-pools of the plan: state, "
        ):
            make()


def test_the_same_calls_do_with_a_split_as_without() -> None:
    free, fixed = Allocator(small_plan("one_float")), Allocator(small_plan("one_float"), split={"state": 0.5})
    for allocator in (free, fixed):
        pages = allocator.reserve([4, 4, 4], runs={FULL})
        lease = allocator.lease(pages[:2], "a copy")
        allocator.release(pages[::2])
        lease.close()
        allocator.move(STATE, allocator.v2p[pages[1:2]].astype(np.int64), allocator.free_places(STATE)[-1:])
        assert allocator.compact() > 0
        allocator.check()
    assert free.reserve([3, 3, 3]).tolist() == fixed.reserve([3, 3, 3]).tolist()


@pytest.mark.parametrize("frontiers", ["", "split"])
@pytest.mark.parametrize("shape", SHAPES)
def test_pages_more_or_fewer_fit_where_a_search_finds_a_place(shape: str, frontiers: str) -> None:
    """Pinned pages stay, however many are to go: the search is asked for the pages that there are then."""
    seen: Counter[tuple[bool, bool]] = Counter()
    for seed, page_size in ((1, 1), (2, 3)):
        print("seed", seed)
        rnd = random.Random(seed)
        world = World(shape, page_size, frontiers)
        operations = [world.reserve, world.reserve, world.release, world.open_lease, world.close_lease]
        operations += [world.open_step, world.close_step]
        for _ in range(60):
            rnd.choice(operations)(rnd)
            held, pins, pinned, before = world.held(), world.pins(), world.pinned(), books(world.allocator)
            stuck = [sum(index == k for index, _ in pinned) for k in world.kinds]
            for _ in range(4):
                more = [rnd.choice([0, 1, -1, -count, -count - 1, rnd.randint(-count, 9)]) for count in held]
                if rnd.random() < 0.5:  # exactly what there is room for, or one page more
                    k = rnd.choice(world.kinds)
                    counts = [max(count + change, least) for count, change, least in zip(held, more, stuck)]
                    more[k] = world.search.most(k, counts, pins) - held[k] + rnd.choice([0, 1])
                counts = [max(count + change, least) for count, change, least in zip(held, more, stuck)]
                fits = world.allocator.fits(more)
                assert fits == world.search.fits(counts, pins), (more, held, pins)
                if min(more) >= 0:
                    assert fits == world.allocator.quote(more).fits
                seen[fits, bool(pinned)] += 1
            assert books(world.allocator) == before
        world.allocator.check()
    assert all(seen[fits, pinned] for fits in (True, False) for pinned in (True, False)), seen


def test_pages_more_or_fewer_are_one_whole_number_for_each_sub_pool() -> None:
    allocator, pages = crowded()
    assert allocator.fits(np.array([0, 0, 54])) and not allocator.fits([0, 0, 55])
    assert allocator.fits((np.int32(-1), 0, 55)) and allocator.fits([-1, -4, 73 - 1]) and allocator.fits([-9, -9, -99])
    lease = allocator.lease(pages[:1], "a copy")  # the state
    assert allocator.fits([-1, 0, 3]) and not allocator.fits([-1, 0, 4])  # it cannot leave
    lease.close()
    for wrong in ([0, 0], [0, 0, 0, 0], [0, 0.5, 0], [0, None, 0], 3, None, "abc"):
        with pytest.raises(PageError, match="one whole number for each of state, window_8, full"):
            allocator.fits(wrong)  # type: ignore[arg-type]
