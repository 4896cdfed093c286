"""Who waits, in which order: against a list that is sorted anew each time."""

from __future__ import annotations

import random
import time

import pytest

from torch_uma.scheduling.request import Clock, Request
from torch_uma.scheduling.waiting import Waiting


def request_of(clock: Clock, arrival: int, rank: int = 0) -> Request:
    return Request(clock, 1, 1, 0, None, (rank, arrival))


@pytest.mark.parametrize("seed", range(3))
def test_the_order_is_by_rank_whatever_comes_and_goes(seed: int) -> None:
    print("seed", seed)
    rnd = random.Random(seed)
    clock, waiting = Clock(), Waiting()
    plain: list[Request] = []
    away: list[Request] = []
    for number in range(1500):
        if not plain or rnd.random() < 0.55:
            comes_back = away and rnd.random() < 0.5
            request = away.pop() if comes_back else request_of(clock, number, rnd.choice([-3, 0, 0, 0, 1, 5]))
            waiting.put(request)
            plain = sorted([*plain, request], key=lambda other: other.rank)
        else:
            request = plain[0] if rnd.random() < 0.5 else rnd.choice(plain)
            waiting.take(request)
            plain.remove(request)
            if rnd.random() < 0.7:
                away.append(request)
        assert list(waiting) == plain and len(waiting) == len(plain)


def test_twenty_thousand_may_wait() -> None:
    clock, waiting = Clock(), Waiting()
    requests = [request_of(clock, number, number % 3) for number in range(20_000)]
    start = time.process_time()
    for request in requests:
        waiting.put(request)
    for request in requests[::7]:
        waiting.take(request)
        next(iter(waiting))
    assert time.process_time() - start < 5  # looking at each of them for every one would take a minute
