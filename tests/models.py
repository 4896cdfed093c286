"""More tiny models, beside those of the examples: one for every form of attention and state that tests go through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tiny_models
import torch
from tiny_models import PAD, VOCABULARY, WINDOW
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

import torch_uma.integrations.transformers  # noqa: F401 (registers its attention)

CHUNK = 16
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SMALL),
    # Full attention beside a window, and a soft cap on the scores.
    "gemma2": lambda: Gemma2Config(
        **_SMALL,
        sliding_window=WINDOW,
        attn_logit_softcapping=5.0,
        query_pre_attn_scalar=16,
        tie_word_embeddings=False,
    ),
    # A window in every layer.
    "mistral": lambda: MistralConfig(**_SMALL, sliding_window=WINDOW),
    # Chunks beside full attention.
    "llama4": lambda: Llama4TextConfig(
        **_SMALL,
        intermediate_size_mlp=96,
        attention_chunk_size=CHUNK,
        layer_types=["chunked_attention", "full_attention"] * 2,
        num_local_experts=4,
    ),
    # Latents.
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**_SMALL, "num_key_value_heads": 4, "head_dim": 8},
        q_lora_rank=24,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    ),
    # States only.
    "mamba2": lambda: Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=3,
        state_size=8,
        num_heads=8,
        head_dim=16,
        n_groups=1,
        chunk_size=16,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.2,
    ),
    # States and full attention in every layer.
    "falcon_h1": lambda: FalconH1Config(
        **_SMALL | {"num_hidden_layers": 3},
        mamba_d_ssm=128,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=16,
    ),
    # Short convolutions beside full attention.
    "lfm2": lambda: Lfm2Config(
        **{key: value for key, value in _SMALL.items() if key != "head_dim"},
        layer_types=["conv", "full_attention", "conv", "full_attention"],
    ),
}


def build(name: str, *, attention: str = "eager") -> PreTrainedModel:
    """The model `name` of here or of the examples, in fp32 with the same weights at every call."""
    if name in tiny_models.BUILDERS:
        return tiny_models.build(name, attention=attention)
    with torch.random.fork_rng():
        torch.manual_seed(sum(name.encode()))
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=attention)
    model.eval().requires_grad_(False)
    return model
