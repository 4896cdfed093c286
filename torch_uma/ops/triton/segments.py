"""The rows of a call of `write_rows` or `gather_rows` as the kernel takes them, each cut into segments.

Owns where the numbers of a row lie. A segment is a run of them at one stride: a whole entry, or one head of it, so that
keys `[batch, heads, tokens, head_dim]` are read as they lie, transposed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_uma.ops.triton.formats import FORMATS
from torch_uma.ops.triton.launch import block_of

# Numbers of a tile: 16 for each thread of 4 warps.
_TILE_NUMBERS = 2048

# So many segments are counted with 32 bits, with room for a tile.
_MOST_SEGMENTS = 2**31 - 2 * _TILE_NUMBERS

# What numbers are read as where they stay as they are; float8 always, as not every GPU has such a type.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_NOT_SCALED, _SCALED_BY_ENTRY, _SCALED_BY_NUMBER = range(3)


@dataclass(frozen=True, kw_only=True)
class Segments:
    """One row of a call. Strides count the caller's numbers, and a tile is `block_segments` by `block_numbers`.

    Attributes:
        numbers: the caller's memory, in a dtype that kernels take.
        scale: float, or None.
        scale_strides: between batch rows, between their entries, between numbers.
        num_heads, width: segments of an entry, and numbers of a segment.
        strides: between batch rows, between their entries, between heads, between numbers.
        first_bytes, entry_bytes: where the row of entry 0 begins in the arena, and how far it is to the next.
        stored: dtype of the numbers in the arena, as kernels take it.
        formats: names of the dtypes that the numbers have in their source and get; equal if they stay as they are.
    """

    numbers: Tensor
    scale: Tensor | None
    scale_strides: tuple[int, int, int]
    num_heads: int
    width: int
    strides: tuple[int, int, int, int]
    first_bytes: int
    entry_bytes: int
    stored: torch.dtype
    formats: tuple[str, str]

    @property
    def vector(self) -> int:
        """So many of the caller's numbers lie together, in at most 16 bytes, wherever the kernel reads or writes."""
        *between, number_stride = self.strides
        together = math.gcd(16 // self.numbers.dtype.itemsize, self.width, *between)
        return together if number_stride == 1 else 1

    @property
    def stored_vector(self) -> int:
        """As `vector`, of the numbers in the arena."""
        size = self.stored.itemsize
        assert self.first_bytes % size == self.entry_bytes % size == 0, (self.first_bytes, self.entry_bytes, size)
        return math.gcd(16 // size, self.width, self.first_bytes // size, self.entry_bytes // size)

    @property
    def block_numbers(self) -> int:
        return block_of(self.width, least=64, most=_TILE_NUMBERS)

    @property
    def block_segments(self) -> int:
        return _TILE_NUMBERS // self.block_numbers

    @property
    def scaling(self) -> int:
        """Which numbers share a scale: none has one, those of an entry, or none does."""
        if self.scale is None:
            return _NOT_SCALED
        return _SCALED_BY_NUMBER if self.scale_strides[2] else _SCALED_BY_ENTRY

    def entries_of(self, arena_bytes: int) -> int:
        """How many entries of the arena have this row."""
        row_bytes = self.num_heads * self.width * self.stored.itemsize
        return (arena_bytes - self.first_bytes - row_bytes) // self.entry_bytes + 1

    def num_tiles(self, num_entries: int) -> int:
        return -(-num_entries * self.num_heads // self.block_segments) * -(-self.width // self.block_numbers)

    @property
    def arguments(self) -> tuple[object, ...]:
        """What the kernel takes of this row. Offsets count vectors, so that it is known to be aligned to these."""
        vector, stored_vector = self.vector, self.stored_vector
        vector_bytes = stored_vector * self.stored.itemsize
        return (
            self.numbers,
            self.scale,
            self.scale_strides,
            self.num_heads,
            self.width // max(vector, stored_vector),
            tuple(stride // vector for stride in self.strides[:3]),
            self.strides[3],
            self.first_bytes // vector_bytes,
            self.entry_bytes // vector_bytes,
        )


def batches_of(entries: Tensor) -> tuple[int, int]:
    """Entries as rows of a batch, of equally many each; other than two dimensions are one row."""
    return (entries.shape[0], entries.shape[1]) if entries.dim() == 2 else (1, entries.numel())


def is_supported(
    source: torch.dtype, target: torch.dtype, scale: Tensor | None, device: torch.device, *, saturates: bool
) -> bool:
    """Whether the kernel converts so; `saturates` says whether numbers beyond the greatest become that one."""
    if scale is None and source == target:
        return target.itemsize in _CARRIERS
    names = {str(dtype).removeprefix("torch.") for dtype in (source, target)}
    if scale is not None and (scale.device != device or scale.dtype not in _SCALE_DTYPES):
        return False
    return names <= set(FORMATS) and (saturates or target.itemsize > 1)


def segments_of(
    values: Tensor,
    entries: Tensor,
    scale: Tensor | None,
    stored: torch.dtype,
    *,
    writes: bool,
    first_bytes: int,
    entry_bytes: int,
) -> Segments:
    """The segments of `values` `[*entries.shape, *shape]`, not empty; a copy if these are too irregular."""
    batches = batches_of(entries)
    shape = values.shape[entries.dim() :]
    values = values.reshape(*batches, *shape)
    dims = _merged(values.shape[2:], values.stride()[2:])
    if len(dims) > 2 or (len(dims) == 2 and dims[0][0] * entries.numel() > _MOST_SEGMENTS):
        values = values.reshape(*batches, -1)
        dims = [(values.shape[2], 1)]
    (num_heads, head_stride), (width, number_stride) = [(1, 0)] * (2 - len(dims)) + dims
    scale_strides = (0, 0, 0)
    if scale is not None:
        scale = scale.broadcast_to(*entries.shape, math.prod(shape)).reshape(*batches, -1)
        scale_strides = (*_outer_strides(scale), scale.stride(2))
    is_copied = scale is None and values.dtype == stored
    source, target = (values.dtype, stored) if writes else (stored, values.dtype)
    return Segments(
        numbers=values.view(_carrier(values.dtype, is_copied)),
        scale=scale,
        scale_strides=scale_strides,
        num_heads=num_heads,
        width=width,
        strides=(*_outer_strides(values), head_stride, number_stride),
        first_bytes=first_bytes,
        entry_bytes=entry_bytes,
        stored=_carrier(stored, is_copied),
        formats=(str(source).removeprefix("torch."), str(target).removeprefix("torch.")),
    )


def _outer_strides(tensor: Tensor) -> tuple[int, int]:
    """Between batch rows, and between their entries; 0 where there is one, as a kernel is compiled for its strides."""
    (num_batches, num_entries), (batch, entry) = tensor.shape[:2], tensor.stride()[:2]
    return batch if num_batches > 1 else 0, entry if num_entries > 1 else 0


def _carrier(dtype: torch.dtype, is_copied: bool) -> torch.dtype:
    is_float8 = dtype.itemsize == 1 and dtype.is_floating_point
    return _CARRIERS[dtype.itemsize] if is_copied or is_float8 else dtype


def _merged(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """The fewest dimensions, as size and stride, at least one, that count the same numbers in the same order."""
    dims: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * stride:
            dims[-1] = (dims[-1][0] * size, stride)
        else:
            dims.append((size, stride))
    return dims or [(1, 1)]
