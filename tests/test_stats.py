"""Where the bytes of an arena are, by hand."""

from __future__ import annotations

import pytest
from arenas import SHAPES, small_plan

from torch_uma.allocator import Allocator
from torch_uma.plan import plan
from torch_uma.stats import Stats, SubPoolStats


def busy() -> Allocator:
    """State 3 live; window 2 live, 1 hole, 1 in quarantine; full 4 live after a peak of 5."""
    allocator = Allocator(small_plan("one_float"))
    pages = allocator.reserve([3, 4, 5])
    allocator.lease(pages[4:5], "a copy")
    allocator.release(pages[[4, 5, 7]])
    return allocator


def test_every_byte_is_somewhere() -> None:
    window = SubPoolStats(
        name="window_8",
        page_bytes=96,
        capacity_pages=41,
        live_pages=2,
        hole_pages=1,
        quarantined_pages=1,
        peak_pages=4,
        moved_pages=0,
        padding_bytes=0,
    )
    state = SubPoolStats(
        name="state",
        page_bytes=208,
        capacity_pages=19,
        live_pages=3,
        hole_pages=0,
        quarantined_pages=0,
        peak_pages=3,
        moved_pages=0,
        padding_bytes=0,
    )
    full = SubPoolStats(
        name="full",
        page_bytes=32,
        capacity_pages=125,
        live_pages=4,
        hole_pages=0,
        quarantined_pages=0,
        peak_pages=5,
        moved_pages=0,
        padding_bytes=0,
    )
    stats = busy().stats()
    assert stats == Stats(
        capacity_bytes=4096,
        sink_bytes=96,
        gap_bytes=4000 - 3 * 208 - 4 * 96 - 4 * 32,
        slack_bytes=0,
        subpools=(state, window, full),
    )
    assert (stats.live_bytes, stats.hole_bytes, stats.quarantined_bytes) == (3 * 208 + 2 * 96 + 4 * 32, 96, 96)
    assert stats.free_bytes == stats.gap_bytes + 96 and stats.moved_bytes == 0
    assert (window.live_bytes, window.hole_bytes, window.quarantined_bytes, window.moved_bytes) == (192, 96, 96, 0)


def test_peaks_and_moves_are_remembered() -> None:
    allocator = Allocator(small_plan("one_float"))
    pages = allocator.reserve([5, 0, 0])
    allocator.release(pages[:2])
    assert allocator.compact() == 416
    allocator.release(pages[2:])
    state = allocator.stats().subpool("state")
    assert (state.live_pages, state.peak_pages, state.moved_pages, state.moved_bytes) == (0, 5, 2, 416)
    assert allocator.stats().moved_bytes == 416


def test_padding_inside_live_pages_is_counted() -> None:
    padded = plan(SHAPES["three_floats"], memory=1 << 20, page_size=3, pad_entries=True)
    allocator = Allocator(padded)
    allocator.reserve([1, 2, 3, 4, 5])
    for subpool, stats in zip(padded.subpools, allocator.stats().subpools):
        assert stats.padding_bytes == stats.live_pages * subpool.page_size * subpool.layout.padding_bytes


def test_a_sub_pool_is_found_by_name() -> None:
    stats = busy().stats()
    assert stats.subpool("full") is stats.subpools[2]
    with pytest.raises(KeyError, match="no sub-pool 'half'; there are state, window_8, full"):
        stats.subpool("half")


def test_the_table_for_people() -> None:
    assert str(busy().stats()).splitlines() == [
        "arena 4,096 bytes: 944 live, 96 holes, 96 quarantined, 2,864 gap, 0 slack, 96 sink, 0 moved so far",
        "pages                     live     holes  quarantined  capacity      peak     moved  of bytes",
        "state                        3         0            0        19         3         0  208",
        "window_8                     2         1            1        41         4         0  96",
        "full                         4         0            0       125         5         0  32",
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [1, 3, 7])
def test_the_equation_holds_for_every_shape(shape: str, page_size: int) -> None:
    small = small_plan(shape, page_size=page_size)
    allocator = Allocator(small)
    for _ in range(3):
        stats = allocator.stats()
        used_bytes = stats.live_bytes + stats.hole_bytes + stats.quarantined_bytes
        assert used_bytes + stats.gap_bytes + stats.slack_bytes + stats.sink_bytes == stats.capacity_bytes
        assert stats.slack_bytes >= 0 and stats.gap_bytes >= 0
        first, last = small.subpools[0], small.subpools[-1]
        assert stats.slack_bytes == (
            first.origin_bytes
            + first.first_page * first.page_bytes
            - small.sink_bytes
            + small.arena_bytes
            - last.origin_bytes
            - last.num_pages * last.page_bytes
        )
        allocator.release(allocator.reserve([1] * len(small.subpools))[::2])
