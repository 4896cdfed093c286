"""Where everything lies in the arena of a serving loop at one moment, as values that any thread may read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torch_uma import ServingLoop, Stats

MAX_CELLS = 512  # of a band, however many pages it has


@dataclass(frozen=True, kw_only=True)
class BandMap:
    """One sub-pool's run of pages.

    Attributes:
        grows: "up", "down" or "float".
        cells: [at most 512] the share of pages in use in each of as many equal parts of the run.
    """

    name: str
    grows: str
    start_bytes: int
    end_bytes: int
    cells: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A serving loop between two steps.

    Attributes:
        retractions: how often a request was retracted, by way.
        host_bytes: what retracted requests have in host memory.
    """

    stats: Stats
    bands: tuple[BandMap, ...]
    num_leases: int
    num_running: int
    num_waiting: int
    retractions: dict[str, int]
    host_bytes: int

    def json(self) -> dict[str, Any]:
        """What the page draws."""
        stats = self.stats
        return {
            "capacity_bytes": stats.capacity_bytes,
            "live_bytes": stats.live_bytes,
            "hole_bytes": stats.hole_bytes,
            "quarantined_bytes": stats.quarantined_bytes,
            "gap_bytes": stats.gap_bytes,
            "slack_bytes": stats.slack_bytes,
            "sink_bytes": stats.sink_bytes,
            "moved_bytes": stats.moved_bytes,
            "num_leases": self.num_leases,
            "num_running": self.num_running,
            "num_waiting": self.num_waiting,
            "retractions": self.retractions,
            "host_bytes": self.host_bytes,
            "bands": [
                {
                    "name": band.name,
                    "grows": band.grows,
                    "start_bytes": band.start_bytes,
                    "end_bytes": band.end_bytes,
                    "page_bytes": subpool.page_bytes,
                    "live_pages": subpool.live_pages,
                    "hole_pages": subpool.hole_pages,
                    "quarantined_pages": subpool.quarantined_pages,
                    "peak_pages": subpool.peak_pages,
                    "cells": band.cells,
                }
                for band, subpool in zip(self.bands, stats.subpools)
            ],
        }


def report_of(loop: ServingLoop) -> Report:
    """Look at a loop, in the thread that drives it; costs some passes over a byte for each page."""
    pool, scheduler = loop.pool, loop.scheduler
    bands = pool.allocator.bands
    counters = scheduler.stats()
    return Report(
        stats=pool.stats(),
        bands=tuple(
            BandMap(
                name=subpool.name,
                grows=subpool.grows,
                start_bytes=band.start_bytes(),
                end_bytes=band.end_bytes(),
                cells=_cells(band.tables.occupied[band.base + band.low : band.base + band.high]),
            )
            for subpool, band in zip(pool.plan.subpools, bands)
        ),
        num_leases=len(pool.allocator.ledger.leases),
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        retractions={"drop": counters.dropped, "offload": counters.offloaded},
        host_bytes=counters.host_bytes,
    )


def _cells(occupied: npt.NDArray[np.uint8]) -> tuple[float, ...]:
    """The share of ones in each of at most 512 equal parts."""
    if not len(occupied):
        return ()
    edges = np.linspace(0, len(occupied), min(len(occupied), MAX_CELLS) + 1).astype(np.int64)
    counts = np.add.reduceat(occupied, edges[:-1], dtype=np.int64)
    return tuple(np.round(counts / np.diff(edges), 3).tolist())
