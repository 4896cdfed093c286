"""Prompts that share a forward: who is held back for others, for how long, and who never is."""

from __future__ import annotations

from typing import Any

import pytest
from scheduling import Loop, scheduler_of

from torch_uma.scheduling import Request, Scheduler


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
