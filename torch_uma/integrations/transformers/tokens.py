"""Layers that keep what attention reads: keys and values, alone or with index keys, groups of tokens or a prompt."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from torch_uma.errors import PlanError, SequenceError
from torch_uma.integrations.transformers.attention import NAME, InPlace
from torch_uma.integrations.transformers.compressed import Groups
from torch_uma.integrations.transformers.given import GivenStep
from torch_uma.integrations.transformers.index import IndexKeys
from torch_uma.integrations.transformers.keep import (
    Rows,
    append,
    check_no_gradients,
    check_stored,
    gather,
    has_dtype,
    views,
    write,
    write_all,
)
from torch_uma.integrations.transformers.layer import ArenaLayer, Steps
from torch_uma.integrations.transformers.prompt import REFERENCE, Prompt
from torch_uma.integrations.transformers.reading import Reading, leave
from torch_uma.integrations.transformers.steps import OwnSteps
from torch_uma.layout import Chunk, Full, Lifetime, Window


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
