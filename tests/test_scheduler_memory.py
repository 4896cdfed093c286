"""Who is in memory: who has to go for want of it, for a more important request, or for others who use the pool."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from pools import make_pool
from scheduling import CHEAP_COMPUTING, CHEAP_HOST, Loop, known, launch, scheduler_of

from torch_uma.errors import ClosedError, OutOfMemory, SequenceError, ThreadError
from torch_uma.pool import CachePool
from torch_uma.scheduling import Costs, Request, Scheduler

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


def test_nobody_takes_the_place_of_who_had_to_go_and_comes_before_him() -> None:
    scheduler = scheduler_of(headroom_steps=1, max_running=2)
    first, second, third = scheduler.submit(28, 30), scheduler.submit(28, 30), scheduler.submit(1, 2)
    loop = Loop(scheduler)
    while not second.num_retractions:
        round = loop.round()
    assert round.dropped == (second,) and round.admitted == () and scheduler.waiting == (second, third)
    loop.run(200)
    assert set(loop.finished) == {first, second, third}


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


def _length(request: Request) -> int:
    assert request.sequence is not None
    return request.sequence.length


def test_a_prompt_is_passed_over_only_by_those_that_came_soon_after() -> None:
    scheduler = scheduler_of(memory=1 << 14, step_tokens=12, patience_rounds=4)
    humble = scheduler.submit(100, 2)
    loop = Loop(scheduler)
    loop.round()
    soon = scheduler.submit(40, 2, priority=1)
    lengths = [_length(humble) for _ in range(2) if loop.round()]
    assert lengths == [24, 24]  # it begins beside the other, and then goes on before it
    while not soon.is_done:
        loop.round()
    later = scheduler.submit(20, 2, priority=1)
    assert humble.rank < later.rank
    loop.run(100)
    assert loop.finished == [soon, humble, later]


def test_a_stream_of_important_prompts_does_not_starve_one_that_runs() -> None:
    scheduler = scheduler_of(memory=1 << 14, step_tokens=12, patience_rounds=10)
    humble = scheduler.submit(100, 2, priority=0)
    loop = Loop(scheduler)
    loop.round()
    num_rounds = 0
    while not humble.is_done and num_rounds < 100:
        scheduler.submit(40, 1, priority=1)
        loop.round()
        num_rounds += 1
    assert humble.is_done
    scheduler.close()


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
