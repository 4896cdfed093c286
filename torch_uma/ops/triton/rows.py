"""Rows that go into entries or come from them, all rows of a call in one launch.

Owns the kernel of `write_rows` and `gather_rows`. A tile is some numbers of some segments of one row; programs take the
tiles of all rows in turns. Numbers that keep their dtype are moved as bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_uma.ops import reference
from torch_uma.ops.triton.addresses import place
from torch_uma.ops.triton.formats import from_float32, to_float32
from torch_uma.ops.triton.launch import Launch, Machine, machine_of, num_programs
from torch_uma.ops.triton.segments import Segments, batches_of, is_supported, segments_of

# More than three rows of different dtypes need: CUDA 13's assembler, not told so, spills to have no more than 80. Fewer
# rows never spilled, and need fewer registers where nothing is said.
_MOST_REGISTERS = 128


@triton.jit
def row_offsets(tile, num_entries, entries_per_batch, entries, row, VECTORS: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of a tile at the caller, in the arena and among scales; which numbers there are, and which are stored."""
    _, _, scale_strides, num_heads, width_vectors, strides, number_stride, first, stride = row
    VECTOR: tl.constexpr = VECTORS[0]
    STORED_VECTOR: tl.constexpr = VECTORS[1]
    width = width_vectors * max(VECTOR, STORED_VECTOR)
    num_parts = tl.cdiv(width, BLOCK[1])
    segment = tile // num_parts * BLOCK[0] + tl.arange(0, BLOCK[0])
    number = (tile % num_parts * BLOCK[1] + tl.arange(0, BLOCK[1]))[None, :]
    index = segment // num_heads
    exists = (index < num_entries)[:, None] & (number < width)
    index = tl.minimum(index, num_entries - 1)  # so that there is an entry, and a scale
    head = segment % num_heads
    batch = index // entries_per_batch
    inside = index % entries_per_batch
    entry = tl.load(entries + index)
    is_stored = exists & (entry >= 0)[:, None]
    at_caller = place(batch, place(inside, place(head, 0, strides[2]), strides[1]), strides[0]) * VECTOR
    in_arena = place(entry, first, stride) * STORED_VECTOR + head * width
    of_scale = place(batch, place(inside, 0, scale_strides[1]), scale_strides[0])[:, None]
    of_scales = of_scale + place(head[:, None] * width + number, 0, scale_strides[2])
    at_caller = at_caller[:, None] + place(number, 0, number_stride)
    return at_caller, in_arena[:, None] + number, of_scale, of_scales, exists, is_stored


@triton.jit
def _scale_of(scale, of_scale, of_scales, is_stored, SCALING: tl.constexpr):
    if SCALING == 1:
        return tl.load(scale + of_scale).to(tl.float32)
    else:
        return tl.load(scale + of_scales, mask=is_stored, other=1.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_entries", "entries_per_batch", "arena_entries", "num_tiles"])
def rows_kernel(
    arena,
    entries,
    rows,
    num_entries,
    entries_per_batch,
    arena_entries,
    num_tiles,
    WRITES: tl.constexpr,
    STORED: tl.constexpr,
    SOURCES: tl.constexpr,
    TARGETS: tl.constexpr,
    SCALINGS: tl.constexpr,
    VECTORS: tl.constexpr,
    BLOCKS: tl.constexpr,
    CONVERTS_FLOAT8: tl.constexpr,
):
    # Before the tiles, where the call that an assertion is would make registers spill.
    for block in range(tl.program_id(0), tl.cdiv(num_entries, 256), tl.num_programs(0)):
        at = block * 256 + tl.arange(0, 256)
        entry = tl.load(entries + at, mask=at < num_entries, other=-1)
        tl.device_assert(entry < arena_entries, "an entry lies outside the arena")
    for tile_of_all in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile = tile_of_all
        for i in tl.static_range(len(STORED)):
            width = rows[i][4] * max(VECTORS[i][0], VECTORS[i][1])
            row_tiles = tl.cdiv(num_entries * rows[i][3], BLOCKS[i][0]) * tl.cdiv(width, BLOCKS[i][1])
            if (tile >= 0) & (tile < row_tiles):
                at_caller, in_arena, of_scale, of_scales, exists, is_stored = row_offsets(
                    tile, num_entries, entries_per_batch, entries, rows[i], VECTORS[i], BLOCKS[i]
                )
                numbers = rows[i][0] + at_caller
                stored = arena.to(tl.pointer_type(STORED[i]), bitcast=True) + in_arena
                values = tl.load(numbers if WRITES else stored, mask=is_stored)
                if SOURCES[i] != TARGETS[i] or SCALINGS[i] != 0:
                    wide = to_float32(values, SOURCES[i], CONVERTS_FLOAT8)
                    if SCALINGS[i] != 0:
                        scale = _scale_of(rows[i][1], of_scale, of_scales, is_stored, SCALINGS[i])
                        wide = tl.div_rn(wide, tl.broadcast_to(scale, wide.shape)) if WRITES else wide * scale
                    values = from_float32(wide, TARGETS[i], CONVERTS_FLOAT8)
                if WRITES:
                    tl.store(stored, values, mask=is_stored)
                else:
                    tl.store(numbers, tl.where(is_stored, values, tl.zeros_like(values)), mask=exists)
            tile -= row_tiles


def plan_rows(machine: Machine, arena: Tensor, entries: Tensor, rows: Sequence[Segments], *, writes: bool) -> Launch:
    """The launch that writes rows, or gathers them, of at least one number."""
    num_tiles = sum(row.num_tiles(entries.numel()) for row in rows)
    return Launch(
        kernel=rows_kernel,
        num_programs=num_programs(machine, num_tiles),
        arguments=(
            arena,
            entries.contiguous(),
            tuple(row.arguments for row in rows),
            entries.numel(),
            batches_of(entries)[1],
            min(row.entries_of(arena.numel()) for row in rows),
            num_tiles,
        ),
        constants={
            "WRITES": writes,
            "STORED": tuple(_TYPES[row.stored] for row in rows),
            "SOURCES": tuple(row.formats[0] for row in rows),
            "TARGETS": tuple(row.formats[1] for row in rows),
            "SCALINGS": tuple(row.scaling for row in rows),
            "VECTORS": tuple((row.vector, row.stored_vector) for row in rows),
            "BLOCKS": tuple((row.block_segments, row.block_numbers) for row in rows),
            "CONVERTS_FLOAT8": machine.converts_float8,
        },
        most_registers=_MOST_REGISTERS if len(rows) > 2 else None,
    )


_TYPES = {
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
}


def write_rows(
    arena: Tensor,
    rows: Sequence[Tensor],
    entries: Tensor,
    origin_bytes: int,
    entry_bytes: int,
    offsets_bytes: Sequence[int],
    dtypes: Sequence[str],
    scales: Sequence[Tensor | None],
) -> None:
    """`reference.write_rows`, which also does what has no kernel, such as float64 that is stored as float32."""
    stored = [reference.dtype_of(name) for name in dtypes]
    kinds = zip(rows, stored, scales, strict=True)
    if not all(is_supported(row.dtype, dtype, scale, arena.device, saturates=True) for row, dtype, scale in kinds):
        reference.write_rows(arena, rows, entries, origin_bytes, entry_bytes, offsets_bytes, dtypes, scales)
        return
    segments = [
        segments_of(
            row, entries, scale, dtype, writes=True, first_bytes=origin_bytes + offset_bytes, entry_bytes=entry_bytes
        )
        for row, offset_bytes, dtype, scale in zip(rows, offsets_bytes, stored, scales, strict=True)
        if row.numel()
    ]
    if segments:
        plan_rows(machine_of(arena.device), arena, entries, segments, writes=True).run(arena)


def gather_rows(
    arena: Tensor,
    entries: Tensor,
    origin_bytes: int,
    entry_bytes: int,
    offsets_bytes: Sequence[int],
    widths: Sequence[int],
    dtypes: Sequence[str],
    out_dtype: torch.dtype | None,
    scales: Sequence[Tensor | None],
) -> list[Tensor]:
    """`reference.gather_rows`, which also does what has no kernel, such as conversions to int8."""
    stored = [reference.dtype_of(name) for name in dtypes]
    kinds = zip(stored, scales, strict=True)
    if not all(is_supported(dtype, out_dtype or dtype, scale, arena.device, saturates=False) for dtype, scale in kinds):
        return reference.gather_rows(
            arena, entries, origin_bytes, entry_bytes, offsets_bytes, widths, dtypes, out_dtype, scales
        )
    gathered = [
        arena.new_empty((*entries.shape, width), dtype=out_dtype or dtype)
        for width, dtype in zip(widths, stored, strict=True)
    ]
    segments = [
        segments_of(
            row, entries, scale, dtype, writes=False, first_bytes=origin_bytes + offset_bytes, entry_bytes=entry_bytes
        )
        for row, offset_bytes, dtype, scale in zip(gathered, offsets_bytes, stored, scales, strict=True)
        if row.numel()
    ]
    if segments:
        plan_rows(machine_of(arena.device), arena, entries, segments, writes=False).run(arena)
    return gathered
