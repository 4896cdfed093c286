"""The model that a cache or a pool was made of, held weakly, and whether it is still where and what it was then."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from torch_uma.errors import SequenceError

if TYPE_CHECKING:
    from torch_uma.pool import CachePool


class Origin:
    """A model and the dtype that its parameters had; of a config, which cannot be moved, nothing.

    Keys and values say by themselves what they are, but a state of the past is handed to the model, which may break off
    after it has changed others: so models with states are looked at before a step.
    """

    def __init__(self, source: Any) -> None:
        self._model = weakref.ref(source) if isinstance(source, torch.nn.Module) else None
        self._dtype = getattr(source, "dtype", None)

    def check(self, pool: CachePool) -> None:
        """SequenceError if the model's parameters have another dtype than before, or lie on another device."""
        model: Any = None if self._model is None else self._model()
        if model is None or not any(subpool.is_state for subpool in pool.plan.subpools):
            return
        if model.dtype != self._dtype:
            raise SequenceError(
                f"the cache was made of the model in {self._dtype}, which is in {model.dtype} now; make a new cache or "
                f"pool of the model as it is now, or move the model back to {self._dtype}"
            )
        device = pool.arena.bytes.device
        if model.device != device and getattr(model, "hf_device_map", None) is None:
            raise SequenceError(
                f"the cache is on {device}, but the model on {model.device}; make a cache or pool of the model where "
                f"it is now, or move the model to {device}"
            )
