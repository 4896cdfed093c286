"""One arena for every kind of memory that a hybrid language model keeps per request: the public names."""

import importlib
from typing import TYPE_CHECKING, Any

import torch_uma.ops  # noqa: F401  (registers them)
from torch_uma.arena import Arena
from torch_uma.errors import (
    ClosedError,
    GradientError,
    InvariantError,
    LeaseError,
    OutOfMemory,
    PageError,
    PlanError,
    ProcessorError,
    SequenceError,
    ThreadError,
    TorchUmaError,
)
from torch_uma.layout import Chunk, Full, Layer, Memory, Row, State, Window
from torch_uma.offload import Offloaded
from torch_uma.placement import Quote
from torch_uma.plan import Plan, plan
from torch_uma.pool import CachePool
from torch_uma.scheduling import Scheduler
from torch_uma.sequence import Sequence
from torch_uma.stats import Stats

if TYPE_CHECKING:
    from torch_uma import simulate, testing
    from torch_uma.integrations.transformers import (
        Event,
        Generation,
        ServingLoop,
        UnifiedCache,
        generate_batch,
        speculate,
    )

__version__ = "0.1.0"

__all__ = [
    "Arena",
    "CachePool",
    "Chunk",
    "ClosedError",
    "Event",
    "Full",
    "Generation",
    "GradientError",
    "InvariantError",
    "Layer",
    "LeaseError",
    "Memory",
    "Offloaded",
    "OutOfMemory",
    "PageError",
    "Plan",
    "PlanError",
    "ProcessorError",
    "Quote",
    "Row",
    "Scheduler",
    "Sequence",
    "SequenceError",
    "ServingLoop",
    "State",
    "Stats",
    "ThreadError",
    "TorchUmaError",
    "UnifiedCache",
    "Window",
    "generate_batch",
    "plan",
    "simulate",
    "speculate",
    "testing",
]


def __getattr__(name: str) -> Any:
    """Import what costs time, or another library, when it is first asked for."""
    if name in ("simulate", "testing"):
        return importlib.import_module(f"torch_uma.{name}")
    if name in ("Event", "Generation", "ServingLoop", "UnifiedCache", "generate_batch", "speculate"):
        return getattr(importlib.import_module("torch_uma.integrations.transformers"), name)
    raise AttributeError(f"module 'torch_uma' has no attribute {name!r}")
