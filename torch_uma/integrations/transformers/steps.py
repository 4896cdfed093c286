"""Which step of the pool a forward pass belongs to, where nobody says so, as under `generate()`.

Owns the moment at which a step begins and ends, which is read off the calls that the layers make.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch

from torch_uma.errors import SequenceError
from torch_uma.integrations.transformers.given import check_shape, in_forward
from torch_uma.integrations.transformers.places import StepPlaces, extent
from torch_uma.integrations.transformers.rows import CacheRows
from torch_uma.layout import Lifetime

if TYPE_CHECKING:
    from torch_uma.pool import CachePool

_log = logging.getLogger(__name__)

Part = tuple[int, str]
"""A layer, and "tokens" or the name of one of its state rows."""

_Method = TypeVar("_Method", bound=Callable[..., Any])
_untraced: Callable[[_Method], _Method] = partial(
    torch.compiler.disable,
    reason="a forward over UnifiedCache is one graph if generate() has announced it, as it does for single tokens where"
    " the cache is compileable; in a loop of your own, compile the model over pool.step()",
)


class OwnSteps:
    """The step that the current forward pass over the rows of one cache is in.

    A step begins at a forward's first call, for all kinds at once, and is complete when all `parts` have been called:
    every layer's tokens, and every row of its state, which several new tokens write while one new token may only read
    it, to change it in place. If tokens came last it is committed at once, otherwise at the next call, as a state may
    still be changing and tokens may still be read. A forward that stopped half-way is aborted at the next call; one
    that stopped in the last layer while it changed a state in place cannot be told from a whole one.

    A compiled forward makes no calls, so its step begins before it, when `generate()` announces it, and is complete
    when the graph has gone through the last layer.
    """

    def __init__(self, rows: CacheRows, parts: Iterable[Part], is_in_place: Callable[[], bool]) -> None:
        self.rows = rows
        self._is_in_place = is_in_place
        self._parts = frozenset(parts)
        self._final_layer = max((layer for layer, _ in self._parts), default=0)
        self._announced: int | None = None
        self._open: StepPlaces | None = None
        self._waiting: set[Part] = set()
        self._touches: set[tuple[int, str, bool]] = set()
        self._last_layer: int | None = None
        self._was_cut = False  # the last step was aborted; its forward may still be running

    @property
    def pool(self) -> CachePool | None:
        """The pool that the rows are in, None until it is made."""
        return self.rows.pool

    @property
    def in_place(self) -> bool:
        """Whether the model's attention reads keys and values in the arena."""
        return self._is_in_place()

    def enter(
        self,
        layer: int,
        name: str,
        *,
        is_read: bool = False,
        num_new_tokens: int | None = None,
        like: torch.Tensor | None = None,
    ) -> StepPlaces | None:
        """Returns the places of the step that this call belongs to, and begins it first where need be.

        `name` is "tokens" or that of a state row, which a layer reads at most once a forward, and before it writes it.
        None while there are no rows and `like`, a tensor [batch, ...], does not tell how many to make. OutOfMemory
        leaves everything as after the last whole step. SequenceError in a forward whose step something else has ended.
        """
        if not torch.compiler.is_compiling():
            return self._enter(layer, name, is_read, num_new_tokens, like)
        places = self._announced_places()
        call = (layer, name, is_read)
        if places is None or call in places.traced:
            return self._enter_untraced(layer, name, is_read, num_new_tokens, like)
        places.traced.add(call)
        places.is_traversed = layer == self._final_layer
        return places

    def _announced_places(self) -> StepPlaces | None:
        """Those of the forward that is being traced; None if it runs, or nobody announced it."""
        if not torch.compiler.is_compiling() or self._open is None or not self._open.is_announced:
            return None
        return self._open

    def _enter(
        self, layer: int, name: str, is_read: bool, num_new_tokens: int | None, like: torch.Tensor | None
    ) -> StepPlaces | None:
        check_shape(len(self.rows), like)
        places = self._open
        if places is not None:
            other_shape = num_new_tokens not in (None, places.num_new_tokens)
            if other_shape and all(touched == layer for touched, _, _ in self._touches):
                places.step.state_touched = False  # its state was only looked at
            is_through = self._is_complete() and layer != self._last_layer
            is_again = (layer, name, is_read) in self._touches or (layer, name, False) in self._touches
            if other_shape or is_through or is_again or self._is_outdated():
                self.settle()
        if self._open is None:
            if not self.rows and like is None:
                return None
            self._begin(num_new_tokens or self._announced or 1, like)
        if self._was_cut and self._waiting and min(self._waiting)[0] < layer:
            self.settle()
            raise SequenceError(
                f"the step of this forward was ended before layer {layer}, as something else used the cache meanwhile; "
                "run the forward again from its beginning"
            )
        places = self._open
        assert places is not None
        places.is_announced = False
        self._last_layer = layer
        self._touches.add((layer, name, is_read))
        if name != "tokens" and (places.num_new_tokens == 1 or not is_read):
            self._waiting.discard((layer, name))
        return places

    _enter_untraced = _untraced(_enter)  # a call through it costs as much as the rest

    def leave(self, layer: int) -> None:
        """A layer has stored its tokens; if it was the last to be waited for, the step is committed.

        Not yet if they are to be read in the arena, as the pages that go with the commit may be among them.
        """
        if not torch.compiler.is_compiling():
            self._leave(layer)
        elif self._open is None or not self._open.is_announced:
            self._leave_untraced(layer)

    def _leave(self, layer: int) -> None:
        self._waiting.discard((layer, "tokens"))
        if not self._waiting and self._open is not None and not self._open.in_place:
            self.settle()

    _leave_untraced = _untraced(_leave)

    @_untraced
    def announce(self, num_new_tokens: int) -> None:
        """Begins the step of a forward that may be compiled, unless one is running or there are no rows yet.

        OutOfMemory. A forward that makes calls after all takes the step over, or ends it if it has another shape.
        """
        if self._open is not None and self._touches and not self._is_complete():
            return
        is_other = self._open is not None and self._open.num_new_tokens != num_new_tokens
        if self._open is not None and (is_other or self._is_complete() or self._is_outdated()):
            self.settle()
        if self._open is None and self.rows:
            self._begin(num_new_tokens, None)
            assert self._open is not None
            self._open.is_announced = True

    def _is_outdated(self) -> bool:
        """Whether a step was announced for another implementation of attention than the model has now."""
        return self._open is not None and self._open.is_announced and self._open.in_place != self.in_place

    def _is_complete(self) -> bool:
        return not self._waiting or (self._open is not None and self._open.is_traversed)

    def settle(self) -> None:
        """Brings the open step to rest: commits it if the forward went through all layers, aborts it otherwise."""
        is_complete = self._is_complete()
        places, self._open = self._open, None
        if places is None:
            return
        self._was_cut = not is_complete and bool(self._touches)
        if not is_complete or places.unused is not None:
            places.step.abort()
            if is_complete:
                places.check_used()
        else:
            places.keep_states()
            places.step.commit()

    def length(self) -> int | torch.Tensor:
        """Tokens in every row after the last whole step; in a trace, those before the step, as for a given one."""
        places = self._announced_places()
        return self._length() if places is None or places.is_traversed else places.longest_past

    @_untraced
    def _length(self) -> int:
        if self._open is not None:
            return self._open.max_past + (self._open.num_new_tokens if self._is_complete() else 0)
        return self.rows.length

    def has_tokens(self) -> bool:
        """Whether the rows hold tokens; in a trace, whether they did before the step."""
        places = self._announced_places()
        return self._length() > 0 if places is None or places.is_traversed else not places.fresh

    @_untraced
    def extent(self, layer: int, lifetime: Lifetime, num_new_tokens: int) -> tuple[int, int]:
        """As for a given step, in a forward of `num_new_tokens` that is expected from now on."""
        self._announced = num_new_tokens
        if num_new_tokens == 1 and self.in_place:
            self.announce(num_new_tokens)
        return extent(lifetime, [self._length()], num_new_tokens)

    def at_rest(self) -> CacheRows:
        """The rows, to be looked at or changed by another than a forward."""
        self.settle()
        return self.rows

    def reset(self) -> None:
        """Frees the rows."""
        if self.pool is not None and self.pool.closed:
            self._open = None
        self.at_rest().free()
        self._was_cut = False
        self._announced = None

    def abandon(self) -> None:
        """Gives up the rows, from any thread and at any moment, as a finalizer must; the pool frees them later."""
        places, self._open = self._open, None
        self.rows.abandon(None if places is None else places.step)

    def fork(self) -> OwnSteps:
        """The same for another cache, with forks of the rows."""
        return OwnSteps(self.at_rest().fork(), self._parts, self._is_in_place)

    def _begin(self, num_new_tokens: int, like: torch.Tensor | None) -> None:
        is_new = not self.rows
        if is_new:
            assert like is not None
            self.rows.add(like.shape[0], like.device)
        assert self.pool is not None
        _NEWEST[self.pool] = ref(self)
        try:
            in_place = self.in_place
            step = self.rows.begin(num_new_tokens, as_views=not in_place)
            _NEWEST[self.pool] = ref(self)  # the rows may have moved into another one
            try:
                self._open = StepPlaces(self.pool, step, whole=in_place, in_place=in_place)
            except BaseException:
                step.abort()
                raise
        except BaseException:
            if is_new:
                self.reset()
            raise
        self._tell_cut()
        step.on_settle = self._rest
        self._waiting = set(self._parts)
        self._touches = set()
        self._last_layer = None
        self._announced = None

    def _tell_cut(self) -> None:
        """Warns: a forward through fewer layers looks like one that was interrupted, and only the user can tell."""
        if self._was_cut and len({layer for layer, _, _ in self._touches}) > 1:
            _log.warning(
                "a forward ended before layer %d, so its tokens were not kept; if nothing interrupted it, the cache "
                "was made for another model",
                min(self._waiting)[0],
            )

    def _rest(self) -> None:
        """What the pool calls before its other operations: `settle`, unless the forward still runs, as in a hook.

        An open step then stays as it is; its pages do not move.
        """
        assert self.pool is not None
        if not in_forward() or _NEWEST[self.pool]() is not self:
            self.settle()


_NEWEST: WeakKeyDictionary[CachePool, ref[OwnSteps]] = WeakKeyDictionary()
"""Whose forward began last on a pool: the only one that can still be running."""
