"""Which pages move where, and in which order, page by page."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from arenas import bands_of, hold

from torch_uma.band import Band
from torch_uma.moves import Wave, num_outside, pack, plan_moves, trimmed
from torch_uma.placement import EMPTY, Grid, Span

UP = Grid(0, 16, 1, 40, "up")
LOWER = Grid(0, 32, 0, 20, "float")
UPPER = Grid(16, 48, 0, 13, "float")
DOWN = Grid(0, 64, 0, 10, "down")  # all end near byte 640
GRIDS = [UP, LOWER, UPPER, DOWN]


def pair(grows: str, span: Span, held: Sequence[int]) -> list[Band]:
    """A band behind an empty one, so that places are not pages."""
    return bands_of([UP, Grid(0, 16, 1, 20, grows)], [EMPTY, span], [(), held])  # type: ignore[arg-type]


def band_of(grows: str, span: Span, held: Sequence[int]) -> Band:
    return pair(grows, span, held)[1]


def as_lists(waves: Sequence[Wave]) -> list[tuple[int, list[int], list[int]]]:
    return [(index, sources.tolist(), destinations.tolist()) for index, sources, destinations in waves]


@pytest.mark.parametrize(
    ("target", "count"),
    [
        ((3, 9), 0),
        ((4, 8), 2),
        ((4, 9), 1),
        ((3, 8), 1),
        ((5, 6), 2),
        ((0, 3), 3),
        ((9, 12), 3),
        ((0, 20), 0),
        ((8, 9), 2),
    ],
)
def test_pages_outside_a_target_are_counted(target: Span, count: int) -> None:
    assert num_outside(band_of("float", (3, 9), (3, 5, 8)), target) == count


@pytest.mark.parametrize(
    ("held", "target", "span"),
    [
        ((4, 7), (5, 6), (4, 8)),
        ((4, 7), (4, 8), (4, 8)),
        ((4, 7), (0, 12), (3, 9)),
        ((4, 7), (3, 9), (3, 9)),
        ((4, 7), (8, 12), (4, 9)),
        ((4, 7), (12, 15), (4, 9)),
        ((4, 7), (0, 2), (3, 8)),
        ((5, 6), (5, 7), (5, 7)),
        ((8,), (8, 12), (8, 9)),
        ((3,), (1, 4), (3, 4)),
        ((3, 8), (5, 6), (3, 9)),
        ((5,), (2, 5), (3, 6)),
        ((7,), (5, 12), (5, 9)),
        ((5,), (4, 8), (4, 8)),
        ((), (12, 15), (9, 9)),
        ((), (1, 2), (3, 3)),
    ],
)
def test_a_span_is_trimmed_to_what_is_held_outside_its_target(held: tuple[int, ...], target: Span, span: Span) -> None:
    assert trimmed(band_of("float", (3, 9), held), target) == span


def test_place_0_is_a_place() -> None:
    (band,) = bands_of([LOWER], [(0, 4)], [(0, 2)])
    assert trimmed(band, (1, 6)) == (0, 4) and trimmed(band, (6, 9)) == (0, 4)
    assert num_outside(band, (1, 6)) == 1
    assert as_lists(plan_moves([band], [(1, 6)]).waves) == [(0, [0], [4])]


@pytest.mark.parametrize(
    ("grows", "span", "held", "target", "moves"),
    [
        ("float", (4, 8), (4, 5, 6, 7), (6, 10), ([4, 5], [8, 9])),
        ("float", (4, 8), (4, 5, 6, 7), (2, 6), ([6, 7], [2, 3])),
        ("float", (4, 8), (4, 5, 6, 7), (12, 16), ([4, 5, 6, 7], [12, 13, 14, 15])),
        ("float", (10, 14), (10, 11, 12, 13), (2, 6), ([10, 11, 12, 13], [2, 3, 4, 5])),
        # new pages first, those beside the pages that stay; then holes
        ("float", (4, 8), (4, 5, 6, 7), (5, 12), ([4], [8])),
        ("float", (5, 8), (5, 6, 7), (1, 7), ([7], [4])),
        ("float", (4, 8), (4, 6, 7), (3, 6), ([6, 7], [3, 5])),
        ("float", (4, 9), (4, 5, 8), (6, 10), ([4, 5], [6, 9])),
        ("float", (4, 9), (4, 8), (5, 8), ([4, 8], [5, 6])),
        ("float", (4, 9), (4, 5, 8), (3, 8), ([8], [3])),
        ("float", (4, 9), (4, 5, 6, 7, 8), (3, 8), ([8], [3])),
        ("float", (4, 8), (4, 5, 6, 7), (4, 8), None),
        ("float", (4, 8), (5, 6), (5, 7), None),
        ("up", (1, 8), (1, 3, 6, 7), (1, 5), ([6, 7], [2, 4])),
        ("up", (1, 9), (1, 8), (1, 5), ([8], [2])),
        ("down", (12, 20), (12, 13, 15, 19), (14, 20), ([12, 13], [17, 18])),
        ("down", (12, 20), (12, 17), (14, 20), ([12], [19])),
        ("down", (12, 20), (12, 13, 15), (16, 20), ([12, 13, 15], [17, 18, 19])),
    ],
)
def test_pages_move_from_outside_the_target_to_inside(
    grows: str, span: Span, held: tuple[int, ...], target: Span, moves: tuple[list[int], list[int]] | None
) -> None:
    bands = pair(grows, span, held)
    bands[0].tables.occupied[: bands[1].base] = 1  # the neighbour's pages are not this band's
    plan = plan_moves(bands, [EMPTY, target])
    assert plan.targets == (EMPTY, target)
    assert as_lists(plan.waves) == ([] if moves is None else [(1, *moves)])


def test_holes_that_were_claimed_are_no_destinations() -> None:
    bands = pair("up", (1, 9), (1, 8))
    hold(bands[1], [2, 4])
    assert as_lists(plan_moves(bands, [EMPTY, (1, 6)]).waves) == [(1, [8], [3])]


@pytest.mark.parametrize(
    ("spans", "targets", "order"),
    [
        # everything is shifted up by its lower neighbour: the highest goes first
        ([(1, 11), (6, 9), (6, 8), (9, 10)], [(1, 17), (9, 12), (8, 10), (9, 10)], [2, 1]),
        # everything is shifted down by its upper neighbour: the lowest goes first
        ([(1, 2), (10, 13), (9, 11), (9, 10)], [(1, 2), (2, 5), (4, 6), (5, 10)], [1, 2]),
        # apart: neither waits
        ([(1, 2), (10, 13), (9, 11), (9, 10)], [(1, 2), (2, 5), (10, 12), (9, 10)], [1, 2]),
        # the float leaves what the low end shrinks from, and the other stays
        ([(1, 11), (6, 9), (10, 12), (9, 10)], [(1, 13), (7, 10), (10, 12), (9, 10)], [1]),
        ([(1, 11), (6, 9), (10, 12), (9, 10)], [(1, 11), (6, 9), (10, 12), (9, 10)], []),
    ],
)
def test_a_band_moves_after_the_neighbour_whose_place_it_takes(
    spans: list[Span], targets: list[Span], order: list[int]
) -> None:
    bands = bands_of(GRIDS, spans, [range(*span) for span in spans])
    for band, target in zip(bands, targets):  # those of the ends stay where they are here
        if band.grid.grows in ("up", "down"):
            assert num_outside(band, target) == 0
    assert [wave.subpool for wave in plan_moves(bands, targets).waves] == order


def test_an_end_gives_way_before_a_float_takes_its_place() -> None:
    # the low end packs from 9 pages to 4, and the lower float moves down to where it was
    bands = bands_of([UP, LOWER], [(1, 10), (5, 9)], [(1, 2, 8, 9), range(5, 9)])
    plan = plan_moves(bands, [(1, 5), (3, 7)])
    assert as_lists(plan.waves) == [(0, [8, 9], [3, 4]), (1, [7, 8], [3, 4])]
    # the other way round: the float goes first, the high end packs towards what it left
    bands = bands_of([LOWER, DOWN], [(10, 14), (7, 10)], [range(10, 14), range(7, 10)])
    assert as_lists(plan_moves(bands, [(6, 10), (7, 10)]).waves) == [(0, [10, 11, 12, 13], [6, 7, 8, 9])]


def test_a_float_waits_for_an_end_that_has_to_pack_and_for_nobody_else() -> None:
    bands = bands_of([LOWER, DOWN], [(2, 6), (3, 10)], [range(2, 6), (3, 4, 9)])
    plan = plan_moves(bands, [(7, 11), (6, 10)])
    assert as_lists(plan.waves) == [(1, [3, 4], [7, 8]), (0, [2, 3, 4, 5], [7, 8, 9, 10])]


def test_touching_is_not_taking() -> None:
    # the lower float's target ends exactly where the upper one starts today: no wait, so order of index
    bands = bands_of([LOWER, UPPER], [(0, 2), (5, 7)], [range(2), range(5, 7)])
    assert UPPER.origin_bytes + 5 * UPPER.page_bytes == 8 * LOWER.page_bytes
    assert [wave.subpool for wave in plan_moves(bands, [(6, 8), (9, 11)]).waves] == [0, 1]
    assert [wave.subpool for wave in plan_moves(bands, [(7, 9), (9, 11)]).waves] == [1, 0]
    bands = bands_of([LOWER, UPPER], [(5, 8), (9, 11)], [range(5, 8), range(9, 11)])
    assert [wave.subpool for wave in plan_moves(bands, [(0, 3), (5, 7)]).waves] == [0, 1]


def test_bands_without_pages_are_nobodys_neighbours() -> None:
    bands = bands_of([LOWER, UPPER, LOWER], [(0, 4), EMPTY, (4, 8)], [range(4), (), range(4, 8)])
    plan = plan_moves(bands, [(4, 8), EMPTY, (8, 12)])
    assert [wave.subpool for wave in plan.waves] == [2, 0]


@pytest.mark.parametrize(
    ("grows", "held", "pin", "budget_pages", "packed"),
    [
        ("up", (2, 5, 8, 10), None, 99, ([8, 10], [3, 4], (2, 6))),
        ("up", (2, 5, 8, 10), None, 2, ([8, 10], [3, 4], (2, 8))),
        ("up", (2, 5, 8, 10), None, 1, ([10], [3], (2, 10))),
        ("up", (2, 5, 8, 10), (8, 9), 99, ([10], [3], (2, 9))),
        ("up", (2, 5, 8, 10), (5, 11), 99, ([], [], (2, 11))),
        ("up", (2, 5, 8, 11), (5, 12), 99, None),
        ("up", (2, 3, 4, 5), None, 99, ([], [], (2, 6))),
        ("up", (2, 5, 8, 10), None, 0, None),
        ("up", (2, 5, 8, 10), None, -3, None),
        ("up", tuple(range(2, 12)), None, 99, None),
        ("down", (2, 4, 7, 11), None, 99, ([2, 4, 7], [8, 9, 10], (8, 12))),
        ("down", (3, 8, 11), None, 99, ([3, 8], [9, 10], (9, 12))),
        ("down", (3, 8, 11), None, 1, ([3], [10], (4, 12))),
        ("down", (3, 8, 11), (8, 9), 99, ([3], [10], (8, 12))),
        ("down", (2, 11), (2, 3), 99, None),
        ("float", (2, 3, 4, 11), None, 99, ([11], [5], (2, 6))),
        ("float", (2, 9, 10, 11), None, 99, ([2], [8], (8, 12))),
        ("float", (2, 3, 10, 11), None, 99, ([10, 11], [4, 5], (2, 6))),  # as many either way: down
        # pins decide to which side, since only one of them gains
        ("float", (2, 3, 10, 11), (10, 11), 99, ([2, 3], [8, 9], (8, 12))),
        ("float", (2, 3, 10, 11), (3, 4), 99, ([10, 11], [4, 5], (2, 6))),
        ("float", (2, 3, 4, 11), (11, 12), 99, ([2, 3, 4], [8, 9, 10], (8, 12))),
        ("float", (2, 6, 11), (2, 12), 99, None),
        ("float", (2, 9, 10, 11), (2, 3), 99, ([9, 10, 11], [3, 4, 5], (2, 6))),
    ],
)
def test_a_band_is_packed_into_its_own_holes(
    grows: str,
    held: tuple[int, ...],
    pin: Span | None,
    budget_pages: int,
    packed: tuple[list[int], list[int], Span] | None,
) -> None:
    band = band_of(grows, (2, 12), held)
    band.tables.occupied[: band.base] = 1
    found = pack(band, pin, budget_pages)
    if packed is None:
        assert found is None
    else:
        sources, destinations, span = packed
        assert found is not None and found[1] == span
        assert as_lists([found[0]]) == [(1, sources, destinations)]
