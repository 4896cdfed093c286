"""What each layer of a transformers model stores, read from its config and from a forward on the meta device.

A config says how long a layer's entries are needed; only the model's code knows the shapes and dtypes of keys, latents
and states. So a throw-away copy without weights runs a few tokens, and what it left in the cache is measured. This is
the only file that knows the names in transformers' configs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.fx.experimental import _config as fx_config
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import CacheLayerMixin
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
)

from torch_uma.errors import PlanError
from torch_uma.integrations.transformers.compressed import memories_of
from torch_uma.integrations.transformers.own import LIGHTNING, as_minimax_cache, check_remembers
from torch_uma.integrations.transformers.prompt import REFERENCE
from torch_uma.integrations.transformers.restarts import restarting
from torch_uma.integrations.transformers.versions import cache_argument, layer_configs, layer_kinds
from torch_uma.layout import Chunk, Full, Layer, Lifetime, Memory, Row, State, Window

_ATTENTION_KINDS: dict[str, Callable[..., Lifetime]] = {
    "full_attention": Full,
    "indexed_attention": Full,
    "minimax_m3_sparse": Full,
    "hybrid": Full,
    REFERENCE: Full,
    "sliding_attention": Window,
    "hybrid_sliding": Window,
    "chunked_attention": Chunk,
    "compressed_sparse_attention": Window,
    "heavily_compressed_attention": Window,
}
_OTHER_KINDS = ("linear_attention", "conv", "dummy")
_NUM_ROWS, _NUM_TOKENS = 2, 3

Watch = Callable[[Any, DynamicCache], AbstractContextManager[None]]
"""What is to be around the first forwards of a decoder over a cache."""


def declare(model_or_config: Any, *, dtype: torch.dtype | None = None, watch: Watch | None = None) -> tuple[Layer, ...]:
    """Layers of a transformers model or config, in the order of its cache.

    `dtype` is the dtype of the activations; without it, that of the model's parameters or the one named by the config.
    `watch` is put around the forwards that tell.
    Rows of a token are `k` and `v` [kv_heads, head_dim], `latent` and `rope_key` [1, width], `index_key` [width], or
    [1, width] where it scores blocks of tokens, and `index_position` [axes]; those of a sequence are `conv` [channels,
    kernel] and `recurrent` [...], then `conv_1`, `recurrent_1`, ..., or `lightning` [heads, head_dim, head_dim].
    Raises PlanError for a config without layers, for kinds of layers that are not known, and for models that keep what
    they remember outside the cache. Nothing is allocated, and the model is not changed; it is run, with three tokens,
    only if its code looks at numbers, which a copy without weights does not have.
    """
    config = _text_config(model_or_config)
    check_remembers(config)
    kinds, lifetimes = _kinds(config)
    cache = _first_forward(model_or_config, dtype, config, watch)
    layers = [_layer(layer) for layer in cache.layers]
    if not any(layer.memories for layer in layers):
        raise PlanError(f"{config.model_type} left nothing in the cache: it keeps what it remembers elsewhere")
    for index, kind in enumerate(kinds):
        if lifetimes[index] is not None and not layers[index].memories:
            raise PlanError(
                f"layer {index} of {config.model_type}, of the kind {kind}, stores nothing for text alone: it attends "
                "to something else, such as images, which UnifiedCache does not keep"
            )
        if kind == "dummy":
            layers[index] = Layer(shares=_producer(config, index), name=kind)
    return tuple(layers)


def fillers(model: Any) -> list[str | None]:
    """For each layer of the cache, the name within the model's decoder of the module that fills it, or of one in it.

    None for a layer that stores nothing. PlanError as for `declare`, which runs the same forward.
    """
    names: dict[int, str] = {}

    @contextmanager
    def watch(decoder: Any, cache: DynamicCache) -> Iterator[None]:
        def note(name: str, *_: Any) -> None:
            for index, layer in enumerate(cache.layers):
                if index not in names and _layer(layer).memories:
                    names[index] = name

        hooks = [module.register_forward_hook(partial(note, name)) for name, module in decoder.named_modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    cache = _first_forward(model, None, _text_config(model), watch)
    return [names.get(index) for index in range(len(cache.layers))]


class _FirstForwards(DynamicCache):
    """A cache whose lengths are known also without attention layers; `num_tokens` is how many it holds."""

    def __init__(self, config: PreTrainedConfig) -> None:
        DynamicCache.__init__(self, config=config)
        self.num_tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        layer = self.layers[layer_idx]
        if self.num_tokens and isinstance(layer, CacheLayerMixin):
            sizes: tuple[int, int] = layer.get_mask_sizes(query_length)
            return sizes
        return self.num_tokens + query_length, 0

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Keys and values that lie token by token, as in an arena: a model that cannot take them shows it now."""
        layer: Any = self.layers[layer_idx]
        layer.is_single = key_states is value_states
        stored = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        keys, values = (tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in stored)
        return keys, values

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        return None

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        layer: Any = self.layers[layer_idx]
        layer.lightning_states = {0: linear_cache}


def _text_config(model_or_config: Any) -> PreTrainedConfig:
    config = getattr(model_or_config, "config", model_or_config)
    if not isinstance(config, PreTrainedConfig):
        raise PlanError(f"a transformers model or config, or a list of Layer, was expected, but not {type(config)}")
    if config.is_encoder_decoder:
        raise PlanError(f"{config.model_type} has an encoder; only decoder-only models can be planned")
    return config.get_text_config(decoder=True)


def _kinds(config: PreTrainedConfig) -> tuple[list[str], list[Lifetime | None]]:
    """Per layer, transformers' name for its kind and the lifetime of its keys and values, None if it has none."""
    if not getattr(config, "num_hidden_layers", 0):
        raise PlanError(f"the config of {config.model_type} has no layers")
    kinds, options = layer_kinds(config)
    unknown = sorted(set(kinds) - set(_ATTENTION_KINDS) - set(_OTHER_KINDS))
    if unknown:
        known = ", ".join([*_ATTENTION_KINDS, *_OTHER_KINDS])
        raise PlanError(f"{config.model_type} has layers of the unknown kinds {unknown}; known are {known}")
    window = getattr(config, "sliding_window", None)  # of kinds whose layers are made of the whole config
    return kinds, [
        _lifetime(kind, option.get("sliding_window", window)) for kind, option in zip(kinds, options, strict=True)
    ]


def _lifetime(kind: str, num_tokens: int | None) -> Lifetime | None:
    make = _ATTENTION_KINDS.get(kind)
    if make is None:
        return None
    if make is Full:
        return Full()
    if num_tokens is None:
        raise PlanError(f"the config has {kind} layers, but does not say how many tokens they see")
    return make(num_tokens)


def _weightless(model_or_config: Any, dtype: torch.dtype | None) -> Any:
    """The text decoder on the meta device, without weights."""
    options: dict[str, Any] = {"attn_implementation": "eager"}
    with torch.device("meta"):
        if isinstance(model_or_config, PreTrainedConfig):
            text_config = model_or_config.get_text_config(decoder=True)
            options["dtype"] = dtype or text_config.dtype or model_or_config.dtype
            auto, config = auto_class(model_or_config, text_config)
            decoder = decoder_of(auto.from_config(copy.deepcopy(config), **options))
        else:
            original = decoder_of(model_or_config)
            options["dtype"] = dtype or original.dtype
            decoder = type(original)._from_config(copy.deepcopy(original.config), **options)
            if dtype is None:
                _adopt_dtypes(decoder, original)
    for module in decoder.modules():
        # Routing depends on values, which meta tensors lack; what experts return has the shape of what they are given.
        if type(module).__name__.endswith("Experts"):
            module.forward = _first_argument
        if isinstance(module, PreTrainedModel):
            # It looks for padding among the tokens.
            module.warn_if_padding_and_no_attention_mask = _first_argument  # type: ignore[assignment,method-assign]
    return decoder.eval()


def decoder_of(model: Any) -> Any:
    """The text decoder of a model; some call their head so."""
    decoder = model.get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model


def auto_class(config: PreTrainedConfig, text_config: PreTrainedConfig) -> tuple[Any, PreTrainedConfig]:
    """The smallest registered model that contains the decoder, and its config."""
    if type(text_config) in MODEL_MAPPING:
        return AutoModel, text_config
    if type(text_config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM, text_config
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText, config
    raise PlanError(f"transformers has no language model for {type(config).__name__}; give the model, not its config")


def _adopt_dtypes(decoder: torch.nn.Module, original: torch.nn.Module) -> None:
    """Give parameters the dtypes they have in `original`, which may keep some in float32."""
    dtypes = {name: parameter.dtype for name, parameter in original.named_parameters()}
    for name, parameter in decoder.named_parameters():
        dtype = dtypes.get(name, parameter.dtype)
        # Weights stored in a byte or less are quantised: their dtype is not that of the activations.
        if dtype.is_floating_point and dtype.itemsize > 1:
            parameter.data = parameter.data.to(dtype)


def _first_argument(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return hidden_states


def _first_forward(
    model_or_config: Any, dtype: torch.dtype | None, config: PreTrainedConfig, watch: Watch | None = None
) -> _FirstForwards:
    """The cache after first forwards on the meta device; if these fail and there is a model, after some of its own."""
    try:
        return _run(_weightless(model_or_config, dtype), config, watch)
    except _NotRun as error:
        failed = error
    where, instead = "on the meta device", "the model instead of its config, or "
    if not isinstance(model_or_config, PreTrainedConfig) and dtype is None:
        where, instead = "on the meta device, or itself,", ""
        try:
            with torch.random.fork_rng():
                return _run(decoder_of(model_or_config), config, watch)
        except _NotRun as error:
            failed = error
    why = failed.__cause__
    raise PlanError(
        f"{config.model_type} does not run {where} with transformers' DynamicCache, so what it stores is unknown; "
        f"give {instead}a sequence of torch_uma.Layer ({type(why).__name__}: {why})"
    ) from why


class _NotRun(Exception):
    """A forward failed, for the cause that it has."""


def _run(decoder: Any, config: PreTrainedConfig, watch: Watch | None) -> _FirstForwards:
    """The cache after first forwards; its layers carry `kind`, `lifetime`, `latent_width` and `restarted_by`."""
    argument = cache_argument(decoder.forward)
    if argument is None:
        raise PlanError(f"{config.model_type} takes no cache: it keeps what it remembers elsewhere")
    cache_class: Any = as_minimax_cache(_FirstForwards) if config.model_type == "minimax" else _FirstForwards
    cache: _FirstForwards = cache_class(config)
    layers: list[Any] = cache.layers
    for layer, kind, lifetime, layer_config in zip(layers, *_kinds(config), layer_configs(config)):
        # Noted on the layer itself, since looped models append copies of layers.
        layer.kind, layer.lifetime = kind, lifetime
        layer.latent_width = getattr(layer_config, "kv_lora_rank", None)
    # What a layer keeps of the last whole group of tokens shows once there is one.
    num_tokens = max([_NUM_TOKENS, *(layer.compress_rate for layer in layers if hasattr(layer, "overlap_kv"))])
    tokens = torch.zeros((_NUM_ROWS, num_tokens), dtype=torch.long, device=decoder.device)
    # Where a shape depends on values, take them as nonzero.
    assume = fx_config.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]

    def forward() -> None:
        decoder(input_ids=tokens, use_cache=True, **{argument: cache})
        cache.num_tokens += num_tokens

    try:
        with torch.no_grad(), assume, nullcontext() if watch is None else watch(decoder, cache):
            forward()
            for layer in restarting(layers, forward):
                layer.restarted_by = config.model_type
    except Exception as error:
        raise _NotRun from error
    return cache


def _layer(layer: Any) -> Layer:
    """What one layer of the cache holds after the forward."""
    memories = []
    states = _state_rows(layer)
    if states:
        memories.append(Memory(lifetime=State(), rows=states))
    tokens = _token_rows(layer)
    if tokens:
        memories.append(Memory(lifetime=layer.lifetime, rows=tokens))
    memories += memories_of(layer)
    return Layer(memories=tuple(memories), name=layer.kind, restarted_by=getattr(layer, "restarted_by", ""))


def _state_rows(layer: Any) -> tuple[Row, ...]:
    rows = []
    for name in ("conv", "recurrent", LIGHTNING):
        for index, state in getattr(layer, f"{name}_states", {}).items():
            if state is not None:
                rows.append(_row(f"{name}_{index}" if index else name, state.shape[1:], state.dtype))
    return tuple(rows)


def _token_rows(layer: Any) -> tuple[Row, ...]:
    rows = []
    keys: torch.Tensor | None = getattr(layer, "prefill_keys", getattr(layer, "keys", None))
    if keys is not None:
        # An MLA layer stores the compressed latent and the rotary key that all heads share.
        is_latent = tuple(keys.shape[1::2]) == (1, layer.latent_width)
        names = ("latent", "rope_key") if is_latent else ("k", "v")
        # What is both is stored once.
        values: torch.Tensor = getattr(layer, "prefill_values", layer.values)
        values = values[..., :0] if layer.is_single else values
        for name, tensor in zip(names, (keys, values), strict=True):
            rows.append(_row(name, tensor.shape[1::2], tensor.dtype))
    index_keys: torch.Tensor | None = getattr(layer, "indexer_keys", None)
    if index_keys is not None:
        rows.append(_row("index_key", index_keys.shape[2:], index_keys.dtype))
    block_keys: torch.Tensor | None = getattr(layer, "idx_keys", None)
    if block_keys is not None:
        rows.append(_row("index_key", block_keys.shape[1::2], block_keys.dtype))
    positions: torch.Tensor | None = getattr(layer, "indexer_position_ids", None)
    if positions is not None:  # [axes, batch, tokens]
        rows.append(_row("index_position", positions.shape[:1], positions.dtype))
    return tuple(rows)


def _row(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Row:
    return Row(name=name, shape=tuple(shape), dtype=dtype, computed_dtype=dtype)


def _producer(config: PreTrainedConfig, index: int) -> int | None:
    """The layer whose keys and values layer `index` uses, None if it uses none or those of another model."""
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is None or modes[index] != "reuse":
        return None
    sources = getattr(config, "kv_source_layers", None)
    if sources is not None:
        return int(sources[index])
    kinds = config.layer_types
    stores = [layer for layer, mode in enumerate(modes) if mode == "store" and kinds[layer] == kinds[index]]
    return stores[-1] if stores else None
