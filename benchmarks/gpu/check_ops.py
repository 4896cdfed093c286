"""Every op against a plain or fp64 reference, with fresh random data and poisoned outputs."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu.device import Device
from gpu.report import Report

SECTION = "Ops"
DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")


def check_ops(report: Report, device: Device) -> None:
    """All of them; one that does not exist is named."""
    checks = {
        "relocate": _relocate,
        "remap": _remap,
        "write_rows": _rows,
        "gather_rows": _rows,
        "locate": _locate,
        "allocate": _stack,
        "release": _stack,
        "page_index": _page_index,
        "attend": _attend,
    }
    for name, check in checks.items():
        if hasattr(torch.ops.torch_uma, name):
            report.run(SECTION, name, partial(check, device))
        else:
            report.skip(SECTION, name, "missing: this build has no such op")


def _relocate(device: Device) -> str:
    cases = [(0, 16), (48, 272), (16, 4112), (64, 65536), (0, device.size(4 << 20, 1 << 16))]
    for origin_bytes, page_bytes in cases:
        num_pages = 64
        arena = torch.randint(0, 256, (origin_bytes + num_pages * page_bytes + 48,), dtype=torch.uint8)
        order = torch.randperm(num_pages)
        source, target = order[:30], order[30:60]
        source[3] = target[7] = -1
        expected = arena.clone()
        pages = expected[origin_bytes:][: num_pages * page_bytes].view(num_pages, page_bytes)
        is_used = (source >= 0) & (target >= 0)
        pages[target[is_used]] = pages[source[is_used]]
        there = arena.to(device.torch)
        torch.ops.torch_uma.relocate(there, source.to(there.device), target.to(there.device), origin_bytes, page_bytes)
        assert torch.equal(there.cpu(), expected), (origin_bytes, page_bytes)
    return f"{len(cases)} page sizes"


def _remap(device: Device) -> None:
    table = torch.arange(5000, dtype=torch.int32)
    index, values = torch.randperm(5000)[:1200], torch.randint(0, 1 << 30, (1200,), dtype=torch.int32)
    index[5] = -1
    there = table.to(device.torch)
    torch.ops.torch_uma.remap(there, index.to(there.device), values.to(there.device))
    table[index[index >= 0]] = values[index >= 0]
    assert torch.equal(there.cpu(), table)


def _rows(device: Device) -> str:
    """Written and fetched again: copies bit by bit, conversions against fp64, nothing beside them touched."""
    num_entries, num_written, width = 700, 301, 72
    for source, stored in itertools.product(("float32", "bfloat16", "float16"), DTYPES):
        dtype, stored_dtype = getattr(torch, source), getattr(torch, stored)
        row_bytes = -(-width * stored_dtype.itemsize // 16) * 16
        entry_bytes = 2 * row_bytes + 32
        arena = device.poisoned(64 + num_entries * entry_bytes)
        entries = torch.randperm(num_entries)[:num_written]
        entries[4] = -1
        values = [torch.randn(num_written, width).mul(3).to(dtype) for _ in range(2)]
        scales: list[Tensor | None] = [None, None if stored == source else torch.rand(num_written, 1) + 0.5]
        there = [value.to(device.torch) for value in values]
        scales_there = [None if scale is None else scale.to(device.torch) for scale in scales]
        where: tuple[Any, ...] = (64, entry_bytes, [0, row_bytes])
        entries_there = entries.to(device.torch)
        torch.ops.torch_uma.write_rows(arena, there, entries_there, *where, [stored] * 2, scales_there)
        grid = arena.cpu()[64:].view(num_entries, entry_bytes)
        used = entries >= 0
        for value, scale, start in zip(values, scales, (0, row_bytes), strict=True):
            found = grid[entries[used], start : start + width * stored_dtype.itemsize].view(stored_dtype)
            _assert_close(found, (value.double() if scale is None else value.double() / scale)[used], stored_dtype)
        untouched = torch.ones(num_entries, dtype=torch.bool)
        untouched[entries[used]] = False
        assert (grid[untouched] == 0xFF).all() and (grid[:, 2 * row_bytes :] == 0xFF).all(), (source, stored)
        fetched = torch.ops.torch_uma.gather_rows(
            arena, entries_there, *where, [width] * 2, [stored] * 2, dtype, scales_there
        )
        for result, scale, start in zip(fetched, scales, (0, row_bytes), strict=True):
            exact = grid[entries.clamp(min=0), start : start + width * stored_dtype.itemsize].view(stored_dtype)
            exact = exact.double() if scale is None else exact.double() * scale
            _assert_close(result.cpu()[used], exact[used], dtype)
            assert not result.cpu()[~used].any()
    return f"{3 * len(DTYPES)} pairs of dtypes"


def _assert_close(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    if dtype == torch.int8:
        assert (found.double() - exact.round().clamp(-128, 127)).abs().max() <= 1, dtype
        return
    limits = torch.finfo(dtype)
    exact = exact.clamp(limits.min, limits.max)
    error = (found.double() - exact).abs()
    assert (error <= exact.abs() * limits.eps + limits.tiny).all(), (dtype, float(error.max()))


def _tables(num_rows: int, columns: int) -> tuple[Tensor, Tensor]:
    ids = torch.randperm(num_rows * columns * 2)[: num_rows * columns].int().view(num_rows, columns)
    return torch.where(torch.rand(num_rows, columns) < 0.1, -1, ids), torch.randperm(num_rows * columns * 2).int()


def _locate(device: Device) -> None:
    for page_size, per_entry in ((1, 1), (3, 1), (16, 4)):
        page_table, v2p = _tables(9, 40)
        rows = torch.tensor([4, 0, -1, 8])
        positions = torch.randint(-2, 41 * page_size * per_entry, (4, device.size(5000, 300)))
        found = torch.ops.torch_uma.locate(
            *(tensor.to(device.torch) for tensor in (page_table, v2p, rows, positions)), page_size, per_entry
        )
        column = positions.div(page_size * per_entry, rounding_mode="floor")
        is_there = (positions >= 0) & (column < 40) & (rows >= 0)[:, None]
        page = page_table[rows.clamp(min=0)[:, None], column.clamp(0, 39)].long()
        is_there &= page >= 0
        within = positions % (page_size * per_entry) // per_entry
        expected = torch.where(is_there, v2p[page.clamp(min=0)].long() * page_size + within, -1)
        assert torch.equal(found.cpu(), expected)


def _stack(device: Device) -> None:
    """Handed out in the order of the batch, step by step, and given back in reverse."""
    num_rows, page_tokens, columns = device.size(3000, 300), 5, 20
    page_table = torch.full((num_rows + 3, columns), -1, dtype=torch.int32)
    rows = torch.randperm(num_rows + 3)[:num_rows]
    rows[7] = -1
    lengths = torch.randint(0, page_tokens * (columns - 1), (num_rows,))
    stack = torch.randperm(num_rows).int()
    there = [tensor.to(device.torch) for tensor in (page_table, torch.tensor([2]), stack, rows, lengths)]
    torch.ops.torch_uma.allocate(*there, page_tokens)
    takes = [i for i in range(num_rows) if rows[i] >= 0 and int(lengths[i]) % page_tokens == 0]
    expected = page_table.clone()
    for place, i in enumerate(takes):
        expected[rows[i], int(lengths[i]) // page_tokens] = stack[2 + place]
    assert torch.equal(there[0].cpu(), expected) and int(there[1]) == 2 + len(takes)
    torch.ops.torch_uma.release(*there[:4], there[4] + 1, there[4], page_tokens)
    assert torch.equal(there[0].cpu(), page_table) and int(there[1]) == 2
    assert torch.equal(there[2].cpu()[2:][: len(takes)], stack[2:][: len(takes)])


def _page_index(device: Device) -> None:
    page_size, capacity = 4, 400
    page_table, v2p = _tables(9, 40)
    page_table = page_table.abs()
    rows, lengths = torch.tensor([4, 0, -1, 8]), torch.tensor([33, 1, 5, 160])
    indptr, indices, last = torch.ops.torch_uma.page_index(
        *(tensor.to(device.torch) for tensor in (page_table, v2p, rows, lengths)), page_size, capacity
    )
    starts = indptr.tolist()
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        if row < 0:
            continue
        pages = v2p[page_table[row, : -(-length // page_size)].long()]
        assert indices[starts[i] : starts[i + 1]].tolist() == pages.tolist()
        assert int(last[i]) == length - (len(pages) - 1) * page_size


def _attend(device: Device) -> str:
    """Against dense softmax in fp64, over scattered pages among NaN."""
    heads, kv_heads, dim, page_size, columns = 8, 2, 64, 16, 12
    lengths = torch.tensor([1, 16, 17, 150])
    entry_bytes = 2 * kv_heads * dim * 2
    arena = device.poisoned(columns * 5 * page_size * entry_bytes)
    places = torch.randperm(columns * 5)[: columns * 4].int()
    page_table = torch.arange(columns * 4, dtype=torch.int32).view(4, columns)
    rows = torch.arange(4)
    tables = [tensor.to(device.torch) for tensor in (page_table, places, rows)]
    key, value = (torch.randn(4, 160, kv_heads * dim).bfloat16() for _ in range(2))
    positions = torch.arange(160).expand(4, -1)
    positions = torch.where(positions < lengths[:, None], positions, -1)
    entries = torch.ops.torch_uma.locate(*tables, positions.to(device.torch), page_size, 1)
    layout: tuple[Any, ...] = (0, entry_bytes)
    offsets_bytes, names = [0, entry_bytes // 2], ["bfloat16"] * 2
    torch.ops.torch_uma.write_rows(
        arena, [key.to(device.torch), value.to(device.torch)], entries, *layout, offsets_bytes, names, [None] * 2
    )
    query = torch.randn(4, heads, dim).bfloat16()
    windows = (0, 20)
    for window in windows:
        found, _ = torch.ops.torch_uma.attend(
            arena,
            query.to(device.torch),
            torch.arange(5, device=device.torch),
            *tables,
            lengths.to(device.torch),
            *layout,
            page_size,
            offsets_bytes,
            [dim, dim],
            kv_heads,
            names,
            dim**-0.5,
            window=window,
        )
        exact = torch.stack(
            [dense(query[i], key[i, :n], value[i, :n], kv_heads, window) for i, n in enumerate(lengths.tolist())]
        )
        torch.testing.assert_close(found.cpu().double(), exact, rtol=2e-2, atol=2e-2)
    return "full and window"


def dense(query: Tensor, key: Tensor, value: Tensor, kv_heads: int, window: int) -> Tensor:
    """Attention in fp64 of one token [heads, dim] to keys and values [tokens, kv_heads * dim]: [heads, dim]."""
    start = max(0, len(key) - window) if window else 0
    keys, values = (part[start:].double().unflatten(1, (kv_heads, -1)) for part in (key, value))
    grouped = query.double().unflatten(0, (kv_heads, -1)) / math.sqrt(query.shape[-1])
    weights = torch.einsum("kgd,tkd->kgt", grouped, keys).softmax(-1)
    return torch.einsum("kgt,tkd->kgd", weights, values).flatten(0, 1)
