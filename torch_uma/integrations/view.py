"""Strided views of the arena as values, for libraries that are given tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class View:
    """A strided view of the arena: `shape` and `strides` in elements of `dtype`, `offset_bytes` from its first byte."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset_bytes: int
    dtype: torch.dtype

    def over(self, arena: Tensor) -> Tensor:
        """The view as a tensor: the memory of `arena`, uint8 `[bytes]`, never a copy."""
        typed = arena.view(self.dtype)
        first = typed.storage_offset() + self.offset_bytes // self.dtype.itemsize
        return typed.as_strided(self.shape, self.strides, first)
