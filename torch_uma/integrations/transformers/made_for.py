"""The model that a pool was made of, as far as it is still there, and whether a cache of another may share it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from torch_uma.errors import PlanError
from torch_uma.integrations.transformers.attention import is_used
from torch_uma.integrations.transformers.declare import declare
from torch_uma.integrations.transformers.devices import devices_of, several
from torch_uma.integrations.transformers.origin import Origin, text_config_of
from torch_uma.integrations.transformers.stores import stores_tokens
from torch_uma.layout import Layer, Row

if TYPE_CHECKING:
    from torch_uma.pool import CachePool

_MADE_FOR: weakref.WeakKeyDictionary[CachePool, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The model or config last seen to store what a pool was made for, as it takes a forward to see."""


_ORIGINS: weakref.WeakKeyDictionary[CachePool, Origin] = weakref.WeakKeyDictionary()
"""What the pools that steps were opened over were made of."""


def config_of(pool: CachePool) -> PreTrainedConfig | None:
    """The text config of the model that a pool was made of, None if it was made of a plan or the model is gone."""
    return text_config_of(None if pool.made_for is None else pool.made_for())


def reads_in_place(pool: CachePool) -> bool:
    """Whether what stores tokens in a pool reads them there; also where nothing does, as states are views."""
    return not stores_tokens(pool.plan.layers) or is_used(config_of(pool))


def check_made_for(pool: CachePool, model_or_config: Any) -> None:
    """PlanError if a pool was made for a model that stores something else, or elsewhere; looks once at each model."""
    if pool in _MADE_FOR and _MADE_FOR[pool]() is model_or_config:
        return
    declared = declare(model_or_config)
    stored = [_shapes(layer) for layer in declared]
    held = [_shapes(layer) for layer in pool.plan.layers]
    if stored != held:
        index = next((i for i, (a, b) in enumerate(zip(stored, held, strict=False)) if a != b), None)
        difference = f"{len(stored)} layers" if index is None else f"in layer {index} {stored[index]}"
        instead = f"{len(held)}" if index is None else f"{held[index]}"
        raise PlanError(
            f"the pool was made for another model: this one stores {difference}, the pool {instead}; "
            "make a CachePool of this model, or leave pool= out"
        )
    for index, (rows, held_rows) in enumerate(zip(map(_rows, declared), map(_rows, pool.plan.layers), strict=True)):
        for row, held_row in zip(rows, held_rows, strict=True):
            if held_row.computed_dtype not in (None, row.dtype):
                raise PlanError(
                    f"the pool was made for a model that computes {held_row.name!r} of layer {index} in "
                    f"{held_row.computed_dtype}, and this one computes it in {row.dtype}; make a CachePool of this "
                    "model, or leave pool= out"
                )
    devices = devices_of(model_or_config)
    if len(devices) > 1:
        raise PlanError(f"{several(devices)}, and the cache has a pool on each; leave pool= out")
    _MADE_FOR[pool] = weakref.ref(model_or_config)


def origin_of(pool: CachePool) -> Origin:
    """What the pool was made of, as it was at the first step."""
    if pool not in _ORIGINS:
        _ORIGINS[pool] = Origin(None if pool.made_for is None else pool.made_for())
    return _ORIGINS[pool]


def _rows(layer: Layer) -> list[Row]:
    return [row for memory in layer.memories for row in memory.rows]


def _shapes(layer: Layer) -> list[Any]:
    """What a layer stores, whatever it is called and in whatever dtype it is kept."""
    return [
        (memory.lifetime, memory.tokens_per_entry, *(row.shape for row in memory.rows)) for memory in layer.memories
    ]
