"""What tests of the scheduler need: small ones, and a loop without a model that runs their rounds and checks them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from pools import layer, make_pool, snapshot

from torch_uma.layout import Chunk, Full, Layer, State, Window
from torch_uma.pool import CachePool
from torch_uma.scheduling import Costs, Forward, Request, Round, Scheduler

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
            list(each)
            for each in (
                scheduler._prompting.requests,
                scheduler._prompting.through,
                scheduler._given,
                scheduler._leaving,
            )
        ],
        "round": (scheduler._clock.round, scheduler._completed, set(scheduler._abandoned), scheduler._num_held_back),
        "stats": scheduler.stats(),
        "pool": snapshot(scheduler.pool),
    }


def random_layers(rnd: random.Random, *, chunks: bool) -> list[Layer]:
    """Some kinds of memory; windows and chunks are shorter and longer than pages."""
    kinds = [
        layer(Full(), tokens_per_entry=rnd.choice([1, 1, 4]), width=rnd.choice([4, 8])),
        layer(Window(rnd.choice([1, 2, 5, 7, 12])), width=rnd.choice([4, 12])),
        layer(Window(rnd.choice([20, 33])), width=8),
        layer(State(), width=rnd.choice([8, 40])),
    ]
    if chunks:
        kinds += [layer(Chunk(rnd.choice([2, 5, 9, 16])), width=4), layer(Chunk(rnd.choice([3, 8])), width=8)]
    return rnd.sample(kinds, rnd.randint(1, 4))


@dataclass
class Loop:
    """Rounds one after another; with `overlap`, each is scheduled and launched before the last one is completed.

    `stops`: of which request the token of which number (from 1) is its last, besides those that get all they may.
    """

    scheduler: Scheduler
    overlap: bool = False
    stops: dict[Request, int] = field(default_factory=dict)
    is_checked: bool = True

    def __post_init__(self) -> None:
        self.pool: CachePool = self.scheduler.pool
        self.known: dict[Request, int] = {}  # new tokens of each that have arrived
        self.finished: list[Request] = []
        self.rounds: list[Round] = []
        self._in_flight: list[tuple[Round, list[Request]]] = []

    def round(self) -> Round:
        """Schedule and run one round."""
        round = self.scheduler.schedule()
        self.rounds.append(round)
        if self.is_checked:
            assert self.scheduler.num_running == len(self.scheduler.running)
            self._check_round(round)
        sampled = [request for forward in round.forwards for request in self._launch(forward)]
        if round:
            self._in_flight.append((round, sampled))
        while len(self._in_flight) > (1 if self.overlap and round else 0):
            self._complete()
        if self.is_checked:
            self.pool.check()
            assert self.scheduler.num_running == len(self.scheduler.running)
        return round

    def run(self, max_rounds: int) -> int:
        """Run until all is done; returns after how many rounds."""
        for number in range(max_rounds):
            if not self.scheduler:
                return number
            self.round()
        assert not self.scheduler, f"{len(self.scheduler)} requests are not done after {max_rounds} rounds"
        return max_rounds

    def _launch(self, forward: Forward) -> list[Request]:
        for request, start, count, samples in zip(
            forward.requests, forward.starts.tolist(), forward.counts, forward.samples.tolist()
        ):
            assert request.sequence is not None and request.sequence.length == start
            if forward.is_decode:
                assert count == 1 and samples
            else:  # every token of its text is known by now
                known = request.num_prompt_tokens + self.known.get(request, 0)
                assert start + count <= known and samples == (start + count == known)
            assert request.num_tokens - samples <= request.max_tokens - 1
        self.pool.begin(forward.batch, forward.num_new_tokens).commit()
        return [request for request, samples in zip(forward.requests, forward.samples.tolist()) if samples]

    def _complete(self) -> None:
        round, sampled = self._in_flight.pop(0)
        ended = []
        for request in sampled:
            if request.is_done:
                continue
            known = self.known[request] = self.known.get(request, 0) + 1
            if known == self.stops.get(request):
                ended.append(request)
        finished = self.scheduler.complete(round, ended)
        for request in finished:
            assert request.state == "finished"
            expected = min(request.max_new_tokens, self.stops.get(request, request.max_new_tokens))
            assert request.num_new_tokens == expected == self.known[request], (request, self.known[request])
        self.finished += finished

    def _check_round(self, round: Round) -> None:
        seen: set[Request] = set()
        for forward in round.forwards:
            assert len(forward.requests) == len(forward.batch) == len(forward.starts) == len(forward.samples)
            assert not seen & set(forward.requests)
            seen |= set(forward.requests)
            assert all(request.state in ("running", "cancelled") for request in forward.requests)
