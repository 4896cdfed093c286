"""The pages that the rows of a step read, on the host, in FlashInfer's terms.

Owns the way from a step's tables to page lists: CSR, block tables, and where new tokens would be appended. Nothing here
reads from a device, so that a plan made of it does not either.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_uma.counts import whole
from torch_uma.errors import PlanError, SequenceError
from torch_uma.layout import Chunk
from torch_uma.lifespans import spread
from torch_uma.plan import SubPool
from torch_uma.pool import CachePool
from torch_uma.step import Step
from torch_uma.tables import Int64Array

_SINK_PAGE = 0


@dataclass(frozen=True, kw_only=True)
class Pages:
    """What R rows read in one sub-pool, int32 in host memory, pinned where the pool is on a CUDA device.

    A row's pages begin with the first that its first new token sees, so positions count from there: masks are relative
    to the end of the keys, and the positions are in the keys already. Padded rows are as long as their new tokens, in
    page 0 of the grid, the sink.

    Attributes:
        num_rows: that are no padding.
        page_size: entries of a page.
        query_starts: [R + 1], new tokens before each row, and of all.
        indptr: [R + 1], pages before each row, and of all.
        indices: [pages] physical pages.
        lengths: [R], tokens from the first of a row's pages on.
        last_page_len: [R], entries of a row's last page that are in use.
        last_ids: [num_rows] int64 in an array, the virtual ids of these pages.
    """

    num_rows: int
    page_size: int
    query_starts: Tensor
    indptr: Tensor
    indices: Tensor
    lengths: Tensor
    last_page_len: Tensor
    last_ids: Int64Array

    @cached_property
    def num_tokens(self) -> int:
        """New tokens of all rows, padding included."""
        return int(self.query_starts[-1])

    @cached_property
    def most_new_tokens(self) -> int:
        """Of one row."""
        return int(self.query_starts.diff().max())

    def block_tables(self, num_columns: int | None = None) -> Tensor:
        """[R, columns] int32, the pages of each row and then the sink; as many columns as the longest row needs.

        PlanError if that is more than `num_columns`.
        """
        counts = self.indptr.diff().long()
        longest = int(counts.max())
        columns = longest if num_columns is None else _count(num_columns, "num_columns of a block table")
        if longest > columns:
            raise PlanError(f"a row reads {longest} pages, but the block table has {columns} columns; make it wider")
        table = torch.full((len(counts), columns), _SINK_PAGE, dtype=torch.int32)
        table[torch.arange(columns) < counts[:, None]] = self.indices
        return table

    def draft_masks(self, most_new_tokens: int) -> Tensor:
        """[T, words] uint16: for each new token a bit for each of its row's that it sees, of up to so many.

        In words of 32 bits, the first token's the lowest, as XQA takes them, and each token sees itself.
        """
        counts = self.query_starts.diff().numpy().astype(np.int64)
        place = spread(np.zeros_like(counts), counts)
        seen = (place + 1)[:, None] - 32 * np.arange(-(-most_new_tokens // 32))
        masks = (1 << seen.clip(0, 32)) - 1
        return torch.from_numpy(masks.astype(np.uint32).view(np.uint16))

    def tails(self, rows: Int64Array) -> Int64Array:
        """Physical entries behind the tokens of these rows, in the last page of each."""
        last_pages = self.indices.numpy()[self.indptr.numpy()[rows + 1] - 1].astype(np.int64)
        used = self.last_page_len.numpy()[rows].astype(np.int64)
        return spread(last_pages * self.page_size + used, self.page_size - used)

    def append(self, num_tokens: int | None = None) -> Append:
        """What FlashInfer's append functions take for the new tokens of all rows, `num_tokens` with padding.

        These functions read the page list at row -1 for a token of no row, and write wherever it says. So padding goes
        to the first entry of a row more, whose only page is the sink. PlanError for fewer tokens than there are.
        """
        counts = self.query_starts.diff().numpy().astype(np.int64)
        num_new = int(counts.sum())
        num_padded = 0 if num_tokens is None else _count(num_tokens, "num_tokens to append") - num_new
        if num_padded < 0:
            raise PlanError(f"{num_new} new tokens do not fit into {num_tokens} rows of keys and values")
        rows = np.repeat(np.arange(len(counts)), counts)
        positions = spread(self.lengths.numpy() - counts, counts)
        end = self.indptr[-1:] + 1
        return Append(
            batch_indices=_int32(np.append(rows, np.full(num_padded, len(counts)))),
            positions=_int32(np.append(positions, np.zeros(num_padded))),
            indptr=torch.cat([self.indptr, end]),
            indices=torch.cat([self.indices, torch.full((1,), _SINK_PAGE, dtype=torch.int32)]),
            last_page_len=torch.cat([self.last_page_len, torch.ones(1, dtype=torch.int32)]),
        )

    def pinned(self) -> Pages:
        """The same in pinned memory, from which a copy to the device does not wait."""
        return Pages(
            num_rows=self.num_rows,
            page_size=self.page_size,
            query_starts=self.query_starts.pin_memory(),
            indptr=self.indptr.pin_memory(),
            indices=self.indices.pin_memory(),
            lengths=self.lengths.pin_memory(),
            last_page_len=self.last_page_len.pin_memory(),
            last_ids=self.last_ids,
        )


@dataclass(frozen=True, kw_only=True)
class Append:
    """Arguments of `append_paged_kv_cache`, by its names: int32, the last row the padding's. No index is negative."""

    batch_indices: Tensor
    positions: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


def pool_of(step: Step) -> CachePool:
    """The pool of an open step. SequenceError for one that has ended, and for what is none, such as a multi-step."""
    if not isinstance(step, Step) or not step.is_open:
        raise SequenceError(
            f"what is read is planned for an open step of pool.begin() or pool.step(), not for {step!r}"
        )
    return step.pool


def pages_of(step: Step, subpool: SubPool, *, num_rows: int | None = None) -> Pages:
    """What the rows of an open step read in a sub-pool that holds tokens, padded to `num_rows` rows.

    PlanError where a new token sees positions that are stored nowhere, or where the tokens of a row lie in two chunks.
    SequenceError for a step that has ended, and for a multi-step, whose tokens only the device knows. Does not look at
    the device.
    """
    pool = pool_of(step)
    if subpool.is_state:
        raise PlanError(f"{subpool.name!r} holds states, and FlashInfer attends to tokens; name another sub-pool")
    books = pool.sequences
    k, size = subpool.index, subpool.page_size
    past = step.past
    new = past + step.num_new_tokens
    counts = new - past
    _check_chunks(subpool, past, new)
    first = books.lifespans.first_needed_page(np.array(k), past)
    num_pages = -(-new // size) - first
    ids = books.tables.mirror[spread(books.tables.origin[k, step.rows] + first, num_pages)]
    if len(ids) and int(ids.min()) < 0:
        raise PlanError(
            f"a step of up to {int(counts.max())} new tokens sees some of {subpool.name!r} that are stored nowhere, as "
            "no later step needs them; take at most a window less one at a time, or attend to the new keys beside the "
            "arena, as torch.ops.torch_uma.attend does with new_key"
        )
    indices = books.allocator.v2p[ids]
    last_ids = ids[num_pages.cumsum() - 1].astype(np.int64)
    lengths = new - first * size
    num_padded = 0 if num_rows is None else _count(num_rows, "num_rows of a graph") - len(past)
    if num_padded < 0:
        raise PlanError(f"the step has {len(past)} rows, but the graph was made for {num_rows}; make it for more")
    if num_padded:
        own = int(counts.max()) if isinstance(step.num_new_tokens, int) else 1
        per_row = -(-own // size)
        counts = np.append(counts, np.full(num_padded, own))
        lengths = np.append(lengths, np.full(num_padded, own))
        num_pages = np.append(num_pages, np.full(num_padded, per_row))
        indices = np.append(indices, np.full(num_padded * per_row, _SINK_PAGE, np.int32))
    pages = Pages(
        num_rows=len(past),
        page_size=size,
        query_starts=_starts(counts),
        indptr=_starts(num_pages),
        indices=_int32(indices),
        lengths=_int32(lengths),
        last_page_len=_int32((lengths - 1) % size + 1),
        last_ids=last_ids,
    )
    return pages.pinned() if pool.device.type == "cuda" else pages


def _check_chunks(subpool: SubPool, past: Int64Array, new: Int64Array) -> None:
    if not isinstance(subpool.lifetime, Chunk):
        return
    chunk = subpool.lifetime.num_tokens
    if (past // chunk != (new - 1) // chunk).any():
        raise PlanError(
            f"new tokens of one row lie in two chunks of {chunk}, and a table of pages begins where only one of them "
            f"does; end the step at a multiple of {chunk}"
        )


def _count(value: Any, name: str) -> int:
    return whole(value, name, least=1, error=PlanError)


def _starts(counts: Int64Array) -> Tensor:
    return _int32(np.concatenate([[0], counts.cumsum()]))


def _int32(numbers: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(numbers.astype(np.int32))
