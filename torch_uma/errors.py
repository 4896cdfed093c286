"""What can go wrong, one class for each thing that a caller can act on.

Every message says what was asked, what there is, and what would help. A call that raises one of these has changed
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_uma.placement import Quote


class TorchUmaError(Exception):
    """Base of every error that torch-uma raises on purpose."""


class PlanError(TorchUmaError, ValueError):
    """The declarations, or the memory given for them, do not make a plan."""


class OutOfMemory(TorchUmaError, MemoryError):
    """A demand does not fit; `quote` names the sub-pool that binds and what releasing pages of each kind would do."""

    def __init__(self, message: str, quote: Quote) -> None:
        super().__init__(message)
        self.quote = quote


class PageError(TorchUmaError, ValueError):
    """Page ids that are not the caller's to use: dead, named twice, a sentinel, the sink, or of another sub-pool."""


class LeaseError(TorchUmaError, ValueError):
    """A lease that is already closed, or that would cover nothing."""


class SequenceError(TorchUmaError, ValueError):
    """A sequence that cannot be used in this way: freed, of another pool, in an open step, cropped too far."""


class ProcessorError(TorchUmaError, RuntimeError):
    """A logits processor raised; `rows` are those of the forward that it was called for."""

    def __init__(self, message: str, rows: tuple[int, ...]) -> None:
        super().__init__(message)
        self.rows = rows


class ThreadError(TorchUmaError, RuntimeError):
    """A pool was used from a second thread."""


class GradientError(TorchUmaError, RuntimeError):
    """A forward pass that records gradients would write into the cache."""


class ClosedError(TorchUmaError, RuntimeError):
    """The pool was closed."""


class InvariantError(TorchUmaError, AssertionError):
    """`check()` found books that do not balance: a bug in torch-uma, or memory written by someone else."""
