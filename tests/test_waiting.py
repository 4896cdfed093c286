"""Who waits, in which order: against a list that is sorted anew each time."""

from __future__ import annotations

import random
import time

import pytest

from torch_uma.scheduling.request import Clock, Request
from torch_uma.scheduling.waiting import Waiting


class Plain:
    """The same, as it is said: the highest priority first, one more for each `patience` of waiting, then arrival."""

    def __init__(self, clock: Clock, patience: int) -> None:
        self.clock = clock
        self.patience = patience
        self.since: dict[Request, int] = {}
        self.waited: dict[Request, int] = {}

    def order(self) -> list[Request]:
        return sorted(self.since, key=lambda request: (-self.priority(request), request.arrival))

    def priority(self, request: Request) -> int:
        waited = self.waited.get(request, 0) + self.clock.round - self.since.get(request, self.clock.round)
        return request.priority + waited // self.patience

    def put(self, request: Request) -> None:
        self.since[request] = self.clock.round

    def take(self, request: Request) -> None:
        self.waited[request] = self.waited.get(request, 0) + self.clock.round - self.since.pop(request)


def request_of(clock: Clock, arrival: int, priority: int = 0) -> Request:
    return Request(clock, 1, 1, priority, None, arrival)


@pytest.mark.parametrize("patience", [1, 2, 7, 50, 10_000])
@pytest.mark.parametrize("seed", range(2))
def test_the_order_is_by_priority_and_arrival_whatever_comes_and_goes(seed: int, patience: int) -> None:
    print("seed", seed)
    rnd = random.Random(seed)
    clock = Clock()
    waiting, plain = Waiting(clock, patience), Plain(clock, patience)
    away: list[Request] = []
    for number in range(1500):
        what = rnd.random()
        if what < 0.35:
            clock.round += rnd.choice([1, 1, 1, 3, 40])
        elif what < 0.65:
            request = away.pop(rnd.randrange(len(away))) if away and rnd.random() < 0.5 else None
            if request is None:
                request = request_of(clock, number, rnd.choice([-3, 0, 0, 0, 1, 5]))
            waiting.put(request)
            plain.put(request)
        elif what < 0.7 and away:
            request = rnd.choice(away)  # runs, and is passed over
            waiting.pass_over(request)
            plain.waited[request] += 1
            assert request.rank == (-plain.priority(request), request.arrival)
        elif plain.since:
            ordered = plain.order()
            request = ordered[0] if rnd.random() < 0.5 else rnd.choice(ordered)
            waiting.take(request)
            plain.take(request)
            assert request.rank == (-plain.priority(request), request.arrival)
            if rnd.random() < 0.7:
                away.append(request)
        if rnd.random() < 0.5:
            assert list(waiting) == plain.order()
            assert [request.rank for request in waiting] == sorted(request.rank for request in waiting)
    assert len(waiting) == len(plain.since) and len(away) > 10


def test_many_rise_at_once() -> None:
    clock = Clock()
    waiting = Waiting(clock, 10)
    old = [request_of(clock, number) for number in range(100)]
    for request in old:
        waiting.put(request)
    clock.round = 5
    urgent = [request_of(clock, 100 + number, priority=1) for number in range(3)]
    for request in urgent:
        waiting.put(request)
    assert list(waiting) == urgent + old
    clock.round = 10
    assert list(waiting) == old + urgent
    clock.round = 15
    assert list(waiting) == urgent + old


def test_nothing_is_kept_of_those_who_have_gone() -> None:
    clock = Clock()
    waiting = Waiting(clock, 3)
    for number in range(50):
        request = request_of(clock, number)
        waiting.put(request)
        clock.round += number % 5
        waiting.take(request)
    assert not list(waiting) and not waiting._order and not waiting._risers


def test_twenty_thousand_may_wait() -> None:
    clock = Clock()
    waiting = Waiting(clock, 100)
    requests = [request_of(clock, number, number % 3) for number in range(20_000)]
    start = time.process_time()
    for request in requests:
        waiting.put(request)
    for request in requests[::7]:
        waiting.take(request)
        clock.round += 1
        next(iter(waiting))
    assert time.process_time() - start < 5  # looking at each of them for every one would take a minute
