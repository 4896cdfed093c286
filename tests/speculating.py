"""What the tests of speculation share: models with caches, prompts, and what an arena holds."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from models import build
from tiny_models import WINDOW
from transformers import PreTrainedModel

import torch_uma

PROMPT_TOKENS = WINDOW + 13
MEMORY = 1 << 20
RECURRENT = ["qwen3_next", "bamba", "mamba2"]


@lru_cache
def model_of(name: str, attention: str = "eager") -> PreTrainedModel:
    return build(name, attention=attention)


def prompt(num_tokens: int = PROMPT_TOKENS, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, 250, (1, num_tokens), generator=torch.Generator().manual_seed(seed))


def poisoned(model: PreTrainedModel, **kwargs: Any) -> torch_uma.UnifiedCache:
    cache = torch_uma.UnifiedCache(model, **{"memory": MEMORY, **kwargs})
    torch_uma.testing.poison(cache.pool)
    return cache


def bounded_pages(pool: torch_uma.CachePool) -> list[int]:
    """Live pages of windows, chunks and states."""
    live = [subpool.live_pages for subpool in pool.stats().subpools]
    return [pages for pages, subpool in zip(live, pool.plan.subpools, strict=True) if subpool.name != "full"]


def assert_all_free(pool: torch_uma.CachePool) -> None:
    pool.check()
    assert not any(subpool.live_pages for subpool in pool.stats().subpools)
