"""One arena against fixed pools on one H200, simulated, beside what was published of an engine that has both.

    python benchmarks/published_h200.py [--json PATH] [--markdown PATH] [--quick]
    python benchmarks/published_h200.py --live [--dry] [--json PATH] [--markdown PATH]

Both are run by the same scheduler and allocator on the clock of `torch_uma.simulate`; pools are `split=` at the default
ratios of that engine. Every assumption is in workloads_h200.py, and printed. Two inputs were not published, and each is
inferred from one published number of the pools, whose row is then used up: the memory of the runs of Qwen3.5-4B from 22
running requests, and the lengths of those of GPT-OSS-20B, in the memory that the defaults leave, from 618. With --quick
lengths are a 32nd and nothing is varied, to see that it runs; with --live the workloads run for real, as
live_h200.py says.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from live_h200 import run_live
from records import Record, parser, publish, record
from rows_h200 import Inputs, Row, infer, rows_of
from served_h200 import full_tokens_per_byte
from variants_h200 import Variant, variants_of
from workloads_h200 import ASSUMPTIONS, GPT_OSS, LONG, QWEN, Workload

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


def simulate(*, is_quick: bool) -> tuple[list[Record], str]:
    """All figures, as records and as a page; if quick, of short requests, and nothing is varied."""
    scale = QUICK_SCALE if is_quick else 1
    inputs = infer(scale, num_tries=1 if is_quick else NUM_TRIES)
    rows = list(rows_of(inputs, scale))
    variants = [] if is_quick else list(variants_of(inputs))
    records = [row.record() for row in rows]
    for variant in variants:
        for name, value in (("pools", variant.pools), ("arena", variant.arena), ("arena / pools", variant.gain)):
            if value is not None:
                records.append(record(variant.assumed, f"{name}, {variant.figure}", value, ""))
    return records, "\n".join(_page(inputs, rows, variants)) + "\n"


def _page(inputs: Inputs, rows: Sequence[Row], variants: Sequence[Variant]) -> list[str]:
    head = ("workload", "figure", "published", "simulated", "deviation", "remark")
    figures = [
        (
            str(row.workload),
            row.figure,
            _number(row.published, row.unit),
            _number(row.simulated, row.unit),
            "used up" if row.used_up else f"{row.deviation:+.1%}",
            row.remark,
        )
        for row in rows
    ]
    otherwise = [(v.assumed, v.figure, _number(v.pools), _number(v.arena), _number(v.gain)) for v in variants]
    many = inputs.many
    return [
        "# Published figures of one H200, simulated",
        "",
        "`python benchmarks/published_h200.py --markdown PATH`",
        "([published_h200.py](../../benchmarks/published_h200.py)): one arena and fixed pools, both run by this",
        "scheduler and allocator on a simulated clock, beside what was published of an engine that has both. Nothing",
        "here was measured on a GPU. Running requests are medians over rounds; a deviation of more than 10 % is",
        "explained.",
        "",
        *_table(head, figures),
        "",
        "## Inferred",
        "",
        f"- The memory of the runs of {QWEN.name}, {inputs.qwen_bytes / 1e9:.1f} GB, from 22 running in pools.",
        f"  The defaults would leave {QWEN.budget_bytes() / 1e9:.0f} GB, in which pools hold",
        f"  {_num_fitting(LONG):.0f} such requests, more than the {LONG.num_clients} clients: the runs had less.",
        f"- The lengths of the runs of {GPT_OSS.name}, {many.num_prompt_tokens:,} in and",
        f"  {many.num_new_tokens:,} out, from 618 running in pools, in the {inputs.gpt_oss_bytes / 1e9:.0f} GB that",
        "  the defaults leave.",
        "",
        "## Assumed",
        "",
        *_table(("what", "value", "why"), ASSUMPTIONS),
        "",
        "## If it is otherwise",
        "",
        *_table(("assumed instead", "figure", "pools", "arena", "arena / pools, tokens/s"), otherwise),
    ]


def _num_fitting(workload: Workload) -> float:
    """Requests that pools hold in the default memory, of the length that they have on average."""
    return workload.model.budget_bytes() * full_tokens_per_byte(workload) / workload.mean_tokens


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)]


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return ""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}".strip()


if __name__ == "__main__":
    sys.exit(main())
