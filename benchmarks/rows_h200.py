"""Every figure that was published, beside the simulated one, and why they differ where they do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from records import Record, record
from served_h200 import Served, Setting, serve
from workloads_h200 import GROWING, LONG, RUNNING_GPT_OSS, RUNNING_QWEN, SHORT, TOKENS_PER_S_QWEN, Workload

TOLERANCE, GAIN_TOLERANCE = 0.1, 0.02
TUNED_WINDOW_TO_FULL = 0.1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure beside the simulated one, and why they differ, if they do.

    `used_up`: it was an input. `is_gain`: it is a ratio, of which what is beyond 1 counts.
    """

    workload: Workload
    figure: str
    published: float
    simulated: float
    unit: str = ""
    why: str
    used_up: bool = False
    is_gain: bool = False

    @property
    def deviation(self) -> float:
        """Of the simulated one, as a share of the published."""
        return self.simulated / self.published - 1

    @property
    def remark(self) -> str:
        """What is to be said of the row."""
        tolerance = GAIN_TOLERANCE if self.is_gain else TOLERANCE
        return self.why if self.used_up or abs(self.deviation) > tolerance else ""

    def record(self) -> Record:
        """As benchmarks write it."""
        return record(
            str(self.workload),
            self.figure,
            self.simulated,
            self.unit,
            self.published,
            used_up=self.used_up,
            why=self.why,
        )


def both(workload: Workload, setting: Setting) -> tuple[Served, Served]:
    """Pools and one arena."""
    return serve(workload, replace(setting, is_split=True)), serve(workload, setting)


def qwen_rows(setting: Setting, scale: int) -> Iterator[Row]:
    """What was published of Qwen3.5-4B, with lengths divided by `scale`."""
    yield from _short(SHORT.scaled(scale), setting)
    yield from _long(LONG.scaled(scale), setting)
    yield from _growing(GROWING.scaled(scale), setting)


def _short(workload: Workload, setting: Setting) -> Iterator[Row]:
    pools, arena = both(workload, setting)
    yield Row(
        workload=workload,
        figure="pools, output tokens",
        published=TOKENS_PER_S_QWEN,
        simulated=pools.report.new_tokens_per_s,
        unit="1/s",
        why=f"used up: what a forward takes besides, {setting.forward_s * 1e3:.1f} ms, was inferred from it",
        used_up=True,
    )
    yield Row(
        workload=workload,
        figure="arena, output tokens",
        published=5830,
        simulated=arena.report.new_tokens_per_s,
        unit="1/s",
        why="as of the gain below",
    )
    yield _gain(
        workload,
        5830 / TOKENS_PER_S_QWEN,
        pools,
        arena,
        "in less memory than inferred, pools hold fewer states than there are clients",
    )


def _long(workload: Workload, setting: Setting) -> Iterator[Row]:
    pools, arena = both(workload, setting)
    yield Row(
        workload=workload,
        figure="pools, running",
        published=RUNNING_QWEN,
        simulated=pools.running,
        why=f"used up: the memory, {setting.budget_bytes / 1e9:.1f} GB, was inferred from it",
        used_up=True,
    )
    yield Row(
        workload=workload,
        figure="arena, running",
        published=32,
        simulated=arena.running,
        why="state slots of a request and the admission of the reference are known only roughly, as shown below",
    )
    yield _gain(
        workload,
        1.26,
        pools,
        arena,
        "the more of a forward's time does not depend on how many run, the more is gained by running more at once",
    )


def _growing(workload: Workload, setting: Setting) -> Iterator[Row]:
    pools, arena = both(workload, setting)
    for name, published, served in (("pools", 294, pools), ("arena", 233, arena)):
        yield Row(
            workload=workload,
            figure=f"{name}, retractions",
            published=published,
            simulated=served.report.retractions_per_1000,
            unit="of 1,000",
            why="answers grow to 32 times their prompts, so much depends on who is admitted beside whom: the reference "
            "reserves more after each retraction, here it is always the same (more is below); how many state slots a "
            "request holds and how many requests there were was not published",
        )


def gpt_oss_rows(workload: Workload, setting: Setting) -> Iterator[Row]:
    """What was published of GPT-OSS-20B, for a workload whose lengths were inferred."""
    pools, arena = both(workload, setting)
    twice = replace(workload, num_clients=2 * workload.num_clients)
    yield Row(
        workload=workload,
        figure="pools, running",
        published=RUNNING_GPT_OSS,
        simulated=pools.running,
        why=f"used up: the lengths, {workload.num_prompt_tokens:,} and as many, were inferred from it",
        used_up=True,
    )
    yield Row(
        workload=workload,
        figure=f"arena, running, with {twice.num_clients:,} clients",
        published=1000,
        simulated=serve(twice, setting).running,
        why="published as about 1,000; here as many as fit, as there are clients enough",
    )
    for name, published, served in (("pools", 43, pools), ("arena", 6, arena)):
        yield Row(
            workload=workload,
            figure=f"{name}, first token",
            published=published,
            simulated=served.report.first_token_s["mean"],
            unit="s",
            why="lengths, clients and how many requests each sends were not published: one waits for about as long as "
            "answers take (other lengths are below), and longer at the beginning, when all ask at once",
        )
    yield _gain(
        workload,
        1.14,
        pools,
        arena,
        "lengths were not published: the shorter they are, the more of a forward's time does not depend on how many "
        "run, and the more is gained (others are below)",
    )
    pools = serve(workload, replace(setting, is_split=True, window_to_full=TUNED_WINDOW_TO_FULL))
    yield _gain(
        workload,
        0.88,
        pools,
        arena,
        "presumably what the reference's own arena costs it in every forward, page numbers and compaction; of ours the "
        "moves are charged, a few GB in all, and pools at 0.1 waste little memory: not much is left to gain or to lose",
        f"arena / pools at {TUNED_WINDOW_TO_FULL}, output tokens",
    )


def _gain(
    workload: Workload,
    published: float,
    pools: Served,
    arena: Served,
    why: str,
    figure: str = "arena / pools, output tokens",
) -> Row:
    gain = arena.report.new_tokens_per_s / pools.report.new_tokens_per_s
    return Row(workload=workload, figure=figure, published=published, simulated=gain, why=why, is_gain=True)
