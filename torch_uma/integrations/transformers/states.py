"""Layers that keep states, of convolutions and of recurrences, in place where the batch's states lie side by side."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from torch_uma.errors import SequenceError
from torch_uma.integrations.transformers.given import in_forward
from torch_uma.integrations.transformers.keep import check_computed, gradient_error
from torch_uma.integrations.transformers.layer import ArenaLayer, Steps
from torch_uma.integrations.transformers.places import StepPlaces
from torch_uma.integrations.transformers.steps import OwnSteps


class LiveStates:
    """`layer.conv_states[i]` for `layer.read("conv", i)`."""

    def __init__(self, layer: StateLayer, kind: str) -> None:
        self._layer = layer
        self._kind = kind

    def __getitem__(self, state_idx: int) -> torch.Tensor | None:
        return self._layer.read(self._kind, state_idx)


class StateLayer(ArenaLayer, LinearAttentionCacheLayerMixin):
    """Convolution and recurrent states of one layer; croppable if they are the last inputs of convolutions alone."""

    is_croppable = False
    is_compileable = False

    def __init__(self, layer: int, number_of_states: int, steps: Steps, restarted_by: str = "") -> None:
        self.number_of_states = number_of_states
        self.path = "none"
        self._restarted_by = restarted_by
        self._layer = layer
        self._steps = steps

    @property
    def conv_states(self) -> LiveStates:  # type: ignore[override]  # all that models do is to index it
        """The live convolution states by index; how models read them before transformers 5.21."""
        return LiveStates(self, "conv")

    @property
    def recurrent_states(self) -> LiveStates:  # type: ignore[override]
        """The live recurrent states by index."""
        return LiveStates(self, "recurrent")

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the arena has the states."""

    def read(self, kind: str, state_idx: int) -> torch.Tensor | None:
        """The live state [batch, *shape], to be changed in place, or None while no row has one. GradientError.

        Between two forwards a copy of it.
        """
        name = _row_name(kind, state_idx)
        if isinstance(self._steps, OwnSteps) and not torch.compiler.is_compiling() and not in_forward():
            return self._steps.at_rest().state(self._layer, name)
        if torch.is_grad_enabled():
            raise gradient_error()
        places = self._steps.enter(self._layer, name, is_read=True)
        if places is None or places.fresh:
            return None
        # Mixers change a state in place when there is one new token, and otherwise give the new one to an update.
        return self._state(places, name, is_write=places.num_new_tokens == 1)

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Keeps the last of [batch, channels, tokens]; returns the old state and all of these, padded on the left.

        Without `conv_kernel_size` they are a state that is ready, as wide as it is, whatever the number of tokens.
        """
        num_new_tokens = None if conv_kernel_size is None else conv_states.shape[-1]
        places, state = self._write(conv_states, "conv", state_idx, num_new_tokens)
        width = state.shape[-1]
        missing = width - conv_states.shape[-1]
        if self.record_past or not places.fresh:
            inputs = torch.cat([state.to(conv_states.dtype), conv_states], dim=-1)
        if self.record_past:
            assert isinstance(self._steps, OwnSteps)
            self._steps.note_inputs(self._layer, _row_name("conv", state_idx), inputs, width)
        if not places.fresh:
            conv_states = inputs
        elif missing > 0:
            conv_states = torch.nn.functional.pad(conv_states, (missing, 0))
        state.copy_(conv_states[..., -state.shape[-1] :])
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Keeps a state [batch, *shape] and returns it as stored."""
        return self.write("recurrent", state_idx, recurrent_states)

    def write(self, kind: str, state_idx: int, new: torch.Tensor) -> torch.Tensor:
        """Keeps a state [batch, *shape] of any kind but "conv", and returns it as stored. GradientError."""
        _, state = self._write(new, kind, state_idx, None)
        return state.copy_(new)

    def _write(
        self, new: torch.Tensor, kind: str, state_idx: int, num_new_tokens: int | None
    ) -> tuple[StepPlaces, torch.Tensor]:
        if torch.is_grad_enabled():
            raise gradient_error()
        name = _row_name(kind, state_idx)
        places = self._steps.enter(self._layer, name, num_new_tokens=num_new_tokens, like=new)
        assert places is not None
        store = places.stores[self._layer].state
        assert store is not None
        check_computed(store.rows[name], new, store.grids[name].device)
        if self._restarted_by and places.num_new_tokens > 1 and not places.fresh:
            raise SequenceError(
                f"{self._restarted_by} starts its recurrent states anew in a forward of several tokens, and would "
                f"forget the {places.max_past} tokens that the rows hold; give it one token at a time, or reset() the "
                "cache and give the whole text at once, without prefill_chunk_size"
            )
        return places, self._state(places, name, is_write=True)

    def _state(self, places: StepPlaces, name: str, *, is_write: bool) -> torch.Tensor:
        state = places.state(self._layer)[name]
        is_traced = torch.compiler.is_compiling()  # and then the same for views and copies
        if is_write and (is_traced or places.views_states):
            places.step.state_touched = True  # in place, unseen: a step that aborts now cannot put it back
        if not is_traced:
            self.path = "state view" if places.views_states else "state copy"
        return state


def _row_name(kind: str, state_idx: int) -> str:
    return kind if state_idx == 0 else f"{kind}_{state_idx}"
