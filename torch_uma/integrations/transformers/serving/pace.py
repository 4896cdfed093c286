"""How fast prompts are computed: measured as a loop goes, never waited for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WEIGHT = 0.1
"""Of the newest forward in the mean, so that it follows the traffic within some tens of forwards."""


class Pace:
    """Seconds that a token of a prompt takes, as a mean of the last forwards in which it was measured.

    On a device with streams it is the time between two events, which are looked at once they have passed.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_timed = device.type == "cuda"
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()
        self._token_s: float | None = None
        self._num_measured = 0

    @property
    def token_s(self) -> float | None:
        """The mean, of the forwards that have ended; None before there is one."""
        while self._pending and self._pending[0][1].query():
            start, end, num_tokens = self._pending.popleft()
            self._note(start.elapsed_time(end) / 1e3 / num_tokens)
        return self._token_s

    @contextmanager
    def of(self, num_tokens: int) -> Iterator[None]:
        """Measures a forward over so many tokens of prompts, unless it raises."""
        if self._is_timed:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._pending.append((start, end, num_tokens))
        else:
            began = time.perf_counter()
            yield
            self._note((time.perf_counter() - began) / num_tokens)

    def _note(self, token_s: float) -> None:
        self._num_measured += 1
        if self._token_s is None or self._num_measured == 2:  # the first forward also builds and loads what it needs
            self._token_s = token_s
        else:
            self._token_s += _WEIGHT * (token_s - self._token_s)
