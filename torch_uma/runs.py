"""Runs: rows whose pages lie one behind the other, and row behind row at one stride: one strided view covers them all.

Owns finding such a run and making one. A run is a preference: where none can be had, pages are taken wherever they are.
"""

from __future__ import annotations

import numpy as np

from torch_uma.books import Sequences
from torch_uma.lifespans import spread
from torch_uma.tables import Int64Array

Run = tuple[int, int]
"""The first physical page of the first row, and the pages from one row to the next."""


def find_run(books: Sequences, rows: Int64Array, k: int, num_pages: int) -> Run | None:
    """The run in which the first `num_pages` pages of every row lie in sub-pool `k`, or None if they do not."""
    if books.first[k, rows].any() or (books.end[k, rows] < num_pages).any():
        return None
    columns = np.arange(num_pages)
    ids = books.tables.mirror[books.tables.origin[k, rows][:, None] + columns]
    pages = books.allocator.v2p[ids]
    starts = pages[:, 0]
    if (ids < 0).any() or (pages != starts[:, None] + columns).any():
        return None
    if len(rows) == 1:
        return int(starts[0]), num_pages
    stride = int(starts[1] - starts[0])
    if stride < num_pages or (np.diff(starts) != stride).any():
        return None
    return int(starts[0]), stride


def extend_runs(books: Sequences, rows: Int64Array, num_tokens: int) -> None:
    """Take room for `num_tokens` tokens in every row, and put full sub-pools into one run each if one can be had.

    Raises OutOfMemory if the room does not fit in any way, and then no row has changed.
    """
    books.settle()
    lifespans, allocator = books.lifespans, books.allocator
    end = books.end[:, rows]
    wanted = end.copy()
    for k in lifespans.paged:
        held = books.first[k, rows] + allocator.plan.subpools[k].num_pages_for(num_tokens)
        columns = int(lifespans.num_pages(np.array(k), np.array(num_tokens)))
        wanted[k] = np.maximum(end[k], np.minimum(columns, held))
    # All rows are equally long in a run, which keeps the room that the longest of them has.
    run_pages = {k: int(wanted[k].max()) for k in lifespans.full}
    broken = [k for k, num_pages in run_pages.items() if num_pages and find_run(books, rows, k, num_pages) is None]
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
            _set_end(books, rows, k, wanted[k])


def _replace(books: Sequences, rows: Int64Array, k: int, run: Int64Array) -> None:
    """Move what the rows hold in sub-pool `k` into the pages `run` [rows, pages], and let go of what they were in."""
    filled = books.lifespans.num_pages(np.full(len(rows), k), books.length[rows])
    row, column = (np.arange(run.shape[1]) < filled[:, None]).nonzero()
    origin = books.tables.origin[k, rows]
    books.copy(k, books.tables.mirror[origin[row] + column], run[row, column])
    held = books.tables.mirror[spread(origin, books.end[k, rows])]
    books.tables.write((origin[:, None] + np.arange(run.shape[1])).ravel(), run.ravel())
    _set_end(books, rows, k, np.full(len(rows), run.shape[1]))
    books.drop(held)


def _set_end(books: Sequences, rows: Int64Array, k: int, end: Int64Array) -> None:
    books.end[k, rows] = end
    books.capacity[k, rows] = end * books.lifespans.page_tokens[k]
