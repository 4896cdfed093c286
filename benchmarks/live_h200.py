"""The published workloads run for real: random weights at the real geometry, through ServingLoop, on a GPU.

Weights are bf16 throughout, and decode steps are not compiled. Scaled so that all ends within ten minutes: answers are
shorter, and a run is cut off after so many seconds, of which its figures are. The memory is that in which pools hold as
many requests as was published, of the mean length that they have here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from records import Record, record
from transformers import AutoModelForCausalLM
from workloads_h200 import GROWING, LONG, MANY, RUNNING_GPT_OSS, RUNNING_QWEN, SHORT, Model, Workload

from torch_uma import CachePool, ServingLoop
from torch_uma.plan import Plan, plan
from torch_uma.simulate.splits import default_split

RUN_S, DRY_S = 55.0, 30.0  # eight runs, and two models to be made
STEP_TOKENS = 4096
DRY_SCALE, DRY_CLIENTS, DRY_REQUESTS = 64, 4, 6
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A workload as it is run here, in a memory in which pools hold so many tokens for full attention."""

    workload: Workload
    num_full_tokens: float

    def memory_bytes(self, planned: Plan) -> int:
        """For a model that is planned like this."""
        full = next(subpool for subpool in planned.subpools if subpool.name == "full")
        return int(self.num_full_tokens * full.bytes_per_token / default_split(planned)["full"])


@dataclass(kw_only=True)
class Seen:
    """What clients have seen of a run, and how many of them ran in each round."""

    num_new_tokens: int = 0
    num_answered: int = 0
    seconds: float = 0.0
    running: list[int] = field(default_factory=list)
    first_s: dict[int, float] = field(default_factory=dict)


def runs_of(is_dry: bool) -> list[Run]:
    """The four workloads; where answers are long, they are cut, and prompts are as much longer as keeps the mean."""
    many = replace(MANY, num_prompt_tokens=256, num_new_tokens=256, num_requests=1536)
    qwen_tokens = RUNNING_QWEN * LONG.mean_tokens
    runs = [
        Run(workload=SHORT, num_full_tokens=qwen_tokens),
        Run(workload=replace(LONG, num_prompt_tokens=18176, num_new_tokens=512), num_full_tokens=qwen_tokens),
        Run(workload=replace(GROWING, num_prompt_tokens=7680, num_new_tokens=2048), num_full_tokens=qwen_tokens),
        Run(workload=many, num_full_tokens=RUNNING_GPT_OSS * many.mean_tokens),
    ]
    if not is_dry:
        return runs
    small = [
        replace(run.workload.scaled(DRY_SCALE), num_clients=DRY_CLIENTS, num_requests=DRY_REQUESTS) for run in runs
    ]
    return [Run(workload=workload, num_full_tokens=16 * workload.mean_tokens) for workload in small]


def run_live(*, is_dry: bool) -> tuple[list[Record], str]:
    """Run all four in pools and in one arena, as records and as a page; on the CPU, with tiny models, if dry."""
    device = torch.device("cpu" if is_dry else "cuda")
    torch.manual_seed(0)
    records: list[Record] = []
    runs = runs_of(is_dry)
    for model in dict.fromkeys(run.workload.model for run in runs):
        made = _make(model, device, is_dry)
        for run in runs:
            if run.workload.model is model:
                records += _both(made, run, DRY_S if is_dry else RUN_S)
        del made
    name = "a CPU, tiny models: no figure means anything" if is_dry else torch.cuda.get_device_name()
    return records, _page(records, name)


def _make(model: Model, device: torch.device, is_dry: bool) -> Any:
    config = model.config()
    if is_dry:
        known = config.to_dict()
        known.pop("layer_types")  # the model's own pattern, for as many as there are then
        config = type(config).from_dict(known | {name: value for name, value in TINY.items() if name in known})
    with device:
        made: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation="torch_uma", dtype=torch.float32 if is_dry else torch.bfloat16
        )
    return made.eval().requires_grad_(False)


def _both(model: Any, run: Run, limit_s: float) -> list[Record]:
    """Pools and one arena, of the same memory."""
    workload = run.workload
    memory_bytes = run.memory_bytes(plan(model, memory="1GiB"))
    split = default_split(plan(model, memory=memory_bytes))
    records = []
    for name, shares in (("pools", split), ("arena", None)):
        clients: dict[str, Any] = {"max_running": workload.num_clients, "step_tokens": STEP_TOKENS}
        with (
            CachePool(model, memory=memory_bytes, max_sequences=workload.num_clients, split=shares) as pool,
            ServingLoop(model, pool=pool, overlap=True, **clients) as loop,
        ):
            seen = _serve(loop, workload, model.config.vocab_size, limit_s)
            stats = loop.scheduler.stats()
        figures = {
            "output tokens, 1/s": seen.num_new_tokens / seen.seconds,
            "running, mean over rounds": sum(seen.running) / len(seen.running),
            "first token, s, of those who had one": sum(seen.first_s.values()) / max(1, len(seen.first_s)),
            "answered": seen.num_answered,
            "retracted": stats.dropped + stats.offloaded,
            "seconds": seen.seconds,
        }
        case = f"{workload}, {memory_bytes / 1e9:.3g} GB"
        print(f"{case}, {name}: {figures}", flush=True)  # in case that the run is ended from outside
        records += [record(case, figure, value, "", policy=name) for figure, value in figures.items()]
    return records


def _serve(loop: ServingLoop, workload: Workload, vocabulary: int, limit_s: float) -> Seen:
    """Clients who each wait for an answer and ask again, until all is answered or the time is over."""
    seen, asked_s = Seen(), list[float]()

    def ask() -> None:
        prompt = torch.randint(vocabulary, (workload.num_prompt_tokens,), device="cpu")
        loop.submit(prompt, max_new_tokens=workload.num_new_tokens, do_sample=False, tag=len(asked_s))
        asked_s.append(time.perf_counter())

    begin_s = time.perf_counter()
    for _ in range(min(workload.num_clients, workload.num_requests)):
        ask()
    while loop and time.perf_counter() - begin_s < limit_s:
        events = loop.step()
        now_s = time.perf_counter()
        seen.running.append(len(loop.scheduler.running))
        for generation, tokens, reason in events:
            seen.num_new_tokens += len(tokens)
            if tokens:
                seen.first_s.setdefault(generation.tag, now_s - asked_s[generation.tag])
            if reason is not None:
                seen.num_answered += 1
                if len(asked_s) < workload.num_requests:
                    ask()
    seen.seconds = time.perf_counter() - begin_s
    return seen


def _page(records: list[Record], device: str) -> str:
    values = {(entry["case"], entry["metric"], entry["policy"]): entry["value"] for entry in records}
    lines = [
        "# The published workloads, run",
        "",
        f"`python benchmarks/published_h200.py --live` on {device}. Random weights, bf16; lengths and memory are",
        f"scaled, and a run ends after {RUN_S:.0f} s at the latest.",
        "",
        "| workload | figure | pools | arena | arena / pools |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case, figure in dict.fromkeys((case, figure) for case, figure, _ in values):
        pools, arena = (values[case, figure, name] for name in ("pools", "arena"))
        lines.append(f"| {case} | {figure} | {pools:,.4g} | {arena:,.4g} | {arena / pools if pools else 0:.3f} |")
    return "\n".join(lines) + "\n"
