"""Reports side by side: a table for people, a drawing, and what they say of the settings."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from torch_uma.simulate import Report
from torch_uma.simulate.advice import advice
from torch_uma.simulate.table import plot, table

REPORT = Report(
    num_requests=12,
    num_completed=1234,
    num_refused=3,
    seconds=2345.67,
    num_rounds=99,
    requests_per_s=0.526,
    new_tokens_per_s=12345.6,
    first_token_s={"mean": 0.25, "50": 0.125, "90": 0.5, "99": 1.75},
    inter_token_s={"mean": 0.02, "50": 0.01, "90": 0.03, "99": 0.04567},
    mean_running=10.04,
    time_mean_running=11.06,
    max_running=64,
    dropped=2,
    offloaded=5,
    preempted=1,
    recomputed_tokens=7654,
    retractions_per_1000=5.67,
    moved_bytes=1_500_000_000,
    host_bytes=250_000_000,
    used_bytes={"state": 1e9, "full": 2e9},
    idle_bytes={"arena": 7e9},
    running=[(0.0, 5), (1.0, 64), (2345.67, 0)],
)
POOLS = replace(
    REPORT,
    new_tokens_per_s=10000.0,
    time_mean_running=8.0,
    first_token_s={"mean": 1.5, "50": 1.0, "90": 2.0, "99": 3.0},
    idle_bytes={"state": 4e9, "full": 3e9},
)


def cells(text: str) -> dict[str, list[str]]:
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()[1:]]
    return {row[0]: row[1:] for row in rows}


def test_every_line_says_what_the_report_says() -> None:
    text = table({"arena": REPORT, "default 0.47/0.53": POOLS})
    assert text.splitlines()[0].split("  ")[-1] == "default 0.47/0.53"
    assert cells(text) == {
        "requests completed": ["1,234"] * 2,
        "refused": ["3"] * 2,
        "simulated time, s": ["2,345.7"] * 2,
        "requests / s": ["0.53"] * 2,
        "new tokens / s": ["12,346", "10,000"],
        "first token, s: mean, 50, 90, 99 %": ["0.25 0.125 0.5 1.75", "1.5 1 2 3"],
        "next token, ms: mean, 50, 90, 99 %": ["20 10 30 45.67"] * 2,
        "running, mean over rounds": ["10.0"] * 2,
        "running, mean over time": ["11.1", "8.0"],
        "running, most": ["64"] * 2,
        "retractions / 1,000 completed": ["5.7"] * 2,
        "of them offloaded": ["5"] * 2,
        "tokens computed again": ["7,654"] * 2,
        "moved in the arena, GB": ["1.50"] * 2,
        "to the host and back, GB": ["0.25"] * 2,
        "in use, mean GB: state": ["1.00"] * 2,
        "in use, mean GB: full": ["2.00"] * 2,
        "idle, mean GB: arena": ["7.00"],
        "idle, mean GB: state": ["4.00"],
        "idle, mean GB: full": ["3.00"],
    }


def test_columns_are_flush() -> None:
    lines = table({"a": REPORT, "with a long name": POOLS}).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert {line[: lines[0].rindex("with") - 2][-1] for line in lines[:15]} <= set("a0123456789")


def test_a_drawing_is_written(tmp_path: Path) -> None:
    for name in ("runs.png", "runs.svg"):
        plot({"arena": REPORT, "pools": POOLS}, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    assert "seconds" in (tmp_path / "runs.svg").read_text() or "<svg" in (tmp_path / "runs.svg").read_text()


def test_without_matplotlib_it_is_said_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError):
        plot({"arena": REPORT}, tmp_path / "runs.png")


# Advice


def said(report: Report, max_running: int = 256, arena_bytes: int = 4_000_000_000) -> str:
    return "\n".join(advice({"arena": report}, max_running=max_running, arena_bytes=arena_bytes))


CALM = replace(REPORT, num_refused=0, dropped=0, offloaded=0, retractions_per_1000=0.0)


def test_the_gain_over_pools_is_said() -> None:
    pools = replace(POOLS, num_refused=0)
    gain, _ = advice({"arena": CALM, "default": pools}, max_running=256, arena_bytes=4_000_000_000)
    assert gain == (
        "one arena against default: +23.5% new tokens a second, +38.3% running, first token after 0.25 s instead of "
        "1.5 s"
    )
    refusing = replace(POOLS, num_refused=1200)
    more, _ = advice({"arena": CALM, "x": refusing}, max_running=256, arena_bytes=4_000_000_000)
    assert more == gain.replace("default", "x") + "; these pools refused 1,200 more, which the arena served as well"
    nothing = replace(POOLS, num_completed=0, new_tokens_per_s=0.0, time_mean_running=0.0)
    assert "completed nothing" in advice({"arena": CALM, "x": nothing}, max_running=9, arena_bytes=4_000_000_000)[0]


def test_no_gain_is_said_without_figures() -> None:
    hardly = replace(CALM, new_tokens_per_s=CALM.new_tokens_per_s * 1.001)
    slower = replace(hardly, first_token_s={**CALM.first_token_s, "mean": 0.5})
    one, other, _ = advice({"arena": CALM, "x": hardly, "y": slower}, max_running=256, arena_bytes=4_000_000_000)
    assert one == "one arena against x: no difference"
    assert "-0.1% new tokens a second, +0.0% running, first token after 0.25 s instead of 0.5 s" in other
    even = replace(slower, new_tokens_per_s=CALM.new_tokens_per_s * 1.0001)
    assert ": +0.0% new" in advice({"arena": CALM, "y": even}, max_running=256, arena_bytes=4_000_000_000)[0]


def test_one_kind_of_memory_has_nothing_to_divide() -> None:
    alone = replace(CALM, used_bytes={"full": 3e9})
    reports = {"arena": alone, "default": alone, "best": alone}
    (kind, _) = advice(reports, max_running=256, arena_bytes=4_000_000_000)
    assert "one kind of memory" in kind
    assert "one kind" not in said(alone)


def test_what_to_set_is_said() -> None:
    assert said(CALM) == (
        "at most 64 of the 256 allowed ran at once, in 75% of the arena on the mean, and few were retracted: the "
        "settings suit this traffic"
    )
    refused = said(replace(CALM, num_refused=3), arena_bytes=10_000_000_000)
    assert refused == "3 requests are longer than the arena can hold: give it more memory"
    assert "max_running=64 allows, in 30% of the arena" in said(CALM, max_running=64, arena_bytes=10_000_000_000)
    assert "try less memory, or more requests a second" in said(CALM, arena_bytes=10_000_000_000)
    busy = replace(CALM, dropped=200, retractions_per_1000=162.0)
    assert "162 retractions for each 1,000 requests, and 6 tokens computed again" in said(busy)
    assert said(busy).endswith("try more headroom_steps, host_memory, or a smaller max_running")
    kept = replace(busy, dropped=0, offloaded=200, recomputed_tokens=0)
    assert said(kept).endswith("try more headroom_steps or a smaller max_running")
    assert "less memory" not in said(busy, arena_bytes=10_000_000_000)
    bursts = replace(CALM, dropped=9, retractions_per_1000=9.0)
    assert "in 30% of the arena on the mean, and few" in said(bursts, arena_bytes=10_000_000_000)
