"""A replay is what a real loop does: the same requests, plan and settings, compared round by round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from served import model_of, prompt_of

import torch_uma.runs
from torch_uma import CachePool, ServingLoop
from torch_uma.plan import Plan
from torch_uma.scheduling import Costs, Round, Scheduler
from torch_uma.simulate import Arrival, Device, Work, at_once, generate_trace, replay

MEMORY = {"gpt_oss": "128KiB", "qwen3_next": "128KiB"}
SETTINGS: dict[str, Any] = {"max_running": 8, "step_tokens": 40}
RECOMPUTED: dict[str, Any] = {"costs": Costs(token_s=1e-6, copy_bytes_per_s=1e9)}
OFFLOADED: dict[str, Any] = {"costs": Costs(token_s=1.0, copy_bytes_per_s=1e9), "host_memory": "48KiB"}
# Every forward takes a second, so that arrivals fall between rounds.
WORK = Work(weight_bytes=1.0, token_flops=1e-30, head_flops=0.0)
DEVICE = Device(name="slow", flops_per_s=1.0, bytes_per_s=1e30, host_bytes_per_s=1e30, forward_s=1.0)


@dataclass(frozen=True)
class Seen:
    """What there is of a round once it is decided; requests by their number of arrival."""

    admitted: tuple[int, ...]
    resumed: tuple[int, ...]
    dropped: tuple[int, ...]
    offloaded: tuple[int, ...]
    forwards: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[bool, ...]], ...]
    live_pages: tuple[int, ...]
    moved_bytes: int
    host_bytes: int
    num_submitted: int


def seen(scheduler: Scheduler, round: Round) -> Seen:
    stats = scheduler.pool.stats()
    return Seen(
        *(
            tuple(request.arrival for request in requests)
            for requests in (round.admitted, round.resumed, round.dropped, round.offloaded)
        ),
        forwards=tuple(
            (
                tuple(request.arrival for request in forward.requests),
                tuple(forward.counts),
                tuple(forward.starts.tolist()),
                tuple(forward.samples.tolist()),
            )
            for forward in round.forwards
        ),
        live_pages=tuple(subpool.live_pages for subpool in stats.subpools),
        moved_bytes=stats.moved_bytes,
        host_bytes=scheduler.stats().host_bytes,
        num_submitted=scheduler.stats().submitted,
    )


def in_replay(plan: Plan, arrivals: list[Arrival], **settings: Any) -> tuple[list[Seen], Any]:
    rounds: list[Seen] = []
    report = replay(
        plan,
        arrivals,
        work=WORK,
        device=DEVICE,
        on_round=lambda scheduler, round: rounds.append(seen(scheduler, round)),
        **settings,
    )
    return rounds, report


def in_earnest(
    name: str, pool: CachePool, arrivals: list[Arrival], num_submitted: list[int], **settings: Any
) -> tuple[list[Seen], Any]:
    """Serve them with a model; before each round so many have been submitted as in the replay."""
    rounds: list[Seen] = []
    waiting = list(arrivals)
    with ServingLoop(model_of(name), pool=pool, **settings) as loop:
        scheduler = loop.scheduler
        schedule = scheduler.schedule

        def watched() -> Round:
            round = schedule()
            rounds.append(seen(scheduler, round))
            return round

        scheduler.schedule = watched  # type: ignore[method-assign]
        while waiting or loop:
            target = num_submitted[len(rounds)]
            while scheduler.stats().submitted < target:
                arrival = waiting.pop(0)
                loop.submit(
                    prompt_of(arrival.num_prompt_tokens),
                    max_new_tokens=arrival.num_new_tokens,
                    priority=arrival.priority,
                )
            loop.step()
        return rounds, scheduler.stats()


@pytest.fixture(autouse=True)
def cheap_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are aligned wherever they can be, on whatever device: how fast it copies does not count here."""
    monkeypatch.setattr(torch_uma.runs, "_HOST_BYTES_PER_US", 1)
    monkeypatch.setattr(torch_uma.runs, "_ACCELERATOR_BYTES_PER_US", 1)


@pytest.mark.parametrize(
    ("retracted", "comes"),
    [(RECOMPUTED, "at once"), (OFFLOADED, "one by one")],
    ids=["recomputed, at once", "offloaded, one by one"],
)
@pytest.mark.parametrize("name", list(MEMORY))
def test_a_replay_is_what_a_loop_does(name: str, retracted: dict[str, Any], comes: str) -> None:
    seed = 7
    print(f"seed {seed}")
    made = generate_trace(20, prompt_tokens=16, new_tokens=40, spread=0.6, rate_per_s=0.2, seed=seed, longest_tokens=90)
    arrivals = [replace(arrival, priority=int(number % 5 == 4)) for number, arrival in enumerate(made)]
    if comes == "at once":
        arrivals = at_once(arrivals)
    settings = SETTINGS | retracted
    pool = CachePool(model_of(name), memory=MEMORY[name], page_size=4, max_sequences=8)
    with ServingLoop(model_of(name), pool=pool, **settings) as loop:
        is_packed = loop.scheduler._prompting._is_packed
    expected, report = in_replay(pool.plan, arrivals, packed=is_packed, **settings)
    real, stats = in_earnest(name, pool, arrivals, [each.num_submitted for each in expected], **settings)
    for number, (ours, theirs) in enumerate(zip(real, expected), 1):
        assert ours == theirs, f"round {number}"
    assert len(real) == len(expected) == report.num_rounds
    assert (report.dropped, report.offloaded, report.preempted) == (stats.dropped, stats.offloaded, stats.preempted)
    assert report.moved_bytes == pool.stats().moved_bytes > 0
    assert stats.offloaded > 0 if "host_memory" in retracted else stats.dropped > 0 and not stats.offloaded
    assert report.num_completed == stats.finished == len(arrivals) and report.mean_running > 2
    pool.close()


def test_prompts_come_in_together_in_both() -> None:
    """Where forwards are packed, those who have room are held back for others in the same rounds."""
    seed = 11
    print(f"seed {seed}")
    arrivals = at_once(
        generate_trace(30, prompt_tokens=8, new_tokens=30, spread=0.6, rate_per_s=1, seed=seed, longest_tokens=90)
    )
    settings: dict[str, Any] = {"max_running": 12, "step_tokens": 200, **RECOMPUTED}
    pool = CachePool(model_of("gpt_oss"), memory="1MiB", page_size=4, max_sequences=12)
    expected, _ = in_replay(pool.plan, arrivals, packed=True, **settings)
    real, _ = in_earnest("gpt_oss", pool, arrivals, [each.num_submitted for each in expected], **settings)
    assert real == expected
    one_by_one, _ = in_replay(pool.plan, arrivals, packed=True, gather=False, **settings)
    num_prompt_rounds, num_without = (sum(bool(each.admitted) for each in rounds) for rounds in (expected, one_by_one))
    assert num_prompt_rounds < 0.8 * num_without
    pool.close()
