"""A published workload served on the clock of torch_uma.simulate, and inputs inferred from what was published of it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace

import torch
from workloads_h200 import (
    H200,
    HEADROOM_STEPS,
    PAGE_SIZE,
    STATE_SLOTS,
    STATE_TO_REST,
    STEP_TOKENS,
    WINDOW_TO_FULL,
    Workload,
)

from torch_uma.plan import Plan, plan
from torch_uma.scheduling import Round, Scheduler
from torch_uma.simulate import Arrival, Report, Work, replay
from torch_uma.simulate.splits import default_split


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a workload is served: in how much memory, in pools or not, and what else a run may vary."""

    budget_bytes: float
    is_split: bool = False
    window_to_full: float = WINDOW_TO_FULL
    slots: int = STATE_SLOTS
    dtype: torch.dtype = torch.float32
    headroom_steps: int = HEADROOM_STEPS

    def split(self, planned: Plan) -> dict[str, float] | None:
        """Of the pools, if it is pools."""
        if not self.is_split:
            return None
        return default_split(planned, state_to_rest=STATE_TO_REST, window_to_full=self.window_to_full)


@dataclass(frozen=True, kw_only=True)
class Served:
    """What came of it; `running` is the median over rounds, `first_token_s` the mean that a client sees."""

    report: Report
    running: float
    first_token_s: float


@dataclass(kw_only=True)
class Clients:
    """When each request was asked for: client after client asks again as soon as an answer is complete."""

    work: Work
    _now_s: float = 0.0
    _answered_s: list[float] = field(default_factory=list)

    def see(self, scheduler: Scheduler, round: Round) -> None:
        """A round is decided; what was finished before it is answered by now."""
        self._answered_s += [self._now_s] * (scheduler.stats().finished - len(self._answered_s))
        self._now_s += sum(self.work.seconds(forward, H200) for forward in round.forwards)

    def mean_asked_s(self, workload: Workload) -> float:
        """When requests were asked for, on average; the first one of each client at 0."""
        return sum(self._answered_s[: workload.num_requests - workload.num_clients]) / workload.num_requests


def serve(workload: Workload, setting: Setting) -> Served:
    """Serve a workload. All requests wait from the beginning, in order, and as many run as there are clients at most:
    that is the schedule of clients who each wait for an answer and ask again, but for when a request was asked for.
    """
    layers = workload.model.layers(setting.slots, setting.dtype)
    planned = plan(layers, memory=int(setting.budget_bytes), page_size=PAGE_SIZE)
    work = workload.model.work(setting.dtype)
    clients = Clients(work=work)
    arrival = Arrival(at_s=0.0, num_prompt_tokens=workload.num_prompt_tokens, num_new_tokens=workload.num_new_tokens)
    report = replay(
        planned,
        [arrival] * workload.num_requests,
        work=work,
        device=H200,
        split=setting.split(planned),
        max_running=workload.num_clients,
        on_round=clients.see,
        step_tokens=STEP_TOKENS,
        headroom_steps=setting.headroom_steps,
    )
    return Served(
        report=report,
        running=statistics.median(count for _, count in report.running),
        first_token_s=report.first_token_s["mean"] - clients.mean_asked_s(workload),
    )


def infer_budget_bytes(workload: Workload, num_running: float, *, num_tries: int) -> float:
    """The memory in which pools run so many requests of a workload at once, with tokens for full attention scarce.

    A first value is that in which so many requests of mean length fit; each try serves the workload and corrects it.
    """
    budget_bytes = num_running * workload.mean_tokens / full_tokens_per_byte(workload)
    for _ in range(num_tries):
        served = serve(workload, Setting(budget_bytes=budget_bytes, is_split=True))
        budget_bytes *= num_running / served.running
    return budget_bytes


def infer_lengths(workload: Workload, num_running: float, budget_bytes: float, *, num_tries: int) -> Workload:
    """The workload with lengths, in their proportion, of which pools run so many at once in this memory."""
    scale = budget_bytes * full_tokens_per_byte(workload) / (num_running * workload.mean_tokens)
    for _ in range(num_tries):
        served = serve(_stretched(workload, scale), Setting(budget_bytes=budget_bytes, is_split=True))
        scale *= served.running / num_running
    return _stretched(workload, scale)


def _stretched(workload: Workload, scale: float) -> Workload:
    return replace(
        workload,
        num_prompt_tokens=round(workload.num_prompt_tokens * scale),
        num_new_tokens=round(workload.num_new_tokens * scale),
    )


def full_tokens_per_byte(workload: Workload) -> float:
    """Tokens for full attention that the pools have, for each byte of memory."""
    planned = plan(workload.model.layers(1, torch.float32), memory="64GiB", page_size=PAGE_SIZE)
    shares = default_split(planned, state_to_rest=STATE_TO_REST, window_to_full=WINDOW_TO_FULL)
    full = next(subpool for subpool in planned.subpools if subpool.name == "full")
    return shares["full"] / full.bytes_per_token
