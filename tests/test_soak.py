"""Requests over time through little memory: retracted both ways, preempted, cancelled, and each gets its own tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import models
import pytest
import tiny_models
import torch

from torch_uma import CachePool, ServingLoop
from torch_uma.scheduling import Costs
from torch_uma.testing import poison, scramble

NUM_REQUESTS = 200
SEED = 6
MEMORY = {"gpt_oss": "100KiB", "qwen3_next": "110KiB", "mamba2": "96KiB"}
HOST_MEMORY = {"gpt_oss": "24KiB", "qwen3_next": "24KiB", "mamba2": "19KiB"}
ATTENTION = {"gpt_oss": "torch_uma", "qwen3_next": "sdpa", "mamba2": "eager"}
KINDS = tuple(MEMORY)


@dataclass(frozen=True)
class Ask:
    """What one user asks for, and when: after how many steps, and after how many more it is given up, if ever."""

    prompt: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]
    seed: int
    priority: int
    arrives_at: int
    lasts: int | None


@cache
def asks() -> tuple[Ask, ...]:
    draw = random.Random(SEED)
    made, now = [], 0
    for seed in range(NUM_REQUESTS):
        now += draw.choice((0, 0, 0, 1, 3))
        options: dict[str, Any] = {"max_new_tokens": draw.choice((1, 2, 5, 12, 25)), "eos_token_id": [7, 99, 200]}
        if draw.random() < 0.4:
            options |= {"do_sample": True, "temperature": draw.choice((0.7, 1.3)), "top_k": draw.choice((5, 50))}
        made.append(
            Ask(
                prompt=tuple(draw.randrange(256) for _ in range(draw.choice((1, 3, 9, 20, 47, 90)))),
                options=tuple(options.items()),
                seed=seed,
                priority=draw.choice((0, 0, 0, 0, 1, 2)),
                arrives_at=now,
                lasts=draw.randrange(1, 30) if draw.random() < 0.15 else None,
            )
        )
    return tuple(made)


@cache
def model_of(kind: str) -> Any:
    return models.build(kind, attention=ATTENTION[kind])


@cache
def alone(kind: str, number: int) -> tuple[int, ...]:
    """The tokens of `generate()` for the prompt of this number alone, with the default cache."""
    model, ask = model_of(kind), asks()[number]
    torch.manual_seed(ask.seed)
    text = model.generate(torch.tensor([ask.prompt]), pad_token_id=tiny_models.PAD, **dict(ask.options))
    return tuple(text[0, len(ask.prompt) :].tolist())


@pytest.mark.parametrize("overlap", (False, True), ids=("in turns", "overlapping"))
@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_that_of_the_prompt_alone(kind: str, overlap: bool) -> None:
    print(f"seed {SEED}")
    model = model_of(kind)
    draw = random.Random(SEED + 1)
    pool = CachePool(model, memory=MEMORY[kind], page_size=4, max_sequences=24, max_tokens=128)
    poison(pool)
    # Once the host's memory is full, the others are recomputed.
    costs = Costs(token_s=1.0, copy_bytes_per_s=1e9)
    loop = ServingLoop(
        model, pool=pool, max_running=16, step_tokens=64, host_memory=HOST_MEMORY[kind], overlap=overlap, costs=costs
    )
    waiting = list(asks())
    going: dict[Any, tuple[Ask, int]] = {}
    streamed: dict[Any, list[int]] = {}
    step = most_running = 0
    while waiting or loop:
        while waiting and waiting[0].arrives_at <= step:
            ask = waiting.pop(0)
            generation = loop.submit(ask.prompt, seed=ask.seed, priority=ask.priority, **dict(ask.options))
            going[generation], streamed[generation] = (ask, step), []
        for generation, (ask, since) in going.items():
            if ask.lasts is not None and step - since == ask.lasts:
                loop.cancel(generation)
        for event in loop.step():
            streamed[event.generation] += event.tokens
        pool.check()
        most_running = max(most_running, len(loop.scheduler.running))
        if step % 3 == 0:
            scramble(pool, draw.randrange(1 << 30))
        step += 1
        assert step < 20_000
    stats = loop.scheduler.stats()
    print(f"{kind}: {step} steps, at most {most_running} at once, {stats}")
    assert min(stats.dropped, stats.offloaded, stats.preempted, stats.cancelled) > 0
    assert stats.finished + stats.cancelled == NUM_REQUESTS
    for generation, (ask, _) in going.items():
        expected = alone(kind, ask.seed)
        assert streamed[generation] == generation.tokens
        if generation.finish_reason == "cancelled":
            assert ask.lasts is not None and tuple(generation.tokens) == expected[: len(generation.tokens)]
        else:
            assert tuple(generation.tokens) == expected, (ask, generation.tokens, expected)
            assert (generation.finish_reason == "stop") == (expected[-1] in (7, 99, 200))
    loop.close()
    assert all(subpool.live_pages == subpool.quarantined_pages == 0 for subpool in pool.stats().subpools)
    assert not pool.allocator.ledger.leases
    pool.check()
    pool.close()
