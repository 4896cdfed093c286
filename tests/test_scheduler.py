"""The scheduler's rounds: what is asked, and what is run; one behaviour a test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pools import layer, make_pool
from scheduling import CHEAP_HOST, Loop, known, launch, live_pages, scheduler_of

from torch_uma.errors import OutOfMemory, PlanError, SequenceError
from torch_uma.layout import Full, Layer, Memory, Row, State
from torch_uma.scheduling import Request, Scheduler
from torch_uma.scheduling.deciding import decide
from torch_uma.scheduling.decision import Standing

# What is asked


def test_a_need_says_what_a_request_takes_at_its_fullest() -> None:
    scheduler = scheduler_of("hybrid", memory=4096)
    need = scheduler.quote(9, 4)  # 12 tokens are stored
    assert need.num_tokens == 13
    assert need.pages == {"state": 1, "window_7": 3, "full": 3}
    assert need.bytes == {"state": 80, "window_7": 3 * 128, "full": 3 * 64}
    assert need and need.fits_empty and need.now is not None and need.now.how == "in_place"
    assert str(need) == ("13 tokens need 80 bytes of state, 384 bytes of window_7, 192 bytes of full; 656 bytes in all")


def test_a_need_is_false_where_the_prompt_does_not_fit_now() -> None:
    scheduler = scheduler_of()
    other = scheduler.pool.add(40)
    need = scheduler.quote(30, 2)
    assert need.fits_empty and not need
    assert need.now is not None and need.now.binding == "full" and need.now.relief == {"full": 3}
    other.free()
    assert scheduler.quote(30, 2)


def test_a_need_can_be_asked_of_what_no_table_holds() -> None:
    scheduler = scheduler_of()
    need = scheduler.quote(10**6, 10**6)
    assert not need and not need.fits_empty and need.now is None


def test_a_request_beyond_the_arena_is_refused_with_what_would_help() -> None:
    scheduler = scheduler_of()
    assert scheduler.max_request_tokens == 61
    scheduler.submit(60, 1)
    before = known(scheduler)
    told = "60 tokens and 2 new ones is longer than the 61 .* bytes in all, .* give the arena more memory"
    with pytest.raises(OutOfMemory, match=told) as raised:
        scheduler.submit(60, 2)
    assert not raised.value.quote.fits_empty and raised.value.quote.demand == (16,)
    assert known(scheduler) == before


def test_a_scheduler_of_what_is_no_pool_is_refused() -> None:
    with pytest.raises(PlanError, match="over a CachePool, not Plan"):
        Scheduler(make_pool("full", memory=1024, page_size=4).plan)  # type: ignore[arg-type]


def test_a_request_beyond_what_the_scheduler_takes_is_refused() -> None:
    scheduler = scheduler_of(max_request_tokens=20)
    scheduler.submit(10, 10)
    with pytest.raises(SequenceError, match="longer than the 20 that are taken"):
        scheduler.submit(10, 11)
    pool = make_pool("full", memory=1024, page_size=4, max_tokens=16)
    with pytest.raises(SequenceError, match="longer than the 17 that are taken"):
        Scheduler(pool).submit(16, 2)


@pytest.mark.parametrize("split", [{"full": 0.25}, {"state": 0.9}])
def test_a_split_pool_takes_what_its_frozen_frontiers_hold(split: dict[str, float]) -> None:
    pool = make_pool([layer(Full()), layer(State(), width=20)], memory=1024, page_size=4, split=split)
    scheduler = Scheduler(pool)
    most = scheduler.max_request_tokens
    assert (
        most
        < Scheduler(make_pool([layer(Full()), layer(State(), width=20)], memory=1024, page_size=4)).max_request_tokens
    )
    with pytest.raises((OutOfMemory, SequenceError)):
        scheduler.submit(most, 1)
    loop = Loop(scheduler)
    scheduler.submit(1, most - 1)
    scheduler.submit(most - 1, 1)
    loop.run(2 * most)


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (-1, 5), (1.5, 1), ("9", 1), (5, None)])
def test_lengths_that_make_no_sense_are_refused(numbers: tuple[Any, Any]) -> None:
    scheduler = scheduler_of()
    before = known(scheduler)
    for ask in (scheduler.submit, scheduler.quote):
        with pytest.raises(SequenceError):
            ask(*numbers)
    with pytest.raises((SequenceError, OutOfMemory)):
        scheduler.submit(10**30, 1)
    for priority in (1.5, None, 1 << 40):
        with pytest.raises(SequenceError, match="priority"):
            scheduler.submit(1, 1, priority=priority)  # type: ignore[arg-type]
    assert known(scheduler) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_running": 13}, "make it with max_sequences=13"),
        ({"max_running": 0}, "at least 1"),
        ({"max_running": 8, "step_tokens": 7}, "raise step_tokens or lower max_running"),
        ({"step_tokens": 0}, "at least 1"),
        ({"reserve_steps": 0}, "at least 1"),
        ({"headroom_steps": 0}, "at least 1"),
        ({"patience_rounds": 0}, "at least 1"),
        ({"max_request_tokens": 62}, "cannot hold one request of 62 tokens.*give the pool more memory"),
        ({"max_request_tokens": 1}, "at least 2"),
        ({"host_memory": "much"}, "^host_memory='much'"),
    ],
)
def test_a_scheduler_that_could_not_work_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        scheduler_of(**arguments)


def test_a_pool_that_holds_no_request_is_refused() -> None:
    pool = make_pool([layer(Full()), layer(State(), width=20)], memory=1024, split={"full": 0.0})
    with pytest.raises(PlanError, match="cannot hold one request.*give it more memory"):
        Scheduler(pool)


def test_prompts_of_states_that_start_anew_come_whole() -> None:
    row = Row(name="ssm", shape=(4,), dtype=torch.float32)
    layers = [layer(Full()), Layer(memories=(Memory(lifetime=State(), rows=(row,)),), restarted_by="MambaMixer")]
    with pytest.raises(PlanError, match="MambaMixer starts its states anew"):
        scheduler_of(layers, memory=2048, chunked=True)
    scheduler = scheduler_of(layers, memory=2048, step_tokens=12)
    requests = [scheduler.submit(30, 3), scheduler.submit(8, 3), scheduler.submit(5, 3)]
    loop = Loop(scheduler)
    counts: dict[Request, list[int]] = {request: [] for request in requests}
    while scheduler:
        for forward in loop.round().forwards:
            for request, count in zip(forward.requests, forward.counts):
                counts[request].append(count)
    assert counts == {requests[0]: [30, 1, 1], requests[1]: [8, 1, 1], requests[2]: [5, 1, 1]}


# What is run


def test_prompts_come_in_chunks_within_the_tokens_of_a_step() -> None:
    scheduler = scheduler_of("hybrid", memory=8192, step_tokens=10, max_running=4)
    requests = [scheduler.submit(length, 20) for length in (23, 4, 17, 9)]
    loop = Loop(scheduler)
    firsts = []
    for _ in range(12):
        round = loop.round()
        assert sum(sum(forward.counts) for forward in round.forwards) <= 10
        prompts = [request for forward in round.forwards if not forward.is_decode for request in forward.requests]
        firsts += sorted(map(requests.index, prompts))
    assert firsts == sorted(firsts)
    loop.run(100)
    assert scheduler.stats().prompt_tokens == 23 + 4 + 17 + 9


def test_equally_long_pieces_of_prompts_are_run_together_and_others_apart() -> None:
    scheduler = scheduler_of(memory=4096, page_size=1)
    for length in (7, 5, 7):
        scheduler.submit(length, 2)
    round = Loop(scheduler).round()
    assert [forward.counts for forward in round.forwards] == [[7, 7], [5]]
    assert [forward.num_new_tokens for forward in round.forwards] == [7, 5]


def test_packed_prompts_are_run_in_one_forward() -> None:
    scheduler = scheduler_of(memory=4096, page_size=1, packed=True)
    for length in (7, 5, 7):
        scheduler.submit(length, 2)
    loop = Loop(scheduler)
    (forward,) = loop.round().forwards
    assert forward.num_new_tokens == [7, 5, 7] and forward.starts.tolist() == [0, 0, 0]
    (forward,) = loop.round().forwards
    assert forward.is_decode and forward.num_new_tokens == 1 and forward.starts.tolist() == [7, 5, 7]


def test_even_forwards_are_over_requests_of_one_length() -> None:
    scheduler = scheduler_of(memory=4096, page_size=1, even=True, step_tokens=20)
    for length in (7, 5, 7, 11):
        scheduler.submit(length, 9)
    loop = Loop(scheduler)
    while scheduler:
        for forward in loop.round().forwards:
            assert len(set(forward.starts.tolist())) == 1 and isinstance(forward.num_new_tokens, int)


def test_a_request_of_one_new_token_is_its_prompt_alone() -> None:
    scheduler = scheduler_of()
    request = scheduler.submit(6, 1)
    round = scheduler.schedule()
    assert round.last_tokens == (request,) and round.admitted == (request,)
    launch(scheduler.pool, round)
    assert scheduler.complete(round) == [request]
    assert request.num_new_tokens == 1 and request.state == "finished" and request.sequence is None
    assert not scheduler and not scheduler.schedule() and live_pages(scheduler.pool) == 0


def test_who_has_all_tokens_is_let_go_of_before_the_last_is_known() -> None:
    scheduler = scheduler_of()
    request = scheduler.submit(6, 1)
    first = scheduler.schedule()
    launch(scheduler.pool, first)
    assert not scheduler.schedule()
    assert request.sequence is None and request.state == "running" and live_pages(scheduler.pool) == 0
    assert scheduler.complete(first) == [request] and len(scheduler) == 0


def test_a_finish_in_the_middle_moves_at_most_one_state() -> None:
    scheduler = scheduler_of([layer(Full()), layer(State(), width=1 << 14)], memory=1 << 20, page_size=4)
    for _ in range(9):
        scheduler.submit(5, 200)
    loop = Loop(scheduler)
    for _ in range(10):
        loop.round()

    def moved() -> int:
        return next(subpool.moved_pages for subpool in scheduler.pool.stats().subpools if subpool.name == "state")

    def slots() -> list[int]:
        books = scheduler.pool.sequences
        cells = books.tables.origin[books.lifespans.states[0], scheduler._decoding.rows]
        places: list[int] = books.allocator.v2p[books.tables.mirror[cells]].tolist()
        return places

    assert slots() == list(range(slots()[0], slots()[0] + 9))
    for place, num_left in ((4, 8), (0, 7), (6, 6)):
        before = moved()
        request = scheduler._decoding.requests[place]
        loop.stops[request] = request.num_new_tokens + 1
        for _ in range(40):
            loop.round()
        assert len(scheduler.running) == num_left and moved() - before <= 1
        assert slots() == list(range(slots()[0], slots()[0] + num_left))


def test_nothing_that_is_decided_changes_anything() -> None:
    scheduler = scheduler_of("hybrid", memory=2048, step_tokens=32, host_memory=600, costs=CHEAP_HOST, gather=True)
    loop = Loop(scheduler, overlap=True)
    num_retracted = 0
    for number in range(60):
        if number < 40:
            scheduler.submit(7 + number % 11, 12, priority=number // 3 % 2)
        scheduler._settle()
        scheduler._let_go_of_given()
        standing = Standing(
            books=scheduler.pool.sequences,
            allocator=scheduler.pool.allocator,
            prompts=scheduler._prompting.requests,
            decoding=scheduler._decoding,
            waiting=scheduler._waiting,
            round=scheduler._clock.round,
            num_completed=scheduler._completed,
            host_bytes=scheduler.stats().host_bytes,
            num_held_back=scheduler._num_held_back,
        )
        before = known(scheduler)
        decisions = [decide(standing, scheduler._outlook, scheduler._limits, scheduler.costs) for _ in range(2)]
        assert known(scheduler) == before and decisions[0] == decisions[1]
        num_retracted += len(decisions[0].offloaded) + len(decisions[0].dropped)
        loop.round()
    loop.run(500)
    assert num_retracted >= 3
