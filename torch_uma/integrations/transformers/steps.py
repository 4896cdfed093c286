"""Which step of the pool a forward pass belongs to.

Owns the moment at which a step begins and ends: a step that a loop opened with `pool.step` is simply given, while under
`generate()` nobody says so, and it is read off the calls that the layers make.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch

from torch_uma.errors import ClosedError, OutOfMemory, SequenceError, TorchUmaError
from torch_uma.integrations.transformers.places import StepPlaces, extent
from torch_uma.layout import Full, Lifetime

if TYPE_CHECKING:
    from torch_uma.pool import Batch, CachePool
    from torch_uma.sequence import Sequence

Part = tuple[int, Literal["tokens", "state"]]

_log = logging.getLogger(__name__)

_Method = TypeVar("_Method", bound=Callable[..., Any])
_untraced: Callable[[_Method], _Method] = torch.compiler.disable


class GivenStep:
    """The one step that `pool.step` opened and will close; every call of a layer belongs to it."""

    def __init__(self, places: StepPlaces, pool: CachePool) -> None:
        self.places = places
        self.pool = pool

    def enter(
        self, layer: int, touch: Hashable, *, num_new_tokens: int | None = None, like: torch.Tensor | None = None
    ) -> StepPlaces | None:
        """Returns the step's places; SequenceError if the forward has another batch or number of tokens."""
        if not self.places.step.is_open:
            raise SequenceError("the step of this cache has ended; open another one for the next forward")
        _check_shape(self.places.num_rows, like)
        if num_new_tokens is not None and num_new_tokens != self.places.num_new_tokens:
            raise SequenceError(
                f"the step was opened for {self.places.num_new_tokens} new tokens a sequence, "
                f"but the forward has {num_new_tokens}; open another step for them"
            )
        return self.places

    def leave(self, layer: int) -> None:
        """A layer has stored its tokens; the step is closed by whoever opened it."""

    def length(self) -> int:
        """Tokens that the longest sequence held before the step."""
        return self.places.max_past

    def extent(self, layer: int, lifetime: Lifetime, num_new_tokens: int) -> tuple[int, int]:
        """The first column and the number of columns of keys that the layer will read."""
        return self.places.extents[layer]


class OwnSteps:
    """The sequences behind the batch rows of one cache, and the step that its current forward pass is in.

    A step begins at a forward's first call, for all kinds at once, and is complete when all `parts` have been called:
    every layer's tokens, every layer's state. If tokens came last it is committed at once, otherwise at the next call,
    as a state is still being written in place. A forward that stopped half-way is aborted at the next call.
    """

    def __init__(
        self,
        make_pool: Callable[[int, torch.device], CachePool],
        *,
        max_tokens: int | None,
        parts: Iterable[Part],
    ) -> None:
        self.pool: CachePool | None = None
        self.max_tokens = max_tokens
        self.sequences: list[Sequence] = []
        self._make_pool = make_pool
        self._parts = frozenset(parts)
        self._batch: Batch | None = None
        self._announced: int | None = None
        self._room_tokens = 0
        self._open: StepPlaces | None = None
        self._waiting: set[Part] = set()
        self._touches: set[tuple[int, Hashable]] = set()
        self._last_layer: int | None = None

    @_untraced
    def enter(
        self, layer: int, touch: Hashable, *, num_new_tokens: int | None = None, like: torch.Tensor | None = None
    ) -> StepPlaces | None:
        """Returns the places of the step that this call belongs to, and begins it first where need be.

        `touch` names the call: a layer makes each once a forward. None while there are no rows and `like`, a tensor
        [batch, ...], does not tell how many to make. OutOfMemory leaves everything as after the last whole step.
        """
        _check_shape(len(self.sequences), like)
        places = self._open
        if places is not None:
            other_shape = num_new_tokens not in (None, places.num_new_tokens)
            if other_shape and all(touched == layer for touched, _ in self._touches):
                places.step.state_touched = False  # its state was only looked at
            is_through = not self._waiting and layer != self._last_layer
            if other_shape or is_through or (layer, touch) in self._touches:
                self.settle()
        if self._open is None:
            if not self.sequences and like is None:
                return None
            self._begin(num_new_tokens or self._announced or 1, like)
        places = self._open
        assert places is not None
        if self._last_layer is not None and self._last_layer != layer:
            places.keep_state(self._last_layer)
        self._last_layer = layer
        self._touches.add((layer, touch))
        if touch != "tokens":
            self._waiting.discard((layer, "state"))
        return places

    @_untraced
    def leave(self, layer: int) -> None:
        """A layer has stored its tokens; if it was the last to be waited for, the step is committed."""
        self._waiting.discard((layer, "tokens"))
        if not self._waiting:
            self.settle()

    def settle(self) -> None:
        """Brings the open step to rest: commits it if the forward went through all layers, aborts it otherwise."""
        places, self._open = self._open, None
        if places is None:
            return
        if self._waiting:
            places.step.abort()
        else:
            places.keep_states()
            places.step.commit()

    @_untraced
    def length(self) -> int:
        """Tokens in every row after the last whole step."""
        if self._open is not None and self._waiting:
            return self._open.max_past
        self.settle()
        return int(self.sequences[0].length) if self.sequences else 0

    @_untraced
    def extent(self, layer: int, lifetime: Lifetime, num_new_tokens: int) -> tuple[int, int]:
        """As for a given step, in a forward of `num_new_tokens` that is expected from now on."""
        self._announced = num_new_tokens
        return extent(lifetime, np.array([self.length()]), num_new_tokens)

    def replace(self, sequences: list[Sequence]) -> None:
        """Makes these the rows, of one length; frees the present ones that are not among them."""
        self.settle()
        kept = set(sequences)
        for sequence in self.sequences:
            if sequence not in kept:
                sequence.free()
        self.sequences = sequences
        self._batch = None if self.pool is None or not sequences else self.pool.batch(sequences)
        # Forked rows share pages, which no run can hold twice.
        self._room_tokens = sys.maxsize if sequences else 0
        self._announced = None

    def close(self) -> None:
        """Frees the rows."""
        if self.pool is None or self.pool.closed:
            self._open = None
            self.sequences = []
        else:
            self.replace([])

    def fork(self) -> OwnSteps:
        """The same for another cache, with forks of the rows."""
        self.settle()
        other = OwnSteps(self._make_pool, max_tokens=self.max_tokens, parts=self._parts)
        other.pool = self.pool
        other.replace([sequence.fork() for sequence in self.sequences])
        return other

    def open_rows(self, num_rows: int, device: torch.device) -> None:
        """Makes `num_rows` empty rows, and the pool if there is none."""
        assert not self.sequences
        if self.pool is None:
            self.pool = self._make_pool(num_rows, device)
        allocator = self.pool.allocator  # which first takes back what earlier rows have let go of
        sequences: list[Sequence] = []
        try:
            for _ in range(num_rows):
                sequences.append(self.pool.add())
        except OutOfMemory:
            for sequence in sequences:
                sequence.free()
            raise
        # A view over all states needs slots that ascend with the rows, and empty rows can still be told which is which.
        sequences.sort(key=lambda sequence: [int(allocator.v2p[ids[0]]) for ids in sequence.pages if len(ids)])
        self.sequences = sequences
        self._batch = self.pool.batch(sequences)
        self._room_tokens = 0

    def _begin(self, num_new_tokens: int, like: torch.Tensor | None) -> None:
        is_new = not self.sequences
        if is_new:
            assert like is not None
            self.open_rows(like.shape[0], like.device)
        assert self.pool is not None and self._batch is not None
        if self.pool.closed:
            raise ClosedError("the pool of this cache was closed; make a new cache on an open pool")
        lengths = [sequence.length for sequence in self.sequences]
        try:
            self._make_room(lengths[0] + num_new_tokens)
            step = self.pool.begin(self._batch, num_new_tokens)
        except TorchUmaError as error:
            if is_new:
                self.close()
            if not isinstance(error, OutOfMemory):
                raise
            raise OutOfMemory(
                f"{error}; the {len(lengths)} rows of this cache hold {lengths} tokens, as before, "
                f"and were to take {num_new_tokens} more each",
                error.quote,
            ) from error
        self._open = StepPlaces(self.pool, step, whole=False)
        step.on_settle = self.settle
        self._waiting = set(self._parts)
        self._touches = set()
        self._last_layer = None
        self._announced = None

    def _make_room(self, num_tokens: int) -> None:
        """Asks for room in one run before the rows outgrow theirs: for `max_tokens`, or twice what they need now."""
        assert self.pool is not None
        if num_tokens <= self._room_tokens or not any(
            isinstance(subpool.lifetime, Full) for subpool in self.pool.plan.subpools
        ):
            return
        self._room_tokens = 2 * num_tokens
        if self.max_tokens is not None and num_tokens <= self.max_tokens:
            self._room_tokens = self.max_tokens
        try:
            self.pool.extend_runs(self.sequences, self._room_tokens)
        except OutOfMemory as error:
            _log.info("no room in one run for %d tokens a row, so pages are taken singly: %s", self._room_tokens, error)


def _check_shape(num_rows: int, like: torch.Tensor | None) -> None:
    if num_rows and like is not None and like.shape[0] != num_rows:
        raise SequenceError(
            f"the cache holds {num_rows} rows, but the forward has a batch of {like.shape[0]}; "
            "reset() the cache for another batch, or select its rows with batch_select_indices()"
        )
