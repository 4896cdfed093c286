"""Tiny hybrid models with fixed random weights, for examples and tests, and what same tokens are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

VOCABULARY = 260  # the 256 bytes, then padding and three that mark the turns of a chat
PAD = 256
MARKS = {"<|pad|>": PAD, "<|end|>": 257, "<|user|>": 258, "<|assistant|>": 259}
WINDOW = 24
TIE_MARGIN = 1e-4
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
}


def gpt_oss() -> PreTrainedModel:
    """Full attention beside a window of 24 tokens, with attention sinks."""
    config = GptOssConfig(
        **_COMMON,
        num_hidden_layers=4,
        intermediate_size=64,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return GptOssForCausalLM(config)


def qwen3_next() -> PreTrainedModel:
    """Gated DeltaNet beside full attention; the last layer is attention."""
    config = Qwen3NextConfig(
        **_COMMON,
        num_hidden_layers=4,
        intermediate_size=96,
        head_dim=16,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    return Qwen3NextForCausalLM(config)


def bamba() -> PreTrainedModel:
    """Mamba-2 beside full attention; the last layer is recurrent."""
    config = BambaConfig(
        **_COMMON,
        num_hidden_layers=3,
        intermediate_size=96,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=16,
    )
    return BambaForCausalLM(config)


BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {"gpt_oss": gpt_oss, "qwen3_next": qwen3_next, "bamba": bamba}


def build(name: str, *, attention: str = "eager") -> PreTrainedModel:
    """Returns the model `name` in fp32 with the same weights at every call, ready to generate."""
    with torch.random.fork_rng():
        torch.manual_seed(sum(name.encode()))
        model = BUILDERS[name]()
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                torch.nn.init.normal_(parameter)
    model.set_attn_implementation(attention)
    model.eval().requires_grad_(False)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a token for each byte, and a template for chats."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the bytes that ByteLevel writes as themselves
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in shown else next(others)): byte for byte in range(256)} | MARKS
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
        chat_template="{% for message in messages %}"
        "{{ '<|assistant|>' if message.role == 'assistant' else '<|user|>' }}{{ message.content }}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    )


def prompts(lengths: Sequence[int], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns random prompts of these lengths, padded on the left: `input_ids` and `attention_mask` [B, max length]."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    input_ids = torch.full((len(lengths), width), PAD)
    attention_mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        input_ids[row, width - length :] = torch.randint(0, 256, (length,), generator=generator)
        attention_mask[row, width - length :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


@torch.no_grad()
def assert_same_tokens(
    model: PreTrainedModel, actual: torch.Tensor, expected: torch.Tensor, attention_mask: torch.Tensor
) -> None:
    """Passes if both [B, S] are equal, or first differ where the model in fp64 has two tokens within 1e-4 (a tie).

    `attention_mask` [B, prompt] marks the padding of the prompts. Only greedy runs can tie.
    """
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    for row in range(actual.shape[0]):
        differences = (actual[row] != expected[row]).nonzero()
        if not len(differences):
            continue
        at = int(differences[0])
        first = int(attention_mask[row].argmax())
        exact = copy.deepcopy(model).double()
        if exact._can_set_experts_implementation():
            exact.set_experts_implementation("eager")  # the grouped product has no fp64
        logits = exact(expected[row : row + 1, first:at], use_cache=False).logits[0, -1]
        top = logits.topk(2)
        margin = float(top.values[0] - top.values[1])
        candidates = {int(actual[row, at]), int(expected[row, at])}
        assert margin < TIE_MARGIN and candidates == set(top.indices.tolist()), (
            f"row {row} differs first at token {at}: {actual[row, at]} for {expected[row, at]}, margin {margin:.2e}"
        )
