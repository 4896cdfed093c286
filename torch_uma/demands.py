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
    """The extents of sub-pools `k` and rows `rows`, [pairs] int64 each, that get as long as `new`."""
    lifespans, end = books.lifespans, books.end[k, rows]
    needed = lifespans.first_needed_page(k, np.minimum(new, books.kept[rows]))
    start = np.maximum(end, needed)
    num_new = np.maximum(lifespans.num_pages(k, new) - start, 0)
    filled = lifespans.num_pages(k, books.length[rows])
    room = np.clip(np.minimum(end, needed) - filled, 0, num_new)
    return Extent(end, needed, start, num_new, filled, room)


def shared_cells_of(books: Sequences, rows: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Sub-pool, place in `rows` and cell of every shared page that their next tokens will be written into.

    They are ordered by sub-pool. Where all who refer to a page are among the rows, the longest keeps it: it writes
    behind what all of them have there, who get it back if the step is aborted.
    """
    if not books.num_shared:
        return rows[:0], rows[:0], rows[:0]
    places = books.may_share[rows].nonzero()[0]
    places = places[(-books.length[rows[places]]).argsort(kind="stable")]
    suspects = rows[places]
    past = books.length[suspects]
    page_tokens = books.lifespans.page_tokens[:, None]
    written = past % page_tokens != 0
    written[list(books.lifespans.states)] = True
    cells = books.tables.origin[:, suspects] + past // page_tokens
    k, column = written.nonzero()
    cells = cells[k, column]
    ids = books.tables.mirror[cells]
    shared = books.references[ids] > 1
    pages, earliest, num_in_step = np.unique(ids, return_index=True, return_counts=True)
    shared[earliest[num_in_step == books.references[pages]]] = False
    return k[shared], places[column[shared]], cells[shared]


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
        k, column, _ = shared_cells_of(books, rows)
        pages[k, column] += 1
    return pages


def released_by_step(books: Sequences, rows: Int64Array, num_new_tokens: int | Int64Array) -> Int64Array:
    """[sub-pools, rows] int64 pages that leave when a step over `rows` is committed, those that it took among them.

    Leased pages stay until their leases end, so they are not counted.
    """
    books.settle()
    new = books.length[rows] + num_new_tokens
    pages = np.zeros((len(books.first), len(rows)), np.int64)
    k, column = (books.last_needing.take(rows, axis=1) < new).nonzero()
    if not len(k):
        return pages
    extent = extent_of(books, k, rows[column], new[column])
    first, stop = books.first[k, rows[column]], np.minimum(extent.end, extent.needed)
    if not _may_stay(books):
        pages[k, column] = stop - first - extent.room
        return pages
    dying, cells = np.arange(len(k)).repeat(stop - first), spread(first, stop - first)
    serves = (cells >= extent.filled[dying]) & (cells < (extent.filled + extent.room)[dying])
    dying, cells = dying[~serves], cells[~serves]
    k, column, _ = _leaving(books, rows, k[dying], column[dying], cells, np.zeros_like(dying), 0)
    np.add.at(pages, (k, column), 1)
    return pages


def pages_ahead(books: Sequences, rows: Int64Array, num_steps: int) -> Int64Array:
    """[num_steps, sub-pools, rows] int64 pages that rows hold in each of their next steps, more than they do now.

    The steps are of one token each, over all of the rows. It is while they are open that most is held; what died with
    the steps before is released by then, so that it may be fewer pages than now. Copies of pages that rows share are
    counted at those who get the copies. Leased pages stay until their leases end.
    """
    books.settle()
    lifespans, length = books.lifespans, books.length[rows]
    new = length + np.arange(1, num_steps + 1)[:, None, None]
    ahead = np.zeros((num_steps, len(books.first), len(rows)), np.int64)
    step, k, column = (books.capacity.take(rows, axis=1) < new).nonzero()
    if len(k):
        end, kept = books.end[k, rows[column]], books.kept[rows[column]]
        ahead[step, k, column] = lifespans.num_stored(k, end, lifespans.num_pages(k, new[step, 0, column]), kept)
    may_stay = _may_stay(books)
    step, k, column = (books.last_needing.take(rows, axis=1) < new - 1).nonzero()
    if len(k):
        first, end = books.first[k, rows[column]], books.end[k, rows[column]]
        needed = lifespans.first_needed_page(k, new[step, 0, column] - 1)
        ahead[step, k, column] -= lifespans.num_stored(k, end, np.maximum(end, needed), NEVER)
        if not may_stay:
            ahead[step, k, column] -= np.minimum(end, needed) - first
    if may_stay:
        ahead -= _left(books, rows, num_steps)
        k, column, _ = shared_cells_of(books, rows)
        ahead[:, k, column] += 1
    return ahead


def pages_alone(books: Sequences, rows: Int64Array) -> Int64Array:
    """[sub-pools, rows] int64 pages that leave if that row alone is freed: nobody shares them, and no lease is open."""
    books.settle()
    first = books.first.take(rows, axis=1)
    count: Int64Array = books.end.take(rows, axis=1) - first
    if not _may_stay(books) and not (books.kept[rows] < NEVER).any():
        return count
    ids = books.tables.mirror[spread((books.tables.origin.take(rows, axis=1) + first).ravel(), count.ravel())]
    pair, is_page = np.arange(count.size).repeat(count.ravel()), ids >= 0
    ids, pair = ids[is_page], pair[is_page]
    leaves = (books.references[ids] == 1) & ~books.allocator.is_leased(ids)
    alone: Int64Array = np.bincount(pair[leaves], minlength=count.size).reshape(count.shape)
    return alone


def _may_stay(books: Sequences) -> bool:
    """Whether a page may stay where a row lets go of it."""
    return books.num_shared > 0 or bool(books.allocator.ledger.leases)


def _left(books: Sequences, rows: Int64Array, num_steps: int) -> Int64Array:
    """[num_steps, sub-pools, rows] int64: of the pages held now, those that have left before each of the next steps."""
    lifespans, length = books.lifespans, books.length[rows]
    left = np.zeros((num_steps, len(books.first), len(rows)), np.int64)
    last = length + num_steps - 1
    k, column = (books.last_needing.take(rows, axis=1) < last).nonzero()
    first = books.first[k, rows[column]]
    count = np.minimum(books.end[k, rows[column]], lifespans.first_needed_page(k, last[column])) - first
    k, column, columns = k.repeat(count), column.repeat(count), spread(first, count)
    step = lifespans.last_needing(k, columns) + 1 - length[column]
    k, column, step = _leaving(books, rows, k, column, columns, step, 1)
    is_near = step < num_steps
    np.add.at(left, (step[is_near], k[is_near], column[is_near]), 1)
    return left.cumsum(axis=0)


def _leaving(
    books: Sequences,
    rows: Int64Array,
    k: Int64Array,
    place: Int64Array,
    columns: Int64Array,
    step: Int64Array,
    first_step: int,
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Sub-pool, place in `rows` and step of each page that leaves.

    Given are those of each column that is let go of. What the rows share and write into they let go of in `first_step`;
    they hold copies then.
    """
    cells = books.tables.origin[k, rows[place]] + columns
    shared_k, shared_place, shared_cells = shared_cells_of(books, rows)
    is_copy = np.isin(cells, shared_cells)
    all_k = np.concatenate([k[is_copy], k[~is_copy], shared_k])
    all_places = np.concatenate([place[is_copy], place[~is_copy], shared_place])
    steps = np.concatenate([step[is_copy], step[~is_copy], np.full_like(shared_k, first_step)])
    num_copies = int(np.count_nonzero(is_copy))
    ids = books.tables.mirror[np.concatenate([cells[~is_copy], shared_cells])]
    order = np.lexsort((steps[num_copies:], ids))
    pages, num_let_go = np.unique(ids, return_counts=True)
    leaves = (num_let_go == books.references[pages]) & ~books.allocator.is_leased(pages)
    last = order[num_let_go.cumsum()[leaves] - 1] + num_copies
    chosen = np.concatenate([np.arange(num_copies), last])
    return all_k[chosen], all_places[chosen], steps[chosen]
