"""The books of the sequences: what each row holds, as one array over all rows for each fact.

Owns lengths, the columns of the page tables that a row holds, and how many rows refer to each page. The user's handle
on a row is in `sequence.py`; steps, which make rows longer, are in `step.py`.

A row holds the columns `[first, end)` of every sub-pool. Between steps `first` is the first column that a query at the
row's length reads, and `end` lies at or behind the last token: what lies behind it is room reserved ahead. A row that
keeps its past may hold more in front, with a gap in it. A state is a column that never ends. A page is referred to by
as many rows as share it (`references`); the allocator sees it released when the last of them lets go. That is put off
until someone looks (`settle`), so that a step makes one release of all that was let go since the last.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from torch_uma.allocator import SCALAR_PAGES, Allocator
from torch_uma.counts import whole
from torch_uma.errors import SequenceError
from torch_uma.lifespans import NEVER, Lifespans, spread
from torch_uma.plan import Plan
from torch_uma.refusal import out_of_memory
from torch_uma.tables import IdArray, Int64Array, Tables


class _Room(NamedTuple):
    """What a new row takes for some number of tokens."""

    num_pages: tuple[int, ...]  # by sub-pool
    k: Int64Array  # [pages] the sub-pool of each
    column: Int64Array  # [pages]
    reach: Int64Array  # [2 * sub-pools] its end, then its capacity


def _room_for(plan: Plan, lifespans: Lifespans, num_tokens: int) -> _Room:
    num_pages = plan.demand(num_tokens)
    counts = np.array(num_pages, np.int64)
    k = np.repeat(np.arange(len(counts)), counts)
    column = spread(np.zeros_like(counts), counts)
    return _Room(num_pages, k, column, np.concatenate([counts, counts * lifespans.page_tokens]))


class Sequences:
    """The books of all rows of a pool.

    Attributes:
        length: [rows] int64 tokens, those of an open step not included.
        first, end: [sub-pools, rows] int64, the half-open range of columns held.
        capacity: [sub-pools, rows] int64, tokens that the held columns reach to; `NEVER` for a state.
        last_needing: [sub-pools, rows] int64, greatest length at which the first held column is needed; `NEVER` where
            the row keeps its past, so that no step lets go of it.
        limits: both of these in one array [2 * sub-pools, rows], so that a step asks both with one look.
        flat_origin, flat_first ...: the same arrays, addressed by sub-pool * rows + row.
        references: [num_ids] int32, rows that refer to a page, and open steps that may have to put it back.
        is_clear: [num_ids] bool, behind its last token the page was cleared since it was taken, for who reads it whole.
        num_shared: references beyond the first, over all pages; 0 means that nothing is shared.
        may_share: [rows] bool, the last page or the state may be another row's too, so that a write needs a look.
        kept: [rows] int64, the length from which on the row keeps all it needed (see `past`); `NEVER` for no past.
        torn: [rows] bool, an aborted step has left the state half written.
        serial: [rows] int64, grows when the row is freed, so that a stale row number can be told.
        last_epoch: [rows] int64, the last step that read or wrote the row.
    """

    def __init__(self, lifespans: Lifespans, allocator: Allocator, tables: Tables) -> None:
        num_subpools, num_rows = tables.origin.shape
        self.lifespans = lifespans
        self.allocator = allocator
        self.tables = tables
        self.length = np.zeros(num_rows, np.int64)
        self._columns = np.zeros((4 * num_subpools, num_rows), np.int64)
        self.first, self.end, self.capacity, self.last_needing = np.split(self._columns, 4)
        self.limits = self._columns[2 * num_subpools :]
        self._reach = self._columns[num_subpools : 3 * num_subpools]  # end and capacity
        self._room = lru_cache(maxsize=128)(partial(_room_for, allocator.plan, lifespans))
        self.flat_origin = tables.origin.reshape(-1)
        self.flat_first = self.first.reshape(-1)
        self.flat_end = self.end.reshape(-1)
        self.flat_capacity = self.capacity.reshape(-1)
        self.flat_last_needing = self.last_needing.reshape(-1)
        self.references = np.zeros(allocator.id_base[-1], np.int32)
        self.is_clear = np.zeros(allocator.id_base[-1], np.bool_)
        self.num_shared = 0
        self.may_share = np.zeros(num_rows, np.bool_)
        self.kept = np.full(num_rows, NEVER, np.int64)
        self.torn = np.zeros(num_rows, np.bool_)
        self.any_torn = False
        self.live = np.zeros(num_rows, np.bool_)
        self.serial = np.zeros(num_rows, np.int64)
        self.num_freed = 0
        self.last_epoch = np.zeros(num_rows, np.int64)
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._freed: list[int] = []  # rows that `settle` has still to clear
        self._dropped: list[IdArray] = []  # references that `settle` has still to give up
        self._every = np.arange(num_subpools)
        self.last_needing[:] = lifespans.last_needing(self._every, np.zeros(num_subpools, np.int64))[:, None]
        self._unused = self._columns[:, :1].copy()

    # Pages

    def pages_of(self, rows: Int64Array) -> Int64Array:
        """The pages that these rows hold, ascending, each once."""
        starts = (self.tables.origin[:, rows] + self.first[:, rows]).ravel()
        ids = self.tables.mirror[spread(starts, (self.end[:, rows] - self.first[:, rows]).ravel())]
        return np.unique(ids[ids >= 0]).astype(np.int64)

    def drop(self, ids: IdArray) -> None:
        """Give up one reference to each of these pages, named as often as given up."""
        self._dropped.append(ids)

    def drop_cells(self, cells: Int64Array) -> None:
        """Empty these cells of the page tables, and give up the pages that they held."""
        cells = cells[self.tables.mirror[cells] >= 0]
        self.drop(self.tables.mirror[cells])
        self.tables.write(cells, -1)

    def settle(self) -> None:
        """Release what has been let go: pages without another reference, and the rows that were freed."""
        # Lists are exchanged before they are read: the collector may run a finalizer that frees at any moment.
        freed, self._freed = self._freed, []
        if freed:
            self._clear(np.array(freed))
            self._free_rows += freed
        dropped, self._dropped = self._dropped, []
        if dropped:
            ids = np.concatenate(dropped, dtype=np.int64)
            if self.num_shared:
                np.subtract.at(self.references, ids, 1)
                unreferenced = np.unique(ids[self.references[ids] == 0])
                self.num_shared -= len(ids) - len(unreferenced)
                ids = unreferenced
            else:
                self.references[ids] = 0
            if len(ids):
                self.is_clear[ids] = False
                self.allocator.release(ids)

    def share(self, ids: IdArray) -> None:
        """Add a reference to each of these pages, which are held already and named once."""
        self.references[ids] += 1
        self.num_shared += len(ids)

    def copy(self, k: int, sources: IdArray, targets: IdArray) -> None:
        """Copy what pages of sub-pool `k` hold into other pages of it, in one launch."""
        mover, v2p = self.allocator.mover, self.allocator.v2p
        if mover is not None and len(sources):
            mover(k, v2p[sources].astype(np.int64), v2p[targets].astype(np.int64))

    # Rows

    @property
    def num_free_rows(self) -> int:
        """Rows that can be taken."""
        return len(self._free_rows) + len(self._freed)

    def add(self, num_tokens: int) -> int:
        """Take a row with room for `num_tokens`; SequenceError without a row, OutOfMemory without the pages."""
        self._need_rows(1)
        room = self._room(num_tokens)
        if len(room.k) <= SCALAR_PAGES and self.allocator.quote(room.num_pages).how == "in_place":
            ids = np.array([self.allocator.reserve_one(k) for k in room.k.tolist()], np.int64)
        else:
            self.settle()
            ids = self.allocator.reserve(room.num_pages)
        row = self._free_rows.pop()
        self.references[ids] = 1
        self.tables.note_pages(ids)
        self.tables.write(self.tables.origin[room.k, row] + room.column, ids)
        self._reach[:, row] = room.reach
        self.live[row] = True
        return row

    def add_many(self, num_tokens: list[int]) -> list[int]:
        """Take a row for each of these numbers of tokens, all or none, with one reservation."""
        if len(num_tokens) <= 1:
            return [self.add(tokens) for tokens in num_tokens]
        self._need_rows(len(num_tokens))
        self.settle()
        rooms = [self._room(tokens) for tokens in num_tokens]
        rows = np.array(self._free_rows[: -len(rooms) - 1 : -1], np.int64)
        k = np.concatenate([room.k for room in rooms])
        order = k.argsort(kind="stable")
        row = rows.repeat([len(room.k) for room in rooms])[order]
        column = np.concatenate([room.column for room in rooms])[order]
        ids = self.allocator.reserve(np.bincount(k, minlength=len(self.first)).tolist())
        del self._free_rows[-len(rooms) :]
        self.references[ids] = 1
        self.tables.note_pages(ids)
        self.tables.write(self.tables.origin[k[order], row] + column, ids)
        self._reach[:, rows] = np.stack([room.reach for room in rooms], axis=1)
        self.live[rows] = True
        added: list[int] = rows.tolist()
        return added

    def fork(self, source: int) -> int:
        """Take a row that shares the pages and the state of `source`, but not the room that it has reserved ahead."""
        self._need_rows(1)
        row = self._free_rows.pop()
        length = int(self.length[source])
        first, last_needing = self.first[:, source], self.last_needing[:, source]
        if self.kept[source] < NEVER:  # the past is not forked with it
            first = self.lifespans.first_needed_page(self._every, np.full(len(first), length))
            last_needing = self.lifespans.last_needing(self._every, first)
        filled = self.lifespans.num_pages(self._every, np.full(len(first), length))
        filled[list(self.lifespans.states)] = 1
        end = np.maximum(np.minimum(self.end[:, source], filled), first)
        counts = end - first
        origin = self.tables.origin
        ids = self.tables.mirror[spread(origin[:, source] + first, counts)]
        self.share(ids)
        self.tables.write(spread(origin[:, row] + first, counts), ids)
        self.first[:, row] = first
        self.end[:, row] = end
        self.capacity[:, row] = end * self.lifespans.page_tokens
        self.last_needing[:, row] = last_needing
        self.last_epoch[row] = self.last_epoch[source]
        self.length[row] = length
        self.tables.write_lengths(np.array([row]), length)
        self.live[row] = True
        self.may_share[source] = self.may_share[row] = True
        return row

    def free(self, row: int) -> None:
        """Let go of everything that the row holds, and of the row."""
        self.live[row] = False
        self.serial[row] += 1
        self.num_freed += 1
        self._freed.append(row)

    def crop(self, row: int, num_tokens: int) -> None:
        """Shorten the row and let go of the pages behind; SequenceError if what it needs then is gone."""
        num_tokens = self.check_crop(row, num_tokens)
        if num_tokens == self.length[row]:
            self.torn[row] &= num_tokens > 0  # without tokens it starts over
            return
        first = self.first[:, row].copy()
        if num_tokens:
            end = self.lifespans.num_pages(self._every, np.full(len(first), num_tokens))
            end[list(self.lifespans.states)] = 1
            end = np.clip(end, first, self.end[:, row])
        else:
            end = np.zeros_like(first)
            end[list(self.lifespans.states)] = 1
            self.first[:, row] = 0
            self.torn[row] = False
            self.kept[row] = NEVER
            self.last_needing[:, row] = self._unused[3 * len(first) :, 0]
        kept_end = np.maximum(first, end)
        self.drop_cells(spread(self.tables.origin[:, row] + kept_end, self.end[:, row] - kept_end))
        self.end[:, row] = end
        self.capacity[:, row] = end * self.lifespans.page_tokens
        self.length[row] = num_tokens
        self.tables.write_lengths(np.array([row]), num_tokens)
        self.may_share[row] = self.num_shared > 0

    def check_crop(self, row: int, num_tokens: int) -> int:
        """The number of tokens; SequenceError if the row cannot be shortened to it."""
        length = int(self.length[row])
        num_tokens = whole(num_tokens, "num_tokens of a crop", least=0, error=SequenceError)
        if num_tokens > length:
            raise SequenceError(f"a sequence of {length} tokens cannot be cropped to {num_tokens}; crop only shortens")
        if 0 < num_tokens < length:
            self._check_state(row, num_tokens)
            self.check_kept(row, num_tokens)
        return num_tokens

    def check_columns(self, num_tokens: int) -> None:
        """Raise SequenceError if the tables have no columns for a sequence of so many tokens.

        OutOfMemory if the arena cannot hold such a sequence either: then it is memory that is missing.
        """
        if num_tokens <= self.tables.max_tokens:
            return
        quote = self.allocator.quote(self.allocator.plan.demand(num_tokens))
        if not quote.fits_empty:
            raise out_of_memory(self.allocator.plan, self.allocator.stats().free_bytes, quote)
        raise SequenceError(
            f"a sequence of {num_tokens} tokens was asked for, but the pool's tables hold {self.tables.max_tokens}; "
            "make the pool with a larger max_tokens"
        )

    def check_whole(self, rows: Int64Array) -> None:
        """Raise SequenceError if an aborted step has left the state of one of the rows half written."""
        if self.any_torn and self.torn[rows].any():
            row = int(rows[self.torn[rows].argmax()])
            raise SequenceError(
                f"the state of row {row} was half written by a step that was aborted; crop(0) starts it over, free() "
                "gives it up"
            )

    def check_kept(self, row: int, num_tokens: int) -> None:
        """Raise SequenceError if pages are gone that the row would need with so many tokens."""
        subpools, length = self.allocator.plan.subpools, int(self.length[row])
        needed, there = (
            self.lifespans.first_needed_page(self._every, np.full(len(subpools), tokens))
            for tokens in (num_tokens, min(length, int(self.kept[row])))
        )
        for k in np.flatnonzero(there > needed).tolist():
            kept = int(there[k]) * subpools[k].page_tokens
            raise SequenceError(
                f"cannot crop from {length} to {num_tokens} tokens: {subpools[k].name!r} needs tokens from "
                f"{subpools[k].lifetime.first_needed(num_tokens)} on, but keeps those from {kept} on; "
                "fork() before going on keeps them, crop(0) starts over"
            )

    def _need_rows(self, count: int) -> None:
        if len(self._free_rows) < count:
            self.settle()
        if len(self._free_rows) < count:
            raise SequenceError(
                f"{count} more sequences were asked for, and {len(self._free_rows)} of {len(self.length)} rows of the "
                "pool are free; free a sequence, or make the pool with a larger max_sequences"
            )

    def _check_state(self, row: int, num_tokens: int) -> None:
        self.check_whole(np.array([row]))
        length = int(self.length[row])
        if self.lifespans.states:
            name = self.allocator.plan.subpools[self.lifespans.states[0]].name
            raise SequenceError(
                f"cannot crop from {length} to {num_tokens} tokens: the {name!r} of {length} tokens has replaced the "
                "older ones; fork() before the step keeps one, crop(0) starts over"
            )

    def _clear(self, rows: Int64Array) -> None:
        """Let go of all that these rows hold, and make them as rows are that have never been used."""
        held = self._columns.take(rows, axis=1)
        first, end = held[: len(self.first)], held[len(self.first) : 2 * len(self.first)]
        self.drop_cells(spread((self.tables.origin.take(rows, axis=1) + first).ravel(), (end - first).ravel()))
        self._columns[:, rows] = self._unused
        self.length[rows] = self.last_epoch[rows] = 0
        self.kept[rows] = NEVER
        self.tables.write_lengths(rows, 0)
        self.may_share[rows] = self.torn[rows] = False
