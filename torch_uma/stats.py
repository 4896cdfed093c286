"""Where the bytes of an arena are: one flat report, for people and for monitors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch_uma.band import Band
from torch_uma.plan import Plan


@dataclass(frozen=True, kw_only=True)
class SubPoolStats:
    """Pages of one sub-pool. Bytes of any of them: times `page_bytes`."""

    name: str
    page_bytes: int
    capacity_pages: int  # with the arena to itself
    live_pages: int
    hole_pages: int
    quarantined_pages: int
    peak_pages: int  # most live at once
    moved_pages: int  # since construction
    padding_bytes: int  # inside the live pages

    @property
    def live_bytes(self) -> int:
        return self.live_pages * self.page_bytes

    @property
    def hole_bytes(self) -> int:
        return self.hole_pages * self.page_bytes

    @property
    def quarantined_bytes(self) -> int:
        return self.quarantined_pages * self.page_bytes

    @property
    def moved_bytes(self) -> int:
        return self.moved_pages * self.page_bytes


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Bytes of the arena; live + holes + quarantined + gaps + slack + sink = capacity."""

    capacity_bytes: int
    sink_bytes: int
    gap_bytes: int
    slack_bytes: int
    subpools: tuple[SubPoolStats, ...]

    @property
    def live_bytes(self) -> int:
        return sum(subpool.live_bytes for subpool in self.subpools)

    @property
    def hole_bytes(self) -> int:
        return sum(subpool.hole_bytes for subpool in self.subpools)

    @property
    def quarantined_bytes(self) -> int:
        return sum(subpool.quarantined_bytes for subpool in self.subpools)

    @property
    def moved_bytes(self) -> int:
        return sum(subpool.moved_bytes for subpool in self.subpools)

    @property
    def free_bytes(self) -> int:
        """Bytes that some sub-pool could still use."""
        return self.gap_bytes + self.hole_bytes

    def subpool(self, name: str) -> SubPoolStats:
        """The sub-pool of this name; KeyError if there is none."""
        for subpool in self.subpools:
            if subpool.name == name:
                return subpool
        raise KeyError(f"no sub-pool {name!r}; there are {', '.join(subpool.name for subpool in self.subpools)}")

    def __str__(self) -> str:
        lines = [
            f"arena {self.capacity_bytes:,} bytes: {self.live_bytes:,} live, {self.hole_bytes:,} holes, "
            f"{self.quarantined_bytes:,} quarantined, {self.gap_bytes:,} gap, {self.slack_bytes:,} slack, "
            f"{self.sink_bytes:,} sink, {self.moved_bytes:,} moved so far",
            f"{'pages':<20}{'live':>10}{'holes':>10}{'quarantined':>13}{'capacity':>10}{'peak':>10}{'moved':>10}"
            "  of bytes",
        ]
        lines += [
            f"{s.name:<20}{s.live_pages:>10}{s.hole_pages:>10}{s.quarantined_pages:>13}{s.capacity_pages:>10}"
            f"{s.peak_pages:>10}{s.moved_pages:>10}  {s.page_bytes:,}"
            for s in self.subpools
        ]
        return "\n".join(lines)


def slack_bytes(plan: Plan, bands: Sequence[Band]) -> int:
    """Bytes between the sink and the lowest grid, and between the highest grid and the arena's end."""
    low, high = bands[0].grid, bands[-1].grid
    below = low.origin_bytes + low.first_page * low.page_bytes - plan.sink_bytes
    above = plan.arena_bytes - (high.origin_bytes + high.num_pages * high.page_bytes)
    return below + above


def arena_stats(plan: Plan, bands: Sequence[Band]) -> Stats:
    """Count the bytes of an arena as the bands have them."""
    subpools = tuple(
        SubPoolStats(
            name=subpool.name,
            page_bytes=subpool.page_bytes,
            capacity_pages=band.grid.num_pages - band.grid.first_page,
            live_pages=band.num_live,
            hole_pages=band.num_holes,
            quarantined_pages=band.num_quarantined,
            peak_pages=band.peak_live,
            moved_pages=band.moved_pages,
            padding_bytes=band.num_live * subpool.page_size * subpool.layout.padding_bytes,
        )
        for subpool, band in zip(plan.subpools, bands)
    )
    slack = slack_bytes(plan, bands)
    span_bytes = sum(band.num_span * band.grid.page_bytes for band in bands)
    return Stats(
        capacity_bytes=plan.arena_bytes,
        sink_bytes=plan.sink_bytes,
        gap_bytes=plan.arena_bytes - plan.sink_bytes - slack - span_bytes,
        slack_bytes=slack,
        subpools=subpools,
    )
