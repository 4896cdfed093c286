"""What steps will take and release, asked before any of them begins: for who decides which rows go on.

Owns how many pages a row takes for its new tokens, and which pages go when these count; `growth` takes and releases
just these. Nothing here changes what anybody holds, but what has been let go of already is released first.

A page leaves when the last row that refers to it lets go, and not before its last lease ends. So where rows share
pages, those that are asked about together are taken to step together. A page that all of them let go of is counted
once, at the last of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from torch_uma.books import Sequences
from torch_uma.lifespans import NEVER, spread
from torch_uma.tables import Int64Array


class Extent(NamedTuple):
    """How far pairs of a sub-pool and a row hold pages, and how far they will: [pairs] int64 columns each."""

    end: Int64Array  # of what they hold
    needed: Int64Array  # the first one that they need when the new tokens are there
    start: Int64Array  # the first one of the new pages
    num_new: Int64Array  # new pages, from `start` on
    filled: Int64Array  # the end of those with tokens; from here to `end` there is room
    room: Int64Array  # pages of that room that no token waits for: they serve as the first new ones


def extent_of(books: Sequences, k: Int64Array, rows: Int64Array, new: Int64Array) -> Extent:
    """The extents of sub-pools `k` and rows `rows`, [pairs] int64 each, that get as long as `new`.

    A single token has a place in its step even if it is dead then, so that it can be read there.
    """
    lifespans, end, past = books.lifespans, books.end[k, rows], books.length[rows]
    needed = lifespans.first_needed_page(k, np.minimum(new, books.kept[rows]))
    start = np.where(new - past == 1, end, np.maximum(end, needed))
    num_new = np.maximum(lifespans.num_pages(k, new) - start, 0)
    filled = lifespans.num_pages(k, past)
    room = np.clip(np.minimum(end, needed) - filled, 0, num_new)
    return Extent(end, needed, start, num_new, filled, room)


class Cells(NamedTuple):
    """Cells of the page tables that rows have pages in: [n] int64 each."""

    k: Int64Array  # sub-pool
    place: Int64Array  # of the row among those that were asked about
    cell: Int64Array


def shared_cells_of(books: Sequences, rows: Int64Array) -> Cells:
    """The cells of all shared pages that the next tokens of `rows` will be written into, ordered by sub-pool.

    Where all who refer to a page are among the rows, the longest keeps it: it writes behind what all of them have
    there, who get it back if the step is aborted.
    """
    if not books.num_shared:
        return Cells(rows[:0], rows[:0], rows[:0])
    places = books.may_share[rows].nonzero()[0]
    places = places[(-books.length[rows[places]]).argsort(kind="stable")]
    past = books.length[rows[places]]
    page_tokens = books.lifespans.page_tokens[:, None]
    written = past % page_tokens != 0
    written[list(books.lifespans.states)] = True
    cells = books.tables.origin[:, rows[places]] + past // page_tokens
    k, column = written.nonzero()
    cells = cells[k, column]
    ids = books.tables.mirror[cells]
    shared = books.references[ids] > 1
    pages, earliest, num_in_step = np.unique(ids, return_index=True, return_counts=True)
    shared[earliest[num_in_step == books.references[pages]]] = False
    return Cells(k[shared], places[column[shared]], cells[shared])


def longest(books: Sequences, rows: Int64Array, num_new_tokens: int | Int64Array) -> int:
    """How long the longest of the rows gets; one number of new tokens may be too great for an array."""
    if isinstance(num_new_tokens, int):
        return int(books.length[rows].max()) + num_new_tokens
    return int((books.length[rows] + num_new_tokens).max())


def step_pages(books: Sequences, rows: Int64Array, num_new_tokens: int | Int64Array) -> Int64Array:
    """[sub-pools, rows] int64 pages that a step over `rows` takes for each of them, as `Growth` does.

    `num_new_tokens` is one number for all rows, or [rows] int64. Copies of pages that rows share are counted at those
    who get the copies. Whether the tables have columns for so many tokens is not asked.
    """
    books.settle()
    new = books.length[rows] + num_new_tokens
    pages = np.zeros((len(books.first), len(rows)), np.int64)
    k, column = (books.capacity.take(rows, axis=1) < new).nonzero()
    if len(k):
        extent = extent_of(books, k, rows[column], new[column])
        pages[k, column] = extent.num_new - extent.room
    if books.num_shared:
        shared = shared_cells_of(books, rows)
        pages[shared.k, shared.place] += 1
    return pages


def released_by_step(books: Sequences, rows: Int64Array, num_new_tokens: int | Int64Array) -> Int64Array:
    """[sub-pools, rows] int64 pages that leave when a step over `rows` is committed, those that it took among them."""
    books.settle()
    new = books.length[rows] + num_new_tokens
    released = np.zeros((len(books.first), len(rows)), np.int64)
    k, column = (books.last_needing.take(rows, axis=1) < new).nonzero()
    if not len(k):
        return released
    extent = extent_of(books, k, rows[column], new[column])
    first, stop = books.first[k, rows[column]], np.minimum(extent.end, extent.needed)
    released[k, column] = np.clip(extent.needed - extent.start, 0, extent.num_new)
    if not may_stay(books):
        released[k, column] += stop - first - extent.room
        return released
    pair, dead = np.arange(len(k)).repeat(stop - first), spread(first, stop - first)
    serves = (dead >= extent.filled[pair]) & (dead < (extent.filled + extent.room)[pair])
    pair, dead = pair[~serves], dead[~serves]
    k, column = k[pair], column[pair]
    dying = Cells(k, column, books.tables.origin[k, rows[column]] + dead)
    np.add.at(released, _leaving(books, dying, np.zeros_like(dead), shared_cells_of(books, rows), 0)[1:], 1)
    return released


def pages_ahead(books: Sequences, rows: Int64Array, num_steps: int) -> Int64Array:
    """[num_steps, sub-pools, rows] int64 pages that rows hold in each of their next steps, more than they do now.

    The steps are of one token each, over all of the rows. It is while they are open that most is held; what died with
    the steps before has left by then, so that it may be fewer pages than now. Copies of pages that rows share are
    counted at those who get the copies.
    """
    books.settle()
    lifespans, length = books.lifespans, books.length[rows]
    new = length + np.arange(1, num_steps + 1)[:, None, None]
    ahead = np.zeros((num_steps, len(books.first), len(rows)), np.int64)
    step, k, column = (books.capacity.take(rows, axis=1) < new).nonzero()
    if len(k):
        ahead[step, k, column] = lifespans.num_pages(k, new[step, 0, column]) - books.end[k, rows[column]]
    is_held = may_stay(books)
    step, k, column = (books.last_needing.take(rows, axis=1) < new - 1).nonzero()
    if len(k):
        first, end = books.first[k, rows[column]], books.end[k, rows[column]]
        needed = lifespans.first_needed_page(k, new[step, 0, column] - 1)
        ahead[step, k, column] -= np.maximum(needed - end, 0) if is_held else needed - first
    if is_held:
        shared = shared_cells_of(books, rows)
        ahead[:, shared.k, shared.place] += 1
        ahead -= _left(books, rows, num_steps, shared)
    return ahead


def pages_alone(books: Sequences, rows: Int64Array) -> Int64Array:
    """[sub-pools, rows] int64 pages that leave if that row alone is freed: nobody shares them, and no lease is open."""
    books.settle()
    first = books.first.take(rows, axis=1)
    count: Int64Array = books.end.take(rows, axis=1) - first
    if not may_stay(books) and not (books.kept[rows] < NEVER).any():
        return count
    ids = books.tables.mirror[spread((books.tables.origin.take(rows, axis=1) + first).ravel(), count.ravel())]
    pair, is_page = np.arange(count.size).repeat(count.ravel()), ids >= 0
    ids, pair = ids[is_page], pair[is_page]
    leaves = (books.references[ids] == 1) & ~books.allocator.is_leased(ids)
    alone: Int64Array = np.bincount(pair[leaves], minlength=count.size).reshape(count.shape)
    return alone


def may_stay(books: Sequences) -> bool:
    """Whether a page may stay where a row lets go of it."""
    return books.num_shared > 0 or books.allocator.any_leased()


def _left(books: Sequences, rows: Int64Array, num_steps: int, shared: Cells) -> Int64Array:
    """[num_steps, sub-pools, rows] int64: of the pages held now and of the first step's copies, those that are gone."""
    lifespans, length = books.lifespans, books.length[rows]
    left = np.zeros((num_steps, len(books.first), len(rows)), np.int64)
    last = length + num_steps - 1
    k, place = (books.last_needing.take(rows, axis=1) < last).nonzero()
    first = books.first[k, rows[place]]
    count = np.minimum(books.end[k, rows[place]], lifespans.first_needed_page(k, last[place])) - first
    k, place, column = k.repeat(count), place.repeat(count), spread(first, count)
    step = lifespans.last_needing(k, column) + 1 - length[place]
    dying = Cells(k, place, books.tables.origin[k, rows[place]] + column)
    leaving = _leaving(books, dying, step, shared, 1)
    is_near = leaving[0] < num_steps
    np.add.at(left, tuple(of[is_near] for of in leaving), 1)
    return left.cumsum(axis=0)


def _leaving(
    books: Sequences, dying: Cells, step: Int64Array, shared: Cells, first_step: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Step, sub-pool and place of each page that leaves where rows let go of the cells `dying`, of each at its `step`.

    In the cells `shared` there are copies by then, which leave with them; what was there before is let go of at
    `first_step`.
    """
    k, place, cell = (np.concatenate(both) for both in zip(dying, shared))
    step = np.concatenate([step, np.full_like(shared.k, first_step)])
    is_copy = np.zeros(len(cell), np.bool_)
    is_copy[: len(dying.cell)] = np.isin(dying.cell, shared.cell)
    others = (~is_copy).nonzero()[0]
    ids = books.tables.mirror[cell[others]]
    pages, num_let_go = np.unique(ids, return_counts=True)
    leaves = (num_let_go == books.references[pages]) & ~books.allocator.is_leased(pages)
    last = others[np.lexsort((step[others], ids))[num_let_go.cumsum() - 1]]
    chosen = np.concatenate([is_copy.nonzero()[0], last[leaves]])
    return step[chosen], k[chosen], place[chosen]
