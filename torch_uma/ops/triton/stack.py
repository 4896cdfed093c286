"""Pages that a captured graph hands out and takes back, from a stack on the device.

Owns the kernels of `allocate` and `release`. One program counts the batch rows before each with a prefix sum, block by
block, so that the order is that of the batch on every run, as the host replays it.
"""

import triton
import triton.language as tl
from torch import Tensor

from torch_uma.ops.triton.addresses import place
from torch_uma.ops.triton.launch import Launch

_BLOCK = 1024


@triton.jit
def _num_before(mask, so_far):
    """How many are set before each, beside `so_far`, and how many with this block."""
    counts = mask.to(tl.int64)
    inclusive = tl.cumsum(counts, 0)
    return so_far + inclusive - counts, so_far + tl.sum(counts, 0)


@triton.jit
def _assert_places(used, place_in_stack, row, column, stack_pages, num_rows, num_columns):
    in_stack = (place_in_stack >= 0) & (place_in_stack < stack_pages)
    tl.device_assert((used == 0) | in_stack, "the stack holds too few pages, or none was taken")
    tl.device_assert((used == 0) | ((row < num_rows) & (column < num_columns)), "a cell lies outside the page table")


@triton.jit(do_not_specialize=["num_rows", "table_rows", "num_columns", "stack_pages"])
def allocate_kernel(
    page_table,
    taken,
    stack,
    rows,
    lengths,
    num_rows,
    table_rows,
    num_columns,
    stack_pages,
    row_stride,
    column_stride,
    stack_stride,
    page_tokens,
    BLOCK: tl.constexpr,
):
    count = tl.load(taken).to(tl.int64)
    tl.debug_barrier()  # all have read it before one writes it
    for first in range(0, num_rows, BLOCK):
        i = first + tl.arange(0, BLOCK)
        row = tl.load(rows + i, mask=i < num_rows, other=-1)
        length = tl.load(lengths + i, mask=i < num_rows, other=0)
        takes = (row >= 0) & (length % page_tokens == 0)
        place_in_stack, count = _num_before(takes, count)
        _assert_places(takes, place_in_stack, row, length // page_tokens, stack_pages, table_rows, num_columns)
        page = tl.load(stack + place(place_in_stack, 0, stack_stride), mask=takes)
        cell = place(row, place(length // page_tokens, 0, column_stride), row_stride)
        tl.store(page_table + cell, page, mask=takes)
    tl.store(taken, count)


@triton.jit(do_not_specialize=["num_rows", "table_rows", "num_columns", "stack_pages"])
def release_kernel(
    page_table,
    taken,
    stack,
    rows,
    old_lengths,
    new_lengths,
    num_rows,
    table_rows,
    num_columns,
    stack_pages,
    row_stride,
    column_stride,
    stack_stride,
    page_tokens,
    BLOCK: tl.constexpr,
):
    count = tl.load(taken).to(tl.int64)
    tl.debug_barrier()  # all have read it before one writes it
    for last in range(num_rows, 0, -BLOCK):  # the first row's page comes to lie lowest, at what is taken in the end
        i = last - 1 - tl.arange(0, BLOCK)
        row = tl.load(rows + i, mask=i >= 0, other=-1)
        new_pages = tl.cdiv(tl.load(new_lengths + i, mask=i >= 0, other=0), page_tokens)
        old_pages = tl.cdiv(tl.load(old_lengths + i, mask=i >= 0, other=0), page_tokens)
        gives = (row >= 0) & (new_pages < old_pages)
        num_given, num_all = _num_before(gives, 0)
        place_in_stack = count - 1 - num_given
        _assert_places(gives, place_in_stack, row, new_pages, stack_pages, table_rows, num_columns)
        cell = place(row, place(new_pages, 0, column_stride), row_stride)
        page = tl.load(page_table + cell, mask=gives)
        tl.store(stack + place(place_in_stack, 0, stack_stride), page, mask=gives)
        tl.store(page_table + cell, -1, mask=gives)
        count -= num_all
    tl.store(taken, count)


def plan_allocate(
    page_table: Tensor, taken: Tensor, stack: Tensor, rows: Tensor, lengths: Tensor, page_tokens: int
) -> Launch:
    """The launch of `allocate`."""
    numbers = (rows.contiguous(), lengths.contiguous(), len(rows))
    sizes = (*page_table.shape, len(stack))
    strides = (*page_table.stride(), stack.stride(0))
    return Launch(
        kernel=allocate_kernel,
        num_programs=1,
        arguments=(page_table, taken, stack, *numbers, *sizes, *strides, page_tokens),
        constants={"BLOCK": _BLOCK},
    )


def plan_release(
    page_table: Tensor,
    taken: Tensor,
    stack: Tensor,
    rows: Tensor,
    old_lengths: Tensor,
    new_lengths: Tensor,
    page_tokens: int,
) -> Launch:
    """The launch of `release`."""
    numbers = (rows.contiguous(), old_lengths.contiguous(), new_lengths.contiguous(), len(rows))
    sizes = (*page_table.shape, len(stack))
    strides = (*page_table.stride(), stack.stride(0))
    return Launch(
        kernel=release_kernel,
        num_programs=1,
        arguments=(page_table, taken, stack, *numbers, *sizes, *strides, page_tokens),
        constants={"BLOCK": _BLOCK},
    )


def allocate(page_table: Tensor, taken: Tensor, stack: Tensor, rows: Tensor, lengths: Tensor, page_tokens: int) -> None:
    """`reference.allocate`."""
    if len(rows):
        plan_allocate(page_table, taken, stack, rows, lengths, page_tokens).run(page_table)


def release(
    page_table: Tensor,
    taken: Tensor,
    stack: Tensor,
    rows: Tensor,
    old_lengths: Tensor,
    new_lengths: Tensor,
    page_tokens: int,
) -> None:
    """`reference.release`."""
    if len(rows):
        plan_release(page_table, taken, stack, rows, old_lengths, new_lengths, page_tokens).run(page_table)
