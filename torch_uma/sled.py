"""Windows that slide through a run: room for a window and as much again, so that one view covers them step after step.

Owns that room. Where it ends, what the windows hold moves to the front of it, whose pages have died meanwhile, or to
another run. So about one entry is copied for each new token, and a batch takes no more than two windows a row. It is a
preference: where no run can be had nothing changes, and pages are taken wherever they are.
"""

from __future__ import annotations

import numpy as np

from torch_uma.books import Sequences
from torch_uma.lifespans import spread
from torch_uma.runs import consecutive, find_run, plan_waves, set_end
from torch_uma.tables import Int64Array


def slide_windows(books: Sequences, rows: Int64Array, num_new_tokens: int, num_tokens: int) -> int:
    """Give the windows of `rows`, equally long, room for a step, in one run each if one can be had.

    `num_tokens`: how long the rows are going to be, beyond which no room is taken. Returns up to which length this
    holds, whether a run could be had or not.
    """
    length = int(books.length[rows[0]])
    if (books.length[rows] != length).any() or length + num_new_tokens > books.tables.max_tokens:
        return length + num_new_tokens
    books.settle()
    longest = max(num_tokens, length + num_new_tokens)
    reached = [longest]
    for k in books.lifespans.windows:
        if books.lifespans.window[k] == 1:  # nothing is read from before a step
            continue
        page_tokens, window_pages = int(books.lifespans.page_tokens[k]), books.lifespans.window_pages(k)
        first, most = int(books.first[k, rows[0]]), 2 * window_pages
        need = min(-(-(length + num_new_tokens) // page_tokens) - first, most)
        wanted = min(-(-longest // page_tokens) - first, most)
        stride = min(-(-longest // page_tokens), most)  # always the same, as compiled steps are made for one
        run = find_run(books, rows, k, first, first + need)
        is_there = run is not None and (len(rows) == 1 or run[1] == stride)
        if is_there or _Sled(books, rows, k).make_room(wanted, stride):
            reached.append(int(books.end[k, rows[0]]) * page_tokens)
        else:
            reached.append(length + window_pages * page_tokens)
    return max(min(reached), length + num_new_tokens)


def give_back(books: Sequences, rows: Int64Array) -> bool:
    """Let go of the room that windows of `rows` have behind their last token; returns whether there was any."""
    given_back = [_Sled(books, rows, k).give_back() for k in books.lifespans.windows]
    return any(given_back)


class _Sled:
    """What rows of one length hold of one window: `live` [rows, pages], and behind it the room."""

    def __init__(self, books: Sequences, rows: Int64Array, k: int) -> None:
        self.books, self.rows, self.k = books, rows, k
        self.first = books.first[k, rows]
        self.filled = books.lifespans.num_pages(np.full(len(rows), k), books.length[rows])
        self.room_cells = spread(books.tables.origin[k, rows] + self.filled, books.end[k, rows] - self.filled)

    def give_back(self) -> bool:
        """Let go of the room."""
        if not len(self.room_cells):
            return False
        self.books.drop(self.books.tables.mirror[self.room_cells])
        self.books.tables.write(self.room_cells, -1)
        set_end(self.books, self.rows, self.k, self.filled)
        return True

    def make_room(self, wanted: int, stride: int) -> bool:
        """Hold `wanted` columns in one run, rows `stride` pages apart, if that can be had."""
        books, allocator, k = self.books, self.books.allocator, self.k
        first, num_live = int(self.first[0]), int(self.filled[0] - self.first[0])
        columns = books.tables.origin[k, self.rows][:, None] + first
        live = books.tables.mirror[columns + np.arange(num_live)].astype(np.int64)
        if not num_live:
            return self._start(stride, columns)
        # A gap, a page that two of the rows share, or a past that is kept and longer than the room.
        if (live < 0).any() or len(np.unique(live)) < live.size or num_live > wanted:
            return False
        sources = allocator.v2p[live].astype(np.int64)
        pinned = allocator.room.pinned_places(k) - allocator.id_base[k]
        room = allocator.v2p[books.tables.mirror[self.room_cells]].astype(np.int64)
        free = np.union1d(allocator.free_places(k), np.setdiff1d(room, pinned))
        run = find_run(books, self.rows, k, first, first + num_live)
        goals = self._places(int(sources[0, 0]), stride, wanted)
        stays = run is not None and (len(self.rows) == 1 or run[1] == stride)
        if not stays or not np.isin(goals[:, num_live:], free).all():
            starts = consecutive(np.union1d(free, sources), goals.shape[0] * stride)
            if not len(starts):
                return False
            goals = self._places(int(starts[0]), stride, wanted)
        moving = sources != goals[:, :num_live]
        if np.isin(sources[moving], pinned).any():
            return False
        moves = dict(zip(sources[moving].tolist(), goals[:, :num_live][moving].tolist(), strict=True))
        waves = plan_waves(k, moves, np.setdiff1d(free, goals[:, :num_live])[: len(moves)].tolist())
        if waves is None:
            return False
        self.give_back()
        books.settle()
        for wave in waves:
            allocator.move(k, wave.sources, wave.destinations)
        self._hold(allocator.reserve_at(k, goals[:, num_live:].ravel()), columns + np.arange(num_live, goals.shape[1]))
        return True

    def _start(self, stride: int, columns: Int64Array) -> bool:
        """`make_room` for rows without tokens."""
        allocator = self.books.allocator
        demand = [0] * len(allocator.bands)
        demand[self.k] = len(self.rows) * stride
        if not allocator.quote(demand).fits:
            return False
        ids = allocator.reserve(demand, runs=(self.k,))
        if (np.diff(allocator.v2p[ids]) != 1).any():
            allocator.release(ids)
            return False
        self.give_back()
        self._hold(ids, columns + np.arange(stride))
        return True

    def _places(self, start: int, stride: int, room: int) -> Int64Array:
        places: Int64Array = start + np.arange(len(self.rows))[:, None] * stride + np.arange(room)
        return places

    def _hold(self, ids: Int64Array, cells: Int64Array) -> None:
        """Let the rows hold these pages in these columns [rows, columns], behind what they hold."""
        books = self.books
        books.references[ids] = 1
        books.tables.note_pages(ids)
        books.tables.write(cells.ravel(), ids)
        set_end(
            books, self.rows, self.k, np.full(len(self.rows), int(books.end[self.k, self.rows[0]]) + cells.shape[1])
        )
