"""How rows get longer: the pages that a step takes for its new tokens, and how they are given back.

Owns one step's reservation. It is all or nothing over all sub-pools, together with the pages that must be copied before
they are written because another row shares them. A sub-pool stores only what survives the step: columns that are dead
at the new length are skipped, so that until `commit` a row may hold what its past needs, a gap, and what is new.

Every cell that is written remembers what it held, and each page in a cell counts as a reference of its own, the
remembered ones too. So `commit` gives up what was remembered, and `abort` gives up what was written and puts back what
was remembered.
"""

from __future__ import annotations

import numpy as np

from torch_uma.books import Sequences
from torch_uma.demands import extent_of, shared_cells_of
from torch_uma.lifespans import spread
from torch_uma.tables import IdArray, Int64Array


class Growth:
    """Pages for `num_new_tokens` more tokens in `rows`, taken when made; `commit` or `abort` ends it.

    `num_new_tokens` is one number for all rows, or [rows] int64; with 0 only the pages that the next tokens would write
    into are made the rows' own. `num_spare` [sub-pools] int64 are pages to be taken at the same time, for no row.

    Attributes:
        past, new: [rows] int64, lengths before and after.
        spare: int64 ids of the pages for no row, by sub-pool; whoever asked for them gives them back.
        displaced: what the written cells held, -1 for nothing; these references are kept until the end.

    Raises OutOfMemory or SequenceError, and then nothing has changed.
    """

    __slots__ = ("_at", "_books", "_cells", "_dying", "_old_end", "_rows", "displaced", "new", "past", "spare")

    def __init__(
        self,
        books: Sequences,
        rows: Int64Array,
        num_new_tokens: int | Int64Array,
        num_spare: Int64Array | None = None,
    ) -> None:
        books.settle()
        self._books = books
        self._rows = rows
        self.past = books.length[rows]
        if isinstance(num_new_tokens, int):
            most_new_tokens, longest = num_new_tokens, int(self.past.max()) + num_new_tokens
        else:
            most_new_tokens, longest = int(num_new_tokens.max()), int((self.past + num_new_tokens).max())
        books.check_columns(longest)
        self.new = self.past + num_new_tokens
        num_subpools = len(books.first)
        passed = books.limits.take(rows, axis=1) < self.new
        self._dying = passed[num_subpools:]
        self._cells: Int64Array | None = None
        self.displaced: IdArray | None = None  # None: every written cell was empty
        self._at = self._old_end = rows[:0]
        self.spare: list[Int64Array] = []
        k, column = passed[:num_subpools].nonzero()
        may_share = books.num_shared and books.may_share[rows].any()
        if num_spare is not None or most_new_tokens > books.lifespans.step_tokens or may_share:
            self._take_many(k, column, num_spare)
        elif len(k):
            self._take_one_each(k, column)
        books.tables.write_lengths(rows, self.new)

    def _take_one_each(self, k: Int64Array, column: Int64Array) -> None:
        """Decode: one page for each pair of sub-pool `k` and row `rows[column]`, ordered by `k`; nothing is shared."""
        books = self._books
        at = k * len(books.length) + self._rows[column]
        ids = books.allocator.reserve(np.bincount(k, minlength=len(books.first)).tolist())
        end = books.flat_end[at]
        cells = books.flat_origin[at] + end
        books.references[ids] = 1
        books.tables.write(cells, ids)
        books.tables.note_pages(ids)
        books.flat_end[at] = end + 1
        books.flat_capacity[at] += books.lifespans.page_tokens[k]
        self._at, self._old_end, self._cells = at, end, cells

    def _take_many(self, k: Int64Array, column: Int64Array, num_spare: Int64Array | None) -> None:
        """Any number of pages for each pair; there may be gaps, room to be moved behind a gap, pages to be copied."""
        books, lifespans = self._books, self._books.lifespans
        at = k * len(books.length) + self._rows[column]
        end, _, start, count, filled, room = extent_of(books, k, self._rows[column], self.new[column])
        origin = books.flat_origin[at]
        shared_k, _, shared_cells = shared_cells_of(books, self._rows)
        taken_k = np.concatenate([np.repeat(k, count - room), shared_k])
        cells = np.concatenate([spread(origin + start + room, count - room), shared_cells])
        order = taken_k.argsort(kind="stable")
        taken_k, cells = taken_k[order], cells[order]
        ids = self._reserve(taken_k, num_spare)

        books.references[ids] = 1
        books.tables.note_pages(ids)
        displaced = books.tables.mirror[cells]
        copied = displaced >= 0
        for shared in np.unique(shared_k).tolist():
            chosen = copied & (taken_k == shared)
            books.copy(shared, displaced[chosen], ids[chosen])
        books.tables.write(cells, ids)
        if room.any():
            left, entered = spread(origin + filled, room), spread(origin + start, room)
            moved = books.tables.mirror[left]
            books.share(moved)
            books.tables.write(left, -1)
            books.tables.write(entered, moved)
            cells = np.concatenate([cells, left, entered])
            displaced = np.concatenate([displaced, moved, np.full_like(moved, -1)])
        books.flat_end[at] = np.maximum(end, start + count)
        books.flat_capacity[at] = books.flat_end[at] * lifespans.page_tokens[k]
        self._at, self._old_end, self._cells, self.displaced = at, end, cells, displaced

    def _reserve(self, k: Int64Array, num_spare: Int64Array | None) -> IdArray:
        """A page for each of the sub-pools `k`, which ascend, and the spare ones."""
        books = self._books
        counts = np.bincount(k, minlength=len(books.first))
        if num_spare is None:
            return books.allocator.reserve(counts.tolist())
        both = np.stack([counts, num_spare], axis=1).ravel()
        ids = books.allocator.reserve((counts + num_spare).tolist())
        parts: list[Int64Array] = np.split(ids, both.cumsum()[:-1])
        self.spare = parts[1::2]
        spare: Int64Array = np.concatenate(self.spare)
        books.references[spare] = 1
        books.tables.note_pages(spare)
        return np.concatenate(parts[::2])

    def reach(self, new: Int64Array) -> None:
        """Have the rows end at other lengths than were announced, [rows] int64, with the pages that they have."""
        self.new = new
        self._dying = self._books.last_needing.take(self._rows, axis=1) < new
        self._books.tables.write_lengths(self._rows, new)

    def commit(self) -> None:
        """The tokens are there: lengths grow, and pages that died with them are let go."""
        books, lifespans, rows = self._books, self._books.lifespans, self._rows
        books.length[rows] = self.new
        k, column = self._dying.nonzero()
        if len(k):
            at = k * len(books.length) + rows[column]
            first = books.flat_first[at]
            needed = lifespans.first_needed_page(k, self.new[column])
            cells = books.flat_origin[at] + first
            if self.displaced is not None or (needed - first).max() > 1:
                cells = spread(cells, needed - first)
                cells = cells[books.tables.mirror[cells] >= 0]
            books.drop(books.tables.mirror[cells])
            books.tables.write(cells, -1)
            books.flat_first[at] = needed
            books.flat_last_needing[at] = lifespans.last_needing(k, needed)
        if self.displaced is not None:
            books.drop(self.displaced[self.displaced >= 0])
            books.may_share[rows] = False

    def abort(self) -> None:
        """The tokens are not there: what was taken is given up, and every row is as before."""
        books = self._books
        if self._cells is not None:
            written = books.tables.mirror[self._cells]
            books.tables.write(self._cells, -1 if self.displaced is None else self.displaced)
            books.flat_end[self._at] = self._old_end
            k = self._at // len(books.length)
            books.flat_capacity[self._at] = self._old_end * books.lifespans.page_tokens[k]
            books.drop(written[written >= 0])
        books.tables.write_lengths(self._rows, self.past)
