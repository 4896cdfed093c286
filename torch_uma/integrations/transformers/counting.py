"""What a forward of a transformers model costs, counted from its config: weights, operations, states."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from torch_uma.errors import PlanError
from torch_uma.integrations.transformers.declare import declare
from torch_uma.layout import Chunk, Layer, Lifetime, Memory, State, Window
from torch_uma.simulate.work import Attention, Work


def work_of(model_or_config: Any, *, dtype: torch.dtype = torch.bfloat16) -> Work:
    """The work of a causal language model whose weights are in `dtype`; nothing is allocated.

    Every weight that is no expert's and no embedding's is multiplied with every token; routed experts are told by their
    name, `experts`, and how many a token chooses by the config. PlanError for a config that names none of that.
    """
    config = getattr(model_or_config, "config", model_or_config)
    text = config.get_text_config(decoder=True)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(text))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name and "shared" not in name)
    num_experts, per_token = _experts(text) if routed else (0, 0)
    head_size = head.weight.numel() if head is not None else 0
    apart = {id(embedding.weight), *([id(head.weight)] if head is not None else [])}
    dense = sum(p.numel() for p in model.parameters() if id(p) not in apart) - routed
    layers = declare(text, dtype=dtype)
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


def _experts(config: Any) -> tuple[int, int]:
    """How many experts a layer has, and how many of them a token goes to."""
    for total in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        for chosen in ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "top_k_experts"):
            if getattr(config, total, None) and getattr(config, chosen, None):
                return int(getattr(config, total)), int(getattr(config, chosen))
    raise PlanError(f"the config of {config.model_type} does not say how many experts a token goes to")


def _attention(layers: tuple[Layer, ...], num_heads: int) -> tuple[Attention, ...]:
    kinds: Counter[tuple[int | None, float, float]] = Counter()
    for layer in layers:
        source = layers[layer.shares] if layer.shares is not None else layer
        for memory in source.memories:
            if not isinstance(memory.lifetime, State):
                token_bytes = sum(row.num_bytes for row in memory.rows) / memory.tokens_per_entry
                flops = _pair_flops(memory, num_heads) / memory.tokens_per_entry
                kinds[(_reach(memory.lifetime), token_bytes, flops)] += 1
    return tuple(
        Attention(window=window, num_layers=count, token_bytes=token_bytes, pair_flops=flops)
        for (window, token_bytes, flops), count in kinds.items()
    )


def _reach(lifetime: Lifetime) -> int | None:
    """How far a query looks back, at most."""
    return lifetime.num_tokens if isinstance(lifetime, Window | Chunk) else None


def _pair_flops(memory: Memory, num_heads: int) -> float:
    """A product of every query head with a key, and one with a value; latents are both."""
    widths = {row.name: row.shape[-1] for row in memory.rows}
    key = widths.get("k", widths.get("latent", 0) + widths.get("rope_key", 0))
    value = widths.get("v", widths.get("latent", 0))
    return 2.0 * num_heads * (key + value)
