"""Batches: which sequences a step is over, in which order, kept from step to step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from torch_uma.arena import keep_address, staged
from torch_uma.errors import SequenceError
from torch_uma.runs import Run, align_states, alignment_price_bytes, find_run
from torch_uma.sequence import Sequence
from torch_uma.stacks import Stacks
from torch_uma.tables import Int64Array

if TYPE_CHECKING:
    from torch_uma.pool import CachePool
    from torch_uma.step import OpenStep


class Rows:
    """Rows of the tables in the order of a batch, and what is remembered about them. They do not change.

    Attributes:
        sequences: whose rows they are.
        numbers: [rows] int64.
    """

    def __init__(self, pool: CachePool, sequences: list[Sequence], numbers: Int64Array) -> None:
        self.sequences = sequences
        self.numbers = numbers
        self._pool = pool
        self._tensor: Tensor | None = None
        self._stacks: dict[int, Stacks] = {}
        self._runs: dict[int, tuple[tuple[int, int, int, int], Run | None]] = {}
        self._num_steps = 0  # since states were last moved
        self._num_steps_worth: float | None = None  # so many copies of the states cost as much as it does to move them
        self._state_cells: Int64Array | None = None
        self._aligned_slots = b""  # that lie side by side
        self._unaligned: tuple[object, ...] | None = None  # how things were when they could not be aligned

    def tensor(self) -> Tensor:
        """[rows] int64 on the pool's device."""
        if self._tensor is None:
            with self._pool.guard.epochs.on_stream(), torch.inference_mode(False):  # it is kept for steps in any mode
                self._tensor = keep_address(staged(self.numbers, self._pool.device))
        return self._tensor

    def stacks(self, num_steps: int) -> Stacks:
        """The tensors of a multi-step of `num_steps`, the same for every one of that length.

        They are made for the next power of two, so that there are few of them, whatever lengths are asked for: a graph
        reads them where they are, and none can be given up before the batch is.
        """
        most_steps = 1 << (num_steps - 1).bit_length()
        if most_steps not in self._stacks:
            self._stacks[most_steps] = Stacks(self._pool, self.tensor(), most_steps)
        return self._stacks[most_steps]

    def run(self, k: int, first: int, end: int) -> Run | None:
        """`find_run` of these rows, remembered while nothing moves and no row holds other pages."""
        books = self._pool.sequences
        state = (books.allocator.layout_version, books.tables.version, first, end)
        known = self._runs.get(k)
        if known is None or known[0] != state:
            known = self._runs[k] = (state, find_run(books, self.numbers, k, first, end))
        return known[1]

    def align_states(self, step: OpenStep) -> None:
        """Move the states of a step over these rows side by side, once there were steps enough for that to be worth it.

        The step has just begun, so that nobody has seen its places and its own pin need not hold yet. Where it cannot
        be done, it is tried again when states have come, gone or moved. Moves pages, or changes nothing.
        """
        self._num_steps += 1
        if self._num_steps_worth is None:
            self._num_steps_worth = self._steps_worth_a_move()
        if self._num_steps < self._num_steps_worth:
            return
        books = self._pool.sequences
        allocator = books.allocator
        k = books.lifespans.states[0]
        if self._state_cells is None:
            self._state_cells = books.tables.origin[k].take(self.numbers)
        slots = allocator.v2p.take(books.tables.mirror.take(self._state_cells))
        seen = slots.tobytes()
        if seen == self._aligned_slots:
            return
        if not np.count_nonzero(slots[1:] - slots[:-1] != 1):
            self._aligned_slots = seen
            return
        band = allocator.bands[k]
        num_leases = len(allocator.ledger.leases)
        state = (seen, allocator.layout_version, books.num_freed, band.num_live, band.num_quarantined, num_leases)
        if state == self._unaligned:
            return
        allocator.unpin(step._pin)
        try:
            is_aligned = align_states(books, k, slots.astype(np.int64))
        finally:
            step._pin = allocator.pin_while(step.pinned_pages)
        if is_aligned:
            self._num_steps = 0
        else:
            self._unaligned = state

    def _steps_worth_a_move(self) -> float:
        books = self._pool.sequences
        num_rows = len(self.numbers)
        if not books.lifespans.states or num_rows == 1:
            return math.inf
        grid = books.allocator.bands[books.lifespans.states[0]].grid
        copied_bytes = 2 * num_rows * grid.page_bytes  # there and back
        return alignment_price_bytes(num_rows, grid.num_pages, self._pool.device) / copied_bytes


class Batch:
    """Sequences of one pool in the order of a batch's rows, kept with what every step would otherwise look up again.

    Changing it leaves a step that is open over it as it was. Raises SequenceError for a sequence that was freed,
    belongs to another pool or is named twice.
    """

    def __init__(self, pool: CachePool, sequences: Iterable[Sequence]) -> None:
        if not isinstance(sequences, Iterable):
            raise SequenceError(f"a batch is made of sequences, not of {sequences!r}; put one alone into a list")
        chosen = list(sequences)
        self.pool = pool
        self.rows = Rows(pool, chosen, pool.rows_of(chosen))
        books = pool.sequences
        self._serials = books.serial[self.rows.numbers]
        self._num_freed = books.num_freed
        self._places: dict[Sequence, int] | None = None

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The sequences, in order."""
        return tuple(self.rows.sequences)

    def append(self, sequence: Sequence) -> None:
        """Put a sequence behind the others."""
        (number,) = self._join([sequence]).tolist()
        self._places = None
        self._serials = np.append(self._serials, self.pool.sequences.serial[number])
        self.rows = Rows(self.pool, [*self.rows.sequences, sequence], np.append(self.rows.numbers, number))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, which may have been freed already; those behind it move up."""
        (place,) = self._leave([sequence])
        self._places = None
        self._serials = np.delete(self._serials, place)
        others = self.rows.sequences[:place] + self.rows.sequences[place + 1 :]
        self.rows = Rows(self.pool, others, np.delete(self.rows.numbers, place))

    def replace(self, old: Iterable[Sequence], new: Iterable[Sequence]) -> None:
        """Put each of `new` at the place of one of `old`, which may have been freed already; as many of each."""
        leaving, joining = list(old), list(new)
        places, joining_numbers = self._leave(leaving), self._join(joining)
        if len(places) != len(joining):
            raise SequenceError(f"{len(places)} sequences cannot be replaced by {len(joining)}")
        numbers, sequences, where = self.rows.numbers.copy(), self.rows.sequences.copy(), self._where()
        numbers[places] = joining_numbers
        self._serials[places] = self.pool.sequences.serial[joining_numbers]
        for place, leaver, joiner in zip(places, leaving, joining, strict=True):
            sequences[place] = joiner
            del where[leaver]
            where[joiner] = place
        self.rows = Rows(self.pool, sequences, numbers)

    def check(self) -> None:
        """Raise SequenceError if a sequence has been freed since it was put in."""
        books = self.pool.sequences
        if books.num_freed != self._num_freed:
            stale = (books.serial[self.rows.numbers] != self._serials).nonzero()[0]
            if len(stale):
                raise SequenceError(f"sequence {int(stale[0])} of the batch was freed; remove() or replace() it")
            self._num_freed = books.num_freed

    def __len__(self) -> int:
        return len(self.rows.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.rows.sequences)

    def _where(self) -> dict[Sequence, int]:
        self.pool.guard.enter()
        if self._places is None:
            self._places = {sequence: place for place, sequence in enumerate(self.rows.sequences)}
        return self._places

    def _leave(self, sequences: list[Sequence]) -> list[int]:
        where = self._where()
        places = [where.get(sequence, -1) for sequence in sequences]
        if -1 in places or len(set(places)) < len(places):
            raise SequenceError("what is to leave the batch is not in it, or is named twice")
        return places

    def _join(self, sequences: list[Sequence]) -> Int64Array:
        where = self._where()
        numbers = self.pool.rows_of(sequences)
        for sequence in sequences:
            if sequence in where:
                raise SequenceError(f"{sequence!r} is in the batch already; fork() makes a second one")
        return numbers
