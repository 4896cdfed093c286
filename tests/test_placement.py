"""Where bands can lie: exact spans by hand, and agreement with a search over all boundaries."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from arenas import BoundarySearch

from torch_uma.placement import EMPTY, Grid, Quote, Span, highest_spans, lowest_spans, target_spans

UP = Grid(0, 16, 1, 20, "up")
FLOAT = Grid(0, 32, 0, 10, "float")
DOWN = Grid(32, 48, 0, 6, "down")  # ends where the others do, at byte 320
GRIDS = [UP, FLOAT, DOWN]
NO_PINS = [None, None, None]


@pytest.mark.parametrize(
    ("counts", "spans"),
    [
        ([0, 0, 0], [EMPTY, EMPTY, EMPTY]),
        ([3, 2, 1], [(1, 4), (2, 4), (5, 6)]),
        ([4, 2, 1], [(1, 5), (3, 5), (5, 6)]),
        ([0, 2, 0], [EMPTY, (0, 2), EMPTY]),
        ([19, 0, 0], [(1, 20), EMPTY, EMPTY]),
        ([20, 0, 0], None),
        ([0, 10, 0], [EMPTY, (0, 10), EMPTY]),
        ([0, 11, 0], None),
        ([0, 0, 6], [EMPTY, EMPTY, (0, 6)]),
        ([0, 0, 7], None),
        ([3, 6, 1], [(1, 4), (2, 8), (5, 6)]),
        ([3, 7, 1], None),  # the float would end at 288, the high end starts at 272
        ([1, 0, 6], [(1, 2), EMPTY, (0, 6)]),
        ([2, 0, 6], None),
    ],
)
def test_bands_are_placed_as_low_as_they_go(counts: list[int], spans: list[Span] | None) -> None:
    assert lowest_spans(GRIDS, counts) == spans
    assert lowest_spans(GRIDS, counts, NO_PINS) == spans


@pytest.mark.parametrize(
    ("counts", "pins", "spans"),
    [
        ([1, 1, 1], [(4, 6), None, None], [(1, 6), (3, 4), (5, 6)]),
        ([1, 1, 1], [None, (4, 5), None], [(1, 2), (1, 5), (5, 6)]),
        ([1, 1, 1], [None, None, (3, 4)], [(1, 2), (1, 2), (3, 6)]),
        ([1, 2, 1], [None, (1, 2), None], [(1, 2), (1, 3), (5, 6)]),
        ([2, 2, 1], [None, (1, 2), None], None),
        ([1, 8, 1], [None, (1, 2), None], None),
        ([1, 4, 1], [None, None, (1, 2)], None),  # the float ends at 160, the pin starts at 80
        ([0, 2, 1], [None, None, (1, 2)], [EMPTY, (0, 2), (1, 6)]),
        ([0, 3, 1], [None, None, (1, 2)], None),
        ([1, 1, 1], [(10, 20), None, None], None),
    ],
)
def test_spans_reach_over_pins(counts: list[int], pins: list[Span | None], spans: list[Span] | None) -> None:
    assert lowest_spans(GRIDS, counts, pins) == spans


@pytest.mark.parametrize(
    ("counts", "pins", "spans"),
    [
        ([0, 0, 0], NO_PINS, [EMPTY, EMPTY, EMPTY]),
        ([3, 2, 1], NO_PINS, [(1, 4), (6, 8), (5, 6)]),
        ([3, 2, 0], NO_PINS, [(1, 4), (8, 10), EMPTY]),
        ([3, 2, 1], [(5, 7), None, None], [(1, 7), (6, 8), (5, 6)]),
        ([3, 2, 1], [None, (3, 4), None], [(1, 4), (3, 8), (5, 6)]),
        ([3, 2, 1], [None, (7, 8), None], [(1, 4), (6, 8), (5, 6)]),
        ([3, 2, 1], [None, None, (3, 4)], [(1, 4), (3, 5), (3, 6)]),
    ],
)
def test_bands_are_placed_as_high_as_they_go(counts: list[int], pins: list[Span | None], spans: list[Span]) -> None:
    assert highest_spans(GRIDS, counts, pins) == spans


@pytest.mark.parametrize(
    ("counts", "pins", "current", "preferred", "spans"),
    [
        # empty bands start in the middle of their room, or where they are wished, as far as that is possible
        ([3, 2, 1], NO_PINS, [EMPTY, EMPTY, EMPTY], None, [(1, 4), (4, 6), (5, 6)]),
        ([3, 2, 1], NO_PINS, [EMPTY, EMPTY, EMPTY], 3, [(1, 4), (3, 5), (5, 6)]),
        ([3, 2, 1], NO_PINS, [EMPTY, EMPTY, EMPTY], 0, [(1, 4), (2, 4), (5, 6)]),
        ([3, 2, 1], NO_PINS, [EMPTY, EMPTY, EMPTY], 9, [(1, 4), (6, 8), (5, 6)]),
        # what does not have to move stays, free pages included
        ([3, 2, 1], NO_PINS, [(1, 5), (4, 7), (5, 6)], 4, [(1, 5), (4, 7), (5, 6)]),
        ([3, 2, 1], NO_PINS, [(1, 5), (4, 7), (4, 6)], 4, [(1, 5), (4, 7), (4, 6)]),
        # a neighbour takes just the free pages that it needs
        ([3, 6, 1], NO_PINS, [(1, 7), (4, 7), (4, 6)], 4, [(1, 4), (2, 8), (5, 6)]),
        ([3, 5, 1], NO_PINS, [(1, 7), (4, 7), (4, 6)], 4, [(1, 6), (3, 8), (5, 6)]),
        ([3, 4, 1], NO_PINS, [(1, 7), (4, 7), (4, 6)], 4, [(1, 7), (4, 8), (5, 6)]),
        ([9, 2, 1], NO_PINS, [(1, 7), (4, 7), (4, 6)], 4, [(1, 10), (5, 7), (4, 6)]),
        ([9, 1, 2], NO_PINS, [(1, 7), (4, 7), (5, 6)], 4, [(1, 10), (5, 7), (4, 6)]),
        # pins are reached over, on both sides
        ([3, 1, 1], [None, (3, 6), None], [(1, 4), (3, 6), (5, 6)], 3, [(1, 4), (3, 6), (5, 6)]),
        ([5, 1, 1], [(2, 3), (3, 5), (4, 5)], [(1, 4), (3, 6), (4, 6)], 3, [(1, 6), (3, 6), (4, 6)]),
        ([0, 2, 1], NO_PINS, [EMPTY, (4, 7), (5, 6)], 4, [EMPTY, (4, 7), (5, 6)]),
    ],
)
def test_targets_are_near_to_where_bands_lie(
    counts: list[int], pins: list[Span | None], current: list[Span], preferred: int | None, spans: list[Span]
) -> None:
    assert target_spans(GRIDS, counts, pins, current, [None, preferred, None]) == spans


@pytest.mark.parametrize("grid", GRIDS)
def test_a_band_alone_keeps_its_free_pages(grid: Grid) -> None:
    span = {"up": (1, 5), "float": (2, 5), "down": (2, 6)}[grid.grows]
    assert target_spans([grid], [2], [None], [span], [span[0]]) == [span]


def test_no_targets_for_what_does_not_fit() -> None:
    assert target_spans(GRIDS, [3, 7, 1], NO_PINS, [EMPTY] * 3, [None] * 3) is None


def random_grids(rnd: random.Random) -> tuple[list[Grid], int]:
    num_bands, arena_bytes = rnd.randint(1, 5), rnd.randint(20, 40)
    grids = []
    for k in range(num_bands):
        page_bytes = rnd.randint(1, 6)
        grows = "up" if k == 0 and num_bands > 1 else "down" if k == num_bands - 1 else "float"
        origin_bytes = arena_bytes % page_bytes if grows == "down" else rnd.randrange(page_bytes)
        num_pages = (arena_bytes - origin_bytes) // page_bytes
        grids.append(Grid(origin_bytes, page_bytes, rnd.randrange(3), num_pages, grows))  # type: ignore[arg-type]
    return grids, arena_bytes


def in_bytes(grid: Grid, span: Span) -> Span:
    return (grid.origin_bytes + span[0] * grid.page_bytes, grid.origin_bytes + span[1] * grid.page_bytes)


def assert_lawful(
    grids: Sequence[Grid], spans: Sequence[Span], counts: Sequence[int], pins: Sequence[Span | None]
) -> None:
    edge_bytes = 0
    for grid, span, count, pin in zip(grids, spans, counts, pins):
        if not count:
            assert span == EMPTY
            continue
        start_bytes, end_bytes = in_bytes(grid, span)
        assert start_bytes >= edge_bytes
        edge_bytes = end_bytes
        assert grid.first_page <= span[0] and span[1] <= grid.num_pages and span[1] - span[0] >= count
        assert pin is None or (span[0] <= pin[0] and pin[1] <= span[1])
        assert grid.grows != "up" or span[0] == grid.first_page
        assert grid.grows != "down" or span[1] == grid.num_pages


@pytest.mark.parametrize("seed", range(4))
def test_a_demand_fits_if_and_only_if_some_boundaries_exist(seed: int) -> None:
    rnd = random.Random(seed)
    num_fitting = num_refused = 0
    for _ in range(400):
        grids, arena_bytes = random_grids(rnd)
        search = BoundarySearch(grids, 0, arena_bytes)
        counts, pins, current, wishes = [], [], [], []
        free = list(range(arena_bytes + 1))
        starts = sorted(rnd.sample(free, len(grids)))
        for k, (grid, start_bytes) in enumerate(zip(grids, starts)):
            # today's span lies between two random bytes, the pin inside it
            end_bytes = starts[k + 1] if k + 1 < len(grids) else arena_bytes
            low = max(grid.first_page, -((grid.origin_bytes - start_bytes) // grid.page_bytes))
            high = min(grid.num_pages, (end_bytes - grid.origin_bytes) // grid.page_bytes)
            low = grid.first_page if grid.grows == "up" else low
            high = grid.num_pages if grid.grows == "down" else high
            span = (low, high) if low < high else EMPTY
            pin = None
            if span[1] and rnd.random() < 0.3:
                first = rnd.randrange(low, high)
                pin = (first, rnd.randint(first + 1, high))
            current.append(span)
            pins.append(pin)
            counts.append(max(int(pin is not None), rnd.choice([0, 1, 2, rnd.randrange(12)])))
            wishes.append(rnd.choice([None, rnd.randrange(20)]))
        spans = lowest_spans(grids, counts, pins)
        assert (spans is not None) == search.fits(counts, pins), (grids, counts, pins)
        targets = target_spans(grids, counts, pins, current, wishes)
        if spans is None:
            assert targets is None
            num_refused += 1
            continue
        num_fitting += 1
        highest = highest_spans(grids, counts, pins)
        for lawful in (spans, highest, targets):
            assert lawful is not None
            assert_lawful(grids, lawful, counts, pins)
        for grid, low_span, high_span, count in zip(grids, spans, highest, counts):
            if grid.grows == "float" and count:
                assert low_span[0] <= high_span[0] and low_span[1] <= high_span[1]
        # where today's spans do, they are the targets
        kept = [span if count else EMPTY for span, count in zip(spans, counts)]
        starts_now: list[int | None] = [span[0] for span in kept]
        assert target_spans(grids, counts, pins, kept, starts_now) == kept
    assert num_fitting > 50 and num_refused > 50


def test_a_quote_fits_unless_it_is_refused() -> None:
    assert Quote((1, 0), "in_place") == Quote((1, 0), "in_place", 0, None, None, True)
    assert all(Quote((1,), how).fits for how in ("in_place", "compact", "redistribute"))
    assert not Quote((1,), "refused").fits
