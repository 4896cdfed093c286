"""A published workload served on the clock of torch_uma.simulate, and inputs inferred from what was published of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from workloads_h200 import (
    H200,
    HEADROOM_STEPS,
    PAGE_SIZE,
    STATE_SLOTS,
    STEP_TOKENS,
    Workload,
)

from torch_uma.plan import Plan, plan
from torch_uma.scheduling import Round, Scheduler
from torch_uma.simulate import Arrival, Device, Report, Work, replay
from torch_uma.simulate.splits import WINDOW_TO_FULL, default_split

NEAR = 0.01  # as good as the number that something is inferred from


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a workload is served: in how much memory, in pools or not, and what else a run may vary.

    `forward_s`: what a forward takes beyond the roofline.
    """

    budget_bytes: float
    forward_s: float = H200.forward_s
    is_split: bool = False
    window_to_full: float = WINDOW_TO_FULL
    slots: int = STATE_SLOTS
    dtype: torch.dtype = torch.float32
    headroom_steps: int = HEADROOM_STEPS

    @property
    def device(self) -> Device:
        """On whose clock it is served."""
        return replace(H200, forward_s=self.forward_s)

    def split(self, planned: Plan) -> dict[str, float] | None:
        """Of the pools, if it is pools."""
        if not self.is_split:
            return None
        return default_split(planned, window_to_full=self.window_to_full)


@dataclass(frozen=True, kw_only=True)
class Served:
    """What came of it; `running` is the median over rounds."""

    report: Report
    running: float


class Clients(Sequence[Arrival]):
    """The requests of clients who each wait for an answer and ask again: when one arrives is known once it has to be.

    The clock is that of the replay, but for the bytes that are moved, which cost milliseconds.
    """

    def __init__(self, workload: Workload, work: Work, device: Device) -> None:
        self._workload = workload
        self._work = work
        self._device = device
        self._scheduler: Scheduler | None = None
        self._now_s = 0.0
        self._answered_s: list[float] = []

    def see(self, scheduler: Scheduler, round: Round) -> None:
        """A round is decided: it will take as long as its forwards do."""
        self._scheduler = scheduler
        self._now_s += sum(self._work.seconds(forward, self._device) for forward in round.forwards)

    def __len__(self) -> int:
        return self._workload.num_requests

    def __getitem__(self, number: Any) -> Any:
        if number >= len(self):
            raise IndexError(number)
        if self._scheduler is not None:
            num_answered = self._scheduler.stats().finished
            self._answered_s += [self._now_s] * (num_answered - len(self._answered_s))
        before = number - self._workload.num_clients  # whose answer this one waits for
        at_s = 0.0 if before < 0 else self._answered_s[before] if before < len(self._answered_s) else math.inf
        prompt, new = self._workload.num_prompt_tokens, self._workload.num_new_tokens
        return Arrival(at_s=at_s, num_prompt_tokens=prompt, num_new_tokens=new)


@cache
def serve(workload: Workload, setting: Setting) -> Served:
    """Serve a workload on the clock of the named device."""
    layers = workload.model.layers(setting.slots, setting.dtype)
    planned = plan(layers, memory=int(setting.budget_bytes), page_size=PAGE_SIZE)
    work = workload.model.work(setting.dtype)
    clients = Clients(workload, work, setting.device)
    report = replay(
        planned,
        clients,
        work=work,
        device=setting.device,
        split=setting.split(planned),
        max_running=workload.num_clients,
        on_round=clients.see,
        step_tokens=STEP_TOKENS,
        headroom_steps=setting.headroom_steps,
    )
    return Served(report=report, running=statistics.median(count for _, count in report.running))


def infer_budget_bytes(workload: Workload, num_running: float, *, num_tries: int) -> float:
    """The memory in which pools run so many requests of a workload at once, with tokens for full attention scarce.

    A first value is that in which so many requests of mean length fit; each try serves the workload and corrects it,
    until it is near.
    """
    budget_bytes = num_running * workload.mean_tokens / full_tokens_per_byte(workload)
    for _ in range(num_tries):
        served = serve(workload, Setting(budget_bytes=budget_bytes, is_split=True))
        if abs(served.running / num_running - 1) <= NEAR:
            break
        budget_bytes *= num_running / served.running
    return budget_bytes


def infer_forward_s(workload: Workload, tokens_per_s: float, budget_bytes: float) -> float:
    """What a forward takes beyond the roofline, if pools give so many new tokens a second in this memory.

    Every forward takes the same besides, so seconds grow with it in a straight line through two runs.
    """
    least, more = (Setting(budget_bytes=budget_bytes, is_split=True, forward_s=forward_s) for forward_s in (0.0, 1e-3))
    least_s, more_s = (serve(workload, setting).report.seconds for setting in (least, more))
    seconds = workload.num_requests * workload.num_new_tokens / tokens_per_s
    return max(0.0, (seconds - least_s) / (more_s - least_s) * more.forward_s)


def infer_lengths(workload: Workload, num_running: float, setting: Setting, *, num_tries: int) -> Workload:
    """The workload with lengths, in their proportion, of which pools run so many at once as they are set."""
    assert setting.is_split
    scale = setting.budget_bytes * full_tokens_per_byte(workload) / (num_running * workload.mean_tokens)
    for _ in range(num_tries):
        served = serve(_stretched(workload, scale), setting)
        if abs(served.running / num_running - 1) <= NEAR:
            break
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
    shares = default_split(planned)
    full = next(subpool for subpool in planned.subpools if subpool.name == "full")
    return shares["full"] / full.bytes_per_token
