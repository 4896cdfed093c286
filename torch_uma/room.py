"""Whether and how a demand fits among today's bands: the three-step answer and the refusal.

In place (holes first, then a frontier into its gap), compact the ends, redistribute the floats: the same geometry
each time, with all spans as pins, with the floats' spans as pins, with only the pinned pages as pins. Nothing here
moves a page or hands one out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from torch_uma.band import Band, PageArray, PageTables
from torch_uma.errors import PlanError
from torch_uma.ledger import Ledger, PlaceArray
from torch_uma.moves import num_outside
from torch_uma.placement import Grid, Quote, Span, lowest_spans, target_spans
from torch_uma.plan import Plan

How = Literal["in_place", "compact", "redistribute"]


class Solution(NamedTuple):
    """Where the bands will lie so that a demand fits."""

    how: How
    targets: list[Span]


class Room:
    """The bands of an arena as spans in bytes, and the questions that only geometry answers.

    Args:
        plan, tables, ledger: those of the allocator.
        step_places: the places pinned by open steps, asked for only when moves are considered.
        hints, split: see `Allocator`.
    """

    def __init__(
        self,
        plan: Plan,
        tables: PageTables,
        ledger: Ledger,
        step_places: Callable[[], Iterable[PlaceArray]],
        *,
        hints: Mapping[str, float] | None,
        split: Mapping[str, float] | None,
    ) -> None:
        self.tables = tables
        self.ledger = ledger
        self._step_places = step_places
        self.names = [subpool.name for subpool in plan.subpools]
        if hints and split:
            raise PlanError("give hints or split, not both: where the frontiers are frozen there is nothing to hint at")
        edges = _edges(plan, hints or split or {})
        self.grids = [subpool.grid for subpool in plan.subpools]
        if split:
            self.grids = [_frozen(grid, *edge) for grid, edge in zip(self.grids, edges)]
        starts = [-((grid.origin_bytes - low) // grid.page_bytes) for grid, (low, _) in zip(self.grids, edges)]
        self._hinted: list[int | None] = [start if hints else None for start in starts]
        self.bands = [
            Band(k, grid, subpool.first_page, tables)
            for k, (grid, subpool) in enumerate(zip(self.grids, plan.subpools))
        ]
        self._leased_pins: list[Span | None] = [None] * len(self.bands)
        self._num_changes_seen = 0

    # Ask

    def quote(self, demand: Sequence[int]) -> Quote:
        if self._fits_in_place(demand):
            return Quote(tuple(demand), "in_place")
        solution = self.solve(demand)
        if solution is None:
            return self._refusal(demand)
        move_bytes = sum(
            num_outside(band, target) * band.grid.page_bytes for band, target in zip(self.bands, solution.targets)
        )
        return Quote(tuple(demand), solution.how, move_bytes)

    def fits(self, more: Sequence[int]) -> bool:
        """Whether the bands can lie anywhere with so many pages more than they hold, or so many unpinned ones fewer."""
        pins = self.pins()
        # A band with pinned pages has pages, and its span reaches over all of them.
        counts = [max(band.num_held + count, pin is not None) for band, count, pin in zip(self.bands, more, pins)]
        return lowest_spans(self.grids, counts, pins) is not None

    def solve(self, demand: Sequence[int]) -> Solution | None:
        """The cheapest step that fits the demand, or None."""
        spans = [band.span for band in self.bands]
        own: list[Span | None] = [span if span[1] else None for span in spans]
        stretched = [
            band.high - band.low + (count - band.num_holes if count > band.num_holes else 0)
            for band, count in zip(self.bands, demand)
        ]
        wishes = self._wishes(demand)
        targets = target_spans(self.grids, stretched, own, spans, wishes)
        if targets is not None:
            return Solution("in_place", targets)
        pins = self.pins()
        counts = [band.num_held + count for band, count in zip(self.bands, demand)]
        floats = [grid.grows == "float" for grid in self.grids]
        targets = target_spans(
            self.grids,
            [s if is_float else c for s, c, is_float in zip(stretched, counts, floats)],
            [o if is_float else p for o, p, is_float in zip(own, pins, floats)],
            spans,
            wishes,
        )
        if targets is not None:
            return Solution("compact", targets)
        targets = target_spans(self.grids, counts, pins, spans, wishes)
        return None if targets is None else Solution("redistribute", targets)

    def _fits_in_place(self, demand: Sequence[int]) -> bool:
        """`lowest_spans` with all spans as pins, written out: the question that is asked most."""
        edge_bytes = 0
        for band, count in zip(self.bands, demand):
            origin, page_bytes, first, last, grows = band.grid
            low, high = band.low, band.high
            missing = count - band.num_holes
            if missing <= 0:
                if high:
                    if origin + low * page_bytes < edge_bytes:
                        return False
                    edge_bytes = origin + high * page_bytes
                continue
            if grows == "down":
                return origin + (last - (high - low) - missing) * page_bytes >= max(
                    edge_bytes, origin + first * page_bytes
                )
            start = -((origin - edge_bytes) // page_bytes)
            if start < first:
                start = first
            if high and start > low:
                return False
            end = start + high - low + missing
            if end < high:
                end = high
            if end > last:
                return False
            edge_bytes = origin + end * page_bytes
        return True

    def fresh_runs(self, demand: Sequence[int], runs: Collection[int]) -> tuple[list[Span] | None, set[int]]:
        """In-place targets under which the sub-pools in `runs` get a run at a frontier, and those that need one."""
        fresh = {k for k in runs if demand[k] > 1 and self.bands[k].find_run(demand[k]) is None}
        if not fresh:
            return None, fresh
        spans = [band.span for band in self.bands]
        counts = [
            band.num_span + (count if k in fresh else max(0, count - band.num_holes))
            for k, (band, count) in enumerate(zip(self.bands, demand))
        ]
        own: list[Span | None] = [span if span[1] else None for span in spans]
        targets = target_spans(self.grids, counts, own, spans, self._wishes(demand, fresh))
        if targets is None:
            return None, set()
        for k in fresh:
            (low, high), (start, end) = spans[k], targets[k]
            if high and max(low - start, end - high) < demand[k]:
                return None, set()
        return targets, fresh

    def extend_by_one(self, index: int) -> bool:
        """Take one page from the gap beside a band into its span, if there is one."""
        band = self.bands[index]
        if band.low == band.high:
            return False
        grid = band.grid
        if grid.grows != "down":
            limit_bytes = self._start_above(index)
            if band.high < grid.num_pages and (
                limit_bytes is None or band.end_bytes() + grid.page_bytes <= limit_bytes
            ):
                band.extend(band.low, band.high + 1)
                return True
        has_page_below = grid.grows != "up" and band.low > grid.first_page
        if has_page_below and band.start_bytes() - grid.page_bytes >= self._end_below(index):
            band.extend(band.low - 1, band.high)
            return True
        return False

    def free_places(self, index: int) -> PageArray:
        band = self.bands[index]
        low, high = self._reach(index)
        if band.low == band.high:
            return np.empty(0, np.int64)
        below = np.arange(low, band.low)
        above = np.arange(band.high, high)
        return np.concatenate([below, np.sort(band.hole_pages()), above])

    # Pins

    def pins(self) -> list[Span | None]:
        """For each band the hull of its pages that must not move: leased, quarantined, in an open step. Read only."""
        step_places = list(self._step_places())
        if step_places:
            return [self._pin(band, step_places) for band in self.bands]
        if self._num_changes_seen != self.ledger.num_changes:
            self._leased_pins = [self._pin(band, ()) for band in self.bands]
            self._num_changes_seen = self.ledger.num_changes
        return self._leased_pins

    def pin(self, index: int) -> Span | None:
        return self._pin(self.bands[index], list(self._step_places()))

    def pinned_places(self, index: int) -> PlaceArray:
        """The distinct pinned places of one band, ascending."""
        base = self.tables.base
        parts = [self.ledger.leased(base[index], base[index + 1])]
        parts += [places[(places >= base[index]) & (places < base[index + 1])] for places in self._step_places()]
        return np.unique(np.concatenate(parts))

    def _pin(self, band: Band, step_places: Iterable[PlaceArray]) -> Span | None:
        base = self.tables.base
        start, end = base[band.index], base[band.index + 1]
        hulls = [self.ledger.pinned_span(start, end)]
        for places in step_places:
            mine = places[(places >= start) & (places < end)]
            if len(mine):
                hulls.append((int(mine.min()), int(mine.max()) + 1))
        found = [hull for hull in hulls if hull is not None]
        if not found:
            return None
        return (min(hull[0] for hull in found) - start, max(hull[1] for hull in found) - start)

    # Refusals

    def _refusal(self, demand: Sequence[int]) -> Quote:
        counts = [band.num_held for band in self.bands]
        pins = self.pins()
        binding = None
        for k, count in enumerate(demand):
            counts[k] += count
            if binding is None and lowest_spans(self.grids, counts, pins) is None:
                binding = self.names[k]
        relief = {name: self._relief(k, counts, pins) for k, name in enumerate(self.names)}
        fits_empty = lowest_spans(self.grids, demand) is not None
        return Quote(tuple(demand), "refused", 0, binding, relief, fits_empty)

    def _relief(self, index: int, counts: Sequence[int], pins: Sequence[Span | None]) -> int | None:
        """The least number of unpinned live pages of one band whose release alone makes `counts` fit."""
        band = self.bands[index]
        most = band.num_live
        if pins[index] is not None:
            pinned = self.pinned_places(index)
            most -= int((self.tables.owner[pinned] >= 0).sum())
        trial = list(counts)

        def fits(released: int) -> bool:
            trial[index] = counts[index] - released
            return lowest_spans(self.grids, trial, pins) is not None

        if most < 1 or not fits(most):
            return None
        refused, fitting = 0, most
        guess = 1
        while fitting - refused > 1:  # gallop up, then halve: the answer is mostly a handful
            middle = refused + guess if refused + guess < fitting else (refused + fitting) // 2
            if fits(middle):
                fitting, guess = middle, 1 << 62
            else:
                refused, guess = middle, guess * 4
        return fitting

    # Neighbours

    def _wishes(self, demand: Sequence[int], fresh: Collection[int] = ()) -> list[int | None]:
        """The page at which each float would like to start: where it is, or lower if it grows with more room there."""
        wishes: list[int | None] = []
        for k, band in enumerate(self.bands):
            if band.grid.grows != "float":
                wishes.append(None)
            elif band.low == band.high:
                wishes.append(self._hinted[k])
            else:
                missing = demand[k] if k in fresh else demand[k] - band.num_holes
                if missing > 0:
                    low, high = self._reach(k)
                    wishes.append(
                        band.low if high - band.high >= band.low - low else band.low - min(missing, band.low - low)
                    )
                else:
                    wishes.append(band.low)
        return wishes

    def _reach(self, index: int) -> Span:
        """The pages between the neighbours of a band: its span and the gaps beside it that it can grow into."""
        band = self.bands[index]
        grid = band.grid
        low, high = band.span
        if grid.grows != "up":
            low = max(grid.first_page, -((grid.origin_bytes - self._end_below(index)) // grid.page_bytes))
        if grid.grows != "down":
            limit_bytes = self._start_above(index)
            high = grid.num_pages
            if limit_bytes is not None:
                high = min(high, (limit_bytes - grid.origin_bytes) // grid.page_bytes)
        return (low, high)

    def _end_below(self, index: int) -> int:
        for band in reversed(self.bands[:index]):
            if band.high > band.low:
                return band.end_bytes()
        return 0

    def _start_above(self, index: int) -> int | None:
        for band in self.bands[index + 1 :]:
            if band.high > band.low:
                return band.start_bytes()
        return None


def _edges(plan: Plan, shares: Mapping[str, float]) -> list[tuple[int, int]]:
    """The region of each sub-pool in bytes: shares of the arena above the sink, what is left in equal parts."""
    names = [subpool.name for subpool in plan.subpools]
    is_sound = isinstance(shares, Mapping) and all(isinstance(share, int | float) for share in shares.values())
    if (
        not is_sound
        or not set(shares) <= set(names)
        or any(not 0 <= share <= 1 for share in shares.values())
        or sum(shares.values()) > 1 + 1e-9
    ):
        raise PlanError(
            f"shares {shares} must be at least 0, at most 1 in all, and name sub-pools of the plan: {', '.join(names)}"
        )
    rest = (1 - sum(shares.values())) / max(1, len(names) - len(shares))
    usable_bytes = plan.arena_bytes - plan.sink_bytes
    edges = []
    share = 0.0
    low_bytes = plan.sink_bytes
    for name in names:
        share += shares.get(name, rest)
        high_bytes = plan.sink_bytes + min(usable_bytes, round(share * usable_bytes))
        edges.append((low_bytes, high_bytes))
        low_bytes = high_bytes
    return edges


def _frozen(grid: Grid, low_bytes: int, high_bytes: int) -> Grid:
    """The part of a grid that lies in a region, so that its band can never leave it."""
    first = max(grid.first_page, -((grid.origin_bytes - low_bytes) // grid.page_bytes))
    end = min(grid.num_pages, (high_bytes - grid.origin_bytes) // grid.page_bytes)
    return grid._replace(first_page=first, num_pages=max(first, end))
