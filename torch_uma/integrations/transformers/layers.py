"""What the layers of a model call: keys and values, and states, read and written where the step's places say.

Owns no memory: every layer asks its cache's step for places in the arena. The classes stand in for those of
transformers, so that its code for masks, lengths and kinds of layers works unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from torch_uma.errors import PlanError, SequenceError
from torch_uma.integrations.transformers.attention import NAME, InPlace
from torch_uma.integrations.transformers.compressed import Groups
from torch_uma.integrations.transformers.given import GivenStep, in_forward
from torch_uma.integrations.transformers.index import IndexKeys
from torch_uma.integrations.transformers.keep import (
    Rows,
    append,
    check_computed,
    check_no_gradients,
    check_stored,
    gather,
    gradient_error,
    has_dtype,
    views,
    write,
    write_all,
)
from torch_uma.integrations.transformers.places import StepPlaces
from torch_uma.integrations.transformers.prompt import REFERENCE, Prompt
from torch_uma.integrations.transformers.reading import Reading, leave
from torch_uma.integrations.transformers.recording import is_recurrent
from torch_uma.integrations.transformers.steps import OwnSteps, Part
from torch_uma.integrations.transformers.stores import INDEX_KEY, check_served, groups_of, parts_of_memory
from torch_uma.integrations.transformers.versions import DummyLayer
from torch_uma.layout import Chunk, Full, Layer, Lifetime, State, Window

Steps = GivenStep | OwnSteps


class ArenaLayer:
    """A layer whose content lies in an arena.

    `is_croppable`: it can be had as it was before any of the tokens behind which its past is recorded.
    """

    is_croppable = False
    _steps: Steps

    @property
    def record_past(self) -> bool:
        """Whether the past of the cache is recorded, so that mixers have to hand over what they put into a state.

        Set False it ends for all layers.
        """
        return self.is_croppable and self._steps.is_recording

    @record_past.setter
    def record_past(self, is_recording: bool) -> None:
        if not isinstance(self._steps, OwnSteps):
            raise SequenceError("the rows of a step belong to the loop that opened it; fork() its sequences before it")
        rows = self._steps.at_rest()
        if is_recording:
            rows.record(None)
        else:
            rows.stop_recording()

    def __deepcopy__(self, memo: dict[int, Any]) -> ArenaLayer:
        """A layer of the same kind, as looped models append them, that has no place in the arena until it is planned.

        The layers of a cache that was made for a looped model have all their places already.
        """
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__, _steps=Unplanned())
        return copied

    def __copy__(self) -> ArenaLayer:
        return self.__deepcopy__({})

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a layer of a UnifiedCache cannot be pickled, as what it keeps lies in the memory of a pool; "
            "copy.deepcopy() of the whole cache forks it there"
        )


class Unplanned:
    """The steps of a layer that no plan knows: PlanError for whatever is asked of them."""

    def __getattr__(self, name: str) -> NoReturn:
        raise PlanError(
            "the plan of this cache has no place for a copied layer; make the cache of the model, so that the copies "
            "that it works with are planned, or copy.deepcopy() the whole cache, which forks it"
        )


class AttentionLayer(ArenaLayer, CacheLayerMixin):
    """Keys and values of one layer, needed for ever or in a window."""

    keys = values = None  # part of the interface; the arena holds them
    is_croppable = True

    def __init__(self, layer: int, lifetime: Lifetime, steps: Steps) -> None:
        self.path = "none"
        self.is_sliding = not isinstance(lifetime, Full)
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
        check_no_gradients(key_states, value_states)
        places = self._steps.enter(self._layer, "tokens", num_new_tokens=key_states.shape[-2], like=key_states)
        assert places is not None
        store = places.stores[self._layer].tokens
        assert store is not None
        new = (key_states, value_states)
        check_stored(store, new)
        is_traced = torch.compiler.is_compiling()
        if places.fixed is not None and (places.is_fixed or is_traced):
            if not is_traced:
                self.path = "view"
            keys, values = places.fixed[self._layer, "tokens"].update(places.longest_past, new)
            self._steps.leave(self._layer, "tokens")
            return keys, values
        where = places.tokens[store.subpool.index]
        made: Rows | None = None
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
        self._steps.leave(self._layer, "tokens")
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


class IndexedLayer(IndexKeys, AttentionLayer):
    """A layer that has index keys beside keys and values, or index keys alone."""

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]  # nobody sets it
        """How many tokens there are keys of, as [1, 1, tokens, 0]: the arena has the keys. None for none.

        SequenceError in a trace, where nobody knows.
        """
        if torch.compiler.is_compiling():
            raise SequenceError(
                f"layer {self._layer} is asked how many keys it has, which a compiled forward does not know; run this "
                "model without torch.compile"
            )
        num_tokens = int(self.get_seq_length())
        return torch.empty((1, 1, num_tokens, 0), device="meta") if num_tokens else None

    def get_seq_length(self) -> int | torch.Tensor:  # type: ignore[override]  # a tensor in a trace
        """Tokens of the longest row, with the new ones of a forward once the layer has stored their keys."""
        return self._steps.length_at(self._layer)


class SingleLayer(AttentionLayer):
    """Keys of one layer that are its values too, and are stored once."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As for keys and values, which it returns as one tensor. PlanError for attention that reads the arena."""
        if self._steps.in_place:
            raise PlanError(
                f"layer {self._layer} stores its keys once, as they are its values too, which attention by {NAME!r} "
                "does not read; call model.set_attn_implementation('eager')"
            )
        keys, _ = super().update(key_states, value_states[..., :0], *args, **kwargs)
        return keys, keys


class CompressedLayer(Groups, SingleLayer):
    """A layer of compressed attention."""


class ReferenceLayer(Prompt, AttentionLayer):
    """Keys and values of which a query sees those of the prompt and of a window."""

    def __init__(self, layer: int, lifetime: Lifetime, steps: Steps) -> None:
        super().__init__(layer, lifetime, steps)
        self._layer_type = REFERENCE  # not of the class, of which transformers would then make its own caches

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As for full attention, whose mask says what is seen."""
        is_fresh = not self._steps.has_tokens()
        updated = super().update(key_states, value_states, *args, **kwargs)
        self.begin(is_fresh, key_states.shape[-2])
        return updated


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


class HybridLayer(StateLayer, AttentionLayer):
    """A layer that has both states, and keys and values."""

    is_croppable = False
    is_compileable = False

    def __init__(
        self, layer: int, number_of_states: int, lifetime: Lifetime, steps: Steps, restarted_by: str = ""
    ) -> None:
        AttentionLayer.__init__(self, layer, lifetime, steps)
        StateLayer.__init__(self, layer, number_of_states, steps, restarted_by)

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
        number_of_states, has_index, is_single, groups = 0, False, False, groups_of(layer)
        lifetime: Lifetime | None = None
        for memory in layer.memories:
            if groups and not isinstance(memory.lifetime, Window):
                continue
            if isinstance(memory.lifetime, State):
                number_of_states = max(1, sum(row.name.startswith("conv") for row in memory.rows))
            else:
                check_served(index, memory)
                lifetime = memory.lifetime
                has_index = any(row.name == INDEX_KEY for row in memory.rows)
                is_single = memory.rows[-1].name == "v" and memory.rows[-1].num_bytes == 0
        if number_of_states and has_index:
            raise PlanError(
                f"layer {index} stores index keys beside states; UnifiedCache serves them in layers of each"
            )
        if number_of_states and lifetime is not None:
            made.append(HybridLayer(index, number_of_states, lifetime, steps, layer.restarted_by))
        elif number_of_states:
            made.append(StateLayer(index, number_of_states, steps, layer.restarted_by))
        elif lifetime is not None:
            kind: type[AttentionLayer] = AttentionLayer
            if layer.name == REFERENCE:
                kind = ReferenceLayer
            elif groups or is_single:
                kind = CompressedLayer if groups else SingleLayer
            elif has_index:
                kind = IndexedLayer
            made.append(kind(index, lifetime, steps))
        else:
            made.append(DummyLayer())
        if any(isinstance(memory.lifetime, State) for memory in layer.memories):
            made[-1].is_croppable = not is_recurrent([layer])
    return made


def parts_of(layers: Iterable[Layer]) -> list[Part]:
    """Every layer's tokens, index keys, groups and rows of its state, as far as every forward stores them."""
    parts: list[Part] = []
    for index, layer in enumerate(layers):
        groups = groups_of(layer)
        for memory in layer.memories:
            if not groups or isinstance(memory.lifetime, Window):
                parts += [(index, name) for name in parts_of_memory(memory)]
        parts += [(index, name) for name in groups]
    return parts


def _row_name(kind: str, state_idx: int) -> str:
    return kind if state_idx == 0 else f"{kind}_{state_idx}"
