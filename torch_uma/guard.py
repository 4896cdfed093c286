"""The guard of a pool: who may call, and what is brought to rest before an operation begins."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from torch_uma.epochs import Epochs
from torch_uma.errors import ClosedError, SequenceError, ThreadError
from torch_uma.tables import Int64Array

if TYPE_CHECKING:
    from torch_uma.step import OpenStep


class Guard:
    """Lets one thread in, until the pool is closed.

    Attributes:
        closed: whether the pool has been closed.
        steps: the open steps by epoch.
        epochs: what other streams wait for.
        abandoned: what finalizers leave to be done: they run in any thread, and while an operation is half done.
    """

    def __init__(self, epochs: Epochs) -> None:
        self.closed = False
        self.steps: dict[int, OpenStep] = {}
        self.epochs = epochs
        self.abandoned: deque[Callable[[], None]] = deque()
        self._thread = threading.get_ident()
        self._is_settling = False

    def check_usable(self) -> None:
        """Raise ThreadError or ClosedError."""
        if threading.get_ident() != self._thread:
            raise ThreadError("a pool is driven by the thread that made it; hand the work to that thread")
        if self.closed:
            raise ClosedError("the pool was closed; make another")

    def enter(self) -> None:
        """What every operation begins with: `check_usable`; what was abandoned goes, implicit steps come to rest."""
        self.check_usable()
        if (self.steps or self.abandoned) and not self._is_settling:
            self._is_settling = True
            try:
                while self.abandoned:
                    self.abandoned.popleft()()
                for step in list(self.steps.values()):
                    settle = step.on_settle
                    if settle is not None:
                        settle()
            finally:
                self._is_settling = False

    def end(self, step: OpenStep) -> None:
        """Note that a step has ended, on the device too."""
        del self.steps[step.epoch]
        self.epochs.record(step.epoch)

    def check_idle(self, rows: Int64Array) -> None:
        """Raise SequenceError if one of the rows is in an open step."""
        for step in tuple(self.steps.values()):
            busy = rows[np.isin(rows, step.rows)]
            if len(busy):
                raise SequenceError(f"row {busy[0]} is in the open step {step.epoch}; commit() or abort() it first")
