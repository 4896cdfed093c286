"""Page tables in the form that FlashInfer plans from, in plain torch, for any device.

Owns what the op `page_index` means.
"""

from __future__ import annotations

import torch
from torch import Tensor


def page_index(
    page_table: Tensor,
    v2p: Tensor,
    rows: Tensor,
    lengths: Tensor,
    page_size: int,
    capacity: int,
    first_pages: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The physical pages of sequences, one sequence after another: `indptr`, `indices` and `last_page_len`, all int32.

    The pages of row i are `indices[indptr[i] : indptr[i + 1]]`, and its last one holds `last_page_len[i]` entries. A
    negative row, and one that has no page, is padding: it gets one entry of page 0, which is the sink's, since kernels
    want at least one. So does any column without a page, and `indices` is 0 behind the last row's pages.

    Args:
        page_table, v2p, rows: as for `locate`.
        lengths: `[R]`, entries of each sequence; the page table has columns for all of them.
        page_size: entries of a page.
        capacity: length of `indices`. Pages that it has no room for are left out, and `indptr` passes it.
        first_pages: `[R]`, the first column of each row that is wanted, such as the first live page of a window; a
            kernel then sees `first_pages[i] * page_size` entries less. None for 0.

    Returns:
        Fresh tensors `[R + 1]`, `[capacity]` and `[R]`.
    """
    num_rows = len(rows)
    indptr = page_table.new_zeros(num_rows + 1)
    if num_rows == 0:
        return indptr, page_table.new_zeros(capacity), page_table.new_empty(0)
    first = torch.zeros_like(lengths) if first_pages is None else first_pages
    num_pages = (lengths + (page_size - 1)) // page_size - first
    is_padding = (rows < 0) | (num_pages <= 0)
    indptr[1:] = torch.where(is_padding, 1, num_pages).cumsum(0)
    last_page_len = torch.where(is_padding, 1, (lengths - 1) % page_size + 1).to(indptr.dtype)

    slots = torch.arange(capacity, dtype=indptr.dtype, device=indptr.device)
    owner = torch.searchsorted(indptr[1:], slots, right=True)
    is_tail = owner == num_rows
    owner = owner.clamp(max=num_rows - 1)
    absent = is_tail | is_padding[owner]
    column = torch.where(absent, 0, first[owner] + slots - indptr[owner])
    page_ids = page_table[rows[owner].clamp(min=0), column]
    pages = v2p[page_ids.clamp(min=0)]
    absent |= (page_ids < 0) | (pages < 0)
    return indptr, torch.where(absent, 0, pages), last_page_len
