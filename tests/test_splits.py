"""Fixed pools to compare with: what a widely used engine begins with, and what a search finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
from pools import layer

from torch_uma.errors import PlanError
from torch_uma.layout import Full, State, Window
from torch_uma.plan import plan
from torch_uma.simulate import Device, Report, Work, generate_trace, replay
from torch_uma.simulate.splits import best_split, default_split

WINDOWED = plan([layer(Full()), layer(Full()), layer(Window(8))], memory=1 << 14)
STATEFUL = plan([layer(State(), width=40), layer(Full())], memory=1 << 14)
THREE = plan([layer(State(), width=40), layer(Window(8)), layer(Full())], memory=1 << 14)


def report_of(throughput: float, num_completed: int = 10) -> Report:
    device = Device(name="d", flops_per_s=1e30, bytes_per_s=1e30, host_bytes_per_s=1e30, forward_s=1.0)
    work = Work(weight_bytes=0.0, token_flops=1.0, head_flops=0.0)
    report = replay(STATEFUL, generate_trace(1, prompt_tokens=1, new_tokens=1), work=work, device=device)
    return replace(report, new_tokens_per_s=throughput, num_completed=num_completed)


def peak(name: str, best: float, at_least: float = 0.0) -> Callable[[Mapping[str, float]], Report]:
    """Throughput falls on both sides of a share; below `at_least` a pool holds no request."""

    def run(split: Mapping[str, float]) -> Report:
        assert sum(split.values()) == pytest.approx(1) and min(split.values()) > 0
        looked.append(dict(split))
        if split[name] < at_least:
            raise PlanError("the pool cannot hold one request")
        return report_of(100 - 50 * abs(split[name] - best))

    looked: list[dict[str, float]] = []
    run.looked = looked  # type: ignore[attr-defined]
    return run


def test_a_window_gets_four_fifths_of_the_tokens() -> None:
    window, full = 0.8 * 16, 32  # bytes for a token
    assert default_split(WINDOWED) == pytest.approx(
        {"window_8": window / (window + full), "full": full / (window + full)}
    )


def test_states_get_nine_tenths_of_the_bytes_of_the_rest() -> None:
    assert default_split(STATEFUL) == pytest.approx({"state": 0.9 / 1.9, "full": 1 / 1.9})
    three = default_split(THREE)
    assert three["state"] / (three["window_8"] + three["full"]) == pytest.approx(0.9)
    assert three["window_8"] / three["full"] == pytest.approx(0.8)


def test_other_ratios_and_a_pool_alone() -> None:
    assert default_split(WINDOWED, window_to_full=0.1)["window_8"] == pytest.approx(1.6 / 33.6)
    assert default_split(STATEFUL, state_to_rest=0.25)["state"] == pytest.approx(0.2)
    for lifetime in (Full(), Window(8), State()):
        assert list(default_split(plan([layer(lifetime)], memory=1 << 12)).values()) == [1.0]


@pytest.mark.parametrize("best", [0.04, 0.2, 0.5, 0.77, 0.95])
def test_the_best_share_is_found(best: float) -> None:
    run = peak("state", best)
    split, report = best_split(STATEFUL, run)
    assert split["state"] == pytest.approx(best, abs=0.03)
    assert report.new_tokens_per_s > 98
    assert len(run.looked) <= 1 + 12  # type: ignore[attr-defined]


def test_more_tries_come_closer() -> None:
    split, _ = best_split(STATEFUL, peak("state", 0.4321), num_tries=24)
    assert split["state"] == pytest.approx(0.4321, abs=1e-3)


def test_splits_that_hold_no_request_are_passed_over() -> None:
    """Also where the default is one of them, and where all but a corner is."""
    split, _ = best_split(STATEFUL, peak("state", 0.9, at_least=0.8))
    assert split["state"] == pytest.approx(0.9, abs=0.03)
    with pytest.raises(PlanError, match="no split was found"):
        best_split(STATEFUL, peak("state", 0.9, at_least=2.0))


def test_other_errors_are_not_hidden() -> None:
    def run(split: Mapping[str, float]) -> Report:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        best_split(STATEFUL, run)


def test_completed_requests_count_before_throughput() -> None:
    split, report = best_split(
        STATEFUL, lambda shares: report_of(100 * shares["full"], num_completed=10 if shares["state"] > 0.6 else 4)
    )
    assert report.num_completed == 10 and 0.6 < split["state"] < 0.65


def test_of_three_one_share_after_the_other() -> None:
    def run(split: Mapping[str, float]) -> Report:
        return report_of(100 - 50 * abs(split["state"] - 0.2) - 50 * abs(split["window_8"] - 0.1))

    split, report = best_split(THREE, run, num_tries=16)
    assert sum(split.values()) == pytest.approx(1)
    assert report.new_tokens_per_s > run(default_split(THREE)).new_tokens_per_s
    assert split["window_8"] == pytest.approx(0.1, abs=0.03)


def test_a_search_in_earnest_is_no_worse_than_the_default_and_no_better_than_the_arena() -> None:
    device = Device(name="steady", flops_per_s=1e30, bytes_per_s=1e30, host_bytes_per_s=1e30, forward_s=1.0)
    work = Work(weight_bytes=0.0, token_flops=1.0, head_flops=0.0)
    arrivals = generate_trace(60, prompt_tokens=12, new_tokens=8, spread=0.5)

    def run(split: Mapping[str, float] | None) -> Report:
        return replay(STATEFUL, arrivals, work=work, device=device, split=split)

    split, best = best_split(STATEFUL, run, num_tries=8)
    assert best == run(split)
    default, arena = run(default_split(STATEFUL)), run(None)
    assert default.new_tokens_per_s <= best.new_tokens_per_s <= arena.new_tokens_per_s
    assert default.new_tokens_per_s < arena.new_tokens_per_s
