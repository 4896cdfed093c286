"""Where bands can lie: pure geometry over page grids, no state.

The order of bands never changes, so whether a demand fits is decided by placing them from the low end upwards, each
as low as its neighbour and its grid allow. A span must be long enough for the band's pages and reach over its pinned
ones. That test is exact. A span is a half-open range of pages `(start, end)` of the sub-pool's own grid; a band
without pages takes no room and is `EMPTY`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Span = tuple[int, int]
EMPTY: Span = (0, 0)


class Grid(NamedTuple):
    """The pages that one sub-pool may occupy; page `p` starts at byte `origin_bytes + p * page_bytes`."""

    origin_bytes: int
    page_bytes: int
    first_page: int
    num_pages: int  # pages [first_page, num_pages) can be handed out
    grows: Literal["up", "down", "float"]


class Quote(NamedTuple):
    """The answer to a demand: whether it fits, how, and at what cost; or what binds and what would help.

    A quote is true if the demand fits, so `if pool.quote(512):` asks just that.

    Attributes:
        demand: pages that were asked for, by sub-pool in band order.
        how: "in_place"; after a "compact" of the bands at the ends; after floats were moved, "redistribute"; or
            "refused".
        move_bytes: bytes that have to be moved first.
        binding: of a refusal, the first sub-pool whose demand no longer fits on top of those before it.
        relief: of a refusal, for each sub-pool the least number of unpinned pages whose release alone would help, or
            None.
        fits_empty: False if not even an empty arena would hold it.
    """

    demand: tuple[int, ...]
    how: Literal["in_place", "compact", "redistribute", "refused"]
    move_bytes: int = 0
    binding: str | None = None
    relief: dict[str, int | None] | None = None
    fits_empty: bool = True

    @property
    def fits(self) -> bool:
        """Whether `reserve` would succeed."""
        return self.how != "refused"

    def __bool__(self) -> bool:
        return self.fits


def lowest_spans(
    grids: Sequence[Grid], counts: Sequence[int], pins: Sequence[Span | None] | None = None
) -> list[Span] | None:
    """Place each band of `counts[k]` pages as low as it can go, over its pins; None if they do not fit."""
    spans: list[Span] = []
    edge_bytes = 0  # where the next band may start
    for k, (origin, page_bytes, first, last, grows) in enumerate(grids):
        count = counts[k]
        if not count:
            spans.append(EMPTY)
            continue
        pin = pins[k] if pins is not None else None
        start = -((origin - edge_bytes) // page_bytes)
        if start < first:
            start = first
        if grows == "down":
            low = last - count
            if pin is not None and pin[0] < low:
                low = pin[0]
            if low < start:
                return None
            spans.append((low, last))
            edge_bytes = origin + last * page_bytes
            continue
        end = start + count
        if pin is not None:
            if pin[0] < start:
                return None
            if pin[1] > end:
                end = pin[1]
        if end > last:
            return None
        spans.append((start, end))
        edge_bytes = origin + end * page_bytes
    return spans


def highest_spans(grids: Sequence[Grid], counts: Sequence[int], pins: Sequence[Span | None]) -> list[Span]:
    """Place each float as high as it can go, for counts that `lowest_spans` could place."""
    spans: list[Span] = [EMPTY] * len(grids)
    edge_bytes: int | None = None  # where the next lower band must end
    for k in range(len(grids) - 1, -1, -1):
        origin, page_bytes, first, last, grows = grids[k]
        count, pin = counts[k], pins[k]
        if not count:
            continue
        if grows == "up":
            start, end = first, first + count
            if pin is not None and pin[1] > end:
                end = pin[1]
        else:
            end = last if edge_bytes is None else min(last, (edge_bytes - origin) // page_bytes)
            start = end - count
            if pin is not None and pin[0] < start:
                start = pin[0]
        spans[k] = (start, end)
        edge_bytes = origin + start * page_bytes
    return spans


def target_spans(
    grids: Sequence[Grid],
    counts: Sequence[int],
    pins: Sequence[Span | None],
    current: Sequence[Span],
    preferred: Sequence[int | None],
) -> list[Span] | None:
    """Clamp today's spans between the lowest and the highest placement: close to the fewest bytes moved.

    `preferred[k]` is the page at which a float would like to start (None: in the middle of the room that it has). A
    band keeps its free pages where its neighbour does not need the room. Returns None if the counts do not fit.
    """
    if lowest_spans(grids, counts, pins) is None:
        return None
    highest = highest_spans(grids, counts, pins)
    ceilings = _ceilings(grids, highest)
    spans: list[Span] = []
    edge_bytes = 0
    for k, (origin, page_bytes, first, last, grows) in enumerate(grids):
        count, pin = counts[k], pins[k]
        if not count:
            spans.append(EMPTY)
            continue
        lowest = max(first, -((origin - edge_bytes) // page_bytes))
        keep_start, keep_end = current[k]
        if grows == "down":
            start, end = highest[k][0], last
            if keep_end and keep_start < start:
                start = max(keep_start, lowest)
        else:
            start = lowest
            if grows == "float":
                wish = preferred[k]
                start = (lowest + highest[k][0]) // 2 if wish is None else min(max(lowest, wish), highest[k][0])
            end = start + count
            if pin is not None and pin[1] > end:
                end = pin[1]
            ceiling = min(last, (ceilings[k] - origin) // page_bytes)
            if min(keep_end, ceiling) > end:
                end = min(keep_end, ceiling)
        spans.append((start, end))
        edge_bytes = origin + end * page_bytes
    return spans


def _ceilings(grids: Sequence[Grid], highest: Sequence[Span]) -> list[int]:
    """For each band, the byte at which the next band with pages starts when it lies as high as it can."""
    ceilings = [0] * len(grids)
    edge_bytes = 1 << 62
    for k in range(len(grids) - 1, -1, -1):
        ceilings[k] = edge_bytes
        start, end = highest[k]
        if end:
            edge_bytes = grids[k].origin_bytes + start * grids[k].page_bytes
    return ceilings
