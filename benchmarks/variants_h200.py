"""How far the simulated figures depend on what had to be assumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from rows_h200 import both
from served_h200 import Setting, infer_budget_bytes, serve
from workloads_h200 import GROWING, LONG, MANY, RUNNING_GPT_OSS

SLOWEST_HEADROOM_STEPS = 2867  # 0.7 of 4,096 tokens: where the reference begins


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What comes out if something that was assumed is otherwise."""

    assumed: str
    figure: str
    pools: float | None
    arena: float
    gain: float | None = None


def qwen_variants(setting: Setting) -> Iterator[Variant]:
    """Other states of Qwen3.5-4B, and another admission."""
    states = (
        ("1 slot, fp32", 1, torch.float32),
        ("5 slots, fp32", 5, torch.float32),
        ("3 slots, bf16", 3, torch.bfloat16),
    )
    for name, slots, dtype in states:
        served = serve(LONG, replace(setting, slots=slots, dtype=dtype))
        yield Variant(assumed=f"{name} ({LONG})", figure="running", pools=None, arena=served.running)
        served = serve(GROWING, replace(setting, slots=slots, dtype=dtype))
        retractions = served.report.retractions_per_1000
        yield Variant(assumed=f"{name} ({GROWING})", figure="retractions", pools=None, arena=retractions)
    few = replace(GROWING, num_requests=2 * GROWING.num_clients)
    for name, workload, steps in (
        (f"room for {SLOWEST_HEADROOM_STEPS:,} tokens when admitted", GROWING, SLOWEST_HEADROOM_STEPS),
        ("2 requests by each client", few, setting.headroom_steps),
    ):
        pools, arena = both(workload, replace(setting, headroom_steps=steps))
        yield Variant(
            assumed=f"{name} ({workload})",
            figure="retractions",
            pools=pools.report.retractions_per_1000,
            arena=arena.report.retractions_per_1000,
        )


def gpt_oss_variants(setting: Setting) -> Iterator[Variant]:
    """Other lengths of GPT-OSS-20B, each in the memory in which as many run as was published."""
    for prompt, new in ((1024, 1024), (1024, 4096)):
        workload = replace(MANY, num_prompt_tokens=prompt, num_new_tokens=new)
        budget_bytes = infer_budget_bytes(workload, RUNNING_GPT_OSS, num_tries=0)
        pools, arena = both(workload, replace(setting, budget_bytes=budget_bytes))
        assumed = f"{workload}, in the {budget_bytes / 1e9:.0f} GB in which 618 fit"
        gain = arena.report.new_tokens_per_s / pools.report.new_tokens_per_s
        yield Variant(assumed=assumed, figure="running", pools=pools.running, arena=arena.running, gain=gain)
        waits_s = [served.report.first_token_s["mean"] for served in (pools, arena)]
        yield Variant(assumed=assumed, figure="first token, s", pools=waits_s[0], arena=waits_s[1])
