"""What the tests of serving loops share: models, prompts, and the tokens of each prompt alone."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import models
import torch
import zoo
from tiny_models import PAD, TIE_MARGIN, prompts
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import torch_uma
from torch_uma import CachePool, Generation, ServingLoop


@lru_cache
def model_of(name: str, attention: str = "torch_uma") -> PreTrainedModel:
    known = name in models.CONFIGS or name in models.tiny_models.BUILDERS
    return models.build(name, attention=attention) if known else zoo.build(name, attention=attention)


def prompt_of(num_tokens: int) -> list[int]:
    ids: list[int] = (prompts((num_tokens,), seed=num_tokens)["input_ids"][0] % 90).tolist()
    return ids


_ALONE: dict[str, list[int]] = {}


def alone(model: PreTrainedModel, prompt: list[int], seed: int | None = None, **options: Any) -> list[int]:
    """The new tokens of `generate()` for this prompt."""
    key = f"{id(model)} {prompt} {seed} {options}"  # models are kept for as long as this is
    if key not in _ALONE:
        if seed is not None:
            torch.manual_seed(seed)
        ids = torch.tensor([prompt])
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        _ALONE[key] = tokens[0, len(prompt) :].tolist()
    return _ALONE[key]


def assert_as_alone(model: PreTrainedModel, generation: Generation, seed: int | None = None, **options: Any) -> None:
    """Passes if the tokens are those of `generate()`, or first differ where two are equally likely, greedily."""
    expected = alone(model, generation.prompt, seed, **options)
    if generation.tokens == expected:
        return
    assert not options.get("do_sample"), (generation.tokens, expected)
    same = next(i for i, (a, b) in enumerate(zip(generation.tokens, expected)) if a != b)
    text = torch.tensor([generation.prompt + expected[:same]])
    with torch.no_grad():
        top = model(text, use_cache=False).logits[0, -1].topk(2)
    tied = {generation.tokens[same], expected[same]} == set(top.indices.tolist())
    assert tied and float(top.values[0] - top.values[1]) < TIE_MARGIN, (generation.tokens, expected)


def tight_pool(model: PreTrainedModel, memory: str, page_size: int = 4) -> CachePool:
    pool = CachePool(model, memory=memory, page_size=page_size, max_sequences=16)
    torch_uma.testing.poison(pool)
    return pool


def run(loop: ServingLoop, *, scrambled: bool = True) -> list[torch_uma.integrations.transformers.Event]:
    """Steps to the end, with the pool's books checked and its pages moved after each."""
    events = []
    num_steps = 0
    while loop:
        events += loop.step()
        num_steps += 1
        if scrambled:
            torch_uma.testing.scramble(loop.pool, num_steps)
        loop.pool.check()
    return events


def assert_all_free(pool: CachePool) -> None:
    pool.check()
    assert not any(subpool.live_pages for subpool in pool.stats().subpools)
    assert not pool.allocator.ledger.leases


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each of 256 characters, those among them that transformers looks for, and padding in front."""
    words = {chr(0x61 + i if i < 26 else 0x100 + i): i for i in range(256)} | {"<pad>": PAD}
    made = Tokenizer(WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", padding_side="left")
