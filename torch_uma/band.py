"""The pages of one sub-pool: its span, its holes, its virtual ids.

A band owns two stacks (free pages inside its span, free virtual ids) and its counters. The tables that pages are
looked up in are flat over all sub-pools and shared (`PageTables`), so that the allocator books a whole step with a
handful of vector operations:

    place = base + page    one number for every physical page of every grid
    id    = base + local   one number for every virtual page of every sub-pool (as many as its grid has pages)

Invariant: num_pages_in(span) = num_live + num_holes + num_quarantined. Outside the span every page is free. No torch
here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torch_uma.errors import PlanError
from torch_uma.placement import EMPTY, Grid, Span

PageArray = npt.NDArray[np.int64]  # pages, places and ids: int64 is what numpy indexes with fastest

NO_PAGE = -1
_FEW_PAGES = 1024  # up to so many, counting bytes beats a vector operation
SINK = -2  # what `owner` says of the sink's pages, so that no id can ever name them


class PageTables:
    """Flat tables over all sub-pools; `base[k]` is where sub-pool `k` starts in each of them.

    Attributes:
        v2p: [num_ids] int32, the physical page (in its own grid) of a virtual id, or -1.
        owner: [num_places] int32, the inverse: the virtual id at a place, -1, or -2 for the sink.
        occupied: [num_places] uint8 over `occupied_bytes`, 1 where a page is live or quarantined.
        hole_at: [num_places] int32, where a hole stands in its band's stack, or -1: an entry of the stack counts iff
            this agrees.
        kind: [num_ids] uint8, the sub-pool of an id.
        base_of: [num_ids] int64, where the sub-pool of an id starts.
    """

    def __init__(self, grid_lengths: Sequence[int]) -> None:
        self.base: list[int] = [0]
        for length in grid_lengths:
            self.base.append(self.base[-1] + length)
        total = self.base[-1]
        if total >= 1 << 31:
            raise PlanError(
                f"{total:,} pages over all sub-pools do not fit 32-bit page ids; a larger page size would help"
            )
        self.v2p = np.full(total, NO_PAGE, np.int32)
        self.owner = np.full(total, NO_PAGE, np.int32)
        self.occupied_bytes = bytearray(total)
        self.occupied = np.frombuffer(self.occupied_bytes, np.uint8)
        self.hole_at = np.full(total, NO_PAGE, np.int32)
        self.kind = np.repeat(np.arange(len(grid_lengths), dtype=np.uint8), grid_lengths)
        self.base_of = np.repeat(np.array(self.base[:-1], np.int64), grid_lengths)
        # Views that hand out Python ints: a scalar read costs a third of numpy's.
        self.v2p_cells = self.v2p.data
        self.owner_cells = self.owner.data
        self.hole_cells = self.hole_at.data
        self.kind_cells = self.kind.data


class Band:
    """One sub-pool's run of pages in the arena, and the free lists that hand them out."""

    __slots__ = (
        "base",
        "first_page",
        "grid",
        "high",
        "holes",
        "ids",
        "index",
        "low",
        "moved_pages",
        "num_free_ids",
        "num_holes",
        "num_live",
        "num_quarantined",
        "peak_live",
        "tables",
        "top",
    )

    def __init__(self, index: int, grid: Grid, first_page: int, tables: PageTables) -> None:
        self.index = index
        self.grid = grid
        self.first_page = first_page  # of the whole grid; `grid.first_page` may be higher where frontiers are frozen
        self.tables = tables
        self.base = tables.base[index]
        self.low, self.high = EMPTY
        self.num_live = self.num_holes = self.num_quarantined = 0
        self.peak_live = 0
        self.moved_pages = 0
        num_pages = tables.base[index + 1] - self.base
        # Twice the grid, so that dropping the stale entries is paid for by the pushes that made them.
        self.holes = np.empty(2 * num_pages, np.int64)
        self.top = 0
        for page in range(first_page):
            tables.v2p[self.base + page] = page
            tables.owner[self.base + page] = SINK
        self.num_free_ids = num_pages - first_page
        self.ids = np.arange(self.base + num_pages - 1, self.base + first_page - 1, -1)

    @property
    def span(self) -> Span:
        return (self.low, self.high)

    @property
    def num_span(self) -> int:
        return self.high - self.low

    @property
    def num_held(self) -> int:
        """Pages that cannot be had for another purpose: live or quarantined."""
        return self.num_live + self.num_quarantined

    def count_live(self, change: int) -> None:
        """Book pages that became live."""
        self.num_live += change
        if self.num_live > self.peak_live:
            self.peak_live = self.num_live

    def start_bytes(self) -> int:
        return self.grid.origin_bytes + self.low * self.grid.page_bytes

    def end_bytes(self) -> int:
        return self.grid.origin_bytes + self.high * self.grid.page_bytes

    def count_held(self, start: int, end: int) -> int:
        """How many pages of `[start, end)` are live or quarantined."""
        if end <= start:
            return 0
        start, end = self.base + start, self.base + end
        if end - start > _FEW_PAGES:
            return int(np.count_nonzero(self.tables.occupied[start:end]))
        return self.tables.occupied_bytes.count(1, start, end)

    def lowest(self, count: int, start: int, end: int, *, held: bool) -> PageArray:
        """The lowest `count` held (or free) pages of `[start, end)`, or all if there are fewer; ascending.

        Looks at a few pages first and at more only if it must, so it does not grow with the span.
        """
        occupied = self.tables.occupied[self.base : self.base + end]
        width = 2 * count + 64
        while True:
            until = min(end, start + width)
            pages = np.flatnonzero(occupied[start:until] == held) + start
            if len(pages) >= count or until == end:
                return pages[:count]
            width *= 4

    def highest(self, count: int, start: int, end: int, *, held: bool) -> PageArray:
        """The highest `count` held (or free) pages of `[start, end)`, or all if there are fewer; ascending."""
        occupied = self.tables.occupied[self.base : self.base + end]
        width = 2 * count + 64
        while True:
            since = max(start, end - width)
            pages = np.flatnonzero(occupied[since:end] == held) + since
            if len(pages) >= count or since == start:
                return pages[max(0, len(pages) - count) :]
            width *= 4

    # Holes

    def push_holes(self, pages: PageArray) -> None:
        """Add free pages of the span to the stack; the last one is handed out first."""
        count = len(pages)
        top = self.top
        if top + count > len(self.holes):
            top = self._drop_stale()
        self.holes[top : top + count] = pages
        self.tables.hole_at[self.base + pages] = np.arange(top, top + count, dtype=np.int32)
        self.top = top + count
        self.num_holes += count

    def pop_holes(self, count: int) -> PageArray:
        """Take `count` holes off the stack, lowest last; the caller has checked that there are as many."""
        assert count <= self.num_holes, (count, self.num_holes)
        if self.num_holes < self.top:
            self._settle_top(count)
        top = self.top
        pages = self.holes[top - count : top][::-1].copy()
        self.tables.hole_at[self.base + pages] = NO_PAGE
        self.top = top - count
        self.num_holes -= count
        return pages

    def pop_hole(self) -> int:
        """Take one hole; the caller has checked that there is one."""
        cells, base = self.tables.hole_cells, self.base
        top = self.top - 1
        page = int(self.holes[top])
        while cells[base + page] != top:
            top -= 1
            page = int(self.holes[top])
        cells[base + page] = NO_PAGE
        self.top = top
        self.num_holes -= 1
        return page

    def push_hole(self, page: int) -> None:
        """Add one free page of the span."""
        if self.top == len(self.holes):
            self._drop_stale()
        self.holes[self.top] = page
        self.tables.hole_cells[self.base + page] = self.top
        self.top += 1
        self.num_holes += 1

    def find_run(self, count: int) -> PageArray | None:
        """The lowest `count` consecutive holes, or None."""
        if count > self.num_holes:
            return None
        holes = np.sort(self.hole_pages())
        starts = np.flatnonzero(holes[count - 1 :] - holes[: len(holes) - count + 1] == count - 1)
        return holes[starts[0] : starts[0] + count] if len(starts) else None

    def take_run(self, count: int) -> PageArray:
        """Take `count` holes, consecutive and ascending if there are such, otherwise as `pop_holes` does."""
        pages = self.find_run(count)
        if pages is None:
            return self.pop_holes(count)
        self.claim_holes(pages)
        return pages

    def hole_pages(self) -> PageArray:
        """Every hole, in the order of the stack."""
        entries = self.holes[: self.top]
        if self.num_holes == self.top:
            return entries
        valid: PageArray = entries[self.tables.hole_at[self.base + entries] == np.arange(self.top, dtype=np.int32)]
        return valid

    def claim_holes(self, pages: PageArray) -> None:
        """Take these holes, wherever they stand in the stack."""
        self.tables.hole_at[self.base + pages] = NO_PAGE
        self.num_holes -= len(pages)

    def _settle_top(self, count: int) -> None:
        """Make the top `count` entries of the stack valid ones."""
        hole_at = self.tables.hole_at
        width = count
        while True:
            start = max(0, self.top - width)
            entries = self.holes[start : self.top]
            valid = entries[hole_at[self.base + entries] == np.arange(start, self.top, dtype=np.int32)]
            if len(valid) >= count or start == 0:
                break
            width *= 2
        self.holes[start : start + len(valid)] = valid
        hole_at[self.base + valid] = np.arange(start, start + len(valid), dtype=np.int32)
        self.top = start + len(valid)

    def _drop_stale(self) -> int:
        self._settle_top(self.top + 1)
        return self.top

    # The span

    def extend(self, low: int, high: int) -> None:
        """Take the pages between today's span and `[low, high)` into the span, as holes. An empty band starts there.

        They are stacked so that those nearest to the old span are handed out first, in ascending order where it grew
        upwards.
        """
        if self.low == self.high:
            self.low = self.high = low
        assert low <= self.low and self.high <= high, (self.span, low, high)
        if high == self.high + 1:
            self.push_hole(self.high)
        elif high > self.high:
            self.push_holes(np.arange(high - 1, self.high - 1, -1))
        if low == self.low - 1:
            self.push_hole(low)
        elif low < self.low:
            self.push_holes(np.arange(low, self.low))
        self.low, self.high = low, high

    def retract(self, low: int, high: int) -> None:
        """Give the (free) pages of the span outside `[low, high)` back; a span without pages left is `EMPTY`."""
        low, high = max(low, self.low), min(high, self.high)
        if low >= high:
            assert not self.num_held
            low = high = self.low
        hole_at, base = self.tables.hole_at, self.base
        if low > self.low:
            hole_at[base + self.low : base + low] = NO_PAGE
        if high < self.high:
            hole_at[base + high : base + self.high] = NO_PAGE
        self.num_holes -= low - self.low + self.high - high
        self.low, self.high = (low, high) if low < high else EMPTY
        if not self.num_holes:
            self.top = 0

    def pull_back(self) -> None:
        """Pull the inner frontiers back over free pages: an end has one, a float two."""
        low, high, base = self.low, self.high, self.base
        if low == high:
            return
        if not self.num_live and not self.num_quarantined:
            self.retract(low, low)
            return
        occupied = self.tables.occupied_bytes
        grows = self.grid.grows
        if grows != "down" and not occupied[base + high - 1]:
            high = occupied.rfind(1, base + low, base + high) - base + 1
        if grows != "up" and not occupied[base + low]:
            low = occupied.find(1, base + low, base + high) - base
        if low != self.low or high != self.high:
            self.retract(low, high)
