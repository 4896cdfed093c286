"""The pool: one arena and the sequences that live in it, for a loop to drive.

Owns the public operations and their order. The arena, the allocator, the tables, the books of the sequences and the
guard each own their part; models and their caches are not known here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

import torch_uma.ops  # noqa: F401 (registers what the tables and steps call)
from torch_uma.allocator import Allocator
from torch_uma.arena import Arena
from torch_uma.band import PageArray
from torch_uma.batch import Batch
from torch_uma.books import Sequences
from torch_uma.budget import device_of, plan_of
from torch_uma.counts import whole, whole_or_each
from torch_uma.demands import longest, step_pages
from torch_uma.epochs import Epochs
from torch_uma.errors import ClosedError, LeaseError, OutOfMemory, PageError, PlanError, SequenceError
from torch_uma.guard import Guard
from torch_uma.ledger import Lease
from torch_uma.lifespans import Lifespans
from torch_uma.multistep import MultiStep
from torch_uma.offload import Offloaded, offload, restore
from torch_uma.placement import Quote
from torch_uma.recount import recount
from torch_uma.runs import extend_runs, wanted_end
from torch_uma.sequence import Sequence
from torch_uma.sled import give_back, slide_windows
from torch_uma.stats import Stats
from torch_uma.step import OpenStep, Step
from torch_uma.supply import demand_of
from torch_uma.tables import Int64Array, Tables

if TYPE_CHECKING:
    from torch_uma.integrations.transformers import UnifiedCache

__all__ = ["Batch", "CachePool", "MultiStep", "Step"]


class CachePool:
    """An arena for every kind of memory of a model, and the sequences in it.

    Args:
        source: a plan; or a transformers model, a config or a sequence of Layer, from which a plan is made.
        memory: bytes, "8GiB", or a fraction of the device's free memory; 0.5 of it by default. Not with a plan.
        page_size: entries of a page, 16 by default. Not with a plan, which has its own.
        max_sequences: sequences that can exist at once.
        max_tokens: longest sequence; by default what the arena can hold, within reason (64 MiB of page tables).
        device: where the arena lies; by default where the model is. On CUDA all work is enqueued on the stream current
            now.
        dtype: of the activations, where a config does not say it.
        kv_dtype: keep keys, values and latents in float8_e4m3fn or float8_e5m2 (saturated, without scales) or bfloat16,
            where the model computes them in more bits. Not with a plan.
        hints: share of the arena by sub-pool name; says where floating bands start, limits nothing.
        split: share of the arena by sub-pool name, those left out have what remains in equal parts; freezes the
            frontiers there, which makes fixed pools to compare with.

    What a loop needs: `add` (or ask `quote` first), `step`, `stats`, and `close` or a `with` block around it all.

    One thread drives a pool: every call from another raises ThreadError. After `close()` every call raises ClosedError.
    No call waits for the device, except `check()` and the first use of a pool's device.
    """

    def __init__(
        self,
        source: Any,
        *,
        memory: int | float | str | None = None,
        page_size: int | None = None,
        max_sequences: int = 256,
        max_tokens: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        kv_dtype: torch.dtype | str | None = None,
        hints: Mapping[str, float] | None = None,
        split: Mapping[str, float] | None = None,
    ) -> None:
        max_sequences = whole(max_sequences, "max_sequences of a pool", least=1, error=PlanError)
        if max_tokens is not None:
            max_tokens = whole(max_tokens, "max_tokens of a pool", least=1, error=PlanError)
        self.device = device_of(source, device)
        # Not kept alive: who makes a pool of a model may drop the model.
        self.made_for = weakref.ref(source) if hasattr(source, "get_text_config") or hasattr(source, "config") else None
        self.plan = plan_of(source, memory, page_size, dtype, kv_dtype, self.device)
        self.guard = Guard(Epochs(self.device))
        self.epoch = 0
        self._arena: Arena | None = Arena(self.plan, device=self.device)
        allocator = Allocator(self.plan, hints=hints, split=split, mover=self._arena.mover())
        tables = Tables(self.plan, allocator.v2p, num_rows=max_sequences, max_tokens=max_tokens, device=self.device)
        allocator.on_moved = tables.note_pages
        self._sequences: Sequences | None = Sequences(Lifespans(self.plan), allocator, tables)
        self.substitute: object | None = None  # who attends over the arena instead of the ops
        if self.device.type == "cuda":
            from torch_uma.integrations.flashinfer import use

            use(self)

    # Parts

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return self.guard.closed

    @property
    def arena(self) -> Arena:
        """The memory and its typed views."""
        if self._arena is None:
            raise _closed()
        return self._arena

    @property
    def sequences(self) -> Sequences:
        """The books of the sequences."""
        if self._sequences is None:
            raise _closed()
        return self._sequences

    @property
    def allocator(self) -> Allocator:
        """The allocator of the arena's pages, once what sequences have let go of is released."""
        self.guard.enter()
        self.sequences.settle()
        return self.sequences.allocator

    @property
    def tables(self) -> Tables:
        """The tables on the device."""
        return self.sequences.tables

    # Sequences

    def add(self, num_tokens: int = 0) -> Sequence:
        """Make an empty sequence with room reserved for `num_tokens` tokens: the pages that it holds at that length.

        On the way there a window or chunk may need more for a while, as a step keeps what its own queries read until it
        is committed, and pages fill unevenly: so a later step can still be out of memory, for a page or a window more.
        Raises OutOfMemory with the quote, or SequenceError if all rows are in use; then nothing has changed.
        """
        self.guard.enter()
        return Sequence(self, self.sequences.add(self._length(num_tokens)))

    def add_many(self, num_tokens: Iterable[int]) -> list[Sequence]:
        """Make an empty sequence for each of `num_tokens`, as `add` does, all or none: cheaper than one by one."""
        self.guard.enter()
        wanted = [self._length(tokens) for tokens in num_tokens]
        return [Sequence(self, row) for row in self.sequences.add_many(wanted)]

    def quote(self, num_tokens: int) -> Quote:
        """Say whether a sequence of `num_tokens` tokens could be added now, at what cost, or what would help.

        Raises SequenceError where not the arena but the pool's `max_tokens` is too small, or for no number of tokens.
        """
        self.guard.enter()
        try:
            return self.allocator.quote(self.plan.demand(self._length(num_tokens)))
        except OutOfMemory as error:
            return error.quote

    def offload(self, sequence: Sequence) -> Offloaded:
        """Copy what a sequence needs to go on to host memory, states and all, and free it; `restore` makes it anew.

        On CUDA the memory is pinned, and the copy is enqueued on the arena's stream: its pages can be used again at
        once, and nothing waits. What forks share is copied, and they keep it; room ahead and a past that it keeps are
        not. Raises SequenceError for a sequence in an open step or with a half-written state, and what torch does where
        host memory is short; then nothing has changed.
        """
        self.sequences.check_whole(np.array([self.idle_row(sequence)]))
        offloaded = offload(sequence)
        sequence.free()
        return offloaded

    def restore(self, offloaded: Offloaded) -> Sequence:
        """Make a sequence with the content of one that was offloaded, bit by bit; `offloaded` is used up.

        It may come from another pool on the same kind of device, of the same layers and page size. Does not wait.
        Raises OutOfMemory where `quote` of its tokens says no, SequenceError if all rows are in use, if it is too long
        for this pool, of other layers or used up; then nothing has changed, and it can still be restored.
        """
        self.guard.enter()
        return restore(offloaded, self)

    def batch(self, sequences: Iterable[Sequence]) -> Batch:
        """Keep sequences in the order of a batch's rows: the fast form of what a step takes."""
        self.guard.enter()
        return Batch(self, sequences)

    def extend_runs(self, sequences: Batch | Iterable[Sequence], num_tokens: int) -> None:
        """Take room for `num_tokens` tokens in every sequence, full attention in one run of pages for all of them.

        Moves what they hold into the run, copies what forks share, and takes pages wherever they are if no run can be
        had. More than the pool's `max_tokens` counts as that. Raises OutOfMemory if there is no room, and then nothing
        has changed.
        """
        rows = self._idle_batch(sequences).rows.numbers
        num_tokens = whole(num_tokens, "num_tokens of a sequence", least=0, error=SequenceError)
        if len(rows):
            extend_runs(self.sequences, rows, min(num_tokens, self.tables.max_tokens))

    def quote_runs(self, sequences: Batch | Iterable[Sequence], num_tokens: int) -> Quote:
        """Say whether `extend_runs` would find the room now, in a run or not, at what cost, or what would help."""
        rows = self._idle_batch(sequences).rows.numbers
        num_tokens = whole(num_tokens, "num_tokens of a sequence", least=0, error=SequenceError)
        missing = (
            wanted_end(self.sequences, rows, min(num_tokens, self.tables.max_tokens)) - self.sequences.end[:, rows]
        )
        return self.allocator.quote(missing.sum(axis=1).tolist())

    def slide_windows(self, sequences: Batch | Iterable[Sequence], num_new_tokens: int, num_tokens: int) -> int:
        """Take room in windows for a step of `num_new_tokens`, and then a window's length more, in one run of pages.

        For equally long sequences that are to reach `num_tokens`; what their windows hold is copied where it has to be.
        Returns the length at which to call again. Where no run can be had nothing changes: it is a preference.
        """
        rows = self._idle_batch(sequences).rows.numbers
        num_new_tokens = whole(num_new_tokens, "num_new_tokens of a step", least=1, error=SequenceError)
        num_tokens = whole(num_tokens, "num_tokens of a sequence", least=0, error=SequenceError)
        if not len(rows):
            return num_tokens
        return slide_windows(self.sequences, rows, num_new_tokens, min(num_tokens, self.tables.max_tokens))

    def give_back_room(self, sequences: Batch | Iterable[Sequence]) -> bool:
        """Release the room that windows have ahead; returns whether there was any."""
        return give_back(self.sequences, self._idle_batch(sequences).rows.numbers)

    # Steps

    @contextmanager
    def step(
        self, sequences: Mapping[Sequence, int] | Batch, num_new_tokens: int | Iterable[int] = 1
    ) -> Iterator[UnifiedCache]:
        """Open a step for as long as a `with` block runs; gives the transformers cache of its forward pass.

        `sequences` maps each sequence, in the order of the batch, to its number of new tokens; a Batch takes
        `num_new_tokens`, as `begin` does. The forward is over [sequences, new] tokens if all have equally many, and
        otherwise over [1, all new tokens], one sequence after another. If the block raises, what the step reserved is
        given back and lengths are as before. If it ends, the tokens count: a block without a forward, or one of a model
        of fewer layers, leaves pages of undefined content, since nobody can see from here whether a captured graph was
        replayed. Raises what `begin` raises, and SequenceError where the model cannot tell apart sequences with
        unequally many new tokens: with recurrent layers, or attention that does not read the arena.
        """
        from torch_uma.integrations.transformers.cache import UnifiedCache

        counts = _counts(list(sequences.values()) if isinstance(sequences, Mapping) else num_new_tokens)
        if isinstance(counts, list):
            if len(set(counts)) > 1:
                self.guard.enter()
                UnifiedCache._check_packed(self, counts)
            elif isinstance(sequences, Mapping) and counts:
                counts = counts[0]
        step = self.begin(sequences, counts)
        try:
            cache = UnifiedCache._of_step(step)
            yield cache
            cache._finish()
        except BaseException:
            step.abort()
            raise
        step.commit()

    def begin(self, sequences: Batch | Iterable[Sequence], num_new_tokens: int | Iterable[int]) -> Step:
        """Open a step of `num_new_tokens` tokens for each sequence: reserve its pages and stage the tables.

        It is one number for all, or one for each sequence, in order.

        Leases whose event has passed end first. States are moved side by side in the order of the batch where that can
        be had and costs less than to go on copying them. Steps over different sequences may be open at once. Raises
        OutOfMemory; SequenceError for no sequence, no token, one named twice, freed, of another pool, in an open
        step, too long, or with a half-written state. Then nothing has changed.
        """
        counts = _counts(num_new_tokens)
        batch = self._whole_batch(sequences)
        counts_of_rows = counts if isinstance(counts, int) else self._counts_of_rows(counts, len(batch))
        step = Step(self, batch, counts_of_rows, self.epoch + 1)
        self._open(step, batch)
        return step

    def quote_step(self, sequences: Batch | Iterable[Sequence], num_new_tokens: int | Iterable[int]) -> Quote:
        """Say whether `begin` would fit now, at what cost, or what would help. SequenceError as there.

        Takes what `begin` takes. Leases whose event has passed end first, as there.
        """
        counts = _counts(num_new_tokens)
        rows = self._whole_batch(sequences).rows.numbers
        try:
            counts_of_rows = counts if isinstance(counts, int) else self._counts_of_rows(counts, len(rows))
            self.sequences.check_columns(longest(self.sequences, rows, counts_of_rows))
        except OutOfMemory as error:
            return error.quote
        return self.allocator.quote(step_pages(self.sequences, rows, counts_of_rows).sum(axis=1).tolist())

    def begin_steps(self, sequences: Batch | Iterable[Sequence], num_steps: int) -> MultiStep:
        """Open a multi-step: `num_steps` steps of one token for each sequence, which a graph takes without the host.

        Reserves the pages that all of them may need, and copies what the sequences share and would write into. Raises
        what `begin` raises, with nothing changed.
        """
        num_steps = whole(num_steps, "num_steps of a multi-step", least=1, error=SequenceError)
        batch = self._whole_batch(sequences)
        step = MultiStep(self, batch, num_steps, self.epoch + 1)
        self._open(step, batch)
        step.load()
        return step

    def quote_steps(self, sequences: Batch | Iterable[Sequence], num_steps: int) -> Quote:
        """Say whether `begin_steps` would fit now, at what cost, or what would help. SequenceError as there."""
        num_steps = whole(num_steps, "num_steps of a multi-step", least=1, error=SequenceError)
        rows = self._whole_batch(sequences).rows.numbers
        try:
            self.sequences.check_columns(int(self.sequences.length[rows].max()) + num_steps)
        except OutOfMemory as error:
            return error.quote
        return self.allocator.quote(demand_of(self.sequences, rows, num_steps).tolist())

    def event(self, epoch: int) -> torch.cuda.Event | None:
        """What another stream waits for before it reads what step `epoch` wrote; None on a device without streams.

        Raises SequenceError for a step that has not ended, and for one that never began.
        """
        self.guard.enter()
        epoch = whole(epoch, "the epoch of a step", least=0, error=SequenceError)
        if epoch > self.epoch:
            raise SequenceError(f"there is no step {epoch}; the last that began is {self.epoch}")
        if epoch in self.guard.steps:
            raise SequenceError(f"step {epoch} has not ended; commit() it first")
        return self.guard.epochs.event(epoch)

    # Memory

    def lease(self, pages: Sequence | PageArray | Iterable[int], user: str) -> Lease:
        """Pin the pages of a sequence, or pages given by id, until the lease ends. Raises PageError or LeaseError."""
        self.guard.enter()
        if isinstance(pages, Sequence):
            pages = self.sequences.pages_of(np.array([self.row_of(pages)]))
        return self.allocator.lease(pages if isinstance(pages, np.ndarray) else list(pages), user)

    def poll(self) -> int:
        """End the leases whose event has passed; returns how many."""
        self.guard.enter()
        return self.allocator.poll()

    def compact(self, budget_bytes: int | None = None) -> int:
        """Move pages into the holes of their bands, at most `budget_bytes`; returns the bytes moved.

        Raises PageError for a budget that is no number of bytes.
        """
        self.guard.enter()
        if budget_bytes is not None:
            budget_bytes = whole(budget_bytes, "budget_bytes of a compaction", least=0, error=PageError)
        return self.allocator.compact(budget_bytes)

    def stats(self) -> Stats:
        """Where the bytes of the arena are now."""
        self.guard.enter()
        return self.allocator.stats()

    def check(self) -> None:
        """Recount everything independently; raises InvariantError with what differs. Waits for the device."""
        self.guard.enter()
        self.allocator.check()
        recount(self.sequences, list(self.guard.steps.values()))

    def close(self) -> None:
        """Give the memory back, as soon as nobody holds a view of it; sequences end with it.

        A second call does nothing. Raises SequenceError while a step is open, LeaseError while pages are leased.
        """
        if self.closed:
            return
        self.guard.enter()
        if self.guard.steps:
            raise SequenceError(
                f"{len(self.guard.steps)} steps are open; commit() or abort() them before the pool is closed"
            )
        self.allocator.poll()
        if self.allocator.ledger.leases:
            users = sorted({lease.user for lease in self.allocator.ledger.leases})
            raise LeaseError(f"pages are still leased by {', '.join(users)}; close those leases before the pool")
        self.guard.closed = True
        self._arena = self._sequences = self.substitute = None

    def __enter__(self) -> CachePool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:  # otherwise what may still be open would hide the error, and the memory goes with the pool
            self.close()

    def __repr__(self) -> str:
        names = ", ".join(subpool.name for subpool in self.plan.subpools)
        state = "closed" if self.closed else f"{self.plan.arena_bytes:,} bytes on {self.device}"
        return f"CachePool({names}; {state})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a CachePool cannot be copied or pickled, as its memory is there once; make another one of its plan, or "
            "fork() its sequences"
        )

    # For sequences, batches, steps and tests

    def row_of(self, sequence: Sequence) -> int:
        """The row of one of the pool's sequences; raises SequenceError for any other."""
        self.guard.enter()
        if not isinstance(sequence, Sequence) or sequence._pool is not self or sequence._row < 0:
            raise self._unusable(sequence)
        return sequence._row

    def idle_row(self, sequence: Sequence) -> int:
        """`row_of`, which must not be in an open step."""
        row = self.row_of(sequence)
        if self.guard.steps:
            self.guard.check_idle(np.array([row]))
        return row

    def rows_of(self, sequences: list[Sequence]) -> Int64Array:
        """[n] int64 rows of sequences, each of which is in use, of this pool and named once; raises SequenceError."""
        if not all(issubclass(kind, Sequence) for kind in set(map(type, sequences))):
            raise next(self._unusable(s) for s in sequences if not isinstance(s, Sequence))
        rows = [sequence._row for sequence in sequences]
        if {sequence._pool for sequence in sequences} - {self} or (rows and min(rows) < 0):
            raise next(self._unusable(s) for s in sequences if s._pool is not self or s._row < 0)
        if len(set(rows)) < len(rows):
            twice = next(s for place, s in enumerate(sequences) if s in sequences[:place])
            raise SequenceError(f"{twice!r} is named twice; a batch has each sequence once (fork() makes a second one)")
        return np.array(rows, np.int64)

    def abandon(self, sequences: Iterable[Sequence], step: Step | None = None) -> None:
        """Give up sequences and the step that is open over them, in any thread and at any moment: for finalizers.

        The pool aborts the step and frees the sequences when it is next used. Nobody else may use them.
        """
        if self._sequences is None:
            return
        rows = [sequence._row for sequence in sequences]
        if step is not None:
            step.detach()
        self.guard.abandoned.append(partial(_take_back, self._sequences, rows, step))

    def _idle_batch(self, sequences: Batch | Iterable[Sequence]) -> Batch:
        self.guard.enter()
        if isinstance(sequences, Batch):
            batch = sequences
            if batch.pool is not self:
                raise SequenceError("the batch is of another pool; make one with this pool's batch()")
            batch.check()
        else:
            batch = Batch(self, sequences)
        if self.guard.steps:
            self.guard.check_idle(batch.rows.numbers)
        return batch

    def _whole_batch(self, sequences: Batch | Iterable[Sequence]) -> Batch:
        batch = self._idle_batch(sequences)
        if not len(batch):
            raise SequenceError("a step needs at least one sequence")
        self.sequences.check_whole(batch.rows.numbers)
        self.sequences.allocator.poll()
        return batch

    def _open(self, step: OpenStep, batch: Batch) -> None:
        self.epoch = self.sequences.allocator.ledger.epoch = step.epoch
        self.guard.steps[step.epoch] = step
        try:
            batch.rows.align_states(step)
        except BaseException:
            step.abort()
            raise
        self.tables.flush()

    def _counts_of_rows(self, counts: list[int], num_rows: int) -> int | Int64Array:
        if len(counts) != num_rows:
            raise SequenceError(
                f"{len(counts)} numbers of new tokens were given for {num_rows} sequences; give one for each, or one "
                "for all"
            )
        self.sequences.check_columns(max(counts))  # before one is too great for an array
        return counts[0] if counts.count(counts[0]) == num_rows else np.array(counts, np.int64)

    def _length(self, num_tokens: Any) -> int:
        length = whole(num_tokens, "num_tokens of a sequence", least=0, error=SequenceError)
        self.sequences.check_columns(length)
        return length

    def _unusable(self, sequence: Any) -> SequenceError:
        if not isinstance(sequence, Sequence):
            return SequenceError(f"{sequence!r} is not a sequence of this pool; add() or fork() makes one")
        if sequence._pool is not self:
            return SequenceError(f"{sequence!r} is of another pool")
        return SequenceError("the sequence was freed; add() makes another")


def _take_back(books: Sequences, rows: list[int], step: Step | None) -> None:
    if step is not None:
        step.abort()
    for row in rows:
        books.free(row)


def _counts(num_new_tokens: Any) -> int | list[int]:
    return whole_or_each(num_new_tokens, "num_new_tokens of a step", least=1, error=SequenceError)


def _closed() -> ClosedError:
    return ClosedError("the pool was closed; make another")
