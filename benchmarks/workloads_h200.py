"""What was published of one arena and of fixed pools on one H200: models, workloads, and all that had to be assumed.

Owns the inputs of published_h200.py. No number here was chosen by looking at a simulated one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from geometries import Layers, attention, gpt_oss_20b, recurrent
from transformers import GptOssConfig, Qwen3_5TextConfig

from torch_uma import Full
from torch_uma.integrations.transformers.counting import work_of
from torch_uma.simulate import DEVICES, Device, Work

# Published of the pools: three inputs are inferred from these.
RUNNING_QWEN, RUNNING_GPT_OSS, TOKENS_PER_S_QWEN = 22, 618, 5880
GPU_BYTES = 143_771 << 20  # what an H200 has
RESERVED_BYTES = (25 << 30) // 2  # for activations and graphs
MXFP4_BITS = 4.25  # with a scale of 8 bits for 32 values
PAGE_SIZE = 16
STEP_TOKENS = 8192
HEADROOM_STEPS = 401  # 0.14 * 0.7 of 4,096 tokens
STATE_SLOTS = 3

H200: Device = DEVICES["h200"]

ASSUMPTIONS: tuple[tuple[str, str, str], ...] = (
    ("GPU", "143,771 MiB, 4.3 TB/s, 790 TFLOP/s in bf16", "speeds measured, as of torch_uma.simulate"),
    (
        "a forward",
        "the bound of the roofline, and the same time besides, however few run, for both models",
        "that time is inferred from one figure, as said above, and takes in whatever kernels stay behind the bound",
    ),
    ("weights", "bf16; of GPT-OSS the experts in MXFP4, 4.25 bits, multiplied in bf16", "as published"),
    ("reserve for activations and graphs", "12.5 GiB, which leaves a memory fraction of 0.911", "default on an H200"),
    ("weights of Qwen3.5-4B that are not text", "none", "the vision tower is left out"),
    ("split of the pools", "window to full tokens 0.8, states to the rest 0.9 in bytes", "defaults; window 128"),
    ("state", "fp32, 51.5 MB a slot, 3 slots for a request", "3 to 5 with extra buffers; 1, 5 and bf16 are shown too"),
    ("pages", "16 tokens, in both", "the reference has pages of 1 to 64"),
    ("step", "8,192 tokens, prompts in chunks, first come first served", "default chunk on an H200"),
    (
        "who is admitted leaves room for",
        "401 more tokens of everybody",
        "default, once settled: 0.14 * 0.7 of 4,096; the reference begins at 0.7 and goes up after a retraction",
    ),
    ("prefix cache", "none; who is retracted is computed again", "prompts are random"),
    ("clients", "one request each at a time, 4 each in all", "how many was not published; 2 are shown too"),
    (
        "GPT-OSS clients",
        "1,024, or twice as many where it is asked how many fit",
        "not published; after the published 1,000, which counts where one waits for the first token, and for the gain",
    ),
    ("GPT-OSS lengths", "prompt and answer equally long, all alike", "not published; others are shown"),
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model: its config, what it stores with so many state slots for a request, in this dtype, and its work."""

    name: str
    config: Callable[[], Any]
    layers: Callable[[int, torch.dtype], Layers]
    expert_bits: float = 16.0

    def work(self, dtype: torch.dtype = torch.float32) -> Work:
        """Of a forward on the reference's kernels, with states in `dtype`."""
        counted = _counted(self)
        states = [row for layer in self.layers(1, dtype) for memory in layer.memories for row in memory.rows]
        return replace(
            counted,
            expert_bytes=counted.expert_bytes * self.expert_bits / 16,
            state_bytes=sum(row.num_bytes for row in states if row.name in ("conv", "recurrent")),
        )

    def budget_bytes(self) -> int:
        """What the default memory fraction leaves beside the weights."""
        work = self.work()
        return int(GPU_BYTES - RESERVED_BYTES - work.weight_bytes - work.expert_bytes)


@cache
def _counted(model: Model) -> Work:
    return work_of(model.config())


def _qwen_layers(slots: int, dtype: torch.dtype) -> Layers:
    state = recurrent((8192 * slots, 3), (32 * slots, 128, 128), dtype)
    return (*[state] * 3, attention(Full(), 4, 256)) * 8


def _qwen_config() -> Any:
    return Qwen3_5TextConfig(hidden_size=2560, intermediate_size=9216, num_hidden_layers=32, tie_word_embeddings=True)


def _gpt_oss_config() -> Any:
    return GptOssConfig(num_hidden_layers=24, num_local_experts=32)


def _gpt_oss_layers(slots: int, dtype: torch.dtype) -> Layers:
    return gpt_oss_20b()


QWEN = Model(name="Qwen3.5-4B", config=_qwen_config, layers=_qwen_layers)
GPT_OSS = Model(name="GPT-OSS-20B", config=_gpt_oss_config, layers=_gpt_oss_layers, expert_bits=MXFP4_BITS)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """So many requests of these lengths, by so many clients, each of which waits for its answer and asks again."""

    model: Model
    num_prompt_tokens: int
    num_new_tokens: int
    num_clients: int
    num_requests: int

    @property
    def mean_tokens(self) -> float:
        """That a request has while it is answered, on average."""
        return self.num_prompt_tokens + self.num_new_tokens / 2

    def scaled(self, scale: int) -> Workload:
        """The same with lengths divided by `scale`."""
        lengths = (max(1, tokens // scale) for tokens in (self.num_prompt_tokens, self.num_new_tokens))
        prompt, new = lengths
        return replace(self, num_prompt_tokens=prompt, num_new_tokens=new)

    def __str__(self) -> str:
        lengths = f"{self.num_prompt_tokens:,} in / {self.num_new_tokens:,} out"
        return f"{self.model.name}, {lengths}, {self.num_clients:,} clients"


SHORT = Workload(model=QWEN, num_prompt_tokens=1024, num_new_tokens=256, num_clients=64, num_requests=256)
LONG = Workload(model=QWEN, num_prompt_tokens=16384, num_new_tokens=4096, num_clients=64, num_requests=256)
GROWING = Workload(model=QWEN, num_prompt_tokens=512, num_new_tokens=16384, num_clients=51, num_requests=204)
MANY = Workload(model=GPT_OSS, num_prompt_tokens=1024, num_new_tokens=1024, num_clients=1024, num_requests=4096)
