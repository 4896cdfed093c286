"""In which dtype keys and values are kept, where that is not the one in which they are computed.

Owns the choice that a user has there. How numbers are converted is the ops' business: fp8 saturates, and has no scales.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from torch_uma.errors import PlanError
from torch_uma.layout import Layer, Memory, State

_KV_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16)
_NOT_KEPT_SO = ("index_key", "indexer")  # what is chosen by it changes with a bit of it


def kv_dtype_of(asked: torch.dtype | str) -> torch.dtype:
    """The dtype that was asked for, itself or by its name in torch; PlanError if keys and values are not kept in it."""
    dtype = getattr(torch, asked, None) if isinstance(asked, str) else asked
    if not isinstance(dtype, torch.dtype) or dtype not in _KV_DTYPES:
        known = ", ".join(str(each) for each in _KV_DTYPES)
        raise PlanError(
            f"kv_dtype={asked!r} is none in which keys and values are kept; give {known}, or leave it out to keep them "
            "as the model makes them"
        )
    return dtype


def kept_as(layers: Iterable[Layer], asked: torch.dtype | str | None) -> tuple[Layer, ...]:
    """The layers, with keys, values and latents of tokens kept in the dtype that was asked for; None changes nothing.

    States, index keys and what takes no more bytes already stay as they are. PlanError as for `kv_dtype_of`.
    """
    if asked is None:
        return tuple(layers)
    dtype = kv_dtype_of(asked)
    return tuple(
        dataclasses.replace(layer, memories=tuple(_kept_as(memory, dtype) for memory in layer.memories))
        for layer in layers
    )


def _kept_as(memory: Memory, dtype: torch.dtype) -> Memory:
    if isinstance(memory.lifetime, State):
        return memory
    rows = tuple(
        dataclasses.replace(row, dtype=dtype)
        if row.name not in _NOT_KEPT_SO and row.dtype.is_floating_point and row.dtype.itemsize > dtype.itemsize
        else row
        for row in memory.rows
    )
    return dataclasses.replace(memory, rows=rows)
