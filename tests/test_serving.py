"""A serving loop: the tokens of generate() for each prompt alone, whoever else is there, comes, goes and is retracted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from served import alone, assert_all_free, assert_as_alone, model_of, prompt_of, run, tight_pool, tokenizer
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import StoppingCriteria

import torch_uma
from torch_uma import CachePool, ClosedError, OutOfMemory, PlanError, SequenceError, ServingLoop

torch.set_num_threads(1)

GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "top_k": 20, "temperature": 1.3, "repetition_penalty": 1.2}
BOTH = [(0, True), ("1MiB", False)]
SERVED = [
    ("llama", "torch_uma", "110KiB", [(0, False), (0, True), ("1MiB", False), ("1MiB", True)]),
    ("gpt_oss", "torch_uma", "90KiB", BOTH),
    ("gpt_oss", "eager", "90KiB", [(0, False)]),
    ("qwen3_next", "sdpa", "60KiB", BOTH),
    ("bamba", "torch_uma", "50KiB", BOTH),
    ("mamba2", "eager", "50KiB", [(0, True)]),  # whose memory does not grow
    ("jamba", "eager", "50KiB", BOTH),  # whose prompts come whole
    ("deepseek_v3", "torch_uma", "60KiB", BOTH),
    ("deepseek_v4", "eager", "90KiB", [(0, True)]),  # whose rows are equally long, and are mostly states and windows
    ("git", "eager", "120KiB", [(0, True)]),  # which does not look at positions
    ("biogpt", "torch_uma", "120KiB", [(0, True)]),  # which cannot be packed
]
LENGTHS = (5, 40, 17, 9, 22, 31)


@pytest.mark.parametrize(
    ("name", "attention", "memory", "host_memory", "overlap"), [(*case, *way) for *case, ways in SERVED for way in ways]
)
def test_tokens_are_those_of_each_prompt_alone(
    name: str, attention: str, memory: str, host_memory: int | str, overlap: bool
) -> None:
    """Greedy and sampled requests side by side, chunked prompts, and memory for half of them."""
    model = model_of(name, attention)
    pool = tight_pool(model, memory)
    loop = ServingLoop(model, pool=pool, max_running=8, step_tokens=16, host_memory=host_memory, overlap=overlap)
    asked = [(SAMPLED if place % 2 else GREEDY) | {"max_new_tokens": 20 + place} for place in range(len(LENGTHS))]
    generations = [
        loop.submit(prompt_of(length), seed=place, **options)
        for place, (length, options) in enumerate(zip(LENGTHS, asked, strict=True))
    ]
    assert len(loop) == len(LENGTHS)
    run(loop)
    for place, (generation, options) in enumerate(zip(generations, asked, strict=True)):
        assert generation.finish_reason == "length" and generation.is_finished
        assert_as_alone(model, generation, place, **options)
    stats = loop.scheduler.stats()
    print(name, attention, stats)
    assert (stats.offloaded if host_memory else stats.dropped) > 0 or name in ("mamba2", "deepseek_v4")
    loop.close()
    assert_all_free(pool)
