"""Read from a transformers model or config what each of its layers stores."""

from __future__ import annotations

from typing import Any

import torch

from torch_uma.errors import PlanError
from torch_uma.layout import Layer


def declare(model_or_config: Any, *, dtype: torch.dtype | None = None) -> tuple[Layer, ...]:
    """Layers of a transformers model or config; `dtype` is that of its activations where the config does not say it."""
    raise PlanError(f"cannot read what {type(model_or_config).__name__} stores")
