"""Epochs: which step has passed on the arena's stream, for other streams to wait for."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext

import torch

_NUM_EVENTS = 64


class Epochs:
    """An event for each of the last steps, recorded on the arena's stream when it ends; none without CUDA.

    `stream` is the arena's, the one that was current when the pool was made; None without CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._events: deque[tuple[int, torch.cuda.Event]] = deque(maxlen=_NUM_EVENTS)

    def on_stream(self) -> AbstractContextManager[object]:
        """What is enqueued in such a block goes to the arena's stream, whichever is current outside of it."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def record(self, epoch: int) -> None:
        """Note that all work of the step `epoch` has been enqueued."""
        if self.stream is not None:
            event = torch.cuda.Event()
            event.record(self.stream)
            self._events.append((epoch, event))

    def event(self, epoch: int) -> torch.cuda.Event | None:
        """What passes once step `epoch` has; for one long ago, the oldest event known, which passes later."""
        for recorded, event in self._events:
            if recorded == epoch:
                return event
        return self._events[0][1] if self._events and epoch else None
