"""The pages of a multi-step on the host: taken before it begins, and told apart when it is known who took them.

Owns the host's side of what `allocate` does in a graph. All pages that rows may need for their next tokens are taken at
once and lie on one stack for each sub-pool, for no row yet. The device hands them out, step by step, and at each step
in the order of the batch. So how many tokens each row took says who has which page, and nothing is read back.

No page dies while the multi-step is open: what died with its tokens is let go when it ends.
"""

from __future__ import annotations

import numpy as np

from torch_uma.books import Sequences
from torch_uma.demands import shared_cells_of
from torch_uma.growth import Growth
from torch_uma.lifespans import spread
from torch_uma.tables import IdArray, Int64Array


def demand_of(books: Sequences, rows: Int64Array, num_steps: int) -> Int64Array:
    """[sub-pools] int64 pages that a `Supply` takes, copies of shared ones among them."""
    shared = shared_cells_of(books, rows)
    demand: Int64Array = _ahead(books, rows, num_steps).sum(axis=1) + np.bincount(shared.k, minlength=len(books.first))
    return demand


class Supply:
    """Pages for `num_steps` more tokens of each of `rows`, on stacks; `commit` or `abort` ends it.

    Pages that a row shares and would write into are copied when it is made.

    Attributes:
        past: [rows] int64, lengths before.
        reach: [sub-pools, rows] int64, tokens up to which the rows had pages before.
        stacks: int64 ids for each sub-pool, in the order in which they are handed out.
        cells: [n] int64, all cells of the tables that the device may write.
        displaced: pages that `abort` puts back, and those on the stacks.

    Raises OutOfMemory or SequenceError, and then nothing has changed.
    """

    def __init__(self, books: Sequences, rows: Int64Array, num_steps: int) -> None:
        books.settle()
        self._books = books
        self._rows = rows
        self._num_steps = num_steps
        books.check_columns(int(books.length[rows].max()) + num_steps)
        ahead = _ahead(books, rows, num_steps)
        self._end = books.end.take(rows, axis=1)
        self._growth = Growth(books, rows, 0, num_spare=ahead.sum(axis=1))
        self.past = self._growth.past
        self.reach: Int64Array = books.capacity.take(rows, axis=1)
        self.stacks = self._growth.spare
        self.cells = spread((books.tables.origin.take(rows, axis=1) + self._end).ravel(), ahead.ravel())
        put_back = self._growth.displaced
        assert put_back is not None
        self.displaced: IdArray = np.concatenate([put_back, *self.stacks])

    def commit(self, taken_tokens: Int64Array) -> None:
        """End it with so many tokens of each row, [rows] int64: who took which page is replayed, the rest given up."""
        books, rows = self._books, self._rows
        new = self.past + taken_tokens
        every = np.arange(len(books.first))[:, None]
        counts = np.maximum(books.lifespans.num_pages(every, new) - self._end, 0)
        books.tables.write(self.cells, -1)
        for k in books.lifespans.paged:
            place = np.repeat(np.arange(len(rows)), counts[k])
            column = spread(self._end[k], counts[k])
            step = column * books.lifespans.page_tokens[k] - self.past[place]
            order = np.lexsort((place, step))
            cells = books.tables.origin[k, rows[place[order]]] + column[order]
            books.tables.write(cells, self.stacks[k][: len(order)])
            books.drop(self.stacks[k][len(order) :])
        books.end[:, rows] = end = self._end + counts
        books.capacity[:, rows] = end * books.lifespans.page_tokens[:, None]
        self._growth.reach(new)
        self._growth.commit()

    def abort(self) -> None:
        """End it as if it had not begun."""
        self._books.tables.write(self.cells, -1)
        for stack in self.stacks:
            self._books.drop(stack)
        self._growth.abort()


def _ahead(books: Sequences, rows: Int64Array, num_steps: int) -> Int64Array:
    """[sub-pools, rows] int64 pages that each row takes at most."""
    every = np.arange(len(books.first))[:, None]
    wanted = books.lifespans.num_pages(every, books.length[rows] + num_steps)
    wanted[list(books.lifespans.states)] = 0
    ahead: Int64Array = np.maximum(wanted - books.end.take(rows, axis=1), 0)
    return ahead
