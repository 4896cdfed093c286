"""Page tables, read and changed.

Owns the kernels of `remap` and `locate`, where each cell and each position is by itself.
"""

import triton
import triton.language as tl
from torch import Tensor

from torch_uma.ops.triton.addresses import place
from torch_uma.ops.triton.launch import Launch, Machine, machine_of, num_programs

_BLOCK = 512


@triton.jit
def physical_page(page_table, v2p, num_ids, row, column, read, row_stride, column_stride):
    """The physical pages of cells of a page table, where `read` says that there are such cells; -1 for none."""
    page_id = tl.load(page_table + place(row, place(column, 0, column_stride), row_stride), mask=read, other=-1)
    tl.device_assert(page_id < num_ids, "a page table holds an id outside v2p")
    return tl.load(v2p + page_id.to(tl.int64), mask=page_id >= 0, other=-1)


@triton.jit(do_not_specialize=["num_cells", "table_cells"])
def remap_kernel(table, index, values, num_cells, table_cells, cell_stride, BLOCK: tl.constexpr):
    cell = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(index + cell, mask=cell < num_cells, other=-1)
    tl.device_assert(target < table_cells, "a cell lies outside the table")
    value = tl.load(values + cell, mask=cell < num_cells)
    tl.store(table + place(target, 0, cell_stride), value, mask=target >= 0)


@triton.jit(do_not_specialize=["num_positions", "positions_per_row", "num_ids", "num_rows", "num_columns"])
def locate_kernel(
    page_table,
    v2p,
    rows,
    positions,
    entries,
    num_positions,
    positions_per_row,
    num_ids,
    num_rows,
    num_columns,
    row_stride,
    column_stride,
    page_size,
    tokens_per_entry,
    BLOCK: tl.constexpr,
):
    for block in range(tl.program_id(0), tl.cdiv(num_positions, BLOCK), tl.num_programs(0)):
        i = block * BLOCK + tl.arange(0, BLOCK)
        position = tl.load(positions + i, mask=i < num_positions, other=-1)
        row = tl.load(rows + i // positions_per_row, mask=i < num_positions, other=-1)
        tl.device_assert(row < num_rows, "a row lies outside the page table")
        page_tokens = page_size * tokens_per_entry
        column = position // page_tokens
        read = (row >= 0) & (position >= 0) & (column < num_columns)
        page = physical_page(page_table, v2p, num_ids, row, column, read, row_stride, column_stride)
        entry = place(page, (position - column * page_tokens) // tokens_per_entry, page_size)
        tl.store(entries + i, tl.where(page >= 0, entry, -1), mask=i < num_positions)


def plan_remap(table: Tensor, index: Tensor, values: Tensor) -> Launch:
    """The launch of `remap`, of at least one cell."""
    return Launch(
        kernel=remap_kernel,
        num_programs=-(-len(index) // _BLOCK),
        arguments=(table, index.contiguous(), values.contiguous(), len(index), len(table), table.stride(0)),
        constants={"BLOCK": _BLOCK},
    )


def plan_locate(
    machine: Machine,
    page_table: Tensor,
    v2p: Tensor,
    rows: Tensor,
    positions: Tensor,
    entries: Tensor,
    page_size: int,
    tokens_per_entry: int,
) -> Launch:
    """The launch of `locate`, of at least one position, into `entries`."""
    return Launch(
        kernel=locate_kernel,
        num_programs=num_programs(machine, -(-positions.numel() // _BLOCK)),
        arguments=(
            page_table,
            v2p.contiguous(),
            rows.contiguous(),
            positions.contiguous(),
            entries,
            positions.numel(),
            positions.shape[1],
            len(v2p),
            *page_table.shape,
            *page_table.stride(),
            page_size,
            tokens_per_entry,
        ),
        constants={"BLOCK": _BLOCK},
    )


def remap(table: Tensor, index: Tensor, values: Tensor) -> None:
    """`reference.remap`."""
    if len(index):
        plan_remap(table, index, values).run(table)


def locate(
    page_table: Tensor, v2p: Tensor, rows: Tensor, positions: Tensor, page_size: int, tokens_per_entry: int
) -> Tensor:
    """`reference.locate`."""
    entries = positions.new_empty(positions.shape)
    if positions.numel():
        machine = machine_of(page_table.device)
        launch = plan_locate(machine, page_table, v2p, rows, positions, entries, page_size, tokens_per_entry)
        launch.run(page_table)
    return entries
