"""The guard of a pool: who may call, and what is brought to rest before an operation begins."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from torch_uma.errors import ClosedError, SequenceError, ThreadError
from torch_uma.tables import Int64Array

if TYPE_CHECKING:
    from torch_uma.step import Step


class Guard:
    """Lets one thread in, until the pool is closed.

    Attributes:
        closed: whether the pool has been closed.
        steps: the open steps by epoch.
    """

    def __init__(self) -> None:
        self.closed = False
        self.steps: dict[int, Step] = {}
        self._thread = threading.get_ident()
        self._is_settling = False

    def check_usable(self) -> None:
        """Raise ThreadError or ClosedError."""
        if threading.get_ident() != self._thread:
            raise ThreadError("a pool is driven by the thread that made it; hand the work to that thread")
        if self.closed:
            raise ClosedError("the pool was closed; make another")

    def enter(self) -> None:
        """What every operation begins with: `check_usable`, and implicit steps are brought to rest."""
        self.check_usable()
        if self.steps and not self._is_settling:
            self._is_settling = True
            try:
                for step in list(self.steps.values()):
                    if step.on_settle is not None:
                        step.on_settle()
            finally:
                self._is_settling = False

    def check_idle(self, rows: Int64Array) -> None:
        """Raise SequenceError if one of the rows is in an open step."""
        for step in self.steps.values():
            busy = rows[np.isin(rows, step.rows)]
            if len(busy):
                raise SequenceError(f"row {busy[0]} is in the open step {step.epoch}; commit() or abort() it first")
