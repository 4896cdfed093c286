"""What to move where, and in which order: pure planning, nothing here changes a band.

Given today's spans and target spans, each band moves the pages that lie outside its target to free places inside it.
A boundary between two bands shifts one way only, so at each boundary at most one neighbour must vacate first: the
order has no cycle, needs no scratch space, and is at most one wave a band. Sources and destinations of a wave are
disjoint, so it runs as one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torch_uma.band import Band, PageArray
from torch_uma.placement import Span


class Wave(NamedTuple):
    """Pages of one sub-pool that move at once, `sources[i]` to `destinations[i]`; ascending: runs stay whole."""

    subpool: int
    sources: PageArray
    destinations: PageArray


class MovePlan(NamedTuple):
    """Waves to run in this order, after every band has given up its free pages outside its target."""

    waves: tuple[Wave, ...]
    targets: tuple[Span, ...]


def num_outside(band: Band, target: Span) -> int:
    """How many pages of the band lie outside the target, and so have to move."""
    start, end = target
    return band.count_held(band.low, min(band.high, start)) + band.count_held(max(band.low, end), band.high)


def trimmed(band: Band, target: Span) -> Span:
    """Today's span without its free pages outside the target."""
    occupied, base = band.tables.occupied_bytes, band.base
    low, high = band.span
    start, end = target
    if low < start:
        first = occupied.find(1, base + low, base + min(start, high))
        low = min(start, high) if first < 0 else first - base
    if high > end:
        last = occupied.rfind(1, base + max(end, low), base + high)
        high = max(end, low) if last < 0 else last - base + 1
    return (low, high)


def plan_moves(bands: Sequence[Band], targets: Sequence[Span]) -> MovePlan:
    """The waves that bring every band into its target; targets hold all held pages and reach over the pinned ones."""
    moving = {band.index: wave for band, target in zip(bands, targets) if (wave := _wave(band, target)) is not None}
    return MovePlan(tuple(moving[k] for k in _order(bands, targets, moving)), tuple(targets))


def pack(band: Band, pin: Span | None, budget_pages: int) -> tuple[Wave, Span] | None:
    """Move at most `budget_pages` pages into the band's own holes, to shrink its span; None if that gains nothing.

    An end is packed towards its end of the arena, a float to the shorter span, pins being as they are, or else towards
    the side that costs fewer moves.
    """
    if not band.num_holes or budget_pages <= 0:
        return None
    low, high = band.span
    held = band.num_held
    down_target = (low, max(low + held, pin[1] if pin else 0))
    up_target = (min(high - held, pin[0] if pin else high), high)
    grows = band.grid.grows
    towards_low = grows == "up" or (grows == "float" and _cost(band, down_target) <= _cost(band, up_target))
    start, end = down_target if towards_low else up_target
    if towards_low:
        sources = band.highest(min(budget_pages, high - end), end, high, held=True)
        destinations = band.lowest(len(sources), low, high, held=False)
        if len(sources) == budget_pages:
            end = int(sources[0])
    else:
        sources = band.lowest(min(budget_pages, start - low), low, start, held=True)
        destinations = band.highest(len(sources), low, high, held=False)
        if len(sources) == budget_pages:
            start = int(sources[-1]) + 1
    if (start, end) == (low, high):
        return None
    return Wave(band.index, sources, destinations), (start, end)


def _cost(band: Band, target: Span) -> tuple[int, int]:
    return (target[1] - target[0], num_outside(band, target))


def _wave(band: Band, target: Span) -> Wave | None:
    low, high = band.span
    start, end = target
    occupied = band.tables.occupied[band.base : band.base + band.grid.num_pages]
    below = np.flatnonzero(occupied[low : min(high, start)]) + low
    above = np.flatnonzero(occupied[max(low, end) : high]) + max(low, end)
    count = len(below) + len(above)
    if not count:
        return None
    # Pages new to the span first, nearest to the pages that stay: they are consecutive, so runs stay whole.
    fresh_above = np.arange(max(high, start), end)[:count]
    fresh_below = np.arange(start, min(low, end))
    fresh_below = fresh_below[max(0, len(fresh_below) - (count - len(fresh_above))) :]
    missing = count - len(fresh_above) - len(fresh_below)
    places = [fresh_below, fresh_above]
    if missing > 0:
        choose = band.highest if band.grid.grows == "down" else band.lowest
        places.append(choose(missing, max(low, start), min(high, end), held=False))
    sources = np.concatenate([below, above])
    destinations = np.sort(np.concatenate(places))
    assert len(sources) == len(destinations), (band.span, target, len(sources), len(destinations))
    return Wave(band.index, sources, destinations)


def _order(bands: Sequence[Band], targets: Sequence[Span], moving: dict[int, Wave]) -> list[int]:
    """The moving bands in an order in which each finds its target vacated by its neighbours.

    That is from the low end upwards, except that a band which moves up into the next one's place goes after it.
    """
    present = [band for band in bands if band.num_held]
    order: list[int] = []
    waiting: list[int] = []  # for the next band, each for the one after it
    for band, above in zip(present, [*present[1:], None]):
        if band.index not in moving:
            continue
        end_bytes = band.grid.origin_bytes + targets[band.index][1] * band.grid.page_bytes
        waiting.append(band.index)
        if above is None or above.index not in moving or end_bytes <= _present_start_bytes(above, targets[above.index]):
            order += reversed(waiting)
            waiting.clear()
    return order


def _present_start_bytes(band: Band, target: Span) -> int:
    """Where the band starts before it moves, once it has given up its free pages outside its target."""
    return band.grid.origin_bytes + trimmed(band, target)[0] * band.grid.page_bytes
