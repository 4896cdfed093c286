"""Prompts that share a forward: who is held back for others, for how long, and who never is."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling import CHEAP_COMPUTING, CHEAP_HOST, Loop, scheduler_of
from served import assert_all_free, assert_as_alone, model_of, prompt_of, run, tight_pool

import torch_uma.scheduling.scheduler
from torch_uma import ServingLoop
from torch_uma.pool import CachePool
from torch_uma.scheduling import Costs, Request, Scheduler
from torch_uma.scheduling.deciding import decide
from torch_uma.scheduling.decision import Decision, Limits, Standing
from torch_uma.scheduling.outlook import Outlook
from torch_uma.sequence import Sequence


def crowded(num_running: int, num_waiting: int, **arguments: Any) -> tuple[Scheduler, Loop, list[Request]]:
    """So many decode, each to end a round after the one before, and others wait for their places."""
    num_prompt_tokens = arguments.pop("num_prompt_tokens", 4)
    scheduler = scheduler_of(
        memory=1 << 16,
        max_sequences=64,
        max_running=num_running,
        step_tokens=arguments.pop("step_tokens", 1024),
        packed=arguments.pop("packed", True),
        **arguments,
    )
    loop = Loop(scheduler)
    first = [scheduler.submit(4, 4 + number) for number in range(num_running)]
    loop.round()
    assert list(scheduler.running) == first
    return scheduler, loop, [scheduler.submit(num_prompt_tokens, 40) for _ in range(num_waiting)]


def fill_rows(pool: CachePool, num_free: int) -> list[Sequence]:
    """Sequences of others, so many that only so many rows are left."""
    return [pool.add(1) for _ in range(pool.sequences.num_free_rows - num_free)]


def admissions(loop: Loop) -> list[int]:
    return [len(round.admitted) for round in loop.rounds if round.admitted]


@pytest.mark.parametrize("overlap", [False, True])
def test_those_who_wait_come_in_together(overlap: bool) -> None:
    counts = {}
    for gather in (False, True):
        scheduler, loop, waiting = crowded(20, 40, gather=gather)
        loop.overlap = overlap
        loop.run(400)
        assert len(loop.finished) == 60 and all(request.num_new_tokens == 40 for request in waiting)
        counts[gather] = admissions(loop)
    assert sum(counts[False]) == sum(counts[True]) == 60
    assert counts[False][:4] == [20, 1, 1, 1]
    assert counts[True][:3] == [20, 3, 3]  # 1 + 2 places that stood empty, and with the third it is more than 20 / 4
    assert len(counts[True]) < len(counts[False]) / 2


def test_it_is_so_where_forwards_are_packed() -> None:
    for packed, together in ((False, 1), (True, 3)):
        _, loop, _ = crowded(20, 40, packed=packed)
        loop.run(400)
        assert admissions(loop)[1] == together


def test_nobody_is_held_back_for_nobody() -> None:
    """The last one who waits comes in at once, and so does one who comes where there is room."""
    scheduler, loop, (waiting,) = crowded(20, 1)
    while not loop.finished:
        loop.round()
    assert loop.round().admitted == (waiting,)
    for _ in range(2):
        loop.round()
    late = scheduler.submit(4, 2)
    assert loop.round().admitted == (late,)


def test_few_who_decode_are_waited_for_by_nobody() -> None:
    """Of four places, one that stands empty costs as much as a forward."""
    _, loop, _ = crowded(4, 20)
    loop.run(400)
    assert admissions(loop)[:3] == [4, 1, 1]


@pytest.mark.parametrize(("num_prompt_tokens", "together"), [(4, 5), (20, 3)])
def test_prompts_that_fill_a_quarter_of_a_step_wait_no_longer(num_prompt_tokens: int, together: int) -> None:
    _, loop, _ = crowded(60, 60, step_tokens=240, num_prompt_tokens=num_prompt_tokens)
    loop.run(400)
    assert admissions(loop)[:3] == [60, together, together]


def test_a_more_important_one_comes_in_at_once() -> None:
    scheduler, loop, waiting = crowded(20, 40)
    while not loop.finished:
        loop.round()
    important = scheduler.submit(4, 4, priority=1)
    assert loop.round().admitted[0] is important
    assert all(request.state == "waiting" for request in waiting[1:])


def test_who_comes_before_all_others_is_not_held_back() -> None:
    """The first by rank goes on in every round, whatever becomes of the others."""
    scheduler, loop, _ = crowded(20, 40)
    first = scheduler.running[0]
    for _ in range(2):
        loop.round()
    scheduler._retract(first)
    assert loop.round().admitted == (first,)


def test_a_round_that_is_held_back_is_said_to_be_empty_of_prompts() -> None:
    scheduler, loop, _ = crowded(20, 40)
    while not loop.finished:
        loop.round()
    round = loop.round()
    assert round and not round.admitted and all(forward.is_decode for forward in round.forwards)
    assert scheduler.stats().submitted == 60 and len(scheduler.waiting) == 40


def test_nobody_waits_for_those_who_are_less_important() -> None:
    """All who run are as important as it is, but those who wait are not."""
    scheduler, loop, _ = crowded(20, 0)
    important = [scheduler.submit(4, 40, priority=1) for _ in range(20)]
    loop.round()
    assert set(scheduler.running) == set(important)
    for request in important[:2]:
        scheduler.cancel(request)
    late = scheduler.submit(4, 4, priority=1)
    scheduler.submit(4, 40)
    scheduler.submit(4, 40)
    assert loop.round().admitted[:1] == (late,)


def test_places_that_stood_empty_count_until_somebody_comes_in() -> None:
    """Others take the rows in every second round: who could come in in the rounds between does not wait for ever."""
    scheduler, loop, _ = crowded(20, 0)
    for request in scheduler.running[1:2]:
        scheduler.cancel(request)
    stays = [scheduler.submit(4, 100) for _ in range(20)]
    while scheduler.running != tuple(stays):
        loop.round()
    scheduler.cancel(stays[5])
    waiting = [scheduler.submit(4, 40) for _ in range(3)]
    for _ in range(4):
        assert not loop.round().admitted
        others = fill_rows(scheduler.pool, 0)
        assert not loop.round().admitted
        for sequence in others:
            sequence.free()
    assert loop.round().admitted == (waiting[0],)  # the fifth place that stood empty, of 19 who decode


@pytest.mark.parametrize("num_empty", [1, 2])
def test_nobody_waits_for_prompts_that_have_no_tokens_left_in_the_round(num_empty: int) -> None:
    scheduler = scheduler_of(memory=1 << 16, max_sequences=64, max_running=60, step_tokens=64, gather=True)
    loop = Loop(scheduler)
    first = [scheduler.submit(1, 80) for _ in range(60)]
    loop.round()
    for request in first[-num_empty:]:
        scheduler.cancel(request)
    waiting = [scheduler.submit(12, 20) for _ in range(10)]
    assert loop.round().admitted == (waiting[0],)


def test_nobody_waits_for_a_prompt_that_has_to_be_run_whole_and_alone() -> None:
    for num_prompt_tokens, is_held_back in ((70, True), (90, False)):
        scheduler, loop, _ = crowded(20, 0, step_tokens=100, chunked=False, gather=True)
        scheduler.cancel(scheduler.running[-1])
        small = scheduler.submit(4, 40)
        scheduler.submit(num_prompt_tokens, 40)
        assert loop.round().admitted == (() if is_held_back else (small,))


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_nobody_waits_for_one_whose_prompt_is_not_run_again(is_offloaded: bool) -> None:
    scheduler, loop, _ = crowded(20, 0, host_memory="1MiB")
    loop.round()  # from then on all decode
    dropped, other = scheduler.running[-2:]
    scheduler._retract(dropped)
    scheduler._retract(other, is_offloaded=is_offloaded)
    fill_rows(scheduler.pool, 1)
    assert loop.round().admitted == ((dropped,) if is_offloaded else ())


class Judge:
    """Beside a scheduler's decisions, what they would be if nobody were held back; and the rule, by its own account."""

    def __init__(self) -> None:
        self.num_empty = 0  # places that stood empty since somebody came in
        self.num_rounds_held = 0  # in which nobody came in though somebody could have

    def decide(self, standing: Standing, outlook: Outlook, limits: Limits, costs: Costs) -> Decision:
        decided = decide(standing, outlook, limits, costs)
        assert decided == decide(standing, outlook, limits, costs)
        free = decide(standing, outlook, replace(limits, gather_tokens=0), costs)
        if not standing.waiting:
            self.num_empty = 0
        self.num_empty += len(free.admitted)
        if self.holds_back(free, standing, limits):
            assert not any(decided[:-1]) and standing.decoding.requests, "there is something to run"
            self.num_rounds_held += 1
        else:
            assert decided[:-1] == free[:-1]
            if free.admitted or free.resumed:
                self.num_empty = 0
        return decided

    def holds_back(self, free: Decision, standing: Standing, limits: Limits) -> bool:
        if not free.admitted or len(free.admitted) == len(standing.waiting):
            return False
        if free.dropped or free.offloaded or free.resumed or standing.prompts:
            return False
        running = standing.decoding.requests
        other = next(islice(standing.waiting, len(free.admitted), None))
        is_unknown = other.last_round > standing.num_completed
        num_prompt_tokens = sum(count for _, count in free.chunks)
        has_tokens = len(running) + num_prompt_tokens < limits.step_tokens
        most = max(request.priority for request in free.admitted)
        if is_unknown or other.offloaded or not (has_tokens or other.priority > most):
            return False
        if any(request.priority < most for request in (*running, other)):
            return False
        if all(free.admitted[0].rank < request.rank for request in running):
            return False
        return self.num_empty < len(running) / 4 and num_prompt_tokens < limits.step_tokens // 4


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1 << 30),
    overlap=st.booleans(),
    costs=st.sampled_from([CHEAP_COMPUTING, CHEAP_HOST]),
    memory=st.sampled_from([2 << 10, 4 << 10, 1 << 16]),
    step_tokens=st.sampled_from([24, 32, 400]),
    patience_rounds=st.sampled_from([1, 20, 1000]),
)
def test_who_is_held_back_and_who_is_not(
    seed: int, overlap: bool, costs: Costs, memory: int, step_tokens: int, patience_rounds: int
) -> None:
    chance = random.Random(seed)
    scheduler = scheduler_of(
        memory=memory,
        max_sequences=24,
        step_tokens=step_tokens,
        packed=True,
        costs=costs,
        host_memory="1MiB",
        headroom_steps=2,
        patience_rounds=patience_rounds,
        max_running=20,
    )
    loop, requests, others = Loop(scheduler, overlap=overlap, is_checked=False), [], []
    judge = Judge()
    with patch.object(torch_uma.scheduling.scheduler, "decide", judge.decide):
        for _ in range(60):
            for _ in range(chance.choice([0, 0, 1, 2, 12])):
                priority = chance.choice([0, 0, 0, 0, 1])
                requests.append(scheduler.submit(chance.randint(1, 12), chance.randint(1, 24), priority=priority))
            if chance.random() < 0.1:
                scheduler.cancel(chance.choice(requests)) if requests else None
            if chance.random() < 0.2 and len(others) < 8 and scheduler.pool.quote(1):
                others += fill_rows(scheduler.pool, max(0, scheduler.pool.sequences.num_free_rows - 1))
            elif others and chance.random() < 0.2:
                others.pop().free()
            round = loop.round()
            assert round or not scheduler or overlap
        for sequence in others:
            sequence.free()
        loop.run(2000)
    assert all(request.is_done for request in requests)


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_those_of_each_prompt_alone(overlap: bool) -> None:
    """Sampled and greedy ones, of which a third do not fit until others are done."""
    model = model_of("gpt_oss")
    pool = tight_pool(model, "1MiB")
    loop = ServingLoop(model, pool=pool, max_running=16, step_tokens=300, overlap=overlap)
    asked = [
        {"max_new_tokens": 2 + number % 16, "do_sample": number % 2 == 1, "temperature": 1.3} for number in range(24)
    ]
    judge = Judge()
    with patch.object(torch_uma.scheduling.scheduler, "decide", judge.decide):
        generations = [
            loop.submit(prompt_of(4 + number % 3), seed=number, **options) for number, options in enumerate(asked)
        ]
        run(loop)
    for number, (generation, options) in enumerate(zip(generations, asked, strict=True)):
        assert_as_alone(model, generation, number, **options)
    assert judge.num_rounds_held
    loop.close()
    assert_all_free(pool)
