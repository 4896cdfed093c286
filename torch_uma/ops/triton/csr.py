"""Page tables as FlashInfer takes them: the pages of one sequence after another, in one launch.

Owns the kernel of `page_index`. Each program has one batch row and counts the pages of those before it anew, which
costs less than a second launch; beyond the last row's pages the programs clear the rest in turns.
"""

import triton
import triton.language as tl
from torch import Tensor

from torch_uma.ops.triton.launch import Launch
from torch_uma.ops.triton.tables import physical_page

_BLOCK = 256


@triton.jit(do_not_specialize=["num_rows", "capacity", "num_ids", "table_rows", "num_columns"])
def page_index_kernel(
    page_table,
    v2p,
    rows,
    lengths,
    first_pages,
    indptr,
    indices,
    last_page_len,
    num_rows,
    capacity,
    num_ids,
    table_rows,
    num_columns,
    row_stride,
    column_stride,
    page_size,
    HAS_FIRST_PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    own = tl.program_id(0)
    begin = 0
    end = 0
    total = 0
    for first in range(0, num_rows, BLOCK):
        i = first + tl.arange(0, BLOCK)
        row = tl.load(rows + i, mask=i < num_rows, other=-1)
        length = tl.load(lengths + i, mask=i < num_rows, other=0)
        num_pages = tl.cdiv(length, page_size).to(tl.int32)
        if HAS_FIRST_PAGES:
            num_pages -= tl.load(first_pages + i, mask=i < num_rows, other=0).to(tl.int32)
        num_pages = tl.where((row >= 0) & (num_pages > 0), num_pages, 1)  # padding has the sink
        num_pages = tl.where(i < num_rows, num_pages, 0)
        begin += tl.sum(tl.where(i < own, num_pages, 0), 0)
        end += tl.sum(tl.where(i <= own, num_pages, 0), 0)
        total += tl.sum(num_pages, 0)
    row = tl.load(rows + own, mask=own < num_rows, other=-1)
    length = tl.load(lengths + own, mask=own < num_rows, other=0)
    column = 0
    if HAS_FIRST_PAGES:
        column = tl.load(first_pages + own, mask=own < num_rows, other=0).to(tl.int32)
    has_pages = (row >= 0) & (tl.cdiv(length, page_size) > column)
    tl.store(indptr + own, begin, mask=own < num_rows)
    tl.store(indptr + num_rows, total, mask=own == 0)
    last_entries = tl.where(has_pages, (length - 1) % page_size + 1, 1)
    tl.store(last_page_len + own, last_entries.to(tl.int32), mask=own < num_rows)
    tl.device_assert((row < table_rows) & ((row < 0) | (tl.cdiv(length, page_size) <= num_columns)), "no such cell")
    live_end = tl.where(has_pages, end, begin)
    for at in range(begin, end, BLOCK):
        i = at + tl.arange(0, BLOCK)
        page = physical_page(page_table, v2p, num_ids, row, column + i - begin, i < live_end, row_stride, column_stride)
        tl.store(indices + i, tl.maximum(page, 0), mask=(i < end) & (i < capacity))
    for at in range(total + own * BLOCK, capacity, tl.num_programs(0) * BLOCK):
        i = at + tl.arange(0, BLOCK)
        tl.store(indices + i, tl.zeros_like(i), mask=i < capacity)


def plan_page_index(
    page_table: Tensor,
    v2p: Tensor,
    rows: Tensor,
    lengths: Tensor,
    first_pages: Tensor | None,
    results: tuple[Tensor, Tensor, Tensor],
    page_size: int,
) -> Launch:
    """The launch of `page_index`, into `results`."""
    return Launch(
        kernel=page_index_kernel,
        num_programs=max(1, len(rows)),
        arguments=(
            page_table,
            v2p.contiguous(),
            rows.contiguous(),
            lengths.contiguous(),
            lengths if first_pages is None else first_pages.contiguous(),
            *results,
            len(rows),
            len(results[1]),
            len(v2p),
            *page_table.shape,
            *page_table.stride(),
            page_size,
        ),
        constants={"HAS_FIRST_PAGES": first_pages is not None, "BLOCK": _BLOCK},
    )


def page_index(
    page_table: Tensor,
    v2p: Tensor,
    rows: Tensor,
    lengths: Tensor,
    page_size: int,
    capacity: int,
    first_pages: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.page_index`."""
    num_rows = len(rows)
    indptr, indices, last_page_len = (page_table.new_empty(size) for size in (num_rows + 1, capacity, num_rows))
    launch = plan_page_index(page_table, v2p, rows, lengths, first_pages, (indptr, indices, last_page_len), page_size)
    launch.run(page_table)
    return indptr, indices, last_page_len
