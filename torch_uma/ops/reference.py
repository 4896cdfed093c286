"""The ops in plain torch, for any device.

Owns what each op means. On the host an index can be looked at, so bad ones are dropped and pages are copied run by run;
on an accelerator nothing may be read back, so a bad index becomes a copy of a good one instead. The arena is uint8,
contiguous, its base aligned to 16 bytes and its length a multiple of 16. Offsets of rows, origins and sizes of entries
are multiples of the largest power of two up to 16 that divides the bytes of the row, as every plan lays them out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_uma.ops.host_copy import copy_pages

Integers = npt.NDArray[np.integer[Any]]

# Rows and pages move as the widest lanes that divide them: as bytes, not as numbers, so that every dtype can be indexed
# and a NaN keeps its payload.
_LANES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

# So many positions are located with numpy on the host.
_FEW_POSITIONS = 1024

# Dtypes whose conversion saturates, with their least and greatest numbers.
_LIMITS = {
    torch.int8: (-128.0, 127.0),
    torch.float8_e4m3fn: (-448.0, 448.0),
    torch.float8_e5m2: (-57344.0, 57344.0),
}


def dtype_name(dtype: torch.dtype) -> str:
    """The name under which ops take `dtype`, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype that has this name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def on_host(tensor: Tensor) -> bool:
    """Whether the numbers of `tensor` can be read without waiting for a device."""
    return tensor.device.type == "cpu"


def relocate(arena: Tensor, src_pages: Tensor, dst_pages: Tensor, origin_bytes: int, page_bytes: int) -> None:
    """Copy page `src_pages[i]` over page `dst_pages[i]` of the grid that starts at `origin_bytes`.

    `src_pages` and `dst_pages` are int64 `[n]`, and no page is in both; a pair with a negative page is skipped.
    """
    if src_pages.numel() == 0:
        return
    picks = _Picks.of(src_pages, dst_pages)
    if picks is not None:
        src_pages, dst_pages = picks.index(src_pages), picks.index(dst_pages)
    if on_host(arena):
        _copy_pages(arena, src_pages, dst_pages, origin_bytes, page_bytes)
    else:
        pages = _strided(arena, origin_bytes, page_bytes, 0, page_bytes)
        pages.index_copy_(0, dst_pages, pages.index_select(0, src_pages))


def remap(table: Tensor, index: Tensor, values: Tensor) -> None:
    """Set `table[index[i]] = values[i]`: `table` int32 `[cells]`, `index` int64 `[n]`, `values` int32 `[n]`."""
    if index.numel() == 0:
        return
    picks = _Picks.of(index)
    if picks is not None:
        index = picks.index(index)
        values = picks.values(values, table, index)
    table.index_copy_(0, index, values)


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
    """Store `rows[i]` `[*entries.shape, *shape_i]`, of any strides, at `offsets_bytes[i]` of each entry as `dtypes[i]`.

    What is stored is `rows[i] / scales[i]`, where a scale broadcasts against `[*entries.shape, width_i]`; int8 rounds,
    int8 and float8 saturate. `entries` is int64; a negative one is skipped.
    """
    num_entries = entries.numel()
    if num_entries == 0:
        return
    index = entries.reshape(-1)
    picks = _Picks.of(index)
    if picks is not None:
        index = picks.index(index)
    for values, offset_bytes, name, scale in zip(rows, offsets_bytes, dtypes, scales, strict=True):
        dtype = dtype_of(name)
        width = values.numel() // num_entries
        if width == 0:
            continue
        if scale is not None:
            values = values.reshape(*entries.shape, width)
        stored = encode(values, dtype, scale).reshape(num_entries, width)
        target = _strided(arena, origin_bytes, entry_bytes, offset_bytes, width * dtype.itemsize)
        lanes = stored.contiguous().view(target.dtype)
        if picks is not None:
            lanes = picks.values(lanes, target, index)
        target.index_copy_(0, index, lanes)


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
    """Fetch `widths[i]` numbers of `dtypes[i]` at `offsets_bytes[i]` of each entry: `[*entries.shape, widths[i]]`.

    A result is what is stored times `scales[i]`, which broadcasts against it, in `out_dtype` or else as stored.
    `entries` is int64; a negative one gives zeros.
    """
    index = entries.reshape(-1)
    absent = None
    if not on_host(index) or (index.numel() and index.amin().item() < 0):
        absent = (index < 0).unsqueeze(1)
        index = index.clamp(min=0)
    gathered = []
    for offset_bytes, width, name, scale in zip(offsets_bytes, widths, dtypes, scales, strict=True):
        dtype = dtype_of(name)
        if width == 0:
            gathered.append(arena.new_empty((*entries.shape, 0), dtype=out_dtype or dtype))
            continue
        lanes = _strided(arena, origin_bytes, entry_bytes, offset_bytes, width * dtype.itemsize).index_select(0, index)
        result = _decode(lanes.view(dtype).view(*entries.shape, width), out_dtype or dtype, scale)
        if absent is not None:
            # As lanes, since not every dtype can be filled; at the end, since zero times a scale may be NaN.
            lane = _lane(width * result.dtype.itemsize)
            result.view(-1, width).view(lane).masked_fill_(absent, 0)
        gathered.append(result)
    return gathered


def locate(
    page_table: Tensor, v2p: Tensor, rows: Tensor, positions: Tensor, page_size: int, tokens_per_entry: int
) -> Tensor:
    """Physical entries of token positions: int64, of the shape of `positions`; -1 where a position has no page.

    `page_table` int32 `[num_rows, columns]` holds virtual pages, `v2p` int32 `[num_ids]` their physical pages, -1 for
    none; `rows` int64 `[R]` are rows of the table, `positions` int64 `[R, S]`. A negative row or position, or one
    behind the last column, has no page.
    """
    if on_host(page_table) and positions.numel() <= _FEW_POSITIONS:
        tables = (page_table.numpy(), v2p.numpy())
        return torch.from_numpy(_locate_few(*tables, rows.numpy(), positions.numpy(), page_size, tokens_per_entry))
    columns = page_table.shape[1]
    page_tokens = page_size * tokens_per_entry
    column = positions.div(page_tokens, rounding_mode="floor")
    rows = rows.unsqueeze(1)
    valid = (positions >= 0) & (column < columns) & (rows >= 0)
    page_ids = page_table[rows.clamp(min=0), column.clamp(0, columns - 1)]
    pages = v2p[page_ids.clamp(min=0)]
    valid &= (page_ids >= 0) & (pages >= 0)
    inside = (positions - column * page_tokens).div_(tokens_per_entry, rounding_mode="floor")
    return torch.where(valid, inside.add_(pages, alpha=page_size), -1)


def _locate_few(
    page_table: Integers, v2p: Integers, rows: Integers, positions: Integers, page_size: int, tokens_per_entry: int
) -> npt.NDArray[np.int64]:
    """`locate` with numpy, whose calls cost a fraction of torch's."""
    page_tokens = page_size * tokens_per_entry
    column, inside = np.divmod(positions, page_tokens)
    absent = (column < 0) | (column >= page_table.shape[1]) | (rows < 0)[:, None]
    ids = page_table[np.maximum(rows, 0)[:, None], np.where(absent, 0, column)]
    pages = v2p[np.maximum(ids, 0)]
    absent |= (ids < 0) | (pages < 0)
    entries: npt.NDArray[np.int64] = pages * np.int64(page_size) + inside // tokens_per_entry
    entries[absent] = -1
    return entries


def allocate(page_table: Tensor, taken: Tensor, stack: Tensor, rows: Tensor, lengths: Tensor, page_tokens: int) -> None:
    """Give a page to every batch row whose next token begins one, from a stack, in the order of the batch.

    Row i begins a page if `lengths[i]` is a multiple of `page_tokens`. The m-th row that does gets
    `stack[taken + m]` in `page_table[rows[i], lengths[i] // page_tokens]`, and `taken` grows by their number.
    `page_table` int32 `[num_rows, columns]`; `taken` of one number; `stack` int32 `[n]` with n > 0 and enough pages
    for all; `rows` and `lengths` `[R]`, distinct rows of the table. A negative row takes nothing.
    """
    if rows.numel() == 0:
        return
    takes = (rows >= 0) & (lengths % page_tokens == 0)
    count, order = _prefix(takes)
    pages = stack[torch.where(takes, taken + order, 0)]
    _add_where(takes, page_table, (rows, lengths // page_tokens), pages)
    taken += count


def release(
    page_table: Tensor,
    taken: Tensor,
    stack: Tensor,
    rows: Tensor,
    old_lengths: Tensor,
    new_lengths: Tensor,
    page_tokens: int,
) -> None:
    """The reverse of `allocate`: rows that need a page less put it back, the last row of the batch first.

    Row i gives back the page of column `new_lengths[i] // page_tokens`, rounded up, if `old_lengths[i]` needed it; the
    cell becomes -1. A row drops at most one page. Shapes and dtypes as in `allocate`.
    """
    if rows.numel() == 0:
        return
    num_pages = _num_pages(new_lengths, page_tokens)
    gives = (rows >= 0) & (num_pages < _num_pages(old_lengths, page_tokens))
    count, order = _prefix(gives)
    columns = torch.where(gives, num_pages, 0)
    pages = page_table[rows.clamp(min=0), columns]
    taken -= count
    _add_where(gives, stack, (taken + order,), pages)
    _add_where(gives, page_table, (rows, columns), torch.full_like(pages, -1))


class _Picks:
    """Which of some indices are used, where some may be negative."""

    def __init__(self, positions: Tensor, any_valid: Tensor | None) -> None:
        self._positions = positions
        self._any_valid = any_valid  # None: `positions` are just the valid ones, none if there is none

    @classmethod
    def of(cls, *indices: Tensor) -> _Picks | None:
        """Picks of the places where no index is negative; None if these are known to be all."""
        readable = on_host(indices[0])
        if readable and all(index.amin().item() >= 0 for index in indices):
            return None
        valid = indices[0] >= 0
        for index in indices[1:]:
            valid &= index >= 0
        if readable:
            return cls(valid.nonzero().squeeze(1), None)
        first_valid = valid.to(torch.uint8).argmax()
        places = torch.arange(len(valid), device=valid.device)
        return cls(torch.where(valid, places, first_valid), valid.any())

    def index(self, index: Tensor) -> Tensor:
        """The used indices; zeros if there is none and their number may not be read."""
        picked = index.index_select(0, self._positions)
        return picked if self._any_valid is None else torch.where(self._any_valid, picked, 0)

    def values(self, values: Tensor, target: Tensor, index: Tensor) -> Tensor:
        """The values of the used indices, or what `target` holds at `index` if there is none."""
        picked = values.index_select(0, self._positions)
        if self._any_valid is None:
            return picked
        return torch.where(self._any_valid, picked, target.index_select(0, index))


def _lane(num_bytes: int) -> torch.dtype:
    return _LANES[math.gcd(num_bytes, 16)]


def _strided(arena: Tensor, origin_bytes: int, stride_bytes: int, offset_bytes: int, num_bytes: int) -> Tensor:
    """`num_bytes` at `offset_bytes` of every whole stride from `origin_bytes` on, as lanes: `[strides, lanes]`."""
    lane = _lane(num_bytes)
    size = lane.itemsize
    return arena.view(lane).as_strided(
        ((arena.numel() - origin_bytes) // stride_bytes, num_bytes // size),
        (stride_bytes // size, 1),
        (arena.storage_offset() + origin_bytes + offset_bytes) // size,
    )


def _copy_pages(arena: Tensor, src_pages: Tensor, dst_pages: Tensor, origin_bytes: int, page_bytes: int) -> None:
    """Copy pages on the host, without a temporary copy."""
    src, dst = src_pages.numpy(), dst_pages.numpy()
    last_page = max(src.max(initial=-1), dst.max(initial=-1))
    if origin_bytes + (last_page + 1) * page_bytes > arena.numel():
        raise IndexError(f"page {last_page} passes the end of an arena of {arena.numel()} bytes")
    copy_pages(arena, src * page_bytes + origin_bytes, dst * page_bytes + origin_bytes, page_bytes, source=arena)


def encode(values: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """`values / scale` as they are stored in `dtype`."""
    if scale is None and values.dtype == dtype:
        return values
    if scale is not None:
        values = values.float() / scale
    if dtype in _LIMITS:
        values = values.float()
        if dtype == torch.int8:
            values = values.round()
        values = values.clamp(*_LIMITS[dtype])
    return values.to(dtype)


def _decode(stored: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    return stored.to(dtype) if scale is None else (stored.float() * scale).to(dtype)


def _num_pages(lengths: Tensor, page_tokens: int) -> Tensor:
    return (lengths + (page_tokens - 1)) // page_tokens


def _prefix(mask: Tensor) -> tuple[Tensor, Tensor]:
    """How many are set, and how many are set before each: the same on every run, unlike an atomic counter."""
    counts = mask.long()
    inclusive = counts.cumsum(0)
    return inclusive[-1], inclusive - counts


def _add_where(mask: Tensor, target: Tensor, index: tuple[Tensor, ...], values: Tensor) -> None:
    """Set `target[index] = values` where `mask`, by adding the difference, so that the other places add 0."""
    index = tuple(torch.where(mask, axis, 0).long() for axis in index)
    target.index_put_(index, torch.where(mask, values - target[index], 0), accumulate=True)
