"""Traces replayed in 8 GiB, beside the exact fit: mean requests in memory, and how often one is taken out.

All requests are queued at once and served first come, first served, in rounds of 8,192 tokens: the workloads of
`workloads.py`. Means are over rounds. The reference is `first_come.py`: the same policy where memory is nothing but
bytes and a page one token. Beside it stands vLLM 0.33 with its own scheduler and prefix caching, on the same requests
and as many bytes: driven in this run where it is installed (`peers/vllm_scheduler.py`), else as it was run elsewhere;
and, for larger pages, the exact fit in such pages.

One setting serves all rows. Pages of one token are what the reference has; who comes in leaves room for so few steps
because the reference leaves none; and no request rises while it waits, as in a queue.

    python benchmarks/traces.py --trace AzureLLMInferenceTrace_conv.csv --json traces.json
    python benchmarks/traces.py --quick
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from first_come import ExactFit, Served, first_come
from geometries import GEOMETRIES
from peers.vllm_inputs import why_not
from peers.vllm_scheduler import drive
from records import Record, parser, publish, record
from workloads import ARENA_BYTES, MODELS, STEP_TOKENS, Workload, workloads

import torch_uma
from torch_uma.simulate import DEVICES, Work, replay

SETTINGS: dict[str, Any] = {"step_tokens": STEP_TOKENS, "headroom_steps": 2}
WORK = Work(weight_bytes=0, token_flops=1, head_flops=0)  # means over rounds do not ask how long one takes

# vLLM 0.33, its real scheduler with prefix caching, 8 GiB: mean running, preemptions, rounds; by model as above.
VLLM = {
    "512+128": ((252.2, 63, 260), (87.4, 230, 750), (132.3, 397, 502)),
    "1024+512": ((169.2, 127, 1550), (73.3, 496, 3588), (102.1, 250, 2575)),
    "4096+512": ((72.3, 26, 3628), (39.3, 66, 6681), (46.4, 48, 5664)),
    "16384+1024": ((18.2, 6, 7208), (12.8, 27, 10290), (12.8, 36, 10272)),
    "azure": ((195.5, 13, 1974), (78.4, 729, 4940), (108.1, 799, 3587)),
}
# What a bound like `first_come` gave there, to hold it to.
EXACT = {
    "512+128": ((281.4, 48, 233), (102.1, 27, 642), (166.8, 29, 393)),
    "1024+512": ((172.1, 166, 1524), (85.0, 81, 3084), (102.1, 123, 2569)),
    "4096+512": ((72.5, 55, 3621), (42.5, 45, 6174), (46.4, 51, 5653)),
    "16384+1024": ((18.2, 11, 7205), (12.8, 10, 10280), (14.2, 9, 9264)),
    "azure": ((197.8, 49, 1951), (86.0, 96, 4486), (115.1, 134, 3353)),
}


def bound(plan: torch_uma.Plan, workload: Workload, page_size: int) -> Served:
    """The exact fit in pages of so many tokens."""
    return first_come(
        ExactFit.of(plan, page_size),
        plan.arena_bytes,
        workload.lengths,
        max_running=workload.max_running,
        step_tokens=STEP_TOKENS,
    )


def measure(name: str, workload: Workload, page_sizes: Sequence[int], drives_vllm: bool) -> list[Record]:
    records = []
    vllm, published = (table[workload.name][MODELS.index(name)] for table in (VLLM, EXACT))
    driven = drive(GEOMETRIES[name](), workload) if drives_vllm else None
    vllm_mean_running, vllm_preemptions = (driven.mean_running, driven.preemptions) if driven else vllm[:2]
    for page_size in page_sizes:
        plan = torch_uma.plan(GEOMETRIES[name](), memory=ARENA_BYTES, page_size=page_size)
        report = replay(
            plan,
            workload.arrivals,
            work=WORK,
            device=DEVICES["h200"],
            max_running=workload.max_running,
            **SETTINGS,
        )
        exact, paged = bound(plan, workload, 1), bound(plan, workload, page_size)
        records.append(
            record(
                f"{name}/{workload.name}/page{page_size}",
                "mean_running",
                report.mean_running,
                "requests",
                reference=exact.mean_running,
                preemptions=report.dropped,
                exact_preemptions=exact.preemptions,
                num_rounds=report.num_rounds,
                exact_num_rounds=exact.num_rounds,
                exact_published=published,
                over_exact_in_pages=report.mean_running / paged.mean_running,
                vllm_is_driven=drives_vllm,
                vllm_mean_running=vllm_mean_running,
                vllm_preemptions=vllm_preemptions,
                vllm_num_rounds=driven.num_rounds if driven else vllm[2],
                vllm_published=vllm,
                over_vllm=report.mean_running / vllm_mean_running,
            )
        )
    return records


def describe(entry: Record) -> str:
    """What stands beside a figure."""
    published = "{} and {} elsewhere".format(*entry["vllm_published"]) if entry["vllm_is_driven"] else "elsewhere"
    return (
        f"{entry['case']}: {entry['preemptions']} preemptions ({entry['exact_preemptions']} exact), "
        f"{entry['over_exact_in_pages']:.4f} of it in such pages; vLLM {entry['vllm_mean_running']:.1f} running, "
        f"{entry['vllm_preemptions']} preemptions ({published}): {entry['over_vllm'] - 1:+.1%}"
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--trace", type=Path, metavar="PATH", help="AzureLLMInferenceTrace_conv.csv")
    options.add_argument("--page-size", nargs="+", type=int, default=[1, 16])
    options.add_argument("--quick", action="store_true", help="only the shortest requests")
    arguments = options.parse_args()
    asked = workloads(arguments.trace)[: 1 if arguments.quick else None]
    missing = why_not()
    records = [
        entry
        for name in MODELS
        for workload in asked
        for entry in measure(name, workload, arguments.page_size, missing is None)
    ]
    publish(records, arguments.json)
    for entry in records:
        print(describe(entry))
    if missing is not None:
        print(f"{missing}. Its figures above are those of a run elsewhere.")
    missed = [entry for entry in records if entry["ratio"] < 0.99 or entry["preemptions"] > entry["exact_preemptions"]]
    print(f"{SETTINGS}: {len(records)} figures, {len(missed)} below 0.99 of the exact fit or with more preemptions")
    for entry in missed:
        print("  " + entry["case"])


if __name__ == "__main__":
    main()
