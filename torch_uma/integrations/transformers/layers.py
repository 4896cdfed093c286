"""What the layers of a model call: keys and values, and states, read and written where the step's places say.

Owns no memory: every layer asks its cache's step for places in the arena. The classes stand in for those of
transformers, so that its code for masks, lengths and kinds of layers works unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from torch_uma.errors import GradientError, PlanError, SequenceError
from torch_uma.integrations.transformers.attention import NAME, InPlace
from torch_uma.integrations.transformers.given import GivenStep, in_forward
from torch_uma.integrations.transformers.keep import (
    Pair,
    append,
    check_stored,
    gather,
    has_dtype,
    views,
    write,
    write_all,
)
from torch_uma.integrations.transformers.places import StepPlaces
from torch_uma.integrations.transformers.reading import Reading, leave
from torch_uma.integrations.transformers.steps import OwnSteps, Part
from torch_uma.integrations.transformers.stores import check_served
from torch_uma.integrations.transformers.versions import DummyLayer
from torch_uma.layout import Chunk, Full, Layer, Lifetime, State, Window

Steps = GivenStep | OwnSteps


class ArenaLayer:
    """A layer whose content lies in an arena."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a layer of a UnifiedCache cannot be copied or pickled, as what it keeps lies in the memory of a pool; "
            "copy.deepcopy() of the whole cache forks it there"
        )


class AttentionLayer(ArenaLayer, CacheLayerMixin):
    """Keys and values of one layer, needed for ever or in a window."""

    def __init__(self, layer: int, lifetime: Lifetime, steps: Steps) -> None:
        self.keys = self.values = None  # part of the interface; the arena holds them
        self.path = "none"
        self.is_sliding = not isinstance(lifetime, Full)
        self.is_croppable = not self.is_sliding
        if isinstance(lifetime, Window | Chunk):
            self.sliding_window = lifetime.num_tokens
        self._layer = layer
        self._lifetime = lifetime
        self._steps = steps

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]  # nobody sets it
        """Whether there are rows."""
        return isinstance(self._steps, GivenStep) or bool(self._steps.rows)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Makes the rows for keys of [batch, heads, tokens, head_dim]."""
        assert isinstance(self._steps, OwnSteps)
        self._steps.rows.add(key_states.shape[0], key_states.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new keys and values [batch, heads, num_new_tokens, head_dim]; returns all that the step attends to.

        What it returns may be a view of the arena, good until the next forward. For attention that reads the arena it
        returns what it was given, and puts a `Reading` into the dictionary `kwargs`. OutOfMemory, GradientError.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise _gradient_error()
        places = self._steps.enter(self._layer, "tokens", num_new_tokens=key_states.shape[-2], like=key_states)
        assert places is not None
        store = places.stores[self._layer].tokens
        assert store is not None
        new = (key_states, value_states)
        _check_device(self._layer, places, key_states)
        check_stored(store, new)
        is_traced = torch.compiler.is_compiling()
        if places.fixed is not None and (places.is_fixed or is_traced):
            if not is_traced:
                self.path = "view"
            keys, values = places.fixed[self._layer].update(places.longest_past, new)
            self._steps.leave(self._layer)
            return keys, values
        where = places.tokens[store.subpool.index]
        made: Pair | None = None
        if is_traced or not has_dtype(store, new):
            write(places.arena, store, where.write, new)
        elif where.run is not None and places.is_on_host:
            made = append(store, where.run, places, new)
        elif places.plans_reads and not where.appends:
            write_all(store, where.write, new)
        else:
            write(places.arena, store, where.write, new)
            if where.run is not None and not places.in_place:
                made = views(store, where.run, places, new)
        if places.in_place:
            self.path = "in place"
            if not is_traced:
                places.hand_out(self._layer)
            reading = Reading(places=places, store=store, new=new, views=made)
            is_told = "kwargs" in kwargs
            if is_told:
                kwargs["kwargs"][NAME] = reading
            if store.is_shared or not is_told:
                if store.is_latent or is_traced:
                    raise SequenceError(
                        f"layer {self._layer} {'shares its keys' if is_told else 'does not hand on what it is given'}, "
                        f"with which attention by {NAME!r} reads neither latents nor compiles; use 'sdpa' or 'eager'"
                        + ("" if is_told else ", or transformers 5.24 or newer")
                    )
                leave(reading)
            keys, values = key_states, value_states
        elif isinstance(self._lifetime, Chunk):
            raise PlanError(
                f"layer {self._layer} attends within chunks, which padding may shift, and only attention sees padding; "
                f"call model.set_attn_implementation({NAME!r})"
            )
        elif made is not None:
            self.path = "view"
            keys, values = made
        else:
            self.path = "gather"
            keys, values = gather(places, store, where.appends, new)
        self._steps.leave(self._layer)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int | torch.Tensor]:  # type: ignore[override]
        """Number of keys that `update` will return for `query_length` new tokens, and the position of the first."""
        if not self._steps.in_place:
            sizes = self._steps.fixed_sizes(self._layer, query_length)
            if sizes is not None:
                return sizes
            offset, length = self._steps.extent(self._layer, self._lifetime, query_length)
            return length, offset
        if torch.compiler.is_compiling():  # numbers that change from step to step would be compiled in
            return query_length, 0
        offset, length = self._steps.extent(self._layer, self._lifetime, query_length)
        return InPlace(length), offset

    def get_seq_length(self) -> int | torch.Tensor:  # type: ignore[override]  # a tensor in a trace
        """Tokens of the longest row."""
        return self._steps.length()

    def get_max_length(self) -> int:
        """Tokens that the layer was asked to make room for, or those of its window; -1 if nobody said."""
        if self.is_sliding:
            return int(self.sliding_window)
        limit = None if isinstance(self._steps, GivenStep) else self._steps.rows.max_tokens
        return -1 if limit is None else limit


class LiveStates:
    """`layer.conv_states[i]` for `layer.read("conv", i)`."""

    def __init__(self, layer: StateLayer, kind: str) -> None:
        self._layer = layer
        self._kind = kind

    def __getitem__(self, state_idx: int) -> torch.Tensor | None:
        return self._layer.read(self._kind, state_idx)


class StateLayer(ArenaLayer, LinearAttentionCacheLayerMixin):
    """Convolution and recurrent states of one layer."""

    is_croppable = False
    is_compileable = False

    def __init__(self, layer: int, number_of_states: int, steps: Steps) -> None:
        self.number_of_states = number_of_states
        self.record_past = False
        self.path = "none"
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

    def activate_past_recording(self) -> None:
        """SequenceError: a state of the past is not kept."""
        raise SequenceError(
            "past states are not recorded, so this cache cannot take back tokens of a recurrent layer; "
            "generate without speculation, or fork the cache with copy.deepcopy before"
        )

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
            raise _gradient_error()
        places = self._steps.enter(self._layer, name, is_read=True)
        if places is None or places.fresh:
            return None
        # Mixers change a state in place when there is one new token, and otherwise give the new one to an update.
        return self._state(places, name, is_write=places.num_new_tokens == 1)

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Keeps the last of [batch, channels, tokens]; returns the old state and all of these, padded on the left."""
        places, state = self._write(conv_states, "conv", state_idx)
        missing = state.shape[-1] - conv_states.shape[-1]
        if not places.fresh:
            conv_states = torch.cat([state.to(conv_states.dtype), conv_states], dim=-1)
        elif missing > 0:
            conv_states = torch.nn.functional.pad(conv_states, (missing, 0))
        state.copy_(conv_states[..., -state.shape[-1] :])
        return conv_states

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any) -> torch.Tensor:
        """Keeps a state [batch, *shape] and returns it as stored."""
        _, state = self._write(recurrent_states, "recurrent", state_idx)
        return state.copy_(recurrent_states)

    def _write(self, new: torch.Tensor, kind: str, state_idx: int) -> tuple[StepPlaces, torch.Tensor]:
        if torch.is_grad_enabled():
            raise _gradient_error()
        num_new_tokens = new.shape[-1] if kind == "conv" else None
        name = _row_name(kind, state_idx)
        places = self._steps.enter(self._layer, name, num_new_tokens=num_new_tokens, like=new)
        assert places is not None
        _check_device(self._layer, places, new)
        return places, self._state(places, name, is_write=True)

    def _state(self, places: StepPlaces, name: str, *, is_write: bool) -> torch.Tensor:
        state = places.state(self._layer)[name]
        is_traced = torch.compiler.is_compiling()  # and then the same for views and copies
        if is_write and (is_traced or places.views_states):
            places.step.state_touched = True  # in place, unseen: a step that aborts now cannot put it back
        if not is_traced:
            self.path = "state view" if places.views_states else "state copy"
        return state


class HybridLayer(StateLayer, AttentionLayer):
    """A layer that has both states, and keys and values."""

    is_croppable = False
    is_compileable = False

    def __init__(self, layer: int, number_of_states: int, lifetime: Lifetime, steps: Steps) -> None:
        AttentionLayer.__init__(self, layer, lifetime, steps)
        StateLayer.__init__(self, layer, number_of_states, steps)
        self.is_croppable = False

    def get_max_length(self) -> int:
        """As for keys and values alone."""
        return AttentionLayer.get_max_length(self)


CacheLayer = AttentionLayer | StateLayer | DummyLayer


def make_layers(layers: Iterable[Layer], steps: Steps) -> list[CacheLayer]:
    """One cache layer for each declared layer; those that store nothing get transformers' dummy.

    PlanError for what no cache layer serves.
    """
    made: list[CacheLayer] = []
    for index, layer in enumerate(layers):
        number_of_states = 0
        lifetime: Lifetime | None = None
        for memory in layer.memories:
            if isinstance(memory.lifetime, State):
                number_of_states = max(1, sum(row.name.startswith("conv") for row in memory.rows))
            else:
                check_served(index, memory)
                lifetime = memory.lifetime
        if number_of_states and lifetime is not None:
            made.append(HybridLayer(index, number_of_states, lifetime, steps))
        elif number_of_states:
            made.append(StateLayer(index, number_of_states, steps))
        elif lifetime is not None:
            made.append(AttentionLayer(index, lifetime, steps))
        else:
            made.append(DummyLayer())
    return made


def parts_of(layers: Iterable[Layer]) -> list[Part]:
    """Every layer's tokens and every row of every layer's state, as far as it stores them."""
    return [
        (index, name)
        for index, layer in enumerate(layers)
        for memory in layer.memories
        for name in ([row.name for row in memory.rows] if isinstance(memory.lifetime, State) else ["tokens"])
    ]


def _row_name(kind: str, state_idx: int) -> str:
    return kind if state_idx == 0 else f"{kind}_{state_idx}"


def _check_device(layer: int, places: StepPlaces, new: torch.Tensor) -> None:
    # Once there are tokens, of the first layer only: a model that moves does so as a whole.
    if (places.fresh or layer == 0) and new.device != places.arena.device:
        raise PlanError(
            f"layer {layer} runs on {new.device}, but its memory is on {places.arena.device}; make the cache of the "
            "model itself, once it is where it stays: UnifiedCache(model)"
        )


def _gradient_error() -> GradientError:
    return GradientError(
        "a forward that records gradients would write into the cache, whose rows later steps overwrite; "
        "wrap the call in torch.no_grad(), or pass use_cache=False to train"
    )
