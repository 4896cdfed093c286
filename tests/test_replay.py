"""Replays that can be worked out by hand: every time, count and byte of a report."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pools import layer
from transformers import GptOssConfig

from torch_uma.errors import PlanError, TraceError
from torch_uma.integrations.transformers.counting import work_of
from torch_uma.layout import Chunk, Full, Lifetime, State, Window
from torch_uma.plan import Plan, plan
from torch_uma.scheduling import Costs, Round, Scheduler
from torch_uma.simulate import DEVICES, Arrival, Device, Report, Work, generate_trace, replay
from torch_uma.simulate.recorder import _percentiles, _points

FREE = 1e30
TOKEN_BYTES = 256
A_SECOND_EACH = Device(name="steady", flops_per_s=FREE, bytes_per_s=FREE, host_bytes_per_s=FREE, forward_s=1.0)
TENTHS = Device(name="by tokens", flops_per_s=10.0, bytes_per_s=FREE, host_bytes_per_s=FREE)
WORK = Work(weight_bytes=0.0, token_flops=1.0, head_flops=0.0)
RECOMPUTED = Costs(token_s=1e-6, copy_bytes_per_s=1.0)
OFFLOADED = Costs(token_s=1e6, copy_bytes_per_s=1e9)


def arrival(num_prompt_tokens: int, num_new_tokens: int, at_s: float = 0.0, priority: int = 0) -> Arrival:
    return Arrival(at_s=at_s, num_prompt_tokens=num_prompt_tokens, num_new_tokens=num_new_tokens, priority=priority)


def full(num_pages: int, page_size: int = 1) -> Plan:
    """Full attention alone, in so many pages."""
    made = plan([layer(Full(), width=64)], memory=TOKEN_BYTES * page_size * (num_pages + 1), page_size=page_size)
    (subpool,) = made.subpools
    assert subpool.num_pages - subpool.first_page == num_pages
    return made


def run(source: Plan, arrivals: list[Arrival], device: Device = A_SECOND_EACH, **options: Any) -> Report:
    return replay(source, arrivals, work=WORK, device=device, **options)


def test_a_request_alone() -> None:
    report = run(full(100, page_size=2), [arrival(5, 4)])
    assert (report.num_requests, report.num_completed, report.num_refused) == (1, 1, 0)
    assert (report.seconds, report.num_rounds) == (4.0, 4)
    assert (report.requests_per_s, report.new_tokens_per_s) == (0.25, 1.0)
    assert set(report.first_token_s.values()) == set(report.inter_token_s.values()) == {1.0}
    assert (report.mean_running, report.time_mean_running, report.max_running) == (1.0, 1.0, 1)
    # 5, 6, 7 and 8 tokens, in pages of two: the last token is never stored.
    assert report.used_bytes == {"full": (3 + 3 + 4 + 4) / 4 * 2 * TOKEN_BYTES}
    assert report.idle_bytes == {"arena": (101 - 3.5) * 2 * TOKEN_BYTES}
    assert report.running == [(0.0, 1), (1.0, 1), (2.0, 1), (3.0, 1), (4.0, 0)]
    assert not any((report.dropped, report.offloaded, report.preempted, report.recomputed_tokens, report.moved_bytes))


def test_who_arrives_in_a_round_comes_with_the_next_and_the_clock_waits_for_nobody_else() -> None:
    """The second comes while the first one's prompt runs; the third when everybody has gone."""
    report = run(full(100), [arrival(5, 2), arrival(3, 1, at_s=0.2), arrival(1, 1, at_s=10.0)], TENTHS)
    assert report.seconds == pytest.approx(10.1)
    assert report.num_rounds == 3
    # 0 to 0.5; 0.2 to 0.9, behind the four tokens of the second round; 10 to 10.1.
    assert report.first_token_s == pytest.approx({"mean": 1.3 / 3, "50": 0.5, "90": 0.7, "99": 0.7})
    assert report.inter_token_s == pytest.approx({"mean": 0.4, "50": 0.4, "90": 0.4, "99": 0.4})
    assert report.time_mean_running == pytest.approx((1 * 0.5 + 2 * 0.4 + 1 * 0.1) / 10.1)
    assert report.mean_running == pytest.approx(4 / 3)
    assert report.used_bytes["full"] == pytest.approx(TOKEN_BYTES * (5 * 0.5 + 9 * 0.4 + 1 * 0.1) / 10.1)
    times, running = zip(*report.running)
    assert times == pytest.approx((0.0, 0.5, 0.9, 10.0, 10.1)) and running == (1, 2, 0, 1, 0)


def test_at_once_the_prompts_share_a_round() -> None:
    report = run(full(100), [arrival(4, 3), arrival(4, 2)], TENTHS)
    assert report.first_token_s["mean"] == pytest.approx(0.8)
    assert report.inter_token_s == pytest.approx({"mean": 0.5 / 3, "50": 0.2, "90": 0.2, "99": 0.2})
    assert report.seconds == pytest.approx(0.8 + 0.2 + 0.1)


def test_a_prompt_in_chunks_gives_its_first_token_with_the_last() -> None:
    report = run(full(100), [arrival(10, 2)], step_tokens=4, max_running=4)
    assert report.first_token_s["mean"] == 3.0 and report.seconds == 4.0


TWO = [arrival(4, 5), arrival(4, 5)]  # 8 tokens each at their ends, where there is room for 12
TIGHT: dict[str, Any] = {"headroom_steps": 1, "max_running": 4}


def test_who_is_dropped_is_computed_again() -> None:
    """Both hold six tokens after three rounds; then the second goes until the first is through."""
    report = run(full(12), TWO, **TIGHT, costs=RECOMPUTED)
    assert (report.dropped, report.offloaded, report.recomputed_tokens) == (1, 0, 6)
    assert report.retractions_per_1000 == 500
    assert (report.num_rounds, report.seconds) == (7, 7.0)
    assert report.first_token_s["mean"] == 1.0  # and not once more
    # The first: four of a second. The second: two, then three seconds until it is back, then one.
    assert report.inter_token_s == {"mean": 10 / 8, "50": 1.0, "90": 3.0, "99": 3.0}
    assert report.mean_running == pytest.approx((2 * 3 + 1 * 4) / 7)
    assert report.new_tokens_per_s == pytest.approx(10 / 7)
    assert report.used_bytes["full"] == pytest.approx(TOKEN_BYTES * (8 + 10 + 12 + 7 + 8 + 7 + 8) / 7)


def test_who_is_offloaded_is_charged_for_both_ways() -> None:
    device = replace(A_SECOND_EACH, host_bytes_per_s=6.0 * TOKEN_BYTES)
    report = run(full(12), TWO, device, **TIGHT, costs=OFFLOADED, host_memory=6 * TOKEN_BYTES)
    assert (report.dropped, report.offloaded, report.recomputed_tokens) == (0, 1, 0)
    assert report.host_bytes == 2 * 6 * TOKEN_BYTES
    assert (report.num_rounds, report.seconds) == (7, 9.0)
    # The fourth and the sixth round last two seconds.
    assert report.inter_token_s["mean"] == pytest.approx((1 + 1 + 2 + 1 + 1 + 1 + 5 + 1) / 8)
    assert report.inter_token_s["99"] == 5.0


def test_without_room_on_the_host_nothing_goes_there() -> None:
    report = run(full(12), TWO, **TIGHT, costs=OFFLOADED, host_memory=6 * TOKEN_BYTES - 1)
    assert (report.dropped, report.offloaded, report.host_bytes) == (1, 0, 0)


def test_a_more_important_one_takes_the_place_of_another() -> None:
    report = run(full(12), [arrival(6, 6), arrival(6, 2, at_s=1.5, priority=1)], **TIGHT, costs=RECOMPUTED)
    assert (report.preempted, report.dropped) == (1, 1)
    assert report.first_token_s["mean"] == pytest.approx((1.0 + 1.5) / 2)


def test_time_begins_with_the_first_arrival() -> None:
    """As with a part of a trace, whose times are those of the whole; also where these are large."""
    arrivals = [arrival(5, 2), arrival(3, 1, at_s=0.25), arrival(1, 1, at_s=16.0)]
    expected = run(full(100), arrivals, TENTHS)
    for start_s in (-100.0, 3600.0, 2.0**40):
        assert run(full(100), [replace(each, at_s=each.at_s + start_s) for each in arrivals], TENTHS) == expected


def test_arrivals_may_be_ages_apart() -> None:
    report = run(full(100), [arrival(5, 2), arrival(3, 1, at_s=1e12)])
    assert report.num_completed == 2 and report.first_token_s["99"] == 1.0
    assert report.time_mean_running == pytest.approx(3e-12) and report.mean_running == 1.0


@pytest.mark.parametrize("too_long", [arrival(12, 2), arrival(2, 12), arrival(1 << 40, 1), arrival(3, 1 << 40)])
def test_what_the_arena_cannot_hold_is_refused_and_counted(too_long: Arrival) -> None:
    told: list[tuple[int, int]] = []
    report = run(full(12), [arrival(2, 1), too_long, arrival(2, 1)], progress=lambda *done: told.append(done), **TIGHT)
    assert (report.num_completed, report.num_refused, report.num_requests) == (2, 1, 3)
    assert told[-1] == (3, 3)
    assert run(full(12), [too_long]).seconds == 0.0


def test_moves_are_charged_twice_their_bytes() -> None:
    """A row that leaves a hole behind it in the low band, which the other one's growth then takes."""
    source = plan([layer(State(), width=60), layer(Full())], memory=1024, page_size=1)
    arrivals = generate_trace(60, prompt_tokens=6, new_tokens=12, spread=0.6, seed=1)
    free = run(source, arrivals, headroom_steps=1, costs=RECOMPUTED)
    charged = run(source, arrivals, replace(A_SECOND_EACH, bytes_per_s=16.0), headroom_steps=1, costs=RECOMPUTED)
    assert free.moved_bytes == charged.moved_bytes > 0
    assert charged.seconds == pytest.approx(free.seconds + 2 * charged.moved_bytes / 16)


# Splits

STATE_AND_FULL = [layer(State(), width=40), layer(Full())]  # 160 bytes a request, 16 a token


def test_fixed_pools_run_what_the_smaller_one_holds() -> None:
    source = plan(STATE_AND_FULL, memory=4096, page_size=1)
    arrivals = [arrival(10, 4)] * 9
    report = run(source, arrivals, split={"state": 0.12, "full": 0.88}, headroom_steps=1)
    assert report.max_running == 3  # states in 491 bytes
    assert report.seconds == 3 * 4.0
    assert set(report.idle_bytes) == set(report.used_bytes) == {"state", "full"}
    assert report.used_bytes["state"] == 3 * 160
    assert report.idle_bytes["full"] > 2500 > 160 > report.idle_bytes["state"]
    arena = run(source, arrivals, headroom_steps=1)
    assert arena.max_running == 9 and arena.seconds == 4.0
    assert set(arena.idle_bytes) == {"arena"}


def test_a_split_that_holds_no_request_is_refused() -> None:
    with pytest.raises(PlanError, match="cannot hold one request"):
        run(plan(STATE_AND_FULL, memory=4096, page_size=1), [arrival(10, 4)], split={"state": 0.01, "full": 0.99})


def test_no_shares_are_no_split() -> None:
    source = plan(STATE_AND_FULL, memory=4096, page_size=1)
    assert run(source, [arrival(10, 4)], split={}) == run(source, [arrival(10, 4)])


def test_one_pool_alone_is_the_arena() -> None:
    arrivals = generate_trace(40, prompt_tokens=10, new_tokens=10, spread=0.5, rate_per_s=1)
    arena, pools = (run(full(60), arrivals, split=split) for split in (None, {"full": 1.0}))
    assert replace(pools, idle_bytes={}) == replace(arena, idle_bytes={})


# Around it


def test_rounds_are_shown_as_they_are_decided() -> None:
    seen: list[tuple[Scheduler, Round]] = []
    report = run(full(12), TWO, **TIGHT, costs=RECOMPUTED, on_round=lambda *both: seen.append(both))
    assert [round.number for _, round in seen] == list(range(1, report.num_rounds + 1))
    assert [len(round.dropped) for _, round in seen] == [0, 0, 0, 1, 0, 0, 0]
    with pytest.raises(Exception, match="closed"):
        seen[0][0].pool.stats()


def test_arrivals_that_make_no_replay() -> None:
    with pytest.raises(TraceError, match="no arrivals"):
        run(full(12), [])
    with pytest.raises(TraceError, match="arrival 2 comes at 3.0 s, and the one behind it at 1.0 s"):
        run(full(12), [arrival(1, 1), arrival(1, 1, at_s=3.0), arrival(1, 1, at_s=1.0)])
    with pytest.raises(TraceError, match="arrival 2 never comes"):
        run(full(12), [arrival(1, 1), arrival(1, 1, at_s=float("inf"))])
    with pytest.raises(TraceError, match="arrival 1 never comes"):
        run(full(12), [arrival(1, 1, at_s=float("inf"))])


def test_a_report_is_one_json_object() -> None:
    report = run(full(12), TWO, **TIGHT)
    fields = json.loads(report.to_json())
    assert fields["num_completed"] == 2 and fields["running"][0] == [0.0, 2]
    assert Report(**fields | {"running": [tuple(point) for point in fields["running"]]}) == report


def test_percentiles_are_of_nearest_rank() -> None:
    values = np.arange(10, 0, -1).astype(float)
    assert _percentiles(values, np.ones(10)) == {"mean": 5.5, "50": 5.0, "90": 9.0, "99": 10.0}
    weighted = _percentiles(np.array([5.0, 1.0, 7.0]), np.array([1, 99, 0]))
    assert weighted == {"mean": pytest.approx(1.04), "50": 1.0, "90": 1.0, "99": 1.0}
    assert _percentiles(np.zeros(0), np.zeros(0)) == {"mean": 0.0, "50": 0.0, "90": 0.0, "99": 0.0}


def test_of_many_rounds_a_thousand_points_are_kept() -> None:
    began_s = np.arange(5000.0)
    points = _points(began_s, began_s + 1, np.arange(5000))
    assert len(points) == 1000 and points[0] == (0.0, 0) and points[-1] == (5000.0, 0)
    assert _points(np.zeros(0), np.zeros(0), np.zeros(0, np.int64)) == []


def test_windows_give_back_what_is_behind_them() -> None:
    """At the end of the round in which it falls behind: of 30 tokens and more three are left for the next one."""
    source = plan([layer(Full()), layer(Window(4))], memory=8192, page_size=1)
    report = run(source, [arrival(30, 31)])
    assert report.used_bytes == {"window_4": 16 * 3, "full": 16 * (30 + 60) / 2}


@pytest.mark.parametrize("lifetime", [Window(4), Chunk(4), State()], ids=str)
def test_models_without_full_attention_are_replayed_too(lifetime: Lifetime) -> None:
    """Nothing there grows with a request, so that its length is bounded otherwise."""
    source = plan([layer(lifetime)], memory=4096, page_size=1)
    report = run(source, [arrival(70, 30), arrival(1 << 40, 1), arrival(1, 1 << 40)], max_running=2)
    assert (report.num_completed, report.num_refused) == (1, 2)
    assert report.seconds == 30.0


def test_a_tenth_of_an_hour_of_twenty_requests_a_second_is_soon_over() -> None:
    """An hour takes less than a minute of a processor of its own; these have to share theirs with other tests."""
    config = GptOssConfig(num_hidden_layers=24, num_local_experts=32)
    arrivals = generate_trace(7200, prompt_tokens=1000, new_tokens=200, spread=0.5, rate_per_s=20)
    began = time.thread_time()
    report = replay(
        plan(config, memory="60GiB", page_size=16),
        arrivals,
        work=work_of(config),
        device=DEVICES["h200"],
        max_running=512,
    )
    assert time.thread_time() - began < 30
    assert report.num_completed == 7200 and report.seconds > 350
