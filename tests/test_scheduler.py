"""The scheduler's rounds: what is asked, admitted, run, taken back and given up, one behaviour a test."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from pools import layer, make_pool, snapshot
from scheduling import Loop

from torch_uma.errors import ClosedError, OutOfMemory, PlanError, SequenceError, ThreadError
from torch_uma.layout import Full, Layer, Memory, Row, State
from torch_uma.pool import CachePool
from torch_uma.scheduling import Costs, Request, Round, Scheduler
from torch_uma.scheduling.deciding import Standing, decide

CHEAP_HOST = Costs(token_s=1.0, copy_bytes_per_s=1e12)  # offloading always costs less
CHEAP_COMPUTING = Costs(token_s=1e-9, copy_bytes_per_s=1.0)  # dropping does


def scheduler_of(
    kinds: str | list[Layer] = "full",
    *,
    memory: int = 1024,
    page_size: int = 4,
    max_sequences: int = 12,
    **arguments: Any,
) -> Scheduler:
    """Over a pool on the CPU: 15 pages of 4 tokens, if nothing else is said."""
    return Scheduler(make_pool(kinds, memory=memory, page_size=page_size, max_sequences=max_sequences), **arguments)


def launch(pool: CachePool, round: Round) -> None:
    for forward in round.forwards:
        pool.begin(forward.batch, forward.num_new_tokens).commit()


def live_pages(pool: CachePool) -> int:
    return sum(subpool.live_pages for subpool in pool.stats().subpools)


def known(scheduler: Scheduler) -> dict[str, Any]:
    """Everything that a scheduler knows, in a form that `==` compares."""
    requests = [*scheduler._waiting, *scheduler.running, *scheduler._given, *scheduler._leaving]
    decoding = scheduler._decoding
    return {
        "requests": [
            {name: getattr(request, name) for name in Request.__slots__ if name != "clock"} for request in requests
        ],
        "decoding": [
            decoding.requests,
            decoding.rows.tolist(),
            decoding.last_rounds.tolist(),
            decoding._ahead.tolist(),
        ],
        "lists": [
            list(each) for each in (scheduler._prompts, scheduler._through, scheduler._given, scheduler._leaving)
        ],
        "round": (scheduler._clock.round, scheduler._completed, set(scheduler._abandoned)),
        "stats": scheduler.stats(),
        "pool": snapshot(scheduler.pool),
    }


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
    scheduler = scheduler_of("hybrid", memory=2048, step_tokens=32, host_memory=600, costs=CHEAP_HOST)
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
            prompts=scheduler._prompts,
            decoding=scheduler._decoding,
            waiting=scheduler._waiting,
            round=scheduler._clock.round,
            num_completed=scheduler._completed,
            host_bytes=scheduler.stats().host_bytes,
        )
        before = known(scheduler)
        decisions = [decide(standing, scheduler._outlook, scheduler._limits, scheduler.costs) for _ in range(2)]
        assert known(scheduler) == before and decisions[0] == decisions[1]
        num_retracted += len(decisions[0].offloaded) + len(decisions[0].dropped)
        loop.round()
    loop.run(500)
    assert num_retracted >= 3


# Who has to go


def test_growth_that_does_not_fit_takes_out_another_than_the_first() -> None:
    scheduler = scheduler_of(headroom_steps=1)
    first, second = scheduler.submit(28, 30), scheduler.submit(28, 30)
    loop = Loop(scheduler)
    loop.round()
    assert scheduler.running == (first, second)
    while not second.num_retractions:
        round = loop.round()
    assert round.dropped == (second,) and second.state == "waiting" and second.sequence is None
    assert scheduler.waiting == (second,)
    loop.run(200)
    assert loop.finished == [first, second] and first.num_retractions == 0
    assert scheduler.stats().recomputed_tokens > 0


def test_prompts_come_in_shorter_chunks_before_anybody_has_to_go() -> None:
    scheduler = scheduler_of("window", memory=768, page_size=1, max_running=2, headroom_steps=1)
    for _ in range(2):
        scheduler.submit(60, 30)
    loop = Loop(scheduler)
    others = scheduler.pool.add(4), scheduler.pool.add(4)  # they leave less than two windows and a chunk
    loop.run(400)
    assert scheduler.stats().dropped == scheduler.stats().preempted == 0
    for other in others:
        other.free()


def pool_with(name: str, num_pages: int, **arguments: Any) -> CachePool:
    """A pool over every kind with room enough but in one of them, which has just so many pages."""
    plain = make_pool("hybrid", memory=1 << 15, page_size=4)
    k = [subpool.name for subpool in plain.plan.subpools].index(name)
    page_bytes = plain.plan.subpools[k].page_bytes
    for sixteenths in range(16 * num_pages, 16 * num_pages + 33):
        share = sixteenths * page_bytes / 16 / (plain.plan.arena_bytes - plain.plan.sink_bytes)
        pool = make_pool("hybrid", memory=1 << 15, page_size=4, split={"state": 0.3, name: share}, **arguments)
        grid = pool.allocator.room.grids[k]
        if grid.num_pages - grid.first_page == num_pages:
            return pool
    raise AssertionError(f"no split gives {name} {num_pages} pages")


@pytest.mark.parametrize(
    ("name", "num_pages", "expected"),
    [
        ("state", 3, [2]),
        ("full", 17, [1]),
        ("full", 20, [2]),
        ("full", 10, [0]),
        ("window_7", 7, [1]),
        ("window_7", 8, [2]),
    ],
)
def test_the_victim_is_the_cheapest_whose_release_helps_on_the_side_that_is_short(
    name: str, num_pages: int, expected: list[int]
) -> None:
    pool = pool_with(name, num_pages)
    scheduler = Scheduler(pool, headroom_steps=1)
    lengths = (40, 16, 3) if num_pages > 10 or name != "full" else (24, 7, 3)
    requests = [scheduler.submit(length, 8) for length in lengths]
    loop = Loop(scheduler)
    loop.round()
    assert set(scheduler.running) == set(requests)
    urgent = scheduler.submit(16, 8, priority=1)
    round = loop.round()
    assert round.admitted == (urgent,)
    assert [requests.index(victim) for victim in round.dropped] == expected
    loop.run(300)


def test_the_cheaper_way_out_is_taken() -> None:
    for costs, way in ((CHEAP_HOST, "offloaded"), (CHEAP_COMPUTING, "dropped")):
        scheduler = scheduler_of(headroom_steps=1, host_memory="1MiB", costs=costs)
        scheduler.submit(28, 30)
        second = scheduler.submit(28, 30)
        loop = Loop(scheduler)
        while not second.num_retractions:
            round = loop.round()
        assert (
            getattr(round, way) == (second,) and second.state == {"offloaded": "offloaded", "dropped": "waiting"}[way]
        )
        stats = scheduler.stats()
        assert (stats.offloaded, stats.dropped) == ((1, 0) if way == "offloaded" else (0, 1))
        assert (stats.host_bytes > 0) == (way == "offloaded")
        loop.run(200)
        stats = scheduler.stats()
        assert stats.host_bytes == 0 and (stats.resumed > 0) == (way == "offloaded")
        assert (stats.recomputed_tokens > 0) == (way == "dropped")


def test_offloaded_requests_stay_within_the_memory_of_the_host() -> None:
    scheduler = scheduler_of(memory=2048, headroom_steps=1, host_memory=600, costs=CHEAP_HOST)
    requests = [scheduler.submit(18, 30) for _ in range(6)]
    loop = Loop(scheduler)
    while scheduler:
        loop.round()
        held = sum(request.offloaded.num_bytes for request in requests if request.offloaded is not None)
        assert held == scheduler.stats().host_bytes <= 600
    stats = scheduler.stats()
    assert stats.offloaded > 0 and stats.dropped > 0 and 0 < stats.host_bytes_peak <= 600


def test_a_request_is_not_always_the_one_that_has_to_go() -> None:
    scheduler = scheduler_of(memory=2048, headroom_steps=1, costs=CHEAP_COMPUTING)
    requests = [scheduler.submit(4, 100) for _ in range(4)]
    Loop(scheduler).run(2000)
    assert requests[0].num_retractions == 0
    assert max(request.num_retractions for request in requests) > 1
    assert sum(request.num_retractions for request in requests) == scheduler.stats().dropped


def test_the_first_request_is_never_taken_out_for_want_of_memory() -> None:
    scheduler = scheduler_of(memory=2048, headroom_steps=1, costs=Costs(token_s=1.0))
    first = scheduler.submit(1, 100)  # the cheapest of all
    for _ in range(5):
        scheduler.submit(30, 60)
    loop = Loop(scheduler)
    while not first.is_done:
        loop.round()
    assert first.num_retractions == 0 and scheduler.stats().dropped > 0


# Who is more important


def test_a_more_important_request_begins_in_the_next_round_where_all_places_are_taken() -> None:
    scheduler = scheduler_of("hybrid", memory=1 << 14, max_running=3)
    requests = [scheduler.submit(length, 30) for length in (9, 5, 7)]
    loop = Loop(scheduler)
    loop.round()
    urgent = scheduler.submit(9, 5, priority=1)
    round = loop.round()
    assert round.admitted == (urgent,) and urgent.num_new_tokens == 1
    assert round.dropped == (requests[1],) and scheduler.stats().preempted == 1
    loop.run(200)
    assert len(loop.finished) == 4


@pytest.mark.parametrize("chunked", [True, False])
def test_a_more_important_request_begins_in_the_next_round_where_all_tokens_are_taken(chunked: bool) -> None:
    scheduler = scheduler_of("hybrid", memory=1 << 14, max_running=3, step_tokens=3, chunked=chunked)
    for length in (3, 2, 1):
        scheduler.submit(length, 50)
    loop = Loop(scheduler)
    for _ in range(4):
        loop.round()
    assert len(scheduler.running) == 3
    urgent = scheduler.submit(9, 5, priority=1)
    round = loop.round()
    assert round.admitted == (urgent,)
    assert sum(sum(forward.counts) for forward in round.forwards) <= (3 if chunked else 11)
    loop.run(200)


def test_a_more_important_request_begins_in_the_next_round_beside_a_long_prompt() -> None:
    scheduler = scheduler_of(memory=1 << 14, step_tokens=8)
    long = scheduler.submit(200, 5)
    loop = Loop(scheduler)
    loop.round()
    urgent, later = scheduler.submit(6, 5, priority=1), scheduler.submit(6, 5)
    round = loop.round()
    assert round.admitted == (urgent,) and urgent.num_new_tokens == 1 and later.state == "waiting"
    assert long.state == "running"
    loop.run(400)
    assert loop.finished == [urgent, long, later]


@pytest.mark.parametrize("name", ["state", "window_7", "full"])
def test_a_more_important_request_begins_in_the_next_round_where_memory_is_full(name: str) -> None:
    scheduler = Scheduler(pool_with(name, {"state": 4, "window_7": 12, "full": 16}[name]))
    for _ in range(10):
        scheduler.submit(13, 40)
    loop = Loop(scheduler)
    for _ in range(3):
        loop.round()
    assert scheduler.waiting
    for _ in range(3):
        urgent = scheduler.submit(13, 40, priority=2)
        round = loop.round()
        assert round.admitted == (urgent,) and urgent.num_new_tokens == 1
    assert scheduler.stats().preempted > 0
    loop.run(2000)


def test_equally_important_requests_are_not_taken_out_for_each_other() -> None:
    scheduler = scheduler_of(max_running=1)
    first, second = scheduler.submit(5, 20, priority=1), scheduler.submit(5, 5, priority=1)
    third = scheduler.submit(5, 5, priority=0)
    loop = Loop(scheduler)
    loop.run(200)
    assert loop.finished == [first, second, third] and scheduler.stats().preempted == 0


def test_a_stream_of_important_requests_does_not_starve_another() -> None:
    scheduler = scheduler_of(max_running=1, patience_rounds=10)
    humble = scheduler.submit(5, 5, priority=0)
    loop = Loop(scheduler)
    num_rounds = 0
    while not humble.is_done and num_rounds < 50:
        if num_rounds % 5 == 0:
            scheduler.submit(5, 5, priority=3)
        loop.round()
        num_rounds += 1
    assert 30 < num_rounds < 50  # three priorities, and the one that runs then
    scheduler.close()


def test_a_stream_of_important_prompts_does_not_starve_one_that_runs() -> None:
    scheduler = scheduler_of(memory=1 << 14, step_tokens=12, patience_rounds=10)
    humble = scheduler.submit(100, 2, priority=0)
    loop = Loop(scheduler)
    loop.round()
    num_rounds = 0
    while not humble.is_done and num_rounds < 100:
        scheduler.submit(12, 1, priority=1)
        loop.round()
        num_rounds += 1
    assert humble.is_done
    scheduler.close()


# Given up


def test_a_waiting_request_is_cancelled() -> None:
    scheduler = scheduler_of(max_running=1)
    first, second, third = (scheduler.submit(5, 5) for _ in range(3))
    scheduler.cancel(second)
    scheduler.cancel(second)
    assert second.state == "cancelled" and scheduler.waiting == (first, third) and len(scheduler) == 2
    loop = Loop(scheduler)
    loop.run(50)
    assert loop.finished == [first, third] and scheduler.stats().cancelled == 1


def test_a_request_is_cancelled_in_the_middle_of_its_prompt() -> None:
    scheduler = scheduler_of(step_tokens=4)
    request = scheduler.submit(20, 5)
    Loop(scheduler).round()
    assert request.sequence is not None and request.sequence.length == 4
    scheduler.cancel(request)
    assert live_pages(scheduler.pool) == 5
    assert not scheduler.schedule() and live_pages(scheduler.pool) == 0 and not scheduler


def test_a_decoding_request_is_cancelled() -> None:
    scheduler = scheduler_of()
    first, second = scheduler.submit(4, 20), scheduler.submit(5, 20)
    loop = Loop(scheduler)
    loop.round(), loop.round()
    scheduler.cancel(first)
    assert scheduler.running == (second,)
    (forward,) = loop.round().forwards
    assert forward.requests == (second,) and first.sequence is None
    loop.run(50)


def test_a_request_is_cancelled_between_schedule_and_launch() -> None:
    scheduler = scheduler_of()
    first, second = scheduler.submit(4, 20), scheduler.submit(5, 20)
    round = scheduler.schedule()
    scheduler.cancel(first)
    assert first.sequence is not None  # its forward can be run
    launch(scheduler.pool, round)
    assert scheduler.complete(round, [first]) == []
    assert first.state == "cancelled"
    Loop(scheduler).round()
    assert first.sequence is None and scheduler.running == (second,)


def test_a_request_is_cancelled_with_a_token_in_flight() -> None:
    scheduler = scheduler_of()
    request = scheduler.submit(4, 20)
    first = scheduler.schedule()
    launch(scheduler.pool, first)
    second = scheduler.schedule()
    launch(scheduler.pool, second)
    scheduler.cancel(request)
    third = scheduler.schedule()
    assert not third and live_pages(scheduler.pool) == 0
    for round in (first, second, third):
        assert scheduler.complete(round) == []
    assert request.num_new_tokens == 2


def test_an_offloaded_request_is_cancelled() -> None:
    scheduler = scheduler_of(headroom_steps=1, host_memory="1MiB", costs=CHEAP_HOST)
    first, second = scheduler.submit(28, 30), scheduler.submit(28, 30)
    loop = Loop(scheduler)
    while second.state != "offloaded":
        loop.round()
    scheduler.cancel(second)
    loop.round()
    assert second.offloaded is None and scheduler.stats().host_bytes == 0 and scheduler.waiting == ()
    loop.run(50)
    assert loop.finished == [first]


def test_a_request_is_cancelled_after_it_was_given_its_last_token() -> None:
    scheduler = scheduler_of()
    request = scheduler.submit(4, 1)
    round = scheduler.schedule()
    launch(scheduler.pool, round)
    scheduler.schedule()  # lets go of it
    scheduler.cancel(request)
    assert len(scheduler) == 0 and scheduler.complete(round) == [] and request.state == "cancelled"
    assert not scheduler.schedule() and scheduler.stats().finished == 0


def test_all_are_cancelled_at_once_and_others_may_follow() -> None:
    scheduler = scheduler_of(max_running=2, step_tokens=6)
    requests = [scheduler.submit(4, 10) for _ in range(4)]
    loop = Loop(scheduler)
    loop.round(), loop.round()
    scheduler.close()
    assert {request.state for request in requests} == {"cancelled"} and len(scheduler) == 0
    assert live_pages(scheduler.pool) == 0 and scheduler.running == scheduler.waiting == ()
    another = scheduler.submit(4, 3)
    loop.run(20)
    assert loop.finished == [another]


# What is known


def test_rounds_are_completed_in_order_and_once() -> None:
    scheduler = scheduler_of()
    scheduler.submit(4, 20)
    rounds = []
    for _ in range(3):
        rounds.append(scheduler.schedule())
        launch(scheduler.pool, rounds[-1])
    before = known(scheduler)
    for wrong in (rounds[1], rounds[2]):
        with pytest.raises(SequenceError, match="0 of 3 are, in order"):
            scheduler.complete(wrong)
    assert known(scheduler) == before
    scheduler.complete(rounds[0])
    with pytest.raises(SequenceError, match="1 of 3 are"):
        scheduler.complete(rounds[0])
    scheduler.complete(rounds[1])
    scheduler.complete(rounds[2])
    with pytest.raises(SequenceError, match="3 of 3 are"):
        scheduler.complete(rounds[2])


def test_what_is_of_another_scheduler_is_refused() -> None:
    scheduler, other = scheduler_of(), scheduler_of()
    own, foreign = scheduler.submit(4, 20), other.submit(4, 20)
    round, foreign_round = scheduler.schedule(), other.schedule()
    launch(scheduler.pool, round)
    before = known(scheduler)
    for act in (
        lambda: scheduler.cancel(foreign),
        lambda: scheduler.complete(round, [foreign]),
        lambda: scheduler.complete(foreign_round),
        lambda: scheduler.abandon(foreign_round),
        lambda: scheduler.cancel("own"),  # type: ignore[arg-type]
    ):
        with pytest.raises(SequenceError, match="not a request of this scheduler"):
            act()
    assert known(scheduler) == before
    assert scheduler.complete(round, [own]) == [own]


def test_who_has_got_no_token_cannot_have_ended() -> None:
    scheduler = scheduler_of(memory=4096, step_tokens=14)
    first, second, third = scheduler.submit(4, 20), scheduler.submit(15, 20), scheduler.submit(3, 20)
    rounds = []
    for _ in range(2):
        rounds.append(scheduler.schedule())
        launch(scheduler.pool, rounds[-1])
    assert (first.num_new_tokens, second.num_new_tokens, third.num_new_tokens) == (2, 1, 1)
    before = known(scheduler)
    for request in (second, third):  # their tokens are of the second round
        with pytest.raises(SequenceError, match="got no token until round 1"):
            scheduler.complete(rounds[0], [first, request])
        assert known(scheduler) == before
    scheduler.complete(rounds[0])
    assert set(scheduler.complete(rounds[1], [second, first])) == {first, second}
    assert scheduler.complete(scheduler.schedule()) == []


def test_who_has_ended_already_is_not_named_again() -> None:
    scheduler = scheduler_of()
    first, second = scheduler.submit(4, 2), scheduler.submit(4, 20)
    for expected in ([second], [first]):
        round = scheduler.schedule()
        launch(scheduler.pool, round)
        assert scheduler.complete(round, [second, second]) == expected
    assert scheduler.stats().finished == 2 and second.num_new_tokens == 1


def test_what_was_in_flight_when_a_request_ended_is_not_counted() -> None:
    scheduler = scheduler_of()
    request, other = scheduler.submit(4, 20), scheduler.submit(4, 20)
    rounds = []
    for _ in range(3):
        rounds.append(scheduler.schedule())
        launch(scheduler.pool, rounds[-1])
    assert request.num_new_tokens == 3
    assert scheduler.complete(rounds[0], [request]) == [request]
    assert request.num_new_tokens == 1 and request.state == "finished"
    rounds.append(scheduler.schedule())
    assert request.sequence is None and rounds[3].forwards[0].requests == (other,)
    launch(scheduler.pool, rounds[3])
    for round in rounds[1:]:
        assert scheduler.complete(round, [request]) == []
    assert other.num_new_tokens == 4


def test_a_retracted_request_may_have_ended_with_its_token_in_flight() -> None:
    for host_memory, state in ((0, "waiting"), ("1MiB", "offloaded")):
        scheduler = scheduler_of(max_running=1, host_memory=host_memory, costs=CHEAP_HOST)
        request = scheduler.submit(4, 20)
        first = scheduler.schedule()
        launch(scheduler.pool, first)
        urgent = scheduler.submit(4, 2, priority=1)
        second = scheduler.schedule()
        assert request.state == state and second.admitted == (urgent,)
        launch(scheduler.pool, second)
        assert scheduler.complete(first, [request]) == [request]
        assert scheduler.waiting == () and request.num_new_tokens == 1
        scheduler.complete(second)
        third = scheduler.schedule()
        launch(scheduler.pool, third)
        assert scheduler.complete(third) == [urgent] and not scheduler.schedule()
        assert scheduler.stats().host_bytes == 0


def test_a_retracted_request_waits_until_its_last_token_is_known() -> None:
    scheduler = scheduler_of(max_running=1)
    request = scheduler.submit(4, 20)
    first = scheduler.schedule()
    launch(scheduler.pool, first)
    urgent = scheduler.submit(4, 1, priority=1)
    second = scheduler.schedule()
    assert second.dropped == (request,) and second.admitted == (urgent,)
    launch(scheduler.pool, second)
    third = scheduler.schedule()
    assert not third and scheduler.waiting == (request,)
    scheduler.complete(first)
    fourth = scheduler.schedule()
    assert fourth.admitted == (request,) and fourth.forwards[0].counts == [5]
    launch(scheduler.pool, fourth)
    for round in (second, third, fourth):
        scheduler.complete(round)
    assert urgent.state == "finished" and request.num_new_tokens == 2


# What went wrong


def test_a_round_that_was_not_run_is_not_followed() -> None:
    scheduler = scheduler_of()
    last, other = scheduler.submit(4, 2), scheduler.submit(4, 20)
    Loop(scheduler).round()
    round = scheduler.schedule()
    assert round.last_tokens == (last,)
    with pytest.raises(SequenceError, match="run the forwards of a round before schedule"):
        scheduler.schedule()
    scheduler.abandon(round)  # as the message says
    loop = Loop(scheduler)
    loop.known = {last: 1, other: 1}
    loop.run(30)
    assert set(loop.finished) == {last, other}


@pytest.mark.parametrize("kinds", ["full", "hybrid"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_run", [0, 1, 2])
def test_a_round_is_abandoned(kinds: str, overlap: bool, num_run: int) -> None:
    scheduler = scheduler_of(kinds, memory=1 << 13, step_tokens=20)
    first, second, third = scheduler.submit(4, 3), scheduler.submit(4, 9), scheduler.submit(60, 9)
    loop = Loop(scheduler, overlap=overlap)
    loop.round()
    loop.round()
    round = scheduler.schedule()
    prompts, decode = round.forwards
    assert not prompts.is_decode and decode.is_decode and round.last_tokens == (first,)
    for forward in round.forwards[:num_run]:
        scheduler.pool.begin(forward.batch, forward.num_new_tokens).commit()
    started = third.sequence
    scheduler.abandon(round)
    assert (first.num_new_tokens, second.num_new_tokens, third.num_new_tokens) == (2, 2, 0)
    assert first.state == second.state == "waiting" and third.sequence is started is not None
    with pytest.raises(SequenceError, match="is not the last one"):
        scheduler.abandon(round)
    loop.run(60)
    assert set(loop.finished) == {first, second, third} and live_pages(scheduler.pool) == 0
    assert scheduler.stats().recomputed_tokens >= 10


def test_a_torn_state_is_computed_anew() -> None:
    scheduler = scheduler_of("hybrid", memory=1 << 13, step_tokens=20)
    prompt, short = scheduler.submit(50, 3), scheduler.submit(2, 3)
    loop = Loop(scheduler)
    loop.round()
    round = scheduler.schedule()
    step = scheduler.pool.begin(round.forwards[0].batch, round.forwards[0].num_new_tokens)
    step.state_touched = True
    step.abort()
    scheduler.abandon(round)
    assert prompt.state == "waiting" and prompt.sequence is None  # though it was in the middle of its prompt
    loop.run(60)
    assert set(loop.finished) == {prompt, short}


def test_a_cancelled_request_is_in_a_round_that_is_abandoned() -> None:
    scheduler = scheduler_of()
    first, second = scheduler.submit(4, 9), scheduler.submit(4, 9)
    loop = Loop(scheduler)
    loop.round()
    round = scheduler.schedule()
    scheduler.cancel(first)
    scheduler.abandon(round)
    loop.run(60)
    assert loop.finished == [second] and first.state == "cancelled"


def test_a_completed_round_cannot_be_abandoned() -> None:
    scheduler = scheduler_of()
    scheduler.submit(4, 9)
    round = Loop(scheduler).round()
    before = known(scheduler)
    with pytest.raises(SequenceError, match="or it is completed"):
        scheduler.abandon(round)
    assert known(scheduler) == before


def test_host_memory_that_cannot_be_had_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_of(headroom_steps=1, host_memory="1MiB", costs=CHEAP_HOST)
    first, second = scheduler.submit(28, 30), scheduler.submit(28, 30)
    loop = Loop(scheduler)

    def fail(sequence: object) -> None:
        raise MemoryError("no memory on the host")

    with monkeypatch.context() as patched:
        patched.setattr(scheduler.pool, "offload", fail)
        with pytest.raises(MemoryError):
            for _ in range(50):
                loop.round()
    assert first.state == second.state == "running" and second.num_retractions == 0
    scheduler.pool.check()
    loop.run(200)
    assert set(loop.finished) == {first, second} and second.num_retractions > 0


# Others use the pool


def test_who_cannot_begin_for_others_says_so_and_begins_when_they_are_gone() -> None:
    scheduler = scheduler_of()
    other = scheduler.pool.add(40)
    request = scheduler.submit(30, 5)
    before = known(scheduler)
    with pytest.raises(OutOfMemory, match="releasing pages would help: 3 of full"):
        scheduler.schedule()
    assert known(scheduler) == before
    other.free()
    loop = Loop(scheduler)
    loop.run(20)
    assert loop.finished == [request]


def test_who_cannot_go_on_for_others_says_so_and_goes_on_when_they_are_gone() -> None:
    scheduler = scheduler_of(headroom_steps=1)
    first, second = scheduler.submit(16, 20), scheduler.submit(16, 20)
    loop = Loop(scheduler)
    loop.round()
    others = [scheduler.pool.add(4) for _ in range(5)]
    with pytest.raises(OutOfMemory, match="releasing pages would help"):
        for _ in range(20):
            loop.round()
            if scheduler.pool.quote(4):
                others.append(scheduler.pool.add(4))
    assert first.state == "running" and second.num_retractions <= 1
    before = known(scheduler)
    with pytest.raises(OutOfMemory):
        scheduler.schedule()
    assert known(scheduler) == before
    for other in others:
        other.free()
    loop.run(100)
    assert set(loop.finished) == {first, second}


def test_rows_that_others_use_are_named() -> None:
    scheduler = scheduler_of(max_sequences=2)
    others = [scheduler.pool.add(), scheduler.pool.add()]
    request = scheduler.submit(4, 4)
    with pytest.raises(SequenceError, match="needs one of the 2 rows of the pool, and others use them all"):
        scheduler.schedule()
    others.pop().free()
    loop = Loop(scheduler)
    loop.run(20)
    assert loop.finished == [request]


def test_pages_of_a_victim_that_are_leased_do_not_count_as_free() -> None:
    scheduler = scheduler_of(costs=CHEAP_COMPUTING, headroom_steps=1)
    small, large = scheduler.submit(8, 20), scheduler.submit(24, 20)
    loop = Loop(scheduler)
    loop.round()
    assert small.sequence is not None and large.sequence is not None
    lease = scheduler.pool.lease(small.sequence, "a copy")
    urgent = scheduler.submit(28, 1, priority=1)
    round = loop.round()
    assert round.admitted == (urgent,) and round.dropped == (large,)
    lease.close()
    loop.run(100)


def test_leases_whose_event_has_passed_end_before_a_round_is_decided() -> None:
    class Passed:
        def query(self) -> bool:
            return True

    scheduler = scheduler_of()
    other = scheduler.pool.add(40)
    lease = scheduler.pool.lease(other, "a copy")
    other.free()
    request = scheduler.submit(30, 5)
    with pytest.raises(OutOfMemory):
        scheduler.schedule()
    lease.close(Passed())
    assert scheduler.schedule().admitted == (request,)


@pytest.mark.parametrize("reserve_steps", [1, 4])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_the_forwards_of_a_round_fit_beside_forks_and_leases(page_size: int, reserve_steps: int) -> None:
    """Users fork and lease what requests hold: pages are copied, and others stay where they are let go of."""
    num_retracted = 0
    for memory in range(1536, 3072, 256):
        scheduler = scheduler_of(
            "hybrid", memory=memory, page_size=page_size, reserve_steps=reserve_steps, headroom_steps=1
        )
        pool = scheduler.pool
        for length in (9, 14, 6, 11, 17):
            scheduler.submit(min(length, scheduler.max_request_tokens - 8), 8)
        others: list[Any] = []
        for number in range(100):
            try:
                round = scheduler.schedule()
            except OutOfMemory:
                others.clear()
                continue
            launch(pool, round)
            scheduler.complete(round)
            pool.check()
            if number % 3 == 0:
                for request in scheduler.running[:2]:
                    assert request.sequence is not None
                    if request.sequence.length and pool.sequences.num_free_rows:
                        others.append(Held(pool, request, is_fork=number % 2 == 0))
            if number % 7 == 6:
                others.clear()
        num_retracted += scheduler.stats().dropped
        others.clear()
        assert not scheduler
    assert num_retracted > 0


class Held:
    """A fork of a request's sequence, or a lease on its pages, for as long as somebody has it."""

    def __init__(self, pool: CachePool, request: Request, *, is_fork: bool) -> None:
        assert request.sequence is not None
        self.end = request.sequence.fork().free if is_fork else pool.lease(request.sequence, "a test").close

    def __del__(self) -> None:
        self.end()


def test_another_thread_is_refused() -> None:
    scheduler = scheduler_of()
    request = scheduler.submit(4, 4)
    round = scheduler.schedule()
    raised: list[type[BaseException]] = []

    def act(what: Any) -> None:
        try:
            what()
        except BaseException as error:
            raised.append(type(error))

    acts = [
        lambda: scheduler.submit(4, 4),
        lambda: scheduler.quote(4, 4),
        lambda: scheduler.cancel(request),
        scheduler.schedule,
        lambda: scheduler.complete(round),
        lambda: scheduler.abandon(round),
        scheduler.close,
    ]
    before = known(scheduler)
    for what in acts:
        thread = threading.Thread(target=act, args=(what,))
        thread.start()
        thread.join()
    assert raised == [ThreadError] * len(acts)
    assert known(scheduler) == before


def test_a_closed_pool_ends_it_all() -> None:
    scheduler = scheduler_of()
    request = scheduler.submit(4, 4)
    Loop(scheduler).round()
    scheduler.pool.close()
    for act in (scheduler.schedule, lambda: scheduler.submit(4, 4), lambda: scheduler.cancel(request)):
        with pytest.raises(ClosedError):
            act()


def test_the_numbers_add_up() -> None:
    scheduler = scheduler_of("hybrid", memory=3072, host_memory=400, headroom_steps=1, costs=CHEAP_HOST)
    loop = Loop(scheduler, overlap=True)
    requests: list[Request] = []
    while len(requests) < 40 or scheduler:
        if len(requests) < 40:
            requests.append(scheduler.submit(1 + len(requests) % 13, 1 + len(requests) % 9, priority=len(requests) % 2))
        if len(loop.rounds) % 7 == 0:
            scheduler.cancel(requests[len(loop.rounds) // 2])
        loop.round()
        stats = scheduler.stats()
        assert stats.submitted == len(requests) == stats.finished + stats.cancelled + len(scheduler)
        assert stats.rounds == len(loop.rounds)
        assert stats.dropped + stats.offloaded == sum(request.num_retractions for request in requests)
        assert stats.resumed <= stats.offloaded and stats.preempted <= stats.dropped + stats.offloaded
        assert stats.host_bytes <= stats.host_bytes_peak <= 400
        num_given = sum(request.state == "running" and request.sequence is None for request in requests)
        assert len(scheduler) == len(scheduler.waiting) + len(scheduler.running) + num_given
    assert stats.cancelled > 2 and stats.finished > 20
    assert stats.prompt_tokens >= sum(r.num_prompt_tokens for r in requests if r.state == "finished")
    assert stats.new_tokens >= sum(request.num_new_tokens for request in requests)
    assert scheduler.stats() is not scheduler.stats()
