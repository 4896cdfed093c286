"""One arena against fixed pools on one H200, simulated, beside what was published of an engine that has both.

    python benchmarks/published_h200.py [--json PATH] [--markdown PATH] [--quick]
    python benchmarks/published_h200.py --live [--dry] [--json PATH] [--markdown PATH]

Both are run by the same scheduler and allocator on the clock of `torch_uma.simulate`; pools are `split=` at the default
ratios of that engine. Every assumption is in workloads_h200.py, and printed. Three inputs were not published, and each
is inferred from one published number of the pools, whose row is then used up: the memory of the runs of Qwen3.5-4B from
22 running requests, what a forward takes beyond the roofline from 5,880 tokens a second, and the lengths of the runs of
GPT-OSS-20B, in the memory that the defaults leave, from 618 running requests. With --quick
lengths are a 32nd and nothing is varied, to see that it runs; with --live the workloads run for real, as
live_h200.py says.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from live_h200 import run_live
from records import Record, parser, publish, record
from rows_h200 import Row, gpt_oss_rows, qwen_rows
from served_h200 import Setting, full_tokens_per_byte, infer_budget_bytes, infer_forward_s, infer_lengths
from variants_h200 import Variant, gpt_oss_variants, qwen_variants
from workloads_h200 import (
    ASSUMPTIONS,
    GPT_OSS,
    LONG,
    MANY,
    QWEN,
    RUNNING_GPT_OSS,
    RUNNING_QWEN,
    SHORT,
    TOKENS_PER_S_QWEN,
)

QUICK_SCALE = 32
NUM_TRIES = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns its exit status."""
    options = parser(__doc__)
    options.add_argument("--markdown", type=Path, metavar="PATH", help="write the tables there")
    options.add_argument("--quick", action="store_true", help="lengths are a 32nd, to see that it runs")
    options.add_argument("--live", action="store_true", help="run the workloads on a GPU, with random weights")
    options.add_argument("--dry", action="store_true", help="with --live: tiny models on the CPU, to see that it runs")
    given = options.parse_args(arguments)
    if given.live:
        records, page = run_live(is_dry=given.dry)
    else:
        records, page = simulate(is_quick=given.quick)
    publish(records, given.json)
    if given.markdown is not None:
        given.markdown.write_text(page)
    else:
        print(page)
    return 0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """All that was found for one model; `inferred` says which inputs were, and from what."""

    inferred: tuple[str, ...]
    rows: list[Row]
    variants: list[Variant]


def simulate(*, is_quick: bool) -> tuple[list[Record], str]:
    """All figures, as records and as a page; if quick, of short requests, and nothing is varied."""
    scale, num_tries = (QUICK_SCALE, 1) if is_quick else (1, NUM_TRIES)
    budget_bytes = infer_budget_bytes(LONG.scaled(scale), RUNNING_QWEN, num_tries=num_tries)
    forward_s = infer_forward_s(SHORT.scaled(scale), TOKENS_PER_S_QWEN, budget_bytes)
    qwen = Setting(budget_bytes=budget_bytes, forward_s=forward_s)
    gpt_oss = Setting(budget_bytes=GPT_OSS.budget_bytes() / scale, forward_s=forward_s)
    with ProcessPoolExecutor(max_workers=2) as workers:
        results = [workers.submit(_find_qwen, qwen, is_quick), workers.submit(_find_gpt_oss, gpt_oss, is_quick)]
        found = [result.result() for result in results]
    records = [row.record() for figures in found for row in figures.rows]
    for variant in (variant for figures in found for variant in figures.variants):
        for name, value in (("pools", variant.pools), ("arena", variant.arena), ("arena / pools", variant.gain)):
            if value is not None:
                records.append(record(variant.assumed, f"{name}, {variant.figure}", value, ""))
    return records, "\n".join(_page(found)) + "\n"


def _find_qwen(setting: Setting, is_quick: bool) -> Figures:
    num_fitting = QWEN.budget_bytes() * full_tokens_per_byte(LONG) / LONG.mean_tokens
    return Figures(
        inferred=(
            f"The memory of the runs of {QWEN.name}, {setting.budget_bytes / 1e9:.1f} GB, from {RUNNING_QWEN} running "
            f"in pools at {LONG.num_prompt_tokens:,} in / {LONG.num_new_tokens:,} out. The defaults would leave "
            f"{QWEN.budget_bytes() / 1e9:.0f} GB, in which pools hold {num_fitting:.0f} such requests, more than the "
            f"{LONG.num_clients} clients: the runs had less.",
            f"What a forward takes beyond the roofline, {setting.forward_s * 1e3:.1f} ms, from {TOKENS_PER_S_QWEN:,} "
            f"tokens a second in pools at {SHORT.num_prompt_tokens:,} in / {SHORT.num_new_tokens:,} out.",
        ),
        rows=list(qwen_rows(setting, QUICK_SCALE if is_quick else 1)),
        variants=[] if is_quick else list(qwen_variants(setting)),
    )


def _find_gpt_oss(setting: Setting, is_quick: bool) -> Figures:
    scale, num_tries = (QUICK_SCALE, 1) if is_quick else (1, NUM_TRIES)
    pools = replace(setting, is_split=True)
    many = infer_lengths(MANY.scaled(scale), RUNNING_GPT_OSS, pools, num_tries=num_tries)
    return Figures(
        inferred=(
            f"The lengths of the runs of {GPT_OSS.name}, {many.num_prompt_tokens:,} in and {many.num_new_tokens:,} "
            f"out, from {RUNNING_GPT_OSS} running in pools, in the {setting.budget_bytes / 1e9:.0f} GB that the "
            "defaults leave.",
        ),
        rows=list(gpt_oss_rows(many, setting)),
        variants=[] if is_quick else list(gpt_oss_variants(setting)),
    )


def _page(found: Sequence[Figures]) -> list[str]:
    head = ("workload", "figure", "published", "simulated", "deviation", "remark")
    lines = [
        (
            str(row.workload),
            row.figure,
            _number(row.published, row.unit),
            _number(row.simulated, row.unit),
            "used up" if row.used_up else f"{row.deviation:+.1%}",
            row.remark,
        )
        for figures in found
        for row in figures.rows
    ]
    variants = [variant for figures in found for variant in figures.variants]
    otherwise = [(v.assumed, v.figure, _number(v.pools), _number(v.arena), _number(v.gain)) for v in variants]
    return [
        "# Published figures of one H200, simulated",
        "",
        "`python benchmarks/published_h200.py --markdown PATH`",
        "([published_h200.py](../../benchmarks/published_h200.py)): one arena and fixed pools, both run by this",
        "scheduler and allocator on a simulated clock, beside what was published of an engine that has both. Nothing",
        "here was measured on a GPU. Running requests are medians over rounds. A deviation of more than 10 % is",
        "explained, and of more than 2 % where it is of a ratio.",
        "",
        *_table(head, lines),
        "",
        "## Inferred",
        "",
        *(f"- {inferred}" for figures in found for inferred in figures.inferred),
        "",
        "## Assumed",
        "",
        *_table(("what", "value", "why"), ASSUMPTIONS),
        "",
        "## If it is otherwise",
        "",
        *_table(("assumed instead", "figure", "pools", "arena", "arena / pools, tokens/s"), otherwise),
    ]


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)]


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return ""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}".strip()


if __name__ == "__main__":
    sys.exit(main())
