"""Public names of torch-uma, each resolved when it is first asked for."""

import importlib
from typing import Any

_OWNERS = {
    "layout": ["Chunk", "Full", "Layer", "Memory", "Row", "State", "Window"],
    "plan": ["Plan", "plan"],
    "arena": ["Arena"],
    "pool": ["CachePool"],
    "sequence": ["Sequence"],
    "integrations.transformers": ["UnifiedCache"],
    "errors": [
        "ClosedError",
        "GradientError",
        "InvariantError",
        "LeaseError",
        "OutOfMemory",
        "PageError",
        "PlanError",
        "SequenceError",
        "ThreadError",
        "TorchUmaError",
    ],
}


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("torch_uma.testing")
    for owner, names in _OWNERS.items():
        if name in names:
            return getattr(importlib.import_module(f"torch_uma.{owner}"), name)
    raise AttributeError(f"module 'torch_uma' has no attribute {name!r}")
