"""The step that `pool.step` opened and will close, as the layers of a model see it.

Owns what is refused there, and the question whether a forward of a module runs now.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING

import torch

from torch_uma.errors import SequenceError
from torch_uma.integrations.transformers.origin import Origin
from torch_uma.integrations.transformers.places import StepPlaces
from torch_uma.layout import Lifetime

if TYPE_CHECKING:
    from torch_uma.pool import CachePool

_MODULE_CALL = torch.nn.Module._call_impl.__code__


def in_forward() -> bool:
    """Whether the forward of a module, or a hook of it, is being run by this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _MODULE_CALL:
        frame = frame.f_back
    return frame is not None


class GivenStep:
    """The one step that `pool.step` opened and will close; every call of a layer belongs to it, and to one forward."""

    is_recording = False

    def __init__(self, places: StepPlaces, pool: CachePool, origin: Origin | None = None) -> None:
        self.places = places
        self.pool = pool
        self._origin = origin  # until its user is known
        self._lacks_inputs = not places.is_even
        self._touches: set[tuple[int, str, bool]] = set()

    @property
    def in_place(self) -> bool:
        """Whether the model's attention reads keys and values in the arena."""
        return self.places.in_place

    @property
    def reads_fixed(self) -> bool:
        """Whether the forward reads keys of a fixed size: one that is traced does, where they can be had."""
        return torch.compiler.is_compiling() and self.places.fixed is not None

    def inputs(self) -> dict[str, torch.Tensor]:
        """The position ids and, for attention that needs it, the mask: rows of unequal past go wrong without them."""
        self._lacks_inputs = False
        return self.places.inputs()

    def enter(
        self,
        layer: int,
        name: str,
        *,
        is_read: bool = False,
        num_new_tokens: int | None = None,
        like: torch.Tensor | None = None,
    ) -> StepPlaces | None:
        """Returns the step's places.

        SequenceError if the forward has another batch or number of tokens, lacks the mask, or, unless it is traced, is
        a second one.
        """
        if not self.places.step.is_open:
            raise SequenceError("the step of this cache has ended; open another one for the next forward")
        self._check_inputs()
        if self.places.packing is not None:
            self.places.packing.check_forward(None if like is None else like.shape[0], num_new_tokens)
        check_shape(self.places.batch_size, like)
        if num_new_tokens is not None and num_new_tokens != self.places.num_new_tokens:
            raise SequenceError(
                f"the step was opened for {self.places.num_new_tokens} new tokens a sequence, "
                f"but the forward has {num_new_tokens}; open another step for them"
            )
        if not torch.compiler.is_compiling():  # what is traced must not depend on what was called before
            if self._origin is not None:
                self._origin.check_user()
                self._origin = None
            self._check_first(layer, name, is_read)
        return self.places

    def leave(self, layer: int, name: str) -> None:
        """A layer has stored its tokens or index keys; the step is closed by whoever opened it."""

    def length(self) -> int | torch.Tensor:
        """Tokens that the longest sequence held before the step; a tensor for a trace that goes on for other steps.

        Models count positions from it where they are not told, so in a packing it is [tokens], for each what it takes.
        """
        if self.places.packing is not None:
            return self.places.packing.offsets
        if (self.places.in_place or self.places.fixed is not None) and torch.compiler.is_compiling():
            return self.places.longest_past
        return self.places.max_past

    def length_at(self, layer: int) -> int | torch.Tensor:
        """The same, with the new tokens once the layer has stored them; in a trace, as before them."""
        is_ahead = (layer, "tokens", False) in self._touches
        return self.length() + (self.places.num_new_tokens if is_ahead else 0)

    def has_tokens(self) -> bool:
        """Whether any sequence held tokens before the step."""
        return not self.places.fresh

    def extent(self, layer: int, lifetime: Lifetime, num_new_tokens: int) -> tuple[int, int]:
        """The first column and the number of columns of keys that the layer will read; SequenceError as for `enter`."""
        self._check_inputs()
        return self.places.extent(layer)

    def fixed_sizes(self, layer: int, num_new_tokens: int) -> tuple[int, int | torch.Tensor] | None:
        """Number of columns and first position of keys of a fixed size, where the forward reads such; else None."""
        return self.places.mask_sizes(layer)

    def _check_first(self, layer: int, name: str, is_read: bool) -> None:
        """With one new token a read of the forward counts too, as it may change the state in place."""
        if is_read and (self.places.num_new_tokens > 1 or not in_forward()):
            return
        if (layer, name, is_read) in self._touches or (layer, name, False) in self._touches:
            raise SequenceError(
                f"layer {layer} was already written in this step; open another step for the next forward"
            )
        self._touches.add((layer, name, is_read))

    def _check_inputs(self) -> None:
        if self._lacks_inputs:
            raise SequenceError(
                "the sequences of this step hold, or take, unequal numbers of tokens, so the forward needs the mask "
                "and the position ids of **cache.inputs(): model(tokens, cache=cache, **cache.inputs())"
            )


def check_shape(num_rows: int, like: torch.Tensor | None) -> None:
    """SequenceError if `like` [batch, ...] is of another batch than `num_rows`; 0 rows, or None, fit anything."""
    if num_rows and like is not None and like.shape[0] != num_rows:
        raise SequenceError(
            f"the cache holds {num_rows} rows, but the forward has a batch of {like.shape[0]}; "
            "reset() the cache for another batch, or select its rows with batch_select_indices()"
        )
