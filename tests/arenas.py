"""Small arenas of every shape, what is written in them, and the slow search that admission is checked against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torch_uma.allocator import Allocator
from torch_uma.band import Band, PageTables
from torch_uma.layout import Chunk, Full, Layer, Lifetime, Memory, Row, State, Window
from torch_uma.placement import Grid, Span
from torch_uma.plan import Plan, plan

WORD_BYTES = 16
Edges = npt.NDArray[np.bool_]


def layer(lifetime: Lifetime, width: int, tokens_per_entry: int = 1) -> Layer:
    """A layer that stores `width` fp32 numbers an entry."""
    row = Row(name="x", shape=(width,), dtype=torch.float32)
    return Layer(memories=(Memory(lifetime=lifetime, rows=(row,), tokens_per_entry=tokens_per_entry),))


FULL, STATE, LONG, SHORT = layer(Full(), 4), layer(State(), 40), layer(Window(20), 4), layer(Window(8), 12)
SHAPES: dict[str, tuple[Layer, ...]] = {
    "full": (FULL,),
    "state": (STATE,),
    "window": (SHORT,),
    "state_full": (FULL, STATE),
    "window_full": (FULL, SHORT),
    "two_windows": (LONG, SHORT),
    "one_float": (FULL, SHORT, layer(State(), 52)),
    "two_floats": (FULL, SHORT, LONG, layer(State(), 28)),
    "three_floats": (layer(Full(), 8), layer(Chunk(8), 12), LONG, layer(Full(), 4, 4), layer(State(), 28)),
}


def small_plan(shape: str, *, memory: int = 4096, page_size: int = 2) -> Plan:
    return plan(SHAPES[shape], memory=memory, page_size=page_size)


def bands_of(grids: Sequence[Grid], spans: Sequence[Span], held: Sequence[Sequence[int]]) -> list[Band]:
    """Bands with these spans, in which these pages are live (without ids) and the others holes."""
    tables = PageTables([grid.num_pages for grid in grids])
    bands = [Band(k, grid, grid.first_page, tables) for k, grid in enumerate(grids)]
    for band, span, pages in zip(bands, spans, held):
        if span[1]:
            band.extend(*span)
        hold(band, pages)
    return bands


def hold(band: Band, pages: Sequence[int]) -> None:
    """Make holes of a band live."""
    band.claim_holes(np.array(pages, np.int64))
    band.tables.occupied[band.base + np.array(pages, np.int64)] = 1
    band.count_live(len(pages))


def books(allocator: Allocator) -> dict[str, Any]:
    """Everything that an allocator knows, in a form that `==` compares."""
    tables, ledger = allocator.tables, allocator.ledger
    return {
        "bands": [
            {
                "span": band.span,
                "counts": (band.num_live, band.num_holes, band.num_quarantined, band.peak_live, band.moved_pages),
                "holes": band.holes[: band.top].tolist(),
                "ids": band.ids[: band.num_free_ids].tolist(),
            }
            for band in allocator.bands
        ],
        "v2p": tables.v2p.tolist(),
        "owner": tables.owner.tolist(),
        "occupied": bytes(tables.occupied_bytes),
        "hole_at": tables.hole_at.tolist(),
        "leases": (set(ledger.leases), ledger.counts.tolist(), list(ledger._waiting), ledger.epoch),
        "open_leases": {lease for lease in ledger.leases if lease.is_open},
        "layout_version": allocator.layout_version,
    }


class StampedArena:
    """The bytes of an arena as words of 16, each of which carries the stamp of the page that wrote it; 0 is unwritten.

    `move` is a mover: it insists on what a launch on a device would need, and keeps a record.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.words = np.zeros(plan.arena_bytes // WORD_BYTES, np.int64)
        self.waves: list[tuple[int, list[int], list[int]]] = []
        self.waves_before_failure: int | None = None

    def pages(self, index: int) -> npt.NDArray[np.int64]:
        """[num_pages, words of a page]: a view over the whole grid of one sub-pool."""
        subpool = self.plan.subpools[index]
        start, width = subpool.origin_bytes // WORD_BYTES, subpool.page_bytes // WORD_BYTES
        return self.words[start : start + subpool.num_pages * width].reshape(subpool.num_pages, width)

    def move(self, index: int, sources: npt.NDArray[np.int64], destinations: npt.NDArray[np.int64]) -> None:
        if self.waves_before_failure is not None:
            if self.waves_before_failure == 0:
                self.waves_before_failure = None
                raise MoverError("the copy failed")
            self.waves_before_failure -= 1
        everywhere = np.concatenate([sources, destinations])
        assert len(sources) == len(destinations) > 0
        assert len(np.unique(everywhere)) == len(everywhere), "a wave reads what it writes"
        pages = self.pages(index)
        pages[destinations] = pages[sources]
        self.waves.append((index, sources.tolist(), destinations.tolist()))

    def moved_bytes(self) -> int:
        return sum(len(sources) * self.plan.subpools[index].page_bytes for index, sources, _ in self.waves)


class MoverError(RuntimeError):
    """A copy that failed, as a device might."""


class BoundarySearch:
    """Whether counts of pages fit, found by trying every byte boundary between every two bands.

    It knows nothing of spans, of ends or floats, or of placing things low: band `k` has what lies between two
    boundaries, and that must be enough whole pages of its grid and include its pinned ones.
    """

    def __init__(self, grids: Sequence[Grid], low_bytes: int, high_bytes: int) -> None:
        self.grids = grids
        unit = math.gcd(
            low_bytes, high_bytes, *(grid.origin_bytes for grid in grids), *(grid.page_bytes for grid in grids)
        )
        self.edges = np.arange(low_bytes, high_bytes + 1, unit)
        self.capacity = []  # per band: [edges, edges] pages between two boundaries, -1 if they are in the wrong order
        for origin, page_bytes, first, last, _ in grids:
            lowest = np.maximum(first, -((origin - self.edges) // page_bytes))
            highest = np.minimum(last, (self.edges - origin) // page_bytes)
            pages = np.maximum(0, highest[None, :] - lowest[:, None])
            self.capacity.append(np.where(self.edges[:, None] <= self.edges[None, :], pages, -1).astype(np.int16))

    def fits(self, counts: Sequence[int], pins: Sequence[Span | None]) -> bool:
        return bool(self._below(len(counts), counts, pins).any())

    def most(self, index: int, counts: Sequence[int], pins: Sequence[Span | None]) -> int:
        """The most pages that one band could hold beside `counts` of the others; -1 if the others do not fit."""
        below, above = self._below(index, counts, pins), self._above(index, counts, pins)
        allowed = below[:, None] & above[None, :] & self._reaches(index, pins[index])
        return int(self.capacity[index][allowed].max(initial=-1))

    def _below(self, index: int, counts: Sequence[int], pins: Sequence[Span | None]) -> Edges:
        """[edges]: where the bands below `index` could end."""
        ends: Edges = np.equal(self.edges, self.edges[0])
        for k in range(index):
            ends = np.any(ends[:, None] & self._holds(k, counts[k], pins[k]), axis=0)
        return ends

    def _above(self, index: int, counts: Sequence[int], pins: Sequence[Span | None]) -> Edges:
        """[edges]: where the bands above `index` could start."""
        starts: Edges = np.ones(len(self.edges), np.bool_)
        for k in reversed(range(index + 1, len(counts))):
            starts = np.any(starts[None, :] & self._holds(k, counts[k], pins[k]), axis=1)
        return starts

    def _holds(self, index: int, count: int, pin: Span | None) -> Edges:
        return np.asarray((self.capacity[index] >= count) & self._reaches(index, pin))

    def _reaches(self, index: int, pin: Span | None) -> Edges:
        """[edges, edges]: whether the pinned pages lie between two boundaries."""
        if pin is None:
            return np.ones((len(self.edges), len(self.edges)), np.bool_)
        origin, page_bytes = self.grids[index][:2]
        starts_low = self.edges <= origin + pin[0] * page_bytes
        ends_high = self.edges >= origin + pin[1] * page_bytes
        return np.asarray(starts_low[:, None] & ends_high[None, :])
