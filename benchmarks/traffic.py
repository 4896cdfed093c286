"""Traffic that changes every few minutes: one arena beside fixed pools, phase by phase, on a simulated H200.

Long contexts, then many short requests, then both, so that in every phase memory is what there is too little of. A
phase comes all at once, when the one before is done: what counts is new tokens a second until its last request is done.
The arena has one setting for all phases. Beside it, fixed pools (`split=` on the same code): at the default split of a
widely used engine, at the split that is best for all phases, and at the best one for each, which are found by search.
Nothing here is measured on a GPU.

The arena pays for its freedom by moving pages: their bytes over the keys, values and states that decoding reads.

    python benchmarks/traffic.py --json traffic.json
    python benchmarks/traffic.py --quick
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from geometries import GEOMETRIES
from records import Record, parser, publish, record
from transformers import GptOssConfig, Qwen3_5TextConfig

import torch_uma
from torch_uma.integrations.transformers.counting import work_of
from torch_uma.plan import Plan
from torch_uma.scheduling import Round, Scheduler
from torch_uma.simulate import DEVICES, Arrival, Report, Work, generate_trace, replay
from torch_uma.simulate.splits import best_split, default_split

DEVICE = DEVICES["h200"]
SETTINGS: dict[str, Any] = {"max_running": 1024, "step_tokens": 8192}
# Requests that an H200 is busy with for some two minutes, by model: long contexts, short requests.
NUM_REQUESTS = {"gpt-oss-20b": (240, 8000), "qwen3.5-4b": (450, 4500)}
LONG, SHORT = (8192, 1024), (256, 512)  # mean tokens of prompts and answers
SPREAD = 0.4
PHASES = ("long", "short", "both")

Split = Mapping[str, float] | None


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is simulated: a plan, and what the forwards cost."""

    name: str
    plan: Plan
    work: Work
    is_packed: bool

    def run(self, arrivals: Sequence[Arrival], split: Split = None, watch: Watch | None = None) -> Report:
        return replay(
            self.plan,
            arrivals,
            work=self.work,
            device=DEVICE,
            split=split,
            on_round=watch,
            packed=self.is_packed,
            **SETTINGS,
        )


class Watch:
    """What a replay reads for decoding: keys, values and states, in bytes."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.decode_bytes = 0.0

    def __call__(self, scheduler: Scheduler, round: Round) -> None:
        for forward in round.forwards:
            if forward.is_decode:
                self.decode_bytes += self._work.cache_bytes(forward)


def models(memory: str) -> list[Model]:
    """Published shapes; the weights are counted in bf16."""
    gpt_oss = GptOssConfig(num_hidden_layers=24, num_local_experts=32)
    qwen = Qwen3_5TextConfig(hidden_size=2560, intermediate_size=9216, tie_word_embeddings=True)
    configs = {"gpt-oss-20b": gpt_oss, "qwen3.5-4b": qwen}
    return [
        Model(
            name=name,
            plan=torch_uma.plan(GEOMETRIES[name](), memory=memory),
            work=work_of(config),
            is_packed=name == "gpt-oss-20b",  # states have a forward for each length of prompts
        )
        for name, config in configs.items()
    ]


def traffic(num_long: int, num_short: int, seed: int) -> list[list[Arrival]]:
    """The requests of each phase; in the last there are half as many of both kinds, in random order."""

    def made(count: int, lengths: tuple[int, int], offset: int) -> list[Arrival]:
        prompt, new = lengths
        return generate_trace(count, prompt_tokens=prompt, new_tokens=new, spread=SPREAD, seed=seed + offset)

    both = made(num_long // 2, LONG, 2) + made(num_short // 2, SHORT, 3)
    order = np.random.default_rng(seed).permutation(len(both))
    return [made(num_long, LONG, 0), made(num_short, SHORT, 1), [both[place] for place in order.tolist()]]


def search(model: Model, phases: Sequence[Sequence[Arrival]], num_tries: int) -> dict[str, Split]:
    """The splits to compare with, by name: for each phase, and for all of them one after another."""
    known: dict[tuple[float, ...], list[Report]] = {}

    def reports_of(split: Mapping[str, float]) -> list[Report]:
        key = tuple(round(share, 6) for share in split.values())
        if key not in known:
            known[key] = [model.run(phase, split) for phase in phases]
        return known[key]

    splits: dict[str, Split] = {"default split": default_split(model.plan)}
    for place, name in enumerate(PHASES):

        def report_of(split: Mapping[str, float], place: int = place) -> Report:
            return reports_of(split)[place]

        splits[f"best of {name}"], _ = best_split(model.plan, report_of, num_tries=num_tries)
    num_requests = sum(len(phase) for phase in phases)
    names = [subpool.name for subpool in model.plan.subpools]
    done = {key: of for key, of in known.items() if sum(report.num_completed for report in of) == num_requests}
    best_key = min(done, key=lambda key: sum(report.seconds for report in done[key]))
    return splits | {"best of all": dict(zip(names, best_key))}


def measure(model: Model, phases: Sequence[Sequence[Arrival]], splits: Mapping[str, Split]) -> list[Record]:
    records, rates = [], {}
    for policy, split in {"arena": None, **splits}.items():
        watch = Watch(model.work)
        reports = [model.run(phase, split, watch) for phase in phases]
        # Pools that cannot hold a request serve another traffic.
        rates[policy] = [
            report.new_tokens_per_s if report.num_completed == report.num_requests else 0.0 for report in reports
        ]
        for name, report in zip(PHASES, reports):
            records.append(
                record(f"{model.name}/{name}", "new_tokens_per_s", report.new_tokens_per_s, "1/s", policy=policy)
            )
            records[-1] |= {
                "lasted_s": report.seconds,
                "split": split,
                "running": report.time_mean_running,
                "retractions_per_1000": report.retractions_per_1000,
            }
        seconds = sum(report.seconds for report in reports)
        records.append(record(f"{model.name}/all", "seconds", seconds, "s", policy=policy))
        if split is None:
            moved_bytes = sum(report.moved_bytes for report in reports)
            records.append(
                record(
                    f"{model.name}/all", "moved_bytes", moved_bytes, "B", reference=watch.decode_bytes, policy=policy
                )
            )
    for place, name in enumerate(PHASES):
        policy = max((policy for policy in rates if policy != "arena"), key=lambda policy: rates[policy][place])
        best = rates[policy][place]
        records.append(
            record(
                f"{model.name}/{name}",
                "arena_over_best_split",
                rates["arena"][place],
                "1/s",
                reference=best,
                policy=policy,
            )
        )
    return records


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", nargs="+", choices=sorted(NUM_REQUESTS), default=list(NUM_REQUESTS))
    options.add_argument("--memory", default="8GiB")
    options.add_argument("--share", type=float, default=1.0, help="of the requests of two minutes a phase")
    options.add_argument("--quick", action="store_true", help="1GiB and a twenty-fifth of the requests: says little")
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    records = []
    for model in models("1GiB" if arguments.quick else arguments.memory):
        if model.name in arguments.model:
            num_long, num_short = NUM_REQUESTS[model.name]
            share, num_tries = (0.04, 1) if arguments.quick else (arguments.share, 8)
            phases = traffic(round(num_long * share), round(num_short * share), arguments.seed)
            records += measure(model, phases, search(model, phases, num_tries))
    publish(records, arguments.json)
    print(f"seed {arguments.seed}, {DEVICE.name}, {SETTINGS}; simulated, not measured")


if __name__ == "__main__":
    main()
