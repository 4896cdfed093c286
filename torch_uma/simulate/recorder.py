"""What happens in a replay, taken down round by round."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from torch_uma.pool import CachePool
from torch_uma.scheduling import Request, Round, Scheduler
from torch_uma.simulate.report import PERCENTILES, Report

_NUM_POINTS = 1000


class Recorder:
    """Counts, times and bytes of a replay over `pool`.

    Attributes:
        num_refused: requests that could not be taken; counted by who submits.
        num_done: requests that are finished or refused.
    """

    def __init__(self, pool: CachePool, scheduler: Scheduler, num_requests: int, *, is_split: bool) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._num_requests = num_requests
        self.num_refused = 0
        self._num_completed = self._num_new_tokens = 0
        self._bands = pool.allocator.bands
        self._is_split = is_split
        self._moved_bytes = self._host_bytes = 0
        self._came_s: dict[Request, float] = {}
        self._first_s: list[float] = []
        self._ended_s: list[float] = [0.0]  # by number of the round
        self._gaps: list[tuple[float, int]] = []  # seconds between two tokens of a request, and of how many
        self._running: list[int] = []
        self._held_page_s = np.zeros(len(pool.plan.subpools))
        self._began_s: list[float] = []

    @property
    def num_done(self) -> int:
        """Requests that are finished or refused."""
        return self._num_completed + self.num_refused

    def come(self, request: Request, at_s: float) -> None:
        """A request came in."""
        self._came_s[request] = at_s

    def begin(self, round: Round, now_s: float) -> int:
        """A round is decided, and its forwards begin; returns the bytes that went to the host and back for it."""
        self._began_s.append(now_s)
        self._running.append(self._scheduler.num_running)
        if not round.resumed and not round.offloaded:
            return 0
        num_bytes = sum(request.offloaded.num_bytes for request in round.offloaded if request.offloaded is not None)
        for request in round.resumed:
            assert request.sequence is not None
            num_bytes += self._pool.plan.bytes_per_sequence(request.sequence.length)
        self._host_bytes += num_bytes
        return num_bytes

    def moved_bytes(self) -> int:
        """Bytes moved within the arena since this was last asked."""
        moved = sum(band.moved_pages * band.grid.page_bytes for band in self._bands)
        new, self._moved_bytes = moved - self._moved_bytes, moved
        return new

    def end(self, round: Round, now_s: float) -> None:
        """The forwards of a round are over at `now_s`, and what they have sampled is there."""
        lasted_s = now_s - self._began_s[-1]
        self._ended_s += [now_s] * (round.number + 1 - len(self._ended_s))
        books = self._pool.sequences  # the bands know only later of what was let go of
        self._held_page_s += lasted_s * ((books.end - books.first) @ books.live)
        num_resumed = len(round.resumed)
        for request in round.resumed:
            self._note_gap(request, now_s)
        for forward in round.forwards:
            if forward.is_decode:
                num_others = len(forward.requests)
                if num_resumed:
                    num_others -= len(set(round.resumed).intersection(forward.requests))
                self._gaps.append((lasted_s, num_others))
            else:
                for request, samples in zip(forward.requests, forward.samples.tolist()):
                    if samples:
                        self._note_prompt(request, now_s)

    def finish(self, requests: Iterable[Request]) -> None:
        """These have got all of their tokens."""
        for request in requests:
            self._num_completed += 1
            self._num_new_tokens += request.num_new_tokens
            del self._came_s[request]

    def report(self) -> Report:
        """All of it, summed up."""
        stats = self._scheduler.stats()
        seconds = self._ended_s[-1]
        began_s, ended_s, running = np.array(self._began_s), np.array(self._ended_s[1:]), np.array(self._running)
        lasted_s = ended_s - began_s
        page_bytes = np.array([band.grid.page_bytes for band in self._bands])
        used = self._held_page_s * page_bytes / max(seconds, 1e-12)
        names = [subpool.name for subpool in self._pool.plan.subpools]
        gaps = np.array(self._gaps).reshape(-1, 2)
        completed = max(1, self._num_completed)
        return Report(
            num_requests=self._num_requests,
            num_completed=self._num_completed,
            num_refused=self.num_refused,
            seconds=seconds,
            num_rounds=stats.rounds,
            requests_per_s=self._num_completed / max(seconds, 1e-12),
            new_tokens_per_s=self._num_new_tokens / max(seconds, 1e-12),
            first_token_s=_percentiles(np.array(self._first_s), np.ones(len(self._first_s))),
            inter_token_s=_percentiles(gaps[:, 0], gaps[:, 1]),
            mean_running=float(running.mean()) if len(running) else 0.0,
            time_mean_running=float(running @ lasted_s / max(seconds, 1e-12)),
            max_running=int(running.max(initial=0)),
            dropped=stats.dropped,
            offloaded=stats.offloaded,
            preempted=stats.preempted,
            recomputed_tokens=stats.recomputed_tokens,
            retractions_per_1000=1000 * (stats.dropped + stats.offloaded) / completed,
            moved_bytes=self._moved_bytes,
            host_bytes=self._host_bytes,
            used_bytes=dict(zip(names, used.tolist())),
            idle_bytes=self._idle_bytes(names, used),
            running=_points(began_s, ended_s, running),
        )

    def _note_prompt(self, request: Request, now_s: float) -> None:
        """A prompt has come to its end: that is its first token, or the next after it was recomputed."""
        if request.num_retractions and request.num_new_tokens > 1:
            self._note_gap(request, now_s)
        else:
            self._first_s.append(now_s - self._came_s[request])

    def _note_gap(self, request: Request, now_s: float) -> None:
        self._gaps.append((now_s - self._ended_s[request.last_round], 1))

    def _idle_bytes(self, names: list[str], used: np.ndarray) -> dict[str, float]:
        if not self._is_split:
            return {"arena": self._pool.plan.arena_bytes - float(used.sum())}
        regions = [(grid.num_pages - grid.first_page) * grid.page_bytes for grid in self._pool.allocator.room.grids]
        return {name: region - held for name, region, held in zip(names, regions, used.tolist())}


def _percentiles(values: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """Of values that stand for as many as their weights say; all 0 without any."""
    values, weights = values[weights > 0], weights[weights > 0]
    if not len(values):
        return {"mean": 0.0, **{str(percent): 0.0 for percent in PERCENTILES}}
    order = values.argsort()
    reached = weights[order].cumsum()
    found = {
        str(percent): float(values[order[reached.searchsorted(percent * reached[-1] / 100)]]) for percent in PERCENTILES
    }
    return {"mean": float(np.average(values, weights=weights)), **found}


def _points(began_s: np.ndarray, ended_s: np.ndarray, running: np.ndarray) -> list[tuple[float, int]]:
    """How many run from which time on: nobody between two rounds that do not meet. At most so many as are drawn."""
    is_idle = np.append(began_s[1:] > ended_s[:-1], True)[: len(running)]
    times_s = np.stack([began_s, ended_s], axis=1)
    numbers = np.stack([running, np.zeros_like(running)], axis=1)
    is_point = np.stack([np.ones_like(is_idle), is_idle], axis=1)
    times_s, numbers = times_s[is_point], numbers[is_point]
    chosen = np.unique(np.linspace(0, len(numbers) - 1, min(len(numbers), _NUM_POINTS)).astype(int))
    return list(zip(times_s[chosen].tolist(), numbers[chosen].tolist()))
