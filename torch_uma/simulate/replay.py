"""A trace replayed: the same scheduler and allocator as in earnest, over an arena without memory, by its own clock.

Owns the clock. What a round takes is asked of the model's work; the bytes that it moves, and those that go to the host
and come back, are charged as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch_uma.errors import OutOfMemory, SequenceError, TraceError
from torch_uma.layout import Full
from torch_uma.plan import Plan
from torch_uma.pool import CachePool
from torch_uma.scheduling import Costs, Round, Scheduler
from torch_uma.simulate.device import Device
from torch_uma.simulate.recorder import Recorder
from torch_uma.simulate.report import Report
from torch_uma.simulate.traces import Arrival
from torch_uma.simulate.work import Work

Progress = Callable[[int, int], None]

_MOST_TOKENS = 1 << 20  # that a request is taken with where no memory that grows with it bounds it


def replay(
    plan: Plan,
    arrivals: Sequence[Arrival],
    *,
    work: Work,
    device: Device,
    split: Mapping[str, float] | None = None,
    max_running: int = 256,
    progress: Progress | None = None,
    on_round: Callable[[Scheduler, Round], None] | None = None,
    **options: Any,
) -> Report:
    """Serve the requests of a trace as a scheduler over `plan` would, and say how it went.

    With `split`, shares of the arena by sub-pool, over pools that are fixed there. `max_running` and `options` are the
    scheduler's. `progress` is told how many requests of how many are done; `on_round` sees every round once it is
    decided. Time begins with the first arrival; one that waits for others' answers may come at infinity as long as
    these are not there, as arrivals are looked at when they are next. Requests that the arena could not hold, or of
    more than a million tokens where only windows and states are held, are counted as refused. TraceError for no
    arrivals, for some that are not in the order of their time, and for one that never comes.
    """
    _check(arrivals)
    pool = CachePool(
        plan, device="meta", max_sequences=max_running, max_tokens=_longest_tokens(plan, arrivals), split=split
    )
    with pool:
        if options.get("costs") is None:
            options["costs"] = Costs(
                token_s=work.token_flops / device.flops_per_s, copy_bytes_per_s=device.host_bytes_per_s
            )
        scheduler = Scheduler(pool, max_running=max_running, **options)
        recorder = Recorder(pool, scheduler, len(arrivals), is_split=bool(split))
        start_s, now_s, num_come = arrivals[0].at_s, 0.0, 0
        while num_come < len(arrivals) or scheduler:
            if not scheduler:
                if arrivals[num_come].at_s == math.inf:
                    raise TraceError(f"arrival {num_come + 1} never comes, and nobody else is there")
                now_s = max(now_s, arrivals[num_come].at_s - start_s)
            while num_come < len(arrivals) and arrivals[num_come].at_s - start_s <= now_s:
                _submit(scheduler, arrivals[num_come], start_s, recorder)
                num_come += 1
            if not scheduler:
                continue
            round = scheduler.schedule()
            host_bytes = recorder.begin(round, now_s)
            if on_round is not None:
                on_round(scheduler, round)
            for forward in round.forwards:
                pool.begin(forward.batch, forward.num_new_tokens).commit()
                now_s += work.seconds(forward, device)
            now_s += 2 * recorder.moved_bytes() / device.bytes_per_s + host_bytes / device.host_bytes_per_s
            recorder.end(round, now_s)
            recorder.finish(scheduler.complete(round))
            if progress is not None:
                progress(recorder.num_done, len(arrivals))
        return recorder.report()


def _check(arrivals: Sequence[Arrival]) -> None:
    if not arrivals:
        raise TraceError("there are no arrivals to replay")
    for number, (arrival, other) in enumerate(pairwise(arrivals), 1):
        if arrival.at_s > other.at_s:
            raise TraceError(
                f"arrival {number} comes at {arrival.at_s} s, and the one behind it at {other.at_s} s; sort them"
            )


def _longest_tokens(plan: Plan, arrivals: Sequence[Arrival]) -> int:
    """Tokens that tables have to be for: no more than the arena holds, however long a request asks to be."""
    longest = max(arrival.num_prompt_tokens + arrival.num_new_tokens for arrival in arrivals)
    held = [subpool.num_pages * subpool.page_tokens for subpool in plan.subpools if isinstance(subpool.lifetime, Full)]
    return min(longest, *(held or [_MOST_TOKENS]))


def _submit(scheduler: Scheduler, arrival: Arrival, start_s: float, recorder: Recorder) -> None:
    try:
        request = scheduler.submit(
            arrival.num_prompt_tokens, arrival.num_new_tokens, priority=arrival.priority, tag=arrival
        )
    except (OutOfMemory, SequenceError):
        recorder.num_refused += 1
    else:
        recorder.come(request, arrival.at_s - start_s)
