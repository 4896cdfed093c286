"""A band's span and its stacks, page by page."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from arenas import hold

from torch_uma.band import NO_PAGE, SINK, Band, PageTables
from torch_uma.errors import PlanError
from torch_uma.placement import EMPTY, Grid

BASE = 3


def band_of(grows: str = "float", span: tuple[int, int] = EMPTY, held: tuple[int, ...] = ()) -> Band:
    """Sub-pool 1 of three, with 20 pages of which the first is the sink's."""
    band = Band(1, Grid(8, 16, 1, 20, grows), 1, PageTables([BASE, 20, 2]))  # type: ignore[arg-type]
    if span != EMPTY:
        band.extend(*span)
        hold(band, held)
    return band


def pages(*of: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(of, np.int64)


def assert_holes(band: Band, expected: list[int]) -> None:
    """The holes in the order in which they stand in the stack, and nothing stale that counts."""
    assert band.hole_pages().tolist() == expected
    assert band.num_holes == len(expected)
    at = band.tables.hole_at[BASE : BASE + 20]
    assert np.flatnonzero(at >= 0).tolist() == sorted(expected)
    assert band.holes[at[expected]].tolist() == expected
    others = np.delete(band.tables.hole_at, BASE + np.array(expected, np.int64))
    assert (others == NO_PAGE).all()


def test_tables_are_flat_over_all_sub_pools() -> None:
    tables = PageTables([3, 0, 4])
    assert tables.base == [0, 3, 3, 7]
    assert tables.kind.tolist() == [0, 0, 0, 2, 2, 2, 2]
    assert (tables.v2p == NO_PAGE).all() and (tables.owner == NO_PAGE).all() and (tables.hole_at == NO_PAGE).all()
    assert {len(t) for t in (tables.v2p, tables.owner, tables.hole_at, tables.occupied, tables.occupied_bytes)} == {7}
    assert {tables.v2p.dtype, tables.owner.dtype, tables.hole_at.dtype} == {np.dtype(np.int32)}
    tables.occupied[2] = 1
    assert bytes(tables.occupied_bytes) == b"\0\0\1\0\0\0\0"
    tables.v2p_cells[1], tables.owner_cells[2], tables.hole_cells[3] = 5, 6, 7
    assert (tables.v2p[1], tables.owner[2], tables.hole_at[3], tables.kind_cells[4]) == (5, 6, 7, 2)


def test_more_pages_than_32_bit_ids_are_refused() -> None:
    with pytest.raises(PlanError, match="2,147,483,648 pages over all sub-pools do not fit 32-bit page ids; a larger"):
        PageTables([1 << 30, 1 << 30])


def test_a_new_band_is_empty_and_its_ids_ascend_above_the_sink() -> None:
    tables = PageTables([BASE, 20, 2])
    band = Band(1, Grid(8, 16, 4, 15, "up"), 2, tables)
    assert (band.index, band.base, band.span, band.num_span, band.num_held, band.top) == (1, BASE, EMPTY, 0, 0, 0)
    assert band.num_live == band.num_holes == band.num_quarantined == band.peak_live == band.moved_pages == 0
    assert tables.owner.tolist() == [NO_PAGE] * 3 + [SINK] * 2 + [NO_PAGE] * 20
    assert tables.v2p.tolist() == [NO_PAGE] * 3 + [0, 1] + [NO_PAGE] * 20
    assert band.num_free_ids == 18 and band.ids[:18][::-1].tolist() == list(range(BASE + 2, BASE + 20))
    assert len(band.holes) == 40


def test_where_a_band_lies_in_bytes() -> None:
    band = band_of(span=(4, 9), held=(4, 6, 8))
    assert (band.start_bytes(), band.end_bytes(), band.num_span) == (8 + 4 * 16, 8 + 9 * 16, 5)
    assert (band.num_live, band.num_held, band.peak_live) == (3, 3, 3)
    band.num_quarantined += 2
    assert band.num_held == 5
    band.count_live(-2)
    assert (band.num_live, band.peak_live) == (1, 3)
    band.count_live(1)
    assert (band.num_live, band.peak_live) == (2, 3)
    band.count_live(2)
    assert (band.num_live, band.peak_live) == (4, 4)


@pytest.mark.parametrize(
    ("start", "end", "count"), [(0, 20, 3), (4, 9, 3), (5, 9, 2), (4, 8, 2), (6, 6, 0), (8, 4, 0), (6, 7, 1)]
)
def test_held_pages_are_counted_within_a_range(start: int, end: int, count: int) -> None:
    band = band_of(span=(4, 9), held=(4, 6, 8))
    band.tables.occupied[[0, 1, 2, BASE + 20]] = 1  # the neighbours'
    assert band.count_held(start, end) == count


def test_an_empty_band_starts_where_it_is_told() -> None:
    band = band_of()
    band.extend(5, 8)
    assert band.span == (5, 8)
    assert_holes(band, [7, 6, 5])
    assert [band.pop_hole() for _ in range(3)] == [5, 6, 7]


@pytest.mark.parametrize(
    ("low", "high", "order"),
    [
        (5, 8, [5, 6, 7]),
        (5, 9, [8, 5, 6, 7]),
        (5, 11, [8, 9, 10, 5, 6, 7]),
        (4, 8, [4, 5, 6, 7]),
        (2, 8, [4, 3, 2, 5, 6, 7]),
        (4, 9, [4, 8, 5, 6, 7]),
        (3, 10, [4, 3, 8, 9, 5, 6, 7]),
    ],
)
def test_a_band_that_grows_hands_out_what_is_nearest_first(low: int, high: int, order: list[int]) -> None:
    band = band_of(span=(5, 8))
    band.extend(low, high)
    assert band.span == (low, high)
    assert_holes(band, order[::-1])


@pytest.mark.parametrize("span", [(6, 8), (5, 7), (9, 12), (2, 4)])
def test_extend_never_shrinks(span: tuple[int, int]) -> None:
    band = band_of(span=(5, 8))
    with pytest.raises(AssertionError, match="5, 8"):
        band.extend(*span)
    assert band.span == (5, 8)


def test_holes_are_handed_out_last_in_first_out() -> None:
    band = band_of(span=(2, 12), held=tuple(range(2, 12)))
    band.push_holes(pages(4, 9, 6))
    band.push_hole(3)
    assert_holes(band, [4, 9, 6, 3])
    assert band.pop_holes(2).tolist() == [3, 6]
    assert_holes(band, [4, 9])
    assert band.pop_hole() == 9
    assert band.pop_holes(1).tolist() == [4]
    assert_holes(band, [])


def test_more_holes_than_there_are_cannot_be_popped() -> None:
    band = band_of(span=(5, 8))
    with pytest.raises(AssertionError, match=r"\(4, 3\)"):
        band.pop_holes(4)
    assert_holes(band, [7, 6, 5])


def test_holes_can_be_claimed_from_the_middle_of_the_stack() -> None:
    band = band_of(span=(5, 11))
    band.claim_holes(pages(6, 9, 5))
    assert_holes(band, [10, 8, 7])
    assert band.top == 6  # stale entries stay until they are met
    assert band.pop_hole() == 7
    band.push_hole(6)
    assert_holes(band, [10, 8, 6])
    assert band.pop_holes(2).tolist() == [6, 8]
    assert_holes(band, [10])
    assert band.pop_holes(1).tolist() == [10]
    assert_holes(band, [])


def test_a_claimed_hole_that_comes_back_counts_once() -> None:
    band = band_of(span=(5, 9))
    band.claim_holes(pages(7))
    band.push_hole(7)
    assert_holes(band, [8, 6, 5, 7])
    assert band.pop_holes(4).tolist() == [7, 5, 6, 8]


def test_few_valid_entries_far_down_the_stack_are_found() -> None:
    band = band_of(span=(2, 19))
    band.claim_holes(np.arange(2, 17, dtype=np.int64))
    assert_holes(band, [18, 17])
    assert band.pop_holes(1).tolist() == [17]
    assert_holes(band, [18])
    band = band_of(span=(2, 19))
    band.claim_holes(np.delete(np.arange(2, 19, dtype=np.int64), [3, 7, 12]))
    assert band.pop_holes(2).tolist() == [5, 9]
    assert_holes(band, [14])


def test_the_stack_never_overflows_however_often_holes_are_claimed_and_pushed() -> None:
    one_by_one, at_once = band_of(span=(1, 20)), band_of(span=(1, 20))
    for step in range(200):
        page = 1 + step * 7 % 19
        one_by_one.claim_holes(pages(page))
        one_by_one.push_hole(page)
        some = pages(page, 1 + (page + 4) % 19, 1 + (page + 9) % 19)
        at_once.claim_holes(some)
        at_once.push_holes(some)
        for band in (one_by_one, at_once):
            assert band.num_holes == 19 and band.top <= len(band.holes) == 40
            assert sorted(band.hole_pages().tolist()) == list(range(1, 20))
    assert one_by_one.hole_pages()[-1] == page and at_once.hole_pages()[-3:].tolist() == some.tolist()
    assert_holes(one_by_one, one_by_one.hole_pages().tolist())
    assert_holes(at_once, at_once.hole_pages().tolist())


@pytest.mark.parametrize("push", [lambda band: band.push_hole(0), lambda band: band.push_holes(pages(0))])
def test_a_grid_of_one_page_is_enough(push: Callable[[Band], None]) -> None:
    band = Band(0, Grid(0, 16, 0, 1, "up"), 0, PageTables([1]))
    band.extend(0, 1)
    for _ in range(5):
        band.claim_holes(pages(0))
        push(band)
        assert band.hole_pages().tolist() == [0] and band.num_holes == 1 and band.top <= 2
    assert band.pop_hole() == 0 and band.pop_holes(0).tolist() == []


def test_stale_entries_are_dropped_only_where_the_stack_is_full() -> None:
    band = band_of(span=(1, 20))
    band.claim_holes(np.arange(1, 20, dtype=np.int64))
    band.push_holes(np.arange(1, 20, dtype=np.int64))
    assert band.top == 38
    band.claim_holes(pages(1, 2))
    band.push_holes(pages(1, 2))
    assert band.top == 40
    band.claim_holes(pages(3))
    band.push_hole(3)
    assert band.top == 19
    assert_holes(band, [*range(4, 20), 1, 2, 3])


@pytest.mark.parametrize(
    ("count", "run"), [(1, [3]), (2, [6, 7]), (3, [6, 7, 8]), (4, [11, 12, 13, 14]), (5, None), (9, None)]
)
def test_the_lowest_run_of_holes(count: int, run: list[int] | None) -> None:
    band = band_of(span=(2, 15), held=(2, 4, 5, 9, 10))
    found = band.find_run(count)
    assert (None if found is None else found.tolist()) == run
    taken = band.take_run(count) if count <= 8 else pages()
    if run is not None:
        assert taken.tolist() == run
    assert band.num_holes == 8 - len(taken) and not set(taken.tolist()) & set(band.hole_pages().tolist())
    assert len(set(taken.tolist())) == len(taken)
    assert_holes(band, band.hole_pages().tolist())


def test_without_a_run_the_top_of_the_stack_is_taken() -> None:
    band = band_of(span=(2, 8), held=(3, 5))
    band.claim_holes(pages(6))
    assert band.take_run(3).tolist() == [2, 4, 7]


def test_retract_gives_back_the_holes_outside() -> None:
    band = band_of(span=(2, 15), held=(6, 8))
    band.retract(5, 10)
    assert band.span == (5, 10)
    assert_holes(band, [9, 7, 5])
    band.retract(0, 9)
    assert band.span == (5, 9)
    assert_holes(band, [7, 5])
    band.retract(6, 30)
    assert band.span == (6, 9)
    assert_holes(band, [7])
    band.retract(0, 30)
    assert band.span == (6, 9) and band.top > 0
    band.claim_holes(pages(7))
    band.retract(6, 9)
    assert band.span == (6, 9) and band.top == 0


@pytest.mark.parametrize("span", [(2, 2), (20, 30), (15, 20), (9, 4), (0, 2)])
def test_a_band_retracted_to_nothing_is_empty(span: tuple[int, int]) -> None:
    band = band_of(span=(2, 15))
    band.retract(*span)
    assert band.span == EMPTY and band.top == 0
    assert_holes(band, [])


def test_held_pages_are_never_retracted_to_nothing() -> None:
    band = band_of(span=(2, 5), held=(3,))
    with pytest.raises(AssertionError):
        band.retract(7, 9)


@pytest.mark.parametrize(
    ("grows", "held", "span"),
    [
        ("float", (5, 9), (5, 10)),
        ("float", (2, 9), (2, 10)),
        ("float", (5, 14), (5, 15)),
        ("float", (2, 14), (2, 15)),
        ("float", (7,), (7, 8)),
        ("float", (3, 13), (3, 14)),
        ("float", (), EMPTY),
        ("up", (5, 9), (2, 10)),
        ("up", (5, 14), (2, 15)),
        ("up", (2,), (2, 3)),
        ("up", (), EMPTY),
        ("down", (5, 9), (5, 15)),
        ("down", (2, 9), (2, 15)),
        ("down", (14,), (14, 15)),
        ("down", (), EMPTY),
    ],
)
def test_frontiers_are_pulled_back_over_free_pages(grows: str, held: tuple[int, ...], span: tuple[int, int]) -> None:
    band = band_of(grows, (2, 15), held)
    band.tables.occupied[[BASE - 1, BASE + 1, BASE + 15]] = 1  # not this band's
    band.pull_back()
    assert band.span == span
    expected = set(range(*span)) - set(held)
    assert set(band.hole_pages().tolist()) == expected and band.num_holes == len(expected)


def test_a_band_of_quarantined_pages_alone_keeps_its_span() -> None:
    band = band_of("float", (2, 15), (7,))
    band.num_live, band.num_quarantined = 0, 1
    band.pull_back()
    assert band.span == (7, 8)
    band = band_of()
    band.pull_back()
    assert band.span == EMPTY


@pytest.mark.parametrize("every", [1, 7, 400, 5000])
def test_the_lowest_and_highest_pages_are_found_however_far_they_lie(every: int) -> None:
    num_pages = 4001
    tables = PageTables([3, num_pages])
    band = Band(1, Grid(0, 16, 1, num_pages, "up"), 1, tables)
    band.extend(1, num_pages)
    held = np.arange(1, num_pages)[every - 1 :: every]
    band.claim_holes(held)
    tables.occupied[band.base + held] = 1
    free = np.setdiff1d(np.arange(1, num_pages), held)
    for start, end in ((1, num_pages), (1, 1), (90, 95), (17, 3333)):
        assert band.count_held(start, end) == np.count_nonzero((held >= start) & (held < end))
        for is_held, pages in ((True, held), (False, free)):
            inside = pages[(pages >= start) & (pages < end)].tolist()
            for count in (0, 1, 5, 300, 9000):
                assert band.lowest(count, start, end, held=is_held).tolist() == inside[:count]
                assert band.highest(count, start, end, held=is_held).tolist() == inside[max(0, len(inside) - count) :]
