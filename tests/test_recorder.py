"""Every number of a report, against what is counted anew from the rounds of random replays."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from pools import layer

from torch_uma.layout import Chunk, Full, State, Window
from torch_uma.plan import Plan, plan
from torch_uma.scheduling import Costs, Request, Round, Scheduler
from torch_uma.simulate import Arrival, Attention, Device, Report, Work, replay

KINDS = [
    [Full()],
    [Window(4)],
    [State()],
    [State(), Full()],
    [Window(2), Window(6), Full()],
    [State(), Window(3), Full()],
    [Chunk(4), Full()],
]
WORK = Work(
    weight_bytes=100.0,
    token_flops=3.0,
    head_flops=2.0,
    state_bytes=30.0,
    attention=(Attention(window=3, num_layers=2, token_bytes=16.0, pair_flops=1.0),),
)
DEVICE = Device(name="slow", flops_per_s=100.0, bytes_per_s=1000.0, host_bytes_per_s=300.0, forward_s=0.25)
COSTS = [Costs(token_s=1e-9, copy_bytes_per_s=1.0), Costs(token_s=1e6, copy_bytes_per_s=1e9)]  # dropped, or offloaded


@dataclass
class Seen:
    """A round as it was decided, and how things stood at its end."""

    round: Round
    num_running: int
    lengths: dict[Request, int]  # of the sequences that are there once it is decided
    moved_bytes: int = 0
    held_bytes: tuple[int, ...] = ()


def arrivals_of(draw: random.Random) -> list[Arrival]:
    arrivals, at_s = [], 0.0
    for _ in range(draw.randint(1, 20)):
        arrivals.append(
            Arrival(
                at_s=at_s,
                num_prompt_tokens=draw.choice([1, 3, 9, draw.randint(1, 60)]),
                num_new_tokens=draw.choice([1, 2, 8, draw.randint(1, 30)]),
                priority=draw.choice([0, 0, 0, 1]),
            )
        )
        at_s += draw.choice([0.0, 0.0, 0.7, 2.0, 500.0])
    return arrivals


def watched(source: Plan, arrivals: list[Arrival], **options: Any) -> tuple[Report, list[Seen]]:
    rounds: list[Seen] = []

    def decided(scheduler: Scheduler, round: Round) -> None:
        if not rounds:
            complete = scheduler.complete

            def completed(*arguments: Any) -> list[Request]:
                stats = scheduler.pool.stats()
                rounds[-1].moved_bytes = stats.moved_bytes
                rounds[-1].held_bytes = tuple(subpool.live_bytes for subpool in stats.subpools)
                return complete(*arguments)

            scheduler.complete = completed  # type: ignore[method-assign]
        running = scheduler.running
        lengths = {request: request.sequence.length for request in running if request.sequence is not None}
        rounds.append(Seen(round, len(running), lengths))

    report = replay(source, arrivals, work=WORK, device=DEVICE, on_round=decided, **options)
    return report, rounds


def ranked(values: list[float]) -> dict[str, float]:
    """The mean, and percentiles by nearest rank."""
    if not values:
        return dict.fromkeys(("mean", "50", "90", "99"), 0.0)
    ordered = sorted(values)
    found = {str(percent): ordered[math.ceil(percent * len(ordered) / 100) - 1] for percent in (50, 90, 99)}
    return {"mean": sum(values) / len(values)} | found


def counted_anew(source: Plan, arrivals: list[Arrival], rounds: list[Seen]) -> dict[str, Any]:
    """What the report has to say; the clock, too, is kept anew."""
    now_s, moved_bytes, host_bytes, recomputed = 0.0, 0, 0, 0
    times: list[tuple[float, float]] = []
    firsts: list[float] = []
    gaps: list[float] = []
    last_s: dict[Request, float] = {}
    lengths: dict[Request, int] = {}
    finished: Counter[Request] = Counter()
    for seen in rounds:
        who = [request for forward in seen.round.forwards for request in forward.requests]
        began_s = max(now_s, min(request.tag.at_s for request in who))
        host_bytes_before = host_bytes
        host_bytes += sum(source.bytes_per_sequence(lengths[request]) for request in seen.round.offloaded)
        host_bytes += sum(source.bytes_per_sequence(seen.lengths[request]) for request in seen.round.resumed)
        recomputed += sum(lengths[request] for request in seen.round.dropped)
        now_s = began_s + sum(WORK.seconds(forward, DEVICE) for forward in seen.round.forwards)
        now_s += 2 * (seen.moved_bytes - moved_bytes) / DEVICE.bytes_per_s
        now_s += (host_bytes - host_bytes_before) / DEVICE.host_bytes_per_s
        moved_bytes = seen.moved_bytes
        times.append((began_s, now_s))
        lengths = dict(seen.lengths)
        for forward in seen.round.forwards:
            for request, count, samples in zip(forward.requests, forward.counts, forward.samples.tolist()):
                lengths[request] += count
                if samples:
                    finished[request] += 1
                    since = gaps if request in last_s else firsts
                    since.append(now_s - last_s.get(request, request.tag.at_s))
                    last_s[request] = now_s
    lasted = [ended_s - began_s for began_s, ended_s in times]
    retracted = sum(len(seen.round.dropped) + len(seen.round.offloaded) for seen in rounds)
    held = [sum(map(math.prod, zip(lasted, bytes_of))) for bytes_of in zip(*(seen.held_bytes for seen in rounds))]
    return {
        "num_requests": len(arrivals),
        "num_completed": len(finished),
        "num_refused": len(arrivals) - len(finished),
        "seconds": now_s,
        "num_rounds": len(rounds),
        "requests_per_s": len(finished) / now_s,
        "new_tokens_per_s": sum(finished.values()) / now_s,
        "first_token_s": ranked(firsts),
        "inter_token_s": ranked(gaps),
        "mean_running": sum(seen.num_running for seen in rounds) / len(rounds),
        "time_mean_running": sum(seen.num_running * s for seen, s in zip(rounds, lasted)) / now_s,
        "max_running": max(seen.num_running for seen in rounds),
        "dropped": sum(len(seen.round.dropped) for seen in rounds),
        "offloaded": sum(len(seen.round.offloaded) for seen in rounds),
        "recomputed_tokens": recomputed,
        "retractions_per_1000": 1000 * retracted / len(finished),
        "moved_bytes": moved_bytes,
        "host_bytes": host_bytes,
        "used_bytes": dict(zip((subpool.name for subpool in source.subpools), (each / now_s for each in held))),
    }


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: " ".join(map(str, kinds)))
def test_a_report_is_what_its_rounds_add_up_to(kinds: list[Any]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(30):
        print(f"seed {seed}")
        draw = random.Random(seed)
        layers = [layer(kind, width=32 if isinstance(kind, State) else 8) for kind in kinds]
        source = plan(layers, memory=draw.choice([4096, 8192]), page_size=draw.choice([1, 2, 3]))
        arrivals, max_running = arrivals_of(draw), draw.choice([1, 4, 16])
        report, rounds = watched(
            source,
            arrivals,
            max_running=max_running,
            step_tokens=max_running + draw.choice([0, 1, 16]),
            headroom_steps=draw.choice([1, 16]),
            host_memory=draw.choice([0, 10**6]),
            even=draw.choice([False, False, True]),
            costs=draw.choice(COSTS),
            split=draw.choice([None, dict.fromkeys([s.name for s in source.subpools], 1 / len(kinds))]),
        )
        if not rounds:
            continue
        expected = counted_anew(source, arrivals, rounds)
        for name, value in expected.items():
            assert getattr(report, name) == pytest.approx(value, rel=1e-9), name
        if "arena" in report.idle_bytes:
            held = sum(report.used_bytes.values()) + report.idle_bytes["arena"]
            assert held == pytest.approx(source.arena_bytes)
        seen.update(key for key in ("dropped", "offloaded", "num_refused", "moved_bytes") if expected[key])
    print(seen)
    assert len(kinds) == 1 or seen["dropped"] and seen["offloaded"]
