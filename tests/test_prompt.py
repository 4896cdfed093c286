"""Unlimited-OCR over an arena: the prompt is seen for ever, what follows it by a window."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
from test_generate import Scramble, assert_all_free
from test_own import generate, poisoned, prompts
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
    UnlimitedOcrConfig,
    UnlimitedOcrForConditionalGeneration,
)
from zoo import COMMON

import torch_uma
from torch_uma.errors import SequenceError

torch.set_num_threads(1)

TEXT: dict[str, Any] = {
    **COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "head_dim": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
    "sliding_window": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
VISION = {
    "sam_config": {
        "hidden_size": 16,
        "output_channels": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "mlp_dim": 16,
        "image_size": 64,
        "window_size": 2,
        "global_attn_indexes": [0],
        "downsample_channels": [8, 8],
    },
    "encoder_config": {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 16,
    },
}


@lru_cache
def model_of(attention: str = "eager") -> PreTrainedModel:
    config = UnlimitedOcrConfig(text_config=dict(TEXT), vision_config=copy.deepcopy(VISION), image_token_id=96)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = UnlimitedOcrForConditionalGeneration(config)
    model.set_attn_implementation(attention)
    return model.eval().requires_grad_(False)


@lru_cache
def expected(num_rows: int, num_beams: int = 1) -> torch.Tensor:
    tokens = generate(model_of(), prompts(num_rows), num_beams=num_beams)
    whole = generate(model_of(), prompts(num_rows), num_beams=num_beams, use_cache=False)
    assert not torch.equal(tokens, whole)  # some of what it wrote it sees no more
    return tokens


@pytest.mark.parametrize(("num_beams", "page_size"), [(1, 7), (3, 1), (3, 16)])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "torch_uma"])
def test_tokens_are_those_of_the_default_cache(attention: str, num_beams: int, page_size: int) -> None:
    model = model_of(attention)
    cache = poisoned(model, page_size=page_size)
    moves = LogitsProcessorList([Scramble(cache.pool)])
    tokens = generate(model, prompts(2), cache=cache, num_beams=num_beams, logits_processor=moves)
    assert torch.equal(tokens, expected(2, num_beams))
    cache.reset()
    assert_all_free(cache.pool)
    assert torch.equal(generate(model, prompts(3), cache=cache), expected(3))
    cache.reset()
    assert torch.equal(generate(model, prompts(2), cache=cache, prefill_chunk_size=4), expected(2))


def test_forks_know_the_prompt_and_a_next_one_has_its_own() -> None:
    model, ids = model_of(), prompts(2)
    cache, stock = poisoned(model), DynamicCache(config=model.config)
    for start, end in ((0, 9), (9, 10), (10, 11)):
        with torch.no_grad():
            ours = model(ids[:, start:end], cache=cache).logits
            assert torch.allclose(ours, model(ids[:, start:end], cache=stock).logits, atol=1e-5)
    more = prompts(2, 20)
    for each in (copy.deepcopy(cache), cache):
        kept = copy.deepcopy(stock)
        for i in range(20):
            with torch.no_grad():
                ours = model(more[:, i : i + 1], cache=each).logits
                assert torch.allclose(ours, model(more[:, i : i + 1], cache=kept).logits, atol=1e-5)
    cache.reset()
    assert torch.equal(generate(model, ids, cache=cache), expected(2))


def test_a_loop_tells_how_long_the_prompts_are() -> None:
    model, ids = model_of(), expected(2)
    pool = torch_uma.CachePool(model, memory=4 << 20)
    torch_uma.testing.poison(pool)
    sequences = [pool.add(), pool.add()]
    with (
        pytest.raises(SequenceError, match="set_prefill_length"),
        torch.no_grad(),
        pool.step(dict.fromkeys(sequences, 11)) as cache,
    ):
        model(ids[:, :11], cache=cache, **cache.inputs())
    for start, end in ((0, 11), *((i, i + 1) for i in range(11, 30))):
        with pool.step(dict.fromkeys(sequences, end - start)) as cache, torch.no_grad():
            for layer in cache.layers:
                layer.set_prefill_length(11)
            logits = model(ids[:, start:end], cache=cache, **cache.inputs()).logits[:, -1]
        assert torch.equal(logits.argmax(dim=-1), ids[:, end])
