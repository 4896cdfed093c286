"""Who is using which pages, beyond the steps of the arena's own stream.

A lease says: these pages are being read or written by this user (a host copy, a transfer, work on another stream)
until it says that it is done. Every page has its own count of leases. The ledger knows places (flat page numbers),
not bands; what becomes of a page whose last lease ends is the allocator's business. Events are polled, in `poll()`
alone, and never waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torch_uma.errors import LeaseError

PlaceArray = npt.NDArray[np.int64]


class Event(Protocol):
    """Anything that can say whether it has passed, such as `torch.cuda.Event`."""

    def query(self) -> bool: ...


class Lease:
    """A promise that these pages neither move nor are handed out, until `close`.

    Attributes:
        user: who reads or writes the pages, for messages.
        pages: [n] int64 virtual page ids as they were when the lease was opened.
        epoch: the number of the last step begun before the lease; another stream must wait for it before it touches
            the pages.
    """

    __slots__ = ("_ledger", "epoch", "is_open", "pages", "places", "user")

    def __init__(self, ledger: Ledger, user: str, pages: npt.NDArray[np.int64], places: PlaceArray, epoch: int) -> None:
        self._ledger = ledger
        self.user = user
        self.pages = pages
        self.places = places  # sorted, distinct
        self.epoch = epoch
        self.is_open = True

    def close(self, event: Event | None = None) -> None:
        """End the lease: now, or once `event` has passed (found out by `poll()`; this never waits).

        Raises LeaseError if it was closed before.
        """
        self._ledger.close(self, event)

    def __repr__(self) -> str:
        return f"Lease({self.user!r}, {len(self.places)} pages, {'open' if self.is_open else 'closed'})"


class Ledger:
    """Lease counts by place, and the leases that are open or wait for an event.

    Args:
        num_places: how many places there are over all grids.
        on_unleased: called with the places whose last lease has just ended.
    """

    def __init__(self, num_places: int, on_unleased: Callable[[PlaceArray], None]) -> None:
        self.counts = np.zeros(num_places, np.int32)
        self.leases: set[Lease] = set()  # open, or closed with an event that has not passed
        self.epoch = 0
        self.num_changes = 0  # leases opened and ended so far: what was found out about them holds while it stays
        self._waiting: list[tuple[Lease, Event]] = []
        self._on_unleased = on_unleased

    def open(self, pages: npt.NDArray[np.int64], places: PlaceArray, user: str) -> Lease:
        if not len(places):
            raise LeaseError(f"{user!r} asked for a lease of no pages; name at least one")
        lease = Lease(self, user, pages, np.unique(places), self.epoch)
        self.counts[lease.places] += 1
        self.leases.add(lease)
        self.num_changes += 1
        return lease

    def close(self, lease: Lease, event: Event | None) -> None:
        if not lease.is_open:
            raise LeaseError(f"{lease!r} was closed before; a lease ends once")
        lease.is_open = False
        if event is None:
            self._end(lease)
        else:
            self._waiting.append((lease, event))

    def poll(self) -> int:
        """End the leases whose event has passed, in the order in which they were closed; returns how many."""
        passed = [pair for pair in tuple(self._waiting) if pair[1].query()]
        for pair in passed:
            self._waiting.remove(pair)  # a finalizer may have closed another lease meanwhile
            self._end(pair[0])
        return len(passed)

    def pinned_span(self, start: int, end: int) -> tuple[int, int] | None:
        """The hull of the leased places in `[start, end)`; grows with the number of leases, not of pages."""
        low, high = end, start
        for lease in self.leases:
            places = lease.places
            first, last = places.searchsorted((start, end))
            if first < last:
                low = min(low, int(places[first]))
                high = max(high, int(places[last - 1]) + 1)
        return (low, high) if low < high else None

    def leased(self, start: int, end: int) -> PlaceArray:
        """The distinct leased places in `[start, end)`, ascending."""
        parts = [
            places[slice(*places.searchsorted((start, end)))] for places in (lease.places for lease in self.leases)
        ]
        return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)

    def _end(self, lease: Lease) -> None:
        self.leases.remove(lease)
        self.num_changes += 1
        self.counts[lease.places] -= 1
        self._on_unleased(lease.places[self.counts[lease.places] == 0])
