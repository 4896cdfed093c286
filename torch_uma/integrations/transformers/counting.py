"""What a forward of a transformers model costs, counted from its config: weights, operations, states."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from torch_uma.errors import PlanError
from torch_uma.integrations.transformers.declare import auto_class, declare, decoder_of
from torch_uma.integrations.transformers.stores import COMPRESSOR
from torch_uma.layout import Chunk, Layer, Memory, State, Window
from torch_uma.precision import kept_as
from torch_uma.simulate.work import Attention, Work


def work_of(
    model_or_config: Any, *, dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | str | None = None
) -> Work:
    """The work of a language model whose weights are in `dtype`, over text alone; nothing is allocated.

    Every weight that is no expert's and no embedding's is multiplied with every token, as often as a forward runs what
    it belongs to; routed experts are told by their name, `experts`, and how many a token chooses by the config. A
    decoder that comes without a head gets one as large as its embedding. `kv_dtype` is that of the plan. PlanError as
    for `declare`, and for a config that does not say how many experts a token goes to.
    """
    config = getattr(model_or_config, "config", model_or_config)
    text = config.get_text_config(decoder=True)
    runs = _Runs()
    layers = kept_as(declare(config, dtype=dtype, watch=runs.watch), kv_dtype)
    model = _weightless(config, text)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    head_size = (embedding if head is None else head).weight.numel()
    routed = sum(p.numel() for name, p in model.named_parameters() if _is_routed(name))
    num_experts, per_token = _experts(text) if routed else (0, 0)
    dense = _dense_size(model, runs)
    chosen = routed * per_token / num_experts if routed else 0.0
    return Work(
        weight_bytes=(dense + head_size) * dtype.itemsize,
        expert_bytes=routed * dtype.itemsize,
        num_experts=num_experts,
        experts_per_token=per_token,
        token_flops=2 * (dense + chosen),
        head_flops=2 * head_size,
        state_bytes=sum(
            row.num_bytes
            for layer in layers
            for memory in layer.memories
            if isinstance(memory.lifetime, State)
            for row in memory.rows
        ),
        attention=_attention(layers, text.num_attention_heads if hasattr(text, "num_attention_heads") else 0),
    )


def _weightless(config: Any, text: Any) -> Any:
    """The model without weights: with its head, if there is a class of it for text alone."""
    with torch.device("meta"):
        if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
            return AutoModelForCausalLM.from_config(copy.deepcopy(text))
        auto, source = auto_class(config, text)
        return decoder_of(auto.from_config(copy.deepcopy(source)))


def _is_routed(name: str) -> bool:
    return ".experts." in name and "shared" not in name


def _dense_size(model: Any, runs: _Runs) -> float:
    """Numbers in the weights that a token is multiplied with, each as often as it is, without head and experts."""
    times: dict[int, float] = defaultdict(float)
    for name, p in decoder_of(model).named_parameters(remove_duplicate=False):  # layers may share their weights
        times[id(p)] += runs.of_parameter(name)
    head = model.get_output_embeddings()
    apart = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    apart |= set() if head is None else {id(head.weight)}
    weights = (p for name, p in model.named_parameters() if id(p) not in apart and not _is_routed(name))
    return float(sum(weight.numel() * times.get(id(weight), 1) for weight in weights))


class _Runs:
    """How often a forward over text runs each module of the decoder.

    A tower that looks at images is not run, and a layer that is gone through again is several times.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._names: set[str] = set()
        self._others: set[str] = set()  # second names of modules

    @contextmanager
    def watch(self, decoder: Any, _: Any) -> Iterator[None]:
        """Count them while a block runs forwards."""
        self._names = {name for name, _ in decoder.named_modules()}
        self._others = {name for name, _ in decoder.named_modules(remove_duplicate=False)} - self._names
        hooks = [module.register_forward_hook(partial(self._note, name)) for name, module in decoder.named_modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def of_parameter(self, name: str) -> float:
        """Of the module that a parameter belongs to, or of the one around that, whose code may use it itself."""
        module = name.rpartition(".")[0]
        if module not in self._names:
            return 0 if module in self._others else 1
        return (self._counts[module] or self._counts[module.rpartition(".")[0]]) / self._counts[""]

    def _note(self, name: str, *_: Any) -> None:
        self._counts[name] += 1


def _experts(config: Any) -> tuple[int, int]:
    """How many experts a layer has, and how many of them a token goes to; means where layers differ."""
    for total in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        for chosen in ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts"):
            counts: list[Any] = [getattr(config, name, None) for name in (total, chosen)]
            if all(counts):
                num_experts, per_token = (round(fmean(c)) if isinstance(c, list) else int(c) for c in counts)
                return num_experts, per_token
    raise PlanError(f"the config of {config.model_type} does not say how many experts a token goes to")


def _attention(layers: tuple[Layer, ...], num_heads: int) -> tuple[Attention, ...]:
    kinds: Counter[Attention] = Counter()
    for layer in layers:
        source = layers[layer.shares] if layer.shares is not None else layer
        for memory in source.memories:
            if not isinstance(memory.lifetime, State):
                kinds[_attention_to(memory, num_heads)] += 1
    return tuple(replace(kind, num_layers=count) for kind, count in kinds.items())


def _attention_to(memory: Memory, num_heads: int) -> Attention:
    """One layer of attention to what it stores."""
    lifetime, per_token = memory.lifetime, 1 / memory.tokens_per_entry
    return Attention(
        window=lifetime.num_tokens if isinstance(lifetime, Window | Chunk) else None,
        is_chunked=isinstance(lifetime, Chunk),
        num_layers=1,
        token_bytes=sum(row.num_bytes for row in memory.rows) * per_token,
        pair_flops=_pair_flops(memory, num_heads) * per_token,
    )


def _pair_flops(memory: Memory, num_heads: int) -> float:
    """A product of every query head with a key, and one with a value; what is stored once is both, as are latents."""
    widths = {row.name: row.shape[-1] for row in memory.rows}
    once = widths.get("latent", widths.get(COMPRESSOR, 0))
    key = widths.get("k", once + widths.get("rope_key", 0))
    value = widths.get("v", once) or key
    return 2.0 * num_heads * (key + value)
