"""Every request comes to its end, within a bound, whatever else is asked for.

The bound holds from the last arrival on; nobody's rank ever changes. `rounds_of` a request are those that it takes when
it gets one token in each: a prompt of p tokens and n new ones take p + n - 1, as the last of the prompt brings the
first new one. It is no more after it was dropped with k new tokens: its text of p + k is run again, which brings the
next one.

1. The first of those who run, by rank, gets on in every round: if it decodes by a token, otherwise by at least one of
   its prompt, since `step_tokens` leave one for each who may run, and chunks get shorter before anything else gives
   way. It is never taken out for want of memory, only for a more important request of a lower rank that comes in.
2. Let M be the first of all that are not done. While M waits, nobody behind it comes in. So whoever is the first of
   those who run gets on to its end, unless M comes in before, and after it the next one. If nobody is left, M comes
   in, since an empty arena holds every request that was taken; it is never held back for others to share its forward.
   Once M runs, it is the first and stays: at most `rounds_of` M later it is done.
3. So from one M to the next, all but the last of the first ones came to their ends. Charge their rounds to themselves,
   M's to M, and the rounds of the one that M overtook, fewer than it takes, to M: no more than
   sum(rounds_of(r) for all r that are not done) + len(r) * (max(rounds_of) - 1).

With overlap what is known comes a round later: two rounds more for each, in which it waits for its own last token or is
found to have ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import layer
from scheduling import Loop

from torch_uma.layout import Chunk, Full, Layer, State, Window
from torch_uma.plan import plan
from torch_uma.pool import CachePool
from torch_uma.scheduling import Costs, Request, Scheduler

NEVER = 1 << 40

ARENAS: dict[str, tuple[list[Layer], int]] = {
    "full alone": ([layer(Full())], 1024),
    "windows that are full": ([layer(Full(), width=4), layer(Window(24), width=40)], 16 << 10),
    "states that are exhausted": ([layer(Full(), width=4), layer(State(), width=500)], 8 << 10),
    "full that is exhausted": ([layer(Full(), width=40), layer(State(), width=8)], 8 << 10),
    "all kinds": ([layer(Full()), layer(Window(7), width=8), layer(State(), width=40), layer(Chunk(10))], 5 << 10),
    "only one at a time": ([layer(Full()), layer(Window(9), width=8)], 1280),
}


@dataclass(frozen=True)
class Asked:
    num_prompt_tokens: int
    max_new_tokens: int
    priority: int
    arrival: int
    stop: int


def rounds_of(request: Request, *, overlap: bool) -> int:
    return request.max_tokens - 1 + (2 if overlap else 0)


def bound(requests: list[Request], *, overlap: bool) -> int:
    each = [rounds_of(request, overlap=overlap) for request in requests]
    return sum(each) + len(each) * (max(each, default=1) - 1)


def scheduler_of(
    arena: str, page_size: int, step_tokens: int, *, way: str, patience_rounds: int, reserve_steps: int = 1
) -> Scheduler:
    layers, memory = ARENAS[arena]
    pool = CachePool(plan(layers, memory=memory, page_size=page_size), max_sequences=8, max_tokens=200, device="meta")
    return Scheduler(
        pool,
        step_tokens=step_tokens,
        host_memory="1MiB" if way == "offload" else 0,
        costs=Costs(token_s=1.0 if way == "offload" else 1e-9, copy_bytes_per_s=1e9),
        headroom_steps=1,
        reserve_steps=reserve_steps,
        patience_rounds=patience_rounds,
        gather=True,
    )


def run(scheduler: Scheduler, mix: list[Asked], *, overlap: bool) -> tuple[int, list[Request]]:
    """Let the mix arrive; returns how many rounds it took from the last arrival on, and who was not done by then."""
    loop = Loop(scheduler, overlap=overlap, is_checked=False)
    requests: list[Request] = []
    for number in range(1 + max(asked.arrival for asked in mix)):
        for asked in mix:
            if asked.arrival == number:
                most = scheduler.max_request_tokens
                new = min(asked.max_new_tokens, most - 1)
                prompt = min(asked.num_prompt_tokens, most - new)
                request = scheduler.submit(prompt, new, priority=asked.priority)
                loop.stops[request] = min(asked.stop, new)
                requests.append(request)
        left = [request for request in requests if not request.is_done]
        loop.round()
    num_rounds = 1 + loop.run(20 * bound(left, overlap=overlap) + 10)
    assert all(request.state == "finished" for request in requests)
    if overlap:
        loop.round()
    scheduler.schedule()
    scheduler.pool.check()
    assert not any(subpool.live_pages for subpool in scheduler.pool.stats().subpools)
    return num_rounds, left


def asked(prompts: st.SearchStrategy[int], new: st.SearchStrategy[int], most_arrival: int) -> st.SearchStrategy[Asked]:
    return st.builds(
        Asked,
        num_prompt_tokens=prompts,
        max_new_tokens=new,
        priority=st.sampled_from([0, 0, 0, 1, 3]),
        arrival=st.integers(0, most_arrival),
        stop=st.one_of(st.just(NEVER), st.integers(1, 40)),
    )


small = asked(st.integers(1, 12), st.integers(1, 25), 30)
giant = asked(st.integers(100, 200), st.integers(1, 90), 20)
mixes = st.one_of(
    st.lists(small, min_size=1, max_size=14),
    st.builds(lambda one, many: [one, *many], giant, st.lists(small, min_size=3, max_size=12)),
    st.lists(asked(st.integers(1, 60), st.integers(20, 90), 0), min_size=2, max_size=8),
    st.lists(giant, min_size=1, max_size=4),
)


@pytest.mark.parametrize("arena", ARENAS)
@settings(max_examples=40)
@given(
    mix=mixes,
    overlap=st.booleans(),
    way=st.sampled_from(["drop", "offload"]),
    page_size=st.sampled_from([1, 3, 4]),
    step_tokens=st.sampled_from([8, 9, 40, 400]),
    reserve_steps=st.sampled_from([1, 3]),
    patience_rounds=st.sampled_from([NEVER, NEVER, 1, 10]),
)
def test_every_request_is_done_within_the_bound(
    arena: str,
    mix: list[Asked],
    overlap: bool,
    way: str,
    page_size: int,
    step_tokens: int,
    reserve_steps: int,
    patience_rounds: int,
) -> None:
    scheduler = scheduler_of(
        arena, page_size, step_tokens, way=way, patience_rounds=patience_rounds, reserve_steps=reserve_steps
    )
    num_rounds, left = run(scheduler, mix, overlap=overlap)
    assert num_rounds <= max(1, bound(left, overlap=overlap)) + (2 if overlap else 0)
