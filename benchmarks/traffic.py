"""Traffic that changes every few minutes: one arena beside fixed pools, phase by phase, on a simulated H200.

Long contexts, then many short requests, then both, all queued, so that in every phase memory is what there is too
little of. What counts is new tokens a second from the time when the last request of the phases before is done, as what
a policy was slow with must not count for or against it, until the last of its own is admitted; and how long everything
takes. The arena has one setting for all phases. Beside it, fixed pools (`split=` on the same code): at the default
split of a widely used engine, at the split that is best for all of it, and at the best one for each phase, which are
found by search over the first requests of each phase. Nothing here is measured on a GPU.

The arena pays for its freedom by moving pages: their bytes over the keys, values and states that decoding reads.

    python benchmarks/traffic.py --json traffic.json
    python benchmarks/traffic.py --quick
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
SEARCHED = 0.3  # of the requests of a phase
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
    """The clock of a replay and what it counts: new tokens by phase, and the bytes that decoding reads."""

    def __init__(self, work: Work, phases: Sequence[Sequence[Arrival]]) -> None:
        self._work = work
        self._phase_of = {id(arrival): number for number, phase in enumerate(phases) for arrival in phase}
        self._num_left = [len(phase) for phase in phases]
        self._num_waiting = [len(phase) for phase in phases]
        self._began: list[tuple[float, int] | None] = [None] * len(phases)  # seconds and new tokens until then
        self._ended: list[tuple[float, int] | None] = [None] * len(phases)
        self._come: set[int] = set()
        self.now_s = 0.0
        self._num_new = self._moved_bytes = 0
        self.decode_bytes = 0.0

    def __call__(self, scheduler: Scheduler, round: Round) -> None:
        for request in round.admitted:
            if id(request.tag) not in self._come:
                self._come.add(id(request.tag))
                number = self._phase_of[id(request.tag)]
                self._num_waiting[number] -= 1
                if not self._num_waiting[number]:
                    self._ended[number] = (self.now_s, self._num_new)
        for forward in round.forwards:
            self.now_s += self._work.seconds(forward, DEVICE)
            self._num_new += int(np.count_nonzero(forward.samples))
            if forward.is_decode:
                self.decode_bytes += self._work.cache_bytes(forward)
        moved_bytes = sum(band.moved_pages * band.grid.page_bytes for band in scheduler.pool.allocator.bands)
        self.now_s += 2 * (moved_bytes - self._moved_bytes) / DEVICE.bytes_per_s
        self._moved_bytes = moved_bytes
        for request in round.last_tokens:
            self._num_left[self._phase_of[id(request.tag)]] -= 1
        for number, began in enumerate(self._began):
            if began is None and not any(self._num_left[:number]):
                self._began[number] = (self.now_s, self._num_new)

    def phases(self) -> list[tuple[float, float]]:
        """Seconds that each phase lasted, and its new tokens a second."""
        times = []
        for began, ended in zip(self._began, self._ended):
            assert began is not None and ended is not None
            lasted_s = ended[0] - began[0]
            times.append((lasted_s, (ended[1] - began[1]) / lasted_s if lasted_s > 0 else 0.0))
        return times


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
    """The splits to compare with, by name, found over the first requests of each phase."""

    def best(asked: Sequence[Sequence[Arrival]]) -> dict[str, float]:
        sample = [arrival for phase in asked for arrival in phase[: max(1, round(SEARCHED * len(phase)))]]
        known: dict[tuple[float, ...], Report] = {}

        def run(split: Mapping[str, float]) -> Report:
            key = tuple(round(share, 6) for share in split.values())
            if key not in known:
                known[key] = model.run(sample, split)
            return known[key]

        return best_split(model.plan, run, num_tries=num_tries)[0]

    splits: dict[str, Split] = {"default split": default_split(model.plan), "best of all": best(phases)}
    return splits | {f"best of {name}": best([phase]) for name, phase in zip(PHASES, phases)}


def measure(model: Model, phases: Sequence[Sequence[Arrival]], splits: Mapping[str, Split]) -> list[Record]:
    everything = [arrival for phase in phases for arrival in phase]
    records, rates = [], {}
    for policy, split in {"arena": None, **splits}.items():
        watch = Watch(model.work, phases)
        report = model.run(everything, split, watch)
        rates[policy] = [rate for _, rate in watch.phases()]
        for name, (lasted_s, rate) in zip(PHASES, watch.phases()):
            records.append(record(f"{model.name}/{name}", "new_tokens_per_s", rate, "1/s", policy=policy))
            records[-1] |= {"lasted_s": lasted_s, "split": split}
        records.append(record(f"{model.name}/all", "seconds", report.seconds, "s", policy=policy))
        records.append(
            record(f"{model.name}/all", "retractions_per_1000", report.retractions_per_1000, "1", policy=policy)
        )
        if split is None:
            records.append(
                record(
                    f"{model.name}/all",
                    "moved_bytes",
                    report.moved_bytes,
                    "B",
                    reference=watch.decode_bytes,
                    policy=policy,
                )
            )
    for place, name in enumerate(PHASES):
        policy = max((policy for policy in rates if policy != "arena"), key=lambda policy: rates[policy][place])
        if not rates[policy][place]:
            continue  # so few requests that the phase has no time of its own
        records.append(
            record(
                f"{model.name}/{name}",
                "arena_over_best_split",
                rates["arena"][place],
                "1/s",
                reference=rates[policy][place],
                policy=policy,
            )
        )
    return records


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", nargs="+", choices=sorted(NUM_REQUESTS), default=list(NUM_REQUESTS))
    options.add_argument("--memory", default="8GiB")
    options.add_argument("--share", type=float, default=1.0, help="of the requests of two minutes a phase")
    options.add_argument("--splits", type=Path, help="JSON of splits by model and name, instead of the search")
    options.add_argument("--quick", action="store_true", help="1GiB and a twenty-fifth of the requests: says little")
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    records = []
    for model in models("1GiB" if arguments.quick else arguments.memory):
        if model.name in arguments.model:
            num_long, num_short = NUM_REQUESTS[model.name]
            share, num_tries = (0.04, 1) if arguments.quick else (arguments.share, 8)
            phases = traffic(round(num_long * share), round(num_short * share), arguments.seed)
            given = json.loads(arguments.splits.read_text()) if arguments.splits else {}
            records += measure(model, phases, given.get(model.name) or search(model, phases, num_tries))
    publish(records, arguments.json)
    print(f"seed {arguments.seed}, {DEVICE.name}, {SETTINGS}; simulated, not measured")


if __name__ == "__main__":
    main()
