"""UnifiedCache: the transformers cache over a batch of sequences of a pool.

Owns the batch rows as a whole: making, forking, selecting and freeing them. What a forward reads and writes is in
`layers`, when its step begins and ends in `steps`, and where everything lies in `places`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers.cache_utils import Cache

from torch_uma.counts import whole
from torch_uma.errors import PlanError, SequenceError
from torch_uma.integrations.transformers.attention import NAME, is_used
from torch_uma.integrations.transformers.declare import declare
from torch_uma.integrations.transformers.devices import Shard, memory_by_device, several, shards_of
from torch_uma.integrations.transformers.given import GivenStep
from torch_uma.integrations.transformers.layers import HybridLayer, make_layers, parts_of
from torch_uma.integrations.transformers.made_for import check_made_for, config_of, origin_of, reads_in_place
from torch_uma.integrations.transformers.making import Making
from torch_uma.integrations.transformers.origin import Origin, text_config_of
from torch_uma.integrations.transformers.own import Lightning, as_minimax_cache, with_lightning
from torch_uma.integrations.transformers.places import StepPlaces
from torch_uma.integrations.transformers.shards import ShardedRows, ShardedSteps
from torch_uma.integrations.transformers.states import StateLayer
from torch_uma.integrations.transformers.steps import OwnSteps
from torch_uma.integrations.transformers.stores import has_index, stores_tokens
from torch_uma.integrations.transformers.taking import TakingPlaces, TakingSteps
from torch_uma.integrations.transformers.tokens import AttentionLayer, IndexedLayer, ReferenceLayer
from torch_uma.integrations.transformers.versions import (
    asks_to_compile,
    asks_to_sample,
    makes_masks,
    text_of_prefill,
)
from torch_uma.layout import Chunk, Layer, Window
from torch_uma.precision import kept_as

if TYPE_CHECKING:
    from torch_uma.multistep import MultiStep
    from torch_uma.pool import CachePool
    from torch_uma.step import Step


class UnifiedCache(Cache):
    """A cache for `generate(cache=...)` and for the forward passes of a loop, all kinds of memory in one arena.

    `model_or_config`: of the model that will use it. `pool`: share this one; otherwise the cache makes its own of
    `memory` (bytes, "2GiB" or a fraction of the free memory). Without `memory` it takes, at the first forward, what the
    batch needs for `max_tokens` each, sized for the first batch and no more: give memory= if you will fork, beam or
    batch more; it moves into a roomier pool where a step of several tokens reads one window and leaves another. Without
    both it takes half of the free memory. It logs what it took at INFO. With `max_tokens` the keys and values are
    handed over as views with no copy, windows with twice the room. `page_size` (16; 8 where the arena is sized for the
    batch), `max_sequences` (rows, forks and beams that can exist at once; at least 256 by default), `dtype` (of
    activations), `kv_dtype` (float8_e4m3fn, float8_e5m2 or bfloat16: keep keys, values and latents so, which changes
    tokens) and `device` (that of the model) are for the pool that it makes. PlanError for a pool of another model. Of a
    model whose layers run on several devices, as with a `device_map`, the cache has a pool on each with what lies there
    (`pools`); `memory` is then that of each, or a mapping from devices to it.

    Dropping the cache gives its rows back. A forward raises OutOfMemory (the cache stands as after the last whole
    step), GradientError, SequenceError or PlanError where the model is another one, or was moved, and ClosedError once
    the pool is closed.
    """

    def __init__(
        self,
        model_or_config: Any,
        *,
        memory: int | float | str | Mapping[Any, int | float | str] | None = None,
        max_tokens: int | None = None,
        pool: CachePool | None = None,
        page_size: int | None = None,
        max_sequences: int | None = None,
        dtype: torch.dtype | None = None,
        kv_dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if max_tokens is not None:
            max_tokens = whole(max_tokens, "max_tokens of a cache", least=1, error=PlanError)
        if max_sequences is not None:
            max_sequences = whole(max_sequences, "max_sequences of a pool", least=1, error=PlanError)
        shards: tuple[Shard, ...] = ()
        if pool is None:
            layers = kept_as(declare(model_or_config, dtype=dtype), kv_dtype)
            shards = shards_of(model_or_config, layers)
        else:
            asked = {"memory": memory, "page_size": page_size, "max_sequences": max_sequences, "dtype": dtype}
            for name, value in {**asked, "kv_dtype": kv_dtype, "device": device}.items():
                if value is not None:
                    raise PlanError(f"pool= has its {name} already; give either pool= or {name}=")
            pool.guard.check_usable()
            check_made_for(pool, model_or_config)
            layers = pool.plan.layers
        devices = [shard.device for shard in shards]
        if len(devices) > 1 and device is not None:
            raise PlanError(f"{several(devices)}, and the cache has a pool on each; leave device= out")
        if device is None:
            device = devices[0] if devices else getattr(model_or_config, "device", None)
        config, has_attention = text_config_of(model_or_config), stores_tokens(layers)

        def is_in_place() -> bool:
            return not has_attention or is_used(config)

        making = Making(
            max_tokens=max_tokens, page_size=page_size, max_sequences=max_sequences, is_in_place=is_in_place
        )
        origin = Origin(model_or_config, is_sharded=len(shards) > 1)
        self._steps: OwnSteps | GivenStep
        sizes = memory_by_device(memory, devices or [device or torch.get_default_device()])
        if len(shards) > 1:
            rows = [making.rows(shard.layers, shard.device, size) for shard, size in zip(shards, sizes, strict=True)]
            self._steps = ShardedSteps(ShardedRows(shards, rows), parts_of(layers), is_in_place, origin)
        else:
            self._steps = OwnSteps(making.rows(layers, device, sizes[0], pool), parts_of(layers), is_in_place, origin)
        self._bind(layers)

    @classmethod
    def _of_step(cls, step: Step) -> UnifiedCache:
        """The cache of a step that is opened and closed by `pool.step`."""
        origin = origin_of(step.pool)
        origin.check(step.pool)
        cache = cls.__new__(cls)
        # States are views: nothing is fetched.
        places = StepPlaces(step.pool, step, whole=True, in_place=reads_in_place(step.pool))
        cache._steps = GivenStep(places, step.pool, origin)
        cache._bind(step.pool.plan.layers)
        return cache

    @classmethod
    def _of_multi_step(cls, multi: MultiStep) -> UnifiedCache:
        """The cache of a multi-step; SequenceError for a model that has states or does not attend in the arena."""
        config = config_of(multi.pool)
        if has_index(multi.pool.plan.layers):
            raise SequenceError(
                "a model that chooses its keys by index keys asks how many there are, which nobody knows on the host "
                "during a multi-step; take its steps one by one"
            )
        if not is_used(config):
            raise SequenceError(
                f"between the steps of a multi-step only attention by {NAME!r} can follow; make the pool of the model, "
                f"and call model.set_attn_implementation({NAME!r})"
            )
        cache = cls.__new__(cls)
        cache._steps = TakingSteps(TakingPlaces(multi), multi.pool)
        cache._bind(multi.pool.plan.layers)
        return cache

    @staticmethod
    def _check_packed(pool: CachePool, counts: list[int]) -> None:
        """SequenceError if the model cannot tell apart sequences with so many new tokens, packed into one batch row."""
        state = next((subpool.name for subpool in pool.plan.subpools if subpool.is_state), None)
        config = config_of(pool)
        chooses_keys = has_index(pool.plan.layers)
        if state is None and not chooses_keys and is_used(config):
            return
        if chooses_keys:
            why, remedy = "layers with index keys would choose among the keys of all of them", ""
        elif state is not None:
            why, remedy = f"layers with a {state!r} would carry it from one into the next", ""
        elif config is None:
            why, remedy = "the pool was made of no model, or it is gone", "make the pool of the model, or "
        else:
            why = f"only attention by {NAME!r} tells them apart, and this model has {config._attn_implementation!r}"
            remedy = f"call model.set_attn_implementation({NAME!r}), or "
        raise SequenceError(
            f"the sequences of a step with unequally many new tokens, {sorted(set(counts))}, are packed into one batch "
            f"row, but {why}; {remedy}open a step for each number"
        )

    def _bind(self, layers: Sequence[Layer]) -> None:
        if with_lightning(layers) and not isinstance(self, Lightning):
            kind: Any = type(self)
            self.__class__ = as_minimax_cache(Lightning, kind)
        Cache.__init__(self, layers=list(make_layers(layers, self._steps)))
        self._declared = layers
        self._prompt: torch.Tensor | None = None  # what `generate()` began with, of a model that has states alone
        self._has_index = has_index(layers)
        # Models with states beside index keys, as qwen4_exp and glm5_next, read numbers back to group what they choose.
        self._is_eager = self._has_index and any(self.is_linear)
        self._may_be_fixed = not self._is_eager and not any(
            isinstance(memory.lifetime, Chunk) or memory.lifetime == Window(1) or memory.tokens_per_entry > 1
            for layer in layers
            for memory in layer.memories
        )
        if isinstance(self._steps, OwnSteps):
            # The rows outlive the cache in the pool, so they are freed when it goes; not at exit, when all goes.
            weakref.finalize(self, self._steps.abandon).atexit = False

    @property
    def pool(self) -> CachePool:
        """The pool that the rows are in; PlanError before the first forward of a cache that was given no memory.

        PlanError, too, if there are several.
        """
        pools = self.pools
        if not pools:
            raise PlanError(
                "the pool is made at the first forward, when the batch is known; give memory= to have it now"
            )
        if len(pools) > 1:
            raise PlanError(f"{several([pool.device for pool in pools])}, each with a pool of its own; see cache.pools")
        return pools[0]

    @property
    def pools(self) -> tuple[CachePool, ...]:
        """The pools that the rows are in, one for each device, in the order of their first layers; none until made."""
        steps = self._steps
        return (steps.pool,) if isinstance(steps, GivenStep) else steps.rows.pools

    @property
    def batch_size(self) -> int:
        """Number of rows, of packed ones 1; -1 if there are none yet."""
        if isinstance(self._steps, GivenStep):
            return self._steps.places.batch_size
        return len(self._steps.rows) or -1

    @property
    def is_initialized(self) -> bool:
        """Whether there are rows."""
        return self.batch_size > 0

    @property
    def is_compileable(self) -> bool:
        """Whether a decode step is one graph: attention reads the arena, or keys of a fixed size, or there is none.

        `generate()` asks this before every forward. A model without attention says nothing else of one that is
        compiled, so the step of its next token begins with the question. On a CPU, where transformers does not compile
        unasked, the answer to masks is yes: stock attention then gets one for one token, with which "sdpa" does not
        read strided keys once for every head. While the past is recorded it is no: what a forward records is not
        traced. The recording of an assisted `generate()` ends with the question of one that is not. Over several
        devices it is always no. OutOfMemory.
        """
        steps = self._steps
        if isinstance(steps, ShardedSteps) or self._is_eager:
            return False
        if self._has_index and steps.in_place:  # which reads no index keys of a fixed size
            return False
        if isinstance(steps, OwnSteps) and not torch.compiler.is_compiling():
            if steps.is_recording and asks_to_sample():
                self.deactivate_past_recording()
            if steps.is_recording:
                return False
            if steps.in_place and all(self.is_linear):
                steps.announce(1)
            is_compiled = asks_to_compile()
            if is_compiled is not None:
                steps.is_compiled = is_compiled and self._may_be_fixed
        # Masks for such a cache take windows beside states for full attention.
        if not steps.in_place and any(isinstance(layer, HybridLayer) and layer.is_sliding for layer in self.layers):
            return False
        if steps.reads_fixed:
            return True
        # Masks that are made before the forward are no use to models that look at the padding themselves.
        masked = None if torch.compiler.is_compiling() else makes_masks()
        if steps.in_place:
            return masked is None or getattr(masked, "_can_compile_fullgraph", True)
        return masked is None and steps.pool is not None and steps.pool.device.type == "cpu"

    @property
    def is_linear(self) -> list[bool]:
        """For each layer whether it has states and nothing else.

        `generate()` takes off a text what the cache holds of it, but not where all layers are such, as their own caches
        know no length. This one does, so while that is asked it says that none is. Synchronises then.
        """
        linear = [isinstance(layer, StateLayer) and not isinstance(layer, AttentionLayer) for layer in self.layers]
        if isinstance(self._steps, OwnSteps) and not torch.compiler.is_compiling() and all(linear):
            text = text_of_prefill()
            if text is not None and self._holds_part_of(text):
                return [False] * len(linear)
        return linear

    def _holds_part_of(self, text: torch.Tensor) -> bool:
        """Whether the rows hold the first tokens of `text`, as far as can be told: it may be new as well."""
        length = self._own().at_rest().length
        if length == 0:
            self._prompt = text if text.dim() == 2 else None
        if length == 0 or text.shape[1] <= length:
            return False
        known = self._prompt
        if known is None or text.dim() != 2 or len(text) != len(known):
            return True
        return torch.equal(text[:, : known.shape[1]], known)

    def _finish(self) -> None:
        """Writes back what the forward of a `pool.step` changed in copies."""
        assert isinstance(self._steps, GivenStep)
        self._steps.places.check_used()
        self._steps.places.keep_states()

    def paths(self) -> list[str]:
        """How each layer was served last: "in place", "view", "gather", "state view", "state copy", or "none"."""
        return [getattr(layer, "path", "none") for layer in self.layers]

    def inputs(self) -> dict[str, torch.Tensor]:
        """What the model needs beside its input ids in a step of `pool.step`.

        `position_ids` int64 [rows, num_new_tokens], or [1, all new tokens] where they are packed; and, unless attention
        reads the arena, `attention_mask` int64 [rows, longest past + num_new_tokens], 0 in front of shorter rows, which
        are aligned at their ends. A forward over rows that hold or take unequal numbers of tokens raises SequenceError
        if these were not asked for; some models, as Bamba, need the positions for any rows.
        """
        if not isinstance(self._steps, GivenStep):
            raise SequenceError("inputs() belongs to the cache of a pool.step(); generate() makes its own inputs")
        return self._steps.inputs()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new keys and values of a layer; returns all that the step attends to. PlanError for no such layer."""
        self._check_layer(layer_idx, AttentionLayer, "keys and values")
        layer: Any = self.layers[layer_idx]
        stored: tuple[torch.Tensor, torch.Tensor] = layer.update(key_states, value_states, *args, **kwargs)
        return stored

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Stores new index keys of a layer; returns those of all tokens. PlanError for a layer that has none."""
        self._check_layer(layer_idx, IndexedLayer, "index keys")
        layer: Any = self.layers[layer_idx]
        index_keys: torch.Tensor = layer.update_indexer(indexer_key_states)
        return index_keys

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keeps the last columns of a layer's convolution; returns them behind the old ones."""
        return self._state_layer(layer_idx).update_conv_state(conv_states, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keeps a layer's recurrent state, and returns it as stored."""
        return self._state_layer(layer_idx).update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The live convolution state [rows, channels, kernel], or None while no row has one."""
        return self._state_layer(layer_idx).read("conv", state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The live recurrent state [rows, *shape], or None while no row has one."""
        return self._state_layer(layer_idx).read("recurrent", state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether the rows hold tokens, and so states."""
        return self._steps.has_tokens()

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:  # type: ignore[override]  # a tensor in a trace
        """Tokens of the longest row, also for a model of recurrent layers only.

        Of packed rows [tokens] int64 instead: what a token's place is added to for its position, as models do.
        """
        return self._steps.length()

    def expect(self, batch_size: int, max_tokens: int) -> None:
        """Makes room for rows of `max_tokens` tokens, those of full attention in one run if one can be had.

        The rows are made if there are none. PlanError for numbers that are none, SequenceError for another number of
        rows than there are, OutOfMemory; then the rows that there are, and their room, are as before.
        """
        batch_size = whole(batch_size, "the batch_size that a cache is to expect", least=1, error=PlanError)
        max_tokens = whole(max_tokens, "max_tokens of a cache", least=1, error=PlanError)
        self._own().at_rest().expect(batch_size, max_tokens)

    def early_initialization(
        self,
        batch_size: int,
        num_heads: int | list[int],
        head_dim: int | list[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Makes `batch_size` empty rows, of any model, if there are none; the rest is known, and only counted."""
        super().early_initialization(batch_size, num_heads, head_dim, dtype, device)
        rows = self._own().at_rest()
        if not rows:
            rows.add(batch_size, device)

    def reset(self) -> None:
        """Frees the rows; the next forward starts again, with any batch size that fits."""
        self._own().reset()
        self._prompt = None

    def crop(self, tokens_to_remove: int) -> None:
        """`crop(-n)` removes the last n tokens of every row; what was recorded of their past goes, also with crop(0).

        SequenceError for too many, and for tokens behind which a window or a state has gone on with nothing recorded.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the negative number of tokens to remove, not {tokens_to_remove}")
        rows = self._own().at_rest()
        if -tokens_to_remove > rows.length:
            raise SequenceError(f"cannot remove {-tokens_to_remove} of {rows.length} tokens")
        rows.crop(rows.length + tokens_to_remove)
        if not rows.length:
            self._prompt = None

    def activate_past_recording(self, num_tokens: int | None = None) -> None:
        """From the next forward on, keeps what `crop` needs to take tokens back: all since the last crop.

        Of a single forward only the last `num_tokens`, if that is given. Windows keep their pages, a convolution its
        inputs. Of recurrent states there is one checkpoint, where these tokens begin: `crop` goes back to it, not
        behind it, and what is to stay is run again.
        """
        if num_tokens is not None:
            num_tokens = whole(num_tokens, "num_tokens of a recording", least=1, error=SequenceError)
        self._own().at_rest().record(num_tokens)

    def deactivate_past_recording(self) -> None:
        """Lets go of what was recorded of the past, and records nothing from now on."""
        self._own().at_rest().stop_recording()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row b becomes what row `beam_idx[b]` was; pages are shared, not copied. Synchronises with the device."""
        self._take(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows `indices` in that order, or those where a mask is true. Synchronises with the device."""
        if indices.dtype == torch.bool:
            if indices.shape != (len(self._own().rows),):
                raise SequenceError(f"a mask of {tuple(indices.shape)} says nothing of {len(self._own().rows)} rows")
            indices = indices.nonzero().flatten()
        self._take(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes `repeats` rows in its place, which share pages until they differ."""
        repeats = whole(repeats, "repeats of a row", least=1, error=SequenceError)
        self._take([row for row in range(len(self._own().rows)) for _ in range(repeats)])

    def __deepcopy__(self, memo: dict[int, Any]) -> UnifiedCache:
        """A fork: rows with the same content that share pages until they differ, in the same pool."""
        steps = self._own()
        fork = type(self).__new__(type(self))
        memo[id(self)] = fork
        fork._steps = steps.fork()
        fork._bind(self._declared)
        fork._prompt = self._prompt
        for mine, theirs in zip(fork.layers, self.layers, strict=True):
            if isinstance(mine, ReferenceLayer) and isinstance(theirs, ReferenceLayer):
                mine.follow(theirs)
        return fork

    def __copy__(self) -> UnifiedCache:
        """A fork as well: the rows belong to one cache, and go with it."""
        return self.__deepcopy__({})

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a UnifiedCache cannot be pickled, as its rows lie in the memory of a pool; copy.deepcopy() forks it there"
        )

    def _take(self, indices: list[int]) -> None:
        rows = self._own().at_rest()
        missing = [row for row in indices if not -len(rows) <= row < len(rows)]
        if missing or (rows and not indices):
            what = f"row {missing[0]}" if missing else "a selection without rows"
            raise SequenceError(
                f"{what} was asked for of a cache of {len(rows)} rows; name some of these, or reset() it"
            )
        if indices != list(range(len(rows))):
            rows.select(indices)
            self._prompt = None if self._prompt is None else self._prompt[indices]

    def _own(self) -> OwnSteps:
        if isinstance(self._steps, GivenStep):
            raise SequenceError("the rows of a step belong to the loop that opened it; use the sequences themselves")
        return self._steps

    def _check_layer(self, layer_idx: int, kind: type, wanted: str) -> None:
        if layer_idx >= len(self.layers):
            raise PlanError(
                f"the forward has a layer {layer_idx}, but the pool's plan has {len(self.layers)} layers; use a pool "
                "that was made for this model"
            )
        if not isinstance(self.layers[layer_idx], kind):
            names = [row.name for memory in self._declared[layer_idx].memories for row in memory.rows]
            raise PlanError(
                f"layer {layer_idx} stores {', '.join(names) or 'nothing'}; this forward wants {wanted} there: "
                "the cache was made for another model"
            )

    def _state_layer(self, layer_idx: int) -> StateLayer:
        self._check_layer(layer_idx, StateLayer, "a state")
        layer = self.layers[layer_idx]
        assert isinstance(layer, StateLayer)
        return layer
