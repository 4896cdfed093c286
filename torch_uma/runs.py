"""Runs: rows whose pages lie one behind the other, and row behind row at one stride: one strided view covers them all.

Owns finding such a run and making one: of tokens when a batch asks for it, of states when a step begins. A run is a
preference: where none can be had, pages are taken wherever they are, and states stay there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from torch_uma.band import PageArray
from torch_uma.books import Sequences
from torch_uma.lifespans import spread
from torch_uma.moves import Wave
from torch_uma.tables import Int64Array

Run = tuple[int, int]
"""The physical page of the first row's column 0, held or not, and the pages from one row to the next."""

# Measured: what three waves take on the host, each row more, and each page of the grid that `Allocator.move` looks at.
_WAVES_US = 300.0
_ROW_US = 2.0
_PAGE_US = 0.02
_HOST_BYTES_PER_US = 4_000  # what a step copies meanwhile
_ACCELERATOR_BYTES_PER_US = 1_000_000
_MOST_WAVES = 16  # a longer chain of states that wait for one another stays as it is


def find_run(books: Sequences, rows: Int64Array, k: int, first: int, end: int) -> Run | None:
    """The run in which the columns `[first, end)` of every row lie in sub-pool `k`, or None if they do not."""
    if (books.first[k, rows] > first).any() or (books.end[k, rows] < end).any() or first >= end:
        return None
    columns = np.arange(first, end)
    ids = books.tables.mirror[books.tables.origin[k, rows][:, None] + columns]
    pages = books.allocator.v2p[ids]
    starts = pages[:, 0].astype(np.int64) - first
    if (ids < 0).any() or (pages != starts[:, None] + columns).any():
        return None
    if len(rows) == 1:
        return int(starts[0]), end - first
    stride = int(starts[1] - starts[0])
    if stride < end - first or (np.diff(starts) != stride).any():
        return None
    return int(starts[0]), stride


def extend_runs(books: Sequences, rows: Int64Array, num_tokens: int) -> None:
    """Take room for `num_tokens` tokens in every row, and put full sub-pools into one run each if one can be had.

    Raises OutOfMemory if the room does not fit in any way, and then no row has changed.
    """
    books.settle()
    lifespans, allocator = books.lifespans, books.allocator
    end = books.end[:, rows]
    wanted = wanted_end(books, rows, num_tokens)
    # All rows are equally long in a run, which keeps the room that the longest of them has.
    run_pages = {k: int(wanted[k].max()) for k in lifespans.full}
    broken = [k for k, num_pages in run_pages.items() if num_pages and find_run(books, rows, k, 0, num_pages) is None]
    demand = (wanted - end).sum(axis=1)
    run_demand = demand.copy()
    run_demand[broken] = [len(rows) * run_pages[k] for k in broken]
    if broken and allocator.quote(run_demand.tolist()).fits:
        ids = allocator.reserve(run_demand.tolist(), runs=frozenset(broken))
        parts = np.split(ids, np.cumsum(run_demand)[:-1])
        scattered = [k for k in broken if (np.diff(allocator.v2p[parts[k]]) != 1).any()]
        if scattered:
            # What was taken in vain holds more than what is missing, so the second reservation cannot fail.
            allocator.release(np.concatenate([parts[k] for k in scattered]))
            missing = np.zeros_like(demand)
            missing[scattered] = demand[scattered]
            singly = np.split(allocator.reserve(missing.tolist()), np.cumsum(missing)[:-1])
            parts = [singly[k] if k in scattered else part for k, part in enumerate(parts)]
    else:
        parts, scattered = np.split(allocator.reserve(demand.tolist()), np.cumsum(demand)[:-1]), broken
    for k, part in enumerate(parts):
        books.references[part] = 1
        books.tables.note_pages(part)
        if k in broken and k not in scattered:
            _replace(books, rows, k, part.reshape(len(rows), -1))
        elif len(part):
            cells = spread(books.tables.origin[k, rows] + end[k], wanted[k] - end[k])
            books.tables.write(cells, part)
            set_end(books, rows, k, wanted[k])


def wanted_end(books: Sequences, rows: Int64Array, num_tokens: int) -> Int64Array:
    """[sub-pools, rows] int64, where the columns of `rows` end once they have room for `num_tokens` tokens."""
    wanted = books.end[:, rows]
    for k in books.lifespans.paged:
        held = books.first[k, rows] + books.allocator.plan.subpools[k].num_pages_for(num_tokens)
        columns = int(books.lifespans.num_pages(np.array(k), np.array(num_tokens)))
        wanted[k] = np.maximum(wanted[k], np.minimum(columns, held))
    return wanted


def _replace(books: Sequences, rows: Int64Array, k: int, run: Int64Array) -> None:
    """Move what the rows hold in sub-pool `k` into the pages `run` [rows, pages], and let go of what they were in."""
    filled = books.lifespans.num_pages(np.full(len(rows), k), books.length[rows])
    row, column = (np.arange(run.shape[1]) < filled[:, None]).nonzero()
    origin = books.tables.origin[k, rows]
    books.copy(k, books.tables.mirror[origin[row] + column], run[row, column])
    held = books.tables.mirror[spread(origin, books.end[k, rows])]
    books.tables.write((origin[:, None] + np.arange(run.shape[1])).ravel(), run.ravel())
    set_end(books, rows, k, np.full(len(rows), run.shape[1]))
    books.drop(held)


def set_end(books: Sequences, rows: Int64Array, k: int, end: Int64Array) -> None:
    books.end[k, rows] = end
    books.capacity[k, rows] = end * books.lifespans.page_tokens[k]


def alignment_price_bytes(num_rows: int, num_pages: int, device: torch.device) -> float:
    """What could be copied in the time in which the host aligns the states of a batch in a grid of `num_pages`.

    The states themselves need no price: aligning moves less than two pages a row, and a step that works on a copy of
    them two.
    """
    bytes_per_us = _HOST_BYTES_PER_US if device.type == "cpu" else _ACCELERATOR_BYTES_PER_US
    return (_WAVES_US + _ROW_US * num_rows + _PAGE_US * num_pages) * bytes_per_us


def align_states(books: Sequences, k: int, slots: Int64Array) -> bool:
    """Move the states in the pages `slots` of sub-pool `k` side by side, in this order, if that can be had.

    No other state moves, nor one that is pinned. Returns whether they lie so now; if not, nothing has changed.
    """
    allocator = books.allocator
    free = allocator.free_places(k)
    # Of the gap above the band no more is of use than a run and as many spare places.
    free = free[: free.searchsorted(allocator.bands[k].high + 2 * len(slots))]
    is_pinned = np.isin(slots + allocator.id_base[k], allocator.room.pinned_places(k))
    waves = plan_alignment(k, slots, is_pinned, free)
    if waves is None or len(waves) > _MOST_WAVES:
        return False
    for wave in waves:
        allocator.move(wave.subpool, wave.sources, wave.destinations)
    return True


def plan_alignment(
    k: int, slots: Int64Array, is_pinned: npt.NDArray[np.bool_], free: PageArray
) -> tuple[Wave, ...] | None:
    """The waves that bring pages `slots` into consecutive places in this order, or None if that cannot be had.

    They go to places in `free`, ascending, and to those that they leave themselves. Of all runs that can be made, the
    one in which most pages lie already; the lowest of several.
    """
    assert len(set(slots.tolist())) == len(slots), "a step copies the states that forks share before it writes them"
    start = _best_start(slots, is_pinned, free)
    if start is None:
        return None
    goals = np.arange(start, start + len(slots))
    moving = slots != goals
    spares = free[(free < start) | (free >= start + len(slots))][: len(slots)]
    return plan_waves(k, dict(zip(slots[moving].tolist(), goals[moving].tolist())), spares.tolist())


def consecutive(places: Int64Array, count: int) -> Int64Array:
    """Where `count` consecutive ones of `places`, ascending, start."""
    starts: Int64Array = places[: max(0, len(places) - count + 1)]
    starts = starts[places[count - 1 :] - starts == count - 1]
    return starts


def _best_start(slots: Int64Array, is_pinned: npt.NDArray[np.bool_], free: PageArray) -> int | None:
    starts_if_kept = slots - np.arange(len(slots))
    starts = consecutive(np.sort(np.concatenate([free, slots])), len(slots))
    for pinned_start in np.unique(starts_if_kept[is_pinned]):
        starts = starts[starts == pinned_start]
    if not len(starts):
        return None
    known, num_kept = np.unique(starts_if_kept, return_counts=True)
    nearest = known.searchsorted(starts).clip(max=len(known) - 1)
    return int(starts[np.where(known[nearest] == starts, num_kept[nearest], 0).argmax()])


def plan_waves(k: int, goals: dict[int, int], spares: list[int]) -> tuple[Wave, ...] | None:
    """The waves that bring each page of `goals` to its goal, by way of the free places `spares`, which it uses up.

    Pages wait for one another in chains that end at a free goal, and in cycles. In a wave the first page of a chain
    goes home, the second can in the next wave, and the third makes way for the fourth to do so as well: with enough
    spare places three waves do for any chain, and for any cycle, in which one more page makes way. None if all wait in
    cycles and there is no spare place.
    """
    goals = dict(goals)
    is_goal = set(goals.values())
    waiting = {goal: page for page, goal in goals.items()}  # who waits for a place
    waves = []
    while goals:
        hops: list[tuple[int, int]] = []
        met: set[int] = set()
        spares.sort(reverse=True)
        ends = [goal for goal in waiting if goal not in goals]
        for end in [*ends, *goals.values()]:  # the chains, then what is left: cycles
            place, depth = end, 0
            while (page := waiting.get(place)) is not None and page not in met:
                met.add(page)
                if depth == 0 and end not in goals:
                    hops.append((page, end))
                elif depth % 2 == 0 and page in waiting and spares:
                    hops.append((page, spares.pop()))
                place, depth = page, depth + 1
        if not hops:
            return None
        hops.sort()
        for page, place in hops:
            goal = goals.pop(page)
            del waiting[goal]
            if place != goal:
                goals[place], waiting[goal] = goal, place
            if page not in is_goal:
                spares.append(page)
        sources, destinations = np.array(hops, np.int64).T
        waves.append(Wave(k, sources, destinations))
    return tuple(waves)
