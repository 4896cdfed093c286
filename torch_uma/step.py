"""Steps: one forward pass over a batch of sequences, from the reservation of its pages to the moment at which they count.

Owns the batch (whose row numbers are kept from step to step) and what a forward asks while its step is open: where its
tokens and states lie. What a step takes and gives back is `growth`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_uma.errors import SequenceError
from torch_uma.growth import Growth
from torch_uma.plan import SubPool
from torch_uma.runs import Run, find_run
from torch_uma.sequence import Sequence
from torch_uma.tables import Int32Array, Int64Array

if TYPE_CHECKING:
    from torch_uma.pool import CachePool


class Rows:
    """Rows of the tables in the order of a batch, and what is remembered about them; they do not change."""

    def __init__(self, pool: CachePool, numbers: Int64Array) -> None:
        self.numbers = numbers
        self._pool = pool
        self._tensor: Tensor | None = None
        self._runs: dict[int, tuple[tuple[int, int, int], Run | None]] = {}

    def tensor(self) -> Tensor:
        """[rows] int64 on the pool's device."""
        if self._tensor is None:
            self._tensor = torch.from_numpy(self.numbers).to(self._pool.device)
        return self._tensor

    def run(self, k: int, num_pages: int) -> Run | None:
        """`find_run` of these rows, remembered while nothing moves and no row holds other pages."""
        state = (self._pool.allocator.layout_version, self._pool.tables.version, num_pages)
        known = self._runs.get(k)
        if known is None or known[0] != state:
            known = self._runs[k] = (state, find_run(self._pool.sequences, self.numbers, k, num_pages))
        return known[1]


class Batch:
    """Sequences of one pool in the order of a batch's rows, kept with what every step would otherwise look up again.

    Changing it leaves a step that is open over it as it was. Raises SequenceError for a sequence that was freed, belongs
    to another pool or is named twice.

    Attributes:
        sequences: the sequences, in order.
        rows: their rows in the tables.
    """

    def __init__(self, pool: CachePool, sequences: Iterable[Sequence]) -> None:
        chosen = tuple(sequences)
        numbers = pool.rows_of(chosen)
        self.pool = pool
        self._num_freed = pool.sequences.num_freed
        self._assign(chosen, numbers, pool.sequences.serial[numbers])

    def append(self, sequence: Sequence) -> None:
        """Put a sequence behind the others."""
        numbers = self._new_numbers((sequence,), self.rows.numbers)
        serials = self.pool.sequences.serial[numbers]
        self._assign(
            (*self.sequences, sequence),
            np.concatenate([self.rows.numbers, numbers]),
            np.concatenate([self._serials, serials]),
        )

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, which may have been freed already; those behind it move up."""
        (place,) = self._places([sequence])
        kept = self.sequences[:place] + self.sequences[place + 1 :]
        self._assign(kept, np.delete(self.rows.numbers, place), np.delete(self._serials, place))

    def replace(self, old: Iterable[Sequence], new: Iterable[Sequence]) -> None:
        """Put each of `new` at the place of one of `old`, which may have been freed already; as many of each."""
        places, joining = self._places(old), tuple(new)
        if len(places) != len(joining):
            raise SequenceError(f"{len(places)} sequences cannot be replaced by {len(joining)}")
        numbers, serials, sequences = self.rows.numbers.copy(), self._serials.copy(), list(self.sequences)
        new_numbers = self._new_numbers(joining, np.delete(numbers, places))
        numbers[places] = new_numbers
        serials[places] = self.pool.sequences.serial[new_numbers]
        for place, sequence in zip(places, joining, strict=True):
            sequences[place] = sequence
        self._assign(tuple(sequences), numbers, serials)

    def check(self) -> None:
        """Raise SequenceError if a sequence has been freed since it was put in."""
        books = self.pool.sequences
        if books.num_freed != self._num_freed:
            stale = (books.serial[self.rows.numbers] != self._serials).nonzero()[0]
            if len(stale):
                raise SequenceError(f"sequence {int(stale[0])} of the batch was freed; remove() or replace() it")
            self._num_freed = books.num_freed

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    def _assign(self, sequences: tuple[Sequence, ...], numbers: Int64Array, serials: Int64Array) -> None:
        self.sequences = sequences
        self.rows = Rows(self.pool, numbers)
        self._serials = serials

    def _places(self, sequences: Iterable[Sequence]) -> list[int]:
        try:
            return [self.sequences.index(sequence) for sequence in sequences]
        except ValueError:
            raise SequenceError("a sequence that is to leave the batch is not in it") from None

    def _new_numbers(self, sequences: tuple[Sequence, ...], others: Int64Array) -> Int64Array:
        numbers = self.pool.rows_of(sequences)
        twice = np.isin(numbers, others).nonzero()[0]
        if len(twice):
            raise SequenceError(f"{sequences[int(twice[0])]!r} is in the batch already; fork() makes a second one")
        return numbers


class Step:
    """An open step: the pages for `num_new_tokens` more tokens of every sequence of a batch are reserved and staged.

    Made by `pool.begin()`, or by `pool.step()` together with a cache. `commit` or `abort` ends it. While it is open its
    pages do not move, and its sequences can be neither freed, cropped, forked nor used in another step.

    Attributes:
        sequences: those of the batch, in order.
        rows: [rows] int64, their rows in the tables.
        past: [rows] int64, tokens before the step.
        num_new_tokens: tokens that each row takes.
        epoch: the number of the step.
        state_touched: set by whoever starts to change the states in place; if the step is then aborted, the sequences
            that had a state cannot go on before `crop(0)`.
        on_settle: set by whoever opened the step without a block around it; the pool calls it before any other
            operation, to bring the step to an end first.
    """

    __slots__ = (
        "__weakref__",
        "_growth",
        "_pin",
        "_rows",
        "epoch",
        "is_open",
        "num_new_tokens",
        "on_settle",
        "past",
        "pool",
        "rows",
        "sequences",
        "state_touched",
    )

    def __init__(self, pool: CachePool, batch: Batch, num_new_tokens: int, epoch: int) -> None:
        books = pool.sequences
        self.pool = pool
        self.sequences = batch.sequences
        self.rows = rows = batch.rows.numbers
        self._rows = batch.rows
        self.num_new_tokens = num_new_tokens
        self._growth = Growth(books, rows, num_new_tokens)
        self.past: Int64Array = self._growth.past
        self._pin = books.allocator.pin_while(lambda: books.pages_of(rows))
        self.epoch = epoch
        books.last_epoch[rows] = epoch
        self.state_touched = False
        self.on_settle: Callable[[], None] | None = None
        self.is_open = True

    @property
    def fresh(self) -> npt.NDArray[np.bool_]:
        """[rows] bool, where a row has no state yet: what lies in its slot is to be ignored."""
        return self.past == 0

    @property
    def displaced(self) -> Int32Array | None:
        """Pages that `abort` would put back, -1 among them; None if there are none."""
        return self._growth.displaced

    def entries(self, subpool: SubPool, positions: Tensor) -> Tensor:
        """Physical entries of token positions: [rows, n] int64, of `positions` [rows, n] int64 on the pool's device.

        -1 where a position is negative or has no page. Every new token with an entry must be written there, also one
        that no later query reads. For a state, position 0 is the slot.
        """
        tables = self.pool.tables
        located: Tensor = torch.ops.torch_uma.locate(
            tables.page_table(subpool.index),
            tables.v2p,
            self._rows.tensor(),
            positions,
            subpool.page_size,
            subpool.tokens_per_entry,
        )
        return located

    def run(self, subpool: SubPool) -> Run | None:
        """(first physical page of row 0, pages from row to row) if one strided view covers every row's tokens, else None.

        Every row's own pages then reach over the longest row's tokens, those of this step included. Answered on the
        host.
        """
        length = int(self.past.max()) + self.num_new_tokens
        return self._rows.run(subpool.index, -(-length // subpool.page_tokens))

    def slots(self) -> Int32Array:
        """[rows] int32, the physical page of every row's state."""
        books = self.pool.sequences
        k = books.lifespans.states[0]
        ids = books.tables.mirror[books.tables.origin[k, self.rows]]
        slots: Int32Array = books.allocator.v2p[ids]
        return slots

    def commit(self) -> None:
        """End the step: lengths grow, and pages that died with the new tokens are released. Does not wait for the device."""
        self._close()
        self._growth.commit()

    def abort(self) -> None:
        """End the step as if it had not begun: what it reserved is given back, lengths are as before.

        Where `state_touched` is set, sequences that had a state before can only be cropped to 0 or freed.
        """
        self._close()
        self._growth.abort()
        books = self.pool.sequences
        if self.state_touched and books.lifespans.states:
            books.torn[self.rows[self.past > 0]] = True
            books.any_torn = True

    def _close(self) -> None:
        self.pool.check_usable()
        if not self.is_open:
            raise SequenceError("the step has ended already; begin another one")
        self.is_open = False
        self.on_settle = None
        self.pool.end(self)
        self.pool.allocator.unpin(self._pin)
