"""UnifiedCache: the transformers cache over a batch of sequences of a pool.

Owns the batch rows as a whole: making, forking, selecting and freeing them. What a forward reads and writes is in
`layers`, when its step begins and ends in `steps`, and where everything lies in `places`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from torch_uma.counts import whole
from torch_uma.errors import PlanError, SequenceError
from torch_uma.integrations.transformers.attention import NAME, is_used, text_config_of
from torch_uma.integrations.transformers.given import GivenStep
from torch_uma.integrations.transformers.layers import AttentionLayer, StateLayer, make_layers, parts_of
from torch_uma.integrations.transformers.places import StepPlaces
from torch_uma.integrations.transformers.rows import CacheRows
from torch_uma.integrations.transformers.sizing import plan_for
from torch_uma.integrations.transformers.steps import OwnSteps
from torch_uma.integrations.transformers.taking import TakingPlaces, TakingSteps
from torch_uma.integrations.transformers.versions import asks_to_compile, makes_masks
from torch_uma.layout import Chunk, Layer, State, Window

if TYPE_CHECKING:
    from torch_uma.multistep import MultiStep
    from torch_uma.pool import CachePool
    from torch_uma.step import Step

_log = logging.getLogger(__name__)

_PAGE_ENTRIES = 16
_SIZED_PAGE_ENTRIES = 8  # a window ends within a page, and begins within one: in small arenas that counts


class UnifiedCache(Cache):
    """A cache for `generate(cache=...)` and for the forward passes of a loop, all kinds of memory in one arena.

    `model_or_config`: of the model that will use it. `pool`: share this one; otherwise the cache makes its own of
    `memory` (bytes, "2GiB" or a fraction of the free memory). Without `memory` it takes, at the first forward, what the
    batch needs for `max_tokens` each, sized for the first batch and no more: give memory= if you will fork, beam or
    batch more; it moves into a roomier pool where a step of several tokens reads one window and leaves another. Without
    both it takes half of the free memory. It logs what it took at INFO. With `max_tokens` the keys and values are
    handed over as views with no copy, windows with twice the room. `page_size` (16; 8 where the arena is sized for the
    batch), `max_sequences` (rows, forks and beams that can exist at once; at least 256 by default), `dtype` (of
    activations) and `device` (those of the model) are for the pool that it makes. PlanError for a pool made for
    another model.

    Dropping the cache gives its rows back. A forward raises OutOfMemory (the cache stands as after the last whole
    step), GradientError, or ClosedError once the pool is closed.
    """

    def __init__(
        self,
        model_or_config: Any,
        *,
        memory: int | float | str | None = None,
        max_tokens: int | None = None,
        pool: CachePool | None = None,
        page_size: int | None = None,
        max_sequences: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        from torch_uma.integrations.transformers.declare import declare
        from torch_uma.pool import CachePool

        if max_tokens is not None:
            max_tokens = whole(max_tokens, "max_tokens of a cache", least=1, error=PlanError)
        if max_sequences is not None:
            max_sequences = whole(max_sequences, "max_sequences of a pool", least=1, error=PlanError)
        if pool is None:
            layers = declare(model_or_config, dtype=dtype)
        else:
            asked = {"memory": memory, "page_size": page_size, "max_sequences": max_sequences, "dtype": dtype}
            for name, value in {**asked, "device": device}.items():
                if value is not None:
                    raise PlanError(f"pool= has its {name} already; give either pool= or {name}=")
            pool.guard.check_usable()
            _check_made_for(pool, model_or_config)
            layers = pool.plan.layers
        device = device if device is not None else getattr(model_or_config, "device", None)
        config, has_attention = text_config_of(model_or_config), _stores_tokens(layers)

        def is_in_place() -> bool:
            return not has_attention or is_used(config)

        def make_pool(num_rows: int, tensor_device: torch.device, max_tokens: int | None, is_roomy: bool) -> CachePool:
            on = tensor_device if device is None else torch.device(device)
            options: dict[str, Any] = {"max_sequences": max_sequences or max(256, 4 * num_rows), "device": on}
            if memory is None and max_tokens is not None:
                made_roomy = is_roomy or not is_in_place()  # the same room as that in which windows slide
                entries = _SIZED_PAGE_ENTRIES if page_size is None else page_size
                made = CachePool(plan_for(layers, num_rows, max_tokens, made_roomy, entries, on), **options)
            else:
                entries = _PAGE_ENTRIES if page_size is None else page_size
                made = CachePool(layers, memory=memory, page_size=entries, **options)
            _log.info("took %d bytes on %s for a cache of %d rows", made.plan.arena_bytes, on, num_rows)
            return made

        if pool is None and memory is not None:
            pool = make_pool(1, torch.get_default_device(), max_tokens, False)
        rows = CacheRows(make_pool, pool=pool, max_tokens=max_tokens)
        self._steps: OwnSteps | GivenStep = OwnSteps(rows, parts_of(layers), is_in_place)
        self._bind(layers)

    @classmethod
    def _of_step(cls, step: Step) -> UnifiedCache:
        """The cache of a step that is opened and closed by `pool.step`."""
        cache = cls.__new__(cls)
        # States are views: nothing is fetched.
        in_place = not _stores_tokens(step.pool.plan.layers) or is_used(_config_of(step.pool))
        places = StepPlaces(step.pool, step, whole=True, in_place=in_place)
        cache._steps = GivenStep(places, step.pool)
        cache._bind(step.pool.plan.layers)
        return cache

    @classmethod
    def _of_multi_step(cls, multi: MultiStep) -> UnifiedCache:
        """The cache of a multi-step; SequenceError for a model that has states or does not attend in the arena."""
        config = _config_of(multi.pool)
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
        config = _config_of(pool)
        if state is None and is_used(config):
            return
        if state is not None:
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
        super().__init__(layers=list(make_layers(layers, self._steps)))
        self._declared = layers
        self._may_be_fixed = not any(
            isinstance(memory.lifetime, Chunk) or memory.lifetime == Window(1)
            for layer in layers
            for memory in layer.memories
        )
        if isinstance(self._steps, OwnSteps):
            # The rows outlive the cache in the pool, so they are freed when it goes; not at exit, when all goes.
            weakref.finalize(self, self._steps.abandon).atexit = False

    @property
    def pool(self) -> CachePool:
        """The pool that the rows are in; PlanError before the first forward of a cache that was given no memory."""
        if self._steps.pool is None:
            raise PlanError(
                "the pool is made at the first forward, when the batch is known; give memory= to have it now"
            )
        return self._steps.pool

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
        unasked, the answer is always yes to masks: stock attention then gets one for one token, with which "sdpa" does
        not read strided keys once for every head. OutOfMemory.
        """
        steps = self._steps
        if isinstance(steps, OwnSteps) and not torch.compiler.is_compiling():
            if steps.in_place and all(self.is_linear):
                steps.announce(1)
            is_compiled = asks_to_compile()
            if is_compiled is not None:
                steps.is_compiled = is_compiled and self._may_be_fixed
        if steps.reads_fixed:
            return True
        # Masks that are made before the forward are no use to models that look at the padding themselves.
        masked = None if torch.compiler.is_compiling() else makes_masks()
        if steps.in_place:
            return masked is None or getattr(masked, "_can_compile_fullgraph", True)
        return masked is None and steps.pool is not None and steps.pool.device.type == "cpu"

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

    def reset(self) -> None:
        """Frees the rows; the next forward starts again, with any batch size that fits."""
        self._own().reset()

    def crop(self, tokens_to_remove: int) -> None:
        """`crop(-n)` removes the last n tokens of every row; SequenceError for states, left windows and too many."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the negative number of tokens to remove, not {tokens_to_remove}")
        rows = self._own().at_rest()
        if -tokens_to_remove > rows.length:
            raise SequenceError(f"cannot remove {-tokens_to_remove} of {rows.length} tokens")
        if tokens_to_remove:
            rows.crop(rows.length + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row b becomes what row `beam_idx[b]` was; pages are shared, not copied. Synchronises with the device."""
        self._take(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows `indices` in that order, or those where a mask is true. Synchronises with the device."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero().flatten()
        self._take(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes `repeats` rows in its place, which share pages until they differ."""
        self._take([row for row in range(len(self._own().rows)) for _ in range(repeats)])

    def __deepcopy__(self, memo: dict[int, Any]) -> UnifiedCache:
        """A fork: rows with the same content that share pages until they differ, in the same pool."""
        steps = self._own()
        fork = type(self).__new__(type(self))
        memo[id(self)] = fork
        fork._steps = steps.fork()
        fork._bind(self._declared)
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
        if indices != list(range(len(rows))):
            rows.select(indices)

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


_MADE_FOR: weakref.WeakKeyDictionary[CachePool, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The model or config last seen to store what a pool was made for, as it takes a forward to see."""


def _config_of(pool: CachePool) -> PreTrainedConfig | None:
    """The text config of the model that a pool was made of, None if it was made of a plan or the model is gone."""
    return text_config_of(None if pool.made_for is None else pool.made_for())


def _stores_tokens(layers: Sequence[Layer]) -> bool:
    """Whether any layer stores something for attention."""
    return any(not isinstance(memory.lifetime, State) for layer in layers for memory in layer.memories)


def _check_made_for(pool: CachePool, model_or_config: Any) -> None:
    from torch_uma.integrations.transformers.declare import declare

    if pool in _MADE_FOR and _MADE_FOR[pool]() is model_or_config:
        return
    stored = [_shapes(layer) for layer in declare(model_or_config)]
    held = [_shapes(layer) for layer in pool.plan.layers]
    if stored != held:
        index = next((i for i, (a, b) in enumerate(zip(stored, held, strict=False)) if a != b), None)
        difference = f"{len(stored)} layers" if index is None else f"in layer {index} {stored[index]}"
        instead = f"{len(held)}" if index is None else f"{held[index]}"
        raise PlanError(
            f"the pool was made for another model: this one stores {difference}, the pool {instead}; "
            "make a CachePool of this model, or leave pool= out"
        )
    _MADE_FOR[pool] = weakref.ref(model_or_config)


def _shapes(layer: Layer) -> list[Any]:
    """What a layer stores, whatever it is called and in whatever dtype it is kept."""
    return [
        (memory.lifetime, memory.tokens_per_entry, *(row.shape for row in memory.rows)) for memory in layer.memories
    ]
