"""The batch rows of one cache: sequences of one length in a pool, made, forked, selected and freed together.

Knows nothing of forwards: whoever changes the rows brings the step that is open over them to rest first.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from torch_uma.errors import ClosedError, OutOfMemory, SequenceError, TorchUmaError
from torch_uma.integrations.transformers.places import StepPlaces
from torch_uma.integrations.transformers.recording import Recording
from torch_uma.integrations.transformers.stores import stores_of
from torch_uma.layout import Full
from torch_uma.transplant import transplant

if TYPE_CHECKING:
    from torch_uma.batch import Batch
    from torch_uma.plan import SubPool
    from torch_uma.pool import CachePool
    from torch_uma.sequence import Sequence
    from torch_uma.step import Step

_log = logging.getLogger(__name__)


class CacheRows:
    """What one cache has of a pool.

    `make_pool` makes the pool, for a number of rows on a device, of `max_tokens`, when the first rows are made and
    `pool` is None; and a roomier one for the same rows, which has room for any step within `max_tokens`; both with room
    for a past of so many tokens. `max_tokens` is the length for which the rows are given room at once, None for as much
    as they need, doubled. `recording` is what the rows keep of their past, None if they do not.
    """

    def __init__(
        self,
        make_pool: Callable[[int, torch.device, int | None, bool, int], CachePool],
        *,
        pool: CachePool | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self.pool = pool
        self.max_tokens = max_tokens
        self.sequences: list[Sequence] = []
        self.recording: Recording | None = None
        self._make_pool = make_pool
        self._batch: Batch | None = None
        self._room_tokens = 0
        self._window_tokens = 0  # rows of so many tokens have a run for their windows, or cannot have one
        self._is_roomy = False
        self._past_tokens = self._sized_tokens = 0  # for which the pool was sized
        self._num_sized_for: int | None = None  # rows, if the pool was made for so many of `max_tokens`

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def pools(self) -> tuple[CachePool, ...]:
        """The pool, if there is one."""
        return () if self.pool is None else (self.pool,)

    def of_layer(self, layer: int) -> CacheRows:
        """The rows in the pool of a layer, these."""
        return self

    @property
    def length(self) -> int:
        """Tokens in every row."""
        return self.sequences[0].length if self.sequences else 0

    def add(self, num_rows: int, device: torch.device) -> None:
        """Makes `num_rows` empty rows where there are none, and the pool if there is none. All of them or none."""
        assert not self.sequences
        if self.pool is None:
            self._sized_tokens = self.max_tokens or 0
            self._past_tokens = self._recorded_tokens(self._sized_tokens)
            self.pool = self._make_pool(num_rows, device, self.max_tokens, False, self._past_tokens)
            self._num_sized_for = None if self.max_tokens is None else num_rows
        if self.pool.closed:
            raise _closed_error()
        allocator = self.pool.allocator  # which first takes back what earlier rows have let go of
        sequences: list[Sequence] = []
        try:
            with self._says_size():
                for _ in range(num_rows):
                    sequences.append(self.pool.add())
        except TorchUmaError:
            _free(sequences)
            raise
        # A view over all states needs slots that ascend with the rows, and empty rows can still be told which is which.
        sequences.sort(key=lambda sequence: [int(allocator.v2p[ids[0]]) for ids in sequence.pages if len(ids)])
        self._hold(sequences)
        self._room_tokens = self._window_tokens = 0

    def expect(self, num_rows: int, max_tokens: int) -> None:
        """Gives the rows room for `max_tokens` tokens each, and makes `num_rows` of them where there are none."""
        if self.sequences and len(self) != num_rows:
            raise SequenceError(f"the cache holds {len(self)} rows and cannot expect {num_rows}; reset() it first")
        before, is_new = self.max_tokens, not self.sequences
        self.max_tokens = max_tokens
        try:
            if is_new:
                self.add(num_rows, torch.get_default_device())
            assert self.pool is not None and self._batch is not None
            with self._says_size():
                self.pool.extend_runs(self._batch, max_tokens)
        except TorchUmaError:
            self.max_tokens = before
            if is_new:
                self.free()
            raise
        self._room_tokens = max_tokens

    def has_room(self, max_tokens: int) -> bool:
        """Whether the rows that there are can be given room for `max_tokens` tokens."""
        return self._batch is None or self._batch.pool.quote_runs(self._batch, max_tokens).fits

    def select(self, rows: Iterable[int]) -> None:
        """Row i becomes what row `rows[i]` was; rows that are taken twice share pages. Nothing changes if it fails."""
        self.take(self.choose(rows))

    def choose(self, rows: Iterable[int]) -> list[Sequence]:
        """What the rows are to become, for `take`, or for `let_go` if they are to stay. Nothing changes if it fails."""
        self.check_whole()
        if self.recording is not None:
            self.recording.crop(self.sequences, self.length)
        wanted = [self.sequences[row] for row in rows]
        unused = set(wanted)
        chosen: list[Sequence] = []
        try:
            with self._says_size():
                for sequence in wanted:
                    chosen.append(sequence if sequence in unused else sequence.fork())
                    unused.discard(sequence)
        except TorchUmaError:
            self.let_go(chosen)
            raise
        return chosen

    def take(self, chosen: list[Sequence]) -> None:
        """The rows become what was chosen."""
        _free(set(self.sequences) - set(chosen))
        self._hold(chosen)

    def let_go(self, chosen: list[Sequence]) -> None:
        """The rows stay as they are."""
        _free(set(chosen) - set(self.sequences))

    def fork(self) -> CacheRows:
        """Rows with the same content, for another cache. All of them or none."""
        self.check_whole()
        other = CacheRows(self._make_pool, pool=self.pool, max_tokens=self.max_tokens)
        other._num_sized_for = self._num_sized_for
        forks: list[Sequence] = []
        try:
            with self._says_size():
                for sequence in self.sequences:
                    forks.append(sequence.fork())
        except TorchUmaError:
            _free(forks)
            raise
        if forks:
            other._hold(forks)
        return other

    def check_crop(self, num_tokens: int) -> None:
        """Raise what `crop` would."""
        self.check_whole()
        try:
            for sequence in self.sequences:
                sequence.check_crop(num_tokens)
        except SequenceError as error:
            gone = str(error).partition(";")[0]
            raise SequenceError(
                f"{gone}; activate_past_recording() or copy.deepcopy(cache) before the forward keeps it, and reset() "
                "starts over"
            ) from error

    def crop(self, num_tokens: int) -> None:
        """Shortens every row, or lets go of the past if it is as long already."""
        if self.sequences and self.recording is not None:
            self.check_whole()
            self.recording.crop(self.sequences, num_tokens)
        elif num_tokens < self.length:
            self.check_crop(num_tokens)
            for sequence in self.sequences:
                sequence.crop(num_tokens)
            self._window_tokens = min(self._window_tokens, num_tokens)  # the room behind them went too

    def record(self, num_tokens: int | None) -> None:
        """Keeps from now on what `crop` needs to take back the last `num_tokens` tokens of a step, None for all."""
        if self.recording is None:
            self.recording = Recording(num_tokens, self.length)
        self.recording.num_tokens = num_tokens

    def stop_recording(self) -> None:
        """Lets go of the past, and keeps none from now on."""
        recording, self.recording = self.recording, None
        if recording is not None and self.pool is not None and not self.pool.closed:
            recording.stop(self.sequences)

    def free(self) -> None:
        """Gives up the rows."""
        if self.pool is not None and not self.pool.closed:
            if self.recording is not None:
                self.recording.forget()
            _free(self.sequences)
        self.sequences = []
        self._batch = None

    def abandon(self, opened: tuple[StepPlaces, ...]) -> None:
        """`free` for a finalizer; `opened` is of the step that is open over the rows, empty if none is."""
        sequences, self.sequences, self._batch = self.sequences, [], None
        if self.recording is not None:
            sequences = sequences + self.recording.take()
        if self.pool is not None:
            self.pool.abandon(sequences, opened[0].step if opened else None)

    def begin(self, num_new_tokens: int, *, in_place: bool, is_fixed: bool) -> tuple[StepPlaces, ...]:
        """Opens a step over all rows, in one run of pages where that can be had; returns its places, one for each pool.

        `in_place` and `is_fixed` are those of the places. OutOfMemory says how long the rows are.
        """
        step = self._begin(num_new_tokens, as_views=not in_place)
        try:
            whole = in_place or is_fixed
            return (StepPlaces(step.pool, step, whole=whole, in_place=in_place, is_fixed=is_fixed),)
        except BaseException:
            step.abort()
            raise

    def _begin(self, num_new_tokens: int, *, as_views: bool) -> Step:
        """`as_views`: windows are to be handed over as views too, for which they take room ahead."""
        assert self.pool is not None and self._batch is not None
        if self.pool.closed:
            raise _closed_error()
        self.check_whole()
        num_tokens = self.length + num_new_tokens
        with self._says_size():
            try:
                if as_views:
                    self._make_room_for_windows(num_tokens, num_new_tokens)
                self._make_room(num_tokens)
                try:
                    return self._open(num_new_tokens)
                except OutOfMemory:
                    if self._may_move_out(num_tokens, num_new_tokens):
                        self._move_out(num_tokens, num_new_tokens)
                    elif not self.pool.give_back_room(self._batch):
                        raise
                return self._open(num_new_tokens)
            except OutOfMemory as error:
                lengths = [sequence.length for sequence in self.sequences]
                message = (
                    f"{error}; the {len(lengths)} rows of this cache hold {lengths} tokens, as before, "
                    f"and were to take {num_new_tokens} more each"
                )
                if self.max_tokens is not None and num_tokens > self.max_tokens:
                    message += f", which is more than the max_tokens={self.max_tokens} that the cache was made for"
                else:
                    message += "; give the cache more memory=, or fewer or shorter rows"
                raise OutOfMemory(message, error.quote) from error

    @property
    def may_have_runs(self) -> bool:
        """Whether the pages of all rows may come to lie in runs: not once rows were forked or selected."""
        return self._room_tokens < sys.maxsize or not self.sequences

    def state(self, layer: int, name: str) -> torch.Tensor | None:
        """A copy of the state row `name` of `layer`, [rows, *shape]; None while no row has one."""
        if self.pool is None or self.length == 0:
            return None
        store = stores_of(self.pool)[layer].state
        assert store is not None
        ids = np.concatenate([sequence.pages[store.subpool.index] for sequence in self.sequences])
        slots = torch.from_numpy(self.pool.allocator.v2p[ids].astype(np.int64))
        return store.grids[name].index_select(0, slots.to(self.pool.device))

    def entries(self, subpool: SubPool) -> torch.Tensor:
        """Where the tokens of full attention lie between two steps: int64 entries [rows, length]."""
        assert self.pool is not None
        columns, within = np.divmod(np.arange(self.length), subpool.page_size)
        ids = np.stack([sequence.pages[subpool.index][columns] for sequence in self.sequences])
        pages = self.pool.allocator.v2p[ids].astype(np.int64)
        return torch.from_numpy(pages * subpool.page_size + within).to(self.pool.device)

    def check_whole(self) -> None:
        """Raise SequenceError if a forward was stopped after it had changed states in place."""
        if self.pool is None or not self.sequences or not self.pool.sequences.any_torn:
            return
        try:
            self.pool.sequences.check_whole(np.array([sequence.row for sequence in self.sequences]))
        except SequenceError:
            raise SequenceError(
                "the states of this cache are half written, as a forward was stopped after it had begun to change them "
                "in place; reset() the cache and start again with the whole text"
            ) from None

    def _open(self, num_new_tokens: int) -> Step:
        assert self.pool is not None and self._batch is not None
        if self.recording is not None:
            self.recording.begin(self.sequences, num_new_tokens)
        return self.pool.begin(self._batch, num_new_tokens)

    def _recorded_tokens(self, num_new_tokens: int) -> int:
        """Tokens of the next step that may be taken back."""
        if self.recording is None:
            return 0
        return num_new_tokens if self.recording.num_tokens is None else self.recording.num_tokens

    def _may_move_out(self, num_tokens: int, num_new_tokens: int) -> bool:
        """Whether a roomier pool would do: this one has no room to read a window and leave another in one step.

        Or none for the past that is to be kept, or for speculative tokens beyond the last one that is expected.
        """
        past_tokens = self._recorded_tokens(num_new_tokens)
        if self.max_tokens is None or num_tokens - past_tokens > self.max_tokens or self._num_sized_for != len(self):
            return False
        if self.recording is not None and self.recording.length < self.length:  # what it has kept would be lost
            return False
        is_roomier = num_new_tokens > 1 and not self._is_roomy
        return is_roomier or past_tokens > self._past_tokens or num_tokens > self._sized_tokens

    def _move_out(self, num_tokens: int, num_new_tokens: int) -> None:
        assert self.pool is not None
        past_tokens = max(self._past_tokens, self._recorded_tokens(num_new_tokens))
        sized_tokens = max(self._sized_tokens, num_tokens)
        pool = self._make_pool(len(self), self.pool.device, sized_tokens, True, past_tokens)
        sequences = transplant(self.sequences, pool)
        length = self.length
        self.free()
        if self.recording is not None:
            self.recording.length = length
        self.pool, self._is_roomy = pool, True
        self._past_tokens, self._sized_tokens = past_tokens, sized_tokens
        self._hold(sequences)
        self._room_tokens = self._window_tokens = 0

    @contextmanager
    def _says_size(self) -> Iterator[None]:
        try:
            yield
        except OutOfMemory as error:
            if self._num_sized_for is None:
                raise
            sized = f"the arena was sized for the first batch of {self._num_sized_for} rows; give memory="
            raise OutOfMemory(f"{error}; {sized}", error.quote) from error

    def _hold(self, sequences: list[Sequence]) -> None:
        assert self.pool is not None
        self.sequences = sequences
        self._batch = self.pool.batch(sequences)
        # Forked rows share pages, which no run can hold twice.
        self._room_tokens = self._window_tokens = sys.maxsize

    def _make_room(self, num_tokens: int) -> None:
        """Asks for room in one run before the rows outgrow theirs: for `max_tokens`, or the next power of two."""
        assert self.pool is not None and self._batch is not None
        if num_tokens <= self._room_tokens or not any(
            isinstance(subpool.lifetime, Full) for subpool in self.pool.plan.subpools
        ):
            return
        self._room_tokens = self._expected(num_tokens)
        try:
            self.pool.extend_runs(self._batch, self._room_tokens)
        except OutOfMemory as error:
            _log.info("no room in one run for %d tokens a row, so pages are taken singly: %s", self._room_tokens, error)

    def _make_room_for_windows(self, num_tokens: int, num_new_tokens: int) -> None:
        """The same for windows, which slide through theirs."""
        assert self.pool is not None and self._batch is not None
        if num_tokens > self._window_tokens and self.pool.sequences.lifespans.windows:
            expected = self._expected(num_tokens)
            self._window_tokens = self.pool.slide_windows(self._batch, num_new_tokens, expected)

    def _expected(self, num_tokens: int) -> int:
        """How long rows of `num_tokens` are going to be, as far as anybody knows."""
        if self.max_tokens is not None and num_tokens <= self.max_tokens:
            return self.max_tokens
        return 1 << num_tokens.bit_length()  # of few sizes, as a compiled forward is made for each


def _closed_error() -> ClosedError:
    return ClosedError("the pool of this cache was closed; make a new cache on an open pool")


def _free(sequences: Iterable[Sequence]) -> None:
    for sequence in sequences:
        sequence.free()
