"""Steps: one forward pass over a batch of sequences, from the reservation of its pages until they count.

Owns what a forward asks while its step is open: where its tokens and states lie. What a step takes and gives back is
`growth`'s business.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_uma.arena import staged
from torch_uma.batch import Batch
from torch_uma.errors import SequenceError
from torch_uma.growth import Growth
from torch_uma.plan import SubPool
from torch_uma.runs import Run
from torch_uma.sequence import Sequence
from torch_uma.supply import Supply
from torch_uma.tables import Int64Array

if TYPE_CHECKING:
    from torch_uma.pool import CachePool


class OpenStep:
    """What is open over a batch, from its reservation on: a step, or a multi-step.

    While it is open its pages do not move, and its sequences can be neither freed, cropped, forked nor used in another.

    Attributes:
        rows: [rows] int64, rows of the tables, in order.
        past: [rows] int64, tokens before the step.
        num_new_tokens: tokens by which the tables' lengths are ahead of that, for all or [rows] int64.
        displaced: pages that `abort` would put back, or that are at hand, -1 among them; None if there are none.
        device_cells: [n] int64, cells of the page tables that the device may write meanwhile.
        epoch: the number of the step.
        state_touched: set by whoever starts to change the states in place; if the step is then aborted, the sequences
            that had a state cannot go on before `crop(0)`.
        writes_first: set by whoever writes new tokens into the arena before their layer attends to them.
        on_settle: set by whoever opened the step without a block around it; the pool calls it before any other
            operation, to bring the step to an end first.
    """

    __slots__ = (
        "__weakref__",
        "_books",
        "_guard",
        "_pin",
        "_reserved",
        "_rows",
        "device_cells",
        "displaced",
        "epoch",
        "is_open",
        "num_new_tokens",
        "on_settle",
        "past",
        "pool",
        "rows",
        "state_touched",
        "writes_first",
    )

    def __init__(self, pool: CachePool, batch: Batch, reserved: Growth | Supply, epoch: int) -> None:
        self.pool = pool
        self._guard = pool.guard
        self._books = books = pool.sequences
        self._reserved = reserved
        self.rows: Int64Array = batch.rows.numbers
        self._rows = batch.rows
        self.past: Int64Array = reserved.past
        self.num_new_tokens: int | Int64Array = 0
        self.displaced = reserved.displaced
        self.device_cells = self.rows[:0]
        self._pin = books.allocator.pin_while(self.pinned_pages)
        self.epoch = epoch
        books.last_epoch[self.rows] = epoch
        self.state_touched = False
        self.writes_first = False
        self.on_settle: Callable[[], None] | None = None
        self.is_open = True

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The sequences of the batch, in order."""
        return tuple(self._rows.sequences)

    @property
    def rows_on_device(self) -> Tensor:
        """[rows] int64, `rows` on the pool's device; at a fixed address for as long as the batch is the same."""
        return self._rows.tensor()

    @property
    def fresh(self) -> npt.NDArray[np.bool_]:
        """[rows] bool, where a row has no state yet: what lies in its slot is to be ignored."""
        fresh: npt.NDArray[np.bool_] = self.past == 0
        return fresh

    def pinned_pages(self) -> Int64Array:
        """[n] int64, the pages that do not move."""
        return self._books.pages_of(self.rows)

    def entries(self, subpool: SubPool, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """Physical entries of token positions: [rows, n] int64, of `positions` [rows, n] int64 on the pool's device.

        `rows` [rows] int64 there: rows of the tables, in any order and number; those of the batch by default. -1 where
        a position is negative or has no page. Every new token with an entry must be written there, also one that no
        later query reads. For a state, position 0 is the slot.
        """
        tables = self.pool.tables
        located: Tensor = torch.ops.torch_uma.locate(
            tables.page_table(subpool.index),
            tables.v2p,
            self.rows_on_device if rows is None else rows,
            positions,
            subpool.page_size,
            subpool.tokens_per_entry,
        )
        return located

    def state_pages(self) -> Int64Array:
        """[rows] int64, the virtual page of every row's state; none if there are no states."""
        books = self._books
        if not books.lifespans.states:
            return self.rows[:0]
        cells = books.tables.origin[books.lifespans.states[0], self.rows]
        ids: Int64Array = books.tables.mirror[cells].astype(np.int64)
        return ids

    def slots(self) -> Int64Array:
        """[rows] int64, the physical page of every row's state."""
        slots: Int64Array = self._books.allocator.v2p[self.state_pages()].astype(np.int64)
        return slots

    def abort(self) -> None:
        """End it as if it had not begun: what it reserved is given back, lengths are as before.

        Where `state_touched` is set, sequences that had a state before can only be cropped to 0 or freed.
        """
        self._close()
        self._reserved.abort()
        self._tear(self.past > 0)

    def detach(self) -> None:
        """Let go of the pool, which holds its open steps and would be held by them; `abort` is all that may follow."""
        self.on_settle = None
        del self.pool, self._rows

    def _close(self) -> None:
        self._guard.check_usable()
        if not self.is_open:
            raise SequenceError("the step has ended already; begin another one")
        self.is_open = False
        self.on_settle = None
        self._guard.end(self)
        self._books.allocator.unpin(self._pin)

    def _tear(self, is_torn: npt.NDArray[np.bool_]) -> None:
        """Note, if states were touched, that these of the rows, [rows] bool, cannot go on with theirs."""
        if self.state_touched and self._books.lifespans.states and is_torn.any():
            self._books.torn[self.rows[is_torn]] = True
            self._books.any_torn = True


class Step(OpenStep):
    """An open step: the pages for the new tokens of every sequence of a batch are reserved and staged.

    Made by `pool.begin()`, or by `pool.step()` together with a cache. `commit` or `abort` ends it. Each row takes
    `num_new_tokens`.
    """

    __slots__ = ("_growth",)

    def __init__(self, pool: CachePool, batch: Batch, num_new_tokens: int | Int64Array, epoch: int) -> None:
        self._growth = Growth(pool.sequences, batch.rows.numbers, num_new_tokens)
        super().__init__(pool, batch, self._growth, epoch)
        self.num_new_tokens = num_new_tokens

    def run(self, subpool: SubPool) -> Run | None:
        """(page 0 of row 0, pages from row to row) if one strided view covers what every row's tokens read, else None.

        Every row's own pages then reach over the longest row's tokens, those of this step included. Where tokens in
        front are gone, page 0 is where it would be; then all rows are equally long. Answered on the host.
        """
        past = int(self.past.max())
        first = subpool.lifetime.first_needed(past) // subpool.page_tokens
        if first and (self.past != past).any():
            return None
        return self.run_of(subpool, first, -(-int(self._growth.new.max()) // subpool.page_tokens))

    def run_of(self, subpool: SubPool, first: int, end: int) -> Run | None:
        """The same of the columns `[first, end)` of every row's pages, room ahead included."""
        return self._rows.run(subpool.index, first, end)

    def room_tokens(self, subpool: SubPool) -> int:
        """Tokens up to which the pages of every row reach, room ahead included."""
        return int(self._books.end[subpool.index, self.rows].min()) * subpool.page_tokens

    def clear_behind(self, subpool: SubPool, num_tokens: int) -> None:
        """Clear what lies behind the past, up to `num_tokens`, in pages in which that has not been done yet.

        Of equally long rows, whose pages there nobody shares.
        """
        books, k = self._books, subpool.index
        first, within = divmod(int(self.past[0]), subpool.page_tokens)
        columns = np.arange(first, -(-num_tokens // subpool.page_tokens))
        ids = books.tables.mirror[books.tables.origin[k, self.rows][:, None] + columns]
        unclear = ~books.is_clear[ids]
        if not unclear.any():
            return
        pages = self.pool.arena.pages(subpool)
        places = books.allocator.v2p[ids].astype(np.int64)
        for start_bytes, chosen in (
            (within * subpool.entry_bytes, places[:, :1][unclear[:, :1]]),
            (0, places[:, 1:][unclear[:, 1:]]),
        ):
            pages[:, start_bytes:].index_fill_(0, staged(chosen, pages.device), 0)
        books.is_clear[ids] = True

    def commit(self) -> None:
        """End the step: lengths grow, and pages that died with the new tokens are released.

        Nobody looks whether a forward has written the tokens, since the replay of a captured graph leaves no trace: if
        none has, `abort`, or later steps read what lay in those pages before.
        """
        self._close()
        self._growth.commit()
