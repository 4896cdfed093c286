"""The plan of what a batch reads, from page numbers alone.

Owns what of page tables the plan depends on: it is remembered by that. Where each sequence has a single query it sees
whole stretches, which go as pieces to a loop in C; otherwise queries are cut into blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from torch import Tensor

from torch_uma.ops.blocks import Block, Queries, Run
from torch_uma.ops.pieces import Pieces, cut
from torch_uma.ops.stretches import Integers, Pages, Stretches, find_stretches, look_up


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What a batch reads.

    Attributes:
        queries: who reads.
        stretches: what all of them together read in the arena.
        bands: masks of the blocks, kept by whoever applies the plan for the next layer.
    """

    queries: Queries
    stretches: Stretches
    bands: dict[tuple[object, ...], Tensor] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of queries, in order; a query in none of them sees nothing."""
        return tuple(self.queries.blocks(self.stretches))

    @cached_property
    def only_run(self) -> Run | None:
        """The run, if one query of each sequence reads just one, in the arena, and sees all of it."""
        counts, num_stretches = self.queries.counts, len(self.stretches.entry)
        if self.queries.has_new or num_stretches != len(counts) or counts.count(1) < len(counts):
            return None
        if len(self.blocks) != 1 or len(self.blocks[0].runs) != 1:
            return None
        return self.blocks[0].runs[0]

    @cached_property
    def pieces(self) -> Pieces | None:
        """The same as pieces, if no sequence has more than one query and all keys are in the arena."""
        if self.queries.has_new or max(self.queries.counts, default=0) != 1:
            return None
        return cut(self.stretches, np.array(self.queries.token_starts[:-1]), self.queries.token_bytes)


def plan_reads(
    page_table: Integers,
    v2p: Integers,
    rows: Integers,
    lengths: Integers,
    query_starts: Integers,
    page_size: int,
    *,
    window: int = 0,
    chunk: int = 0,
    starts: Integers | None = None,
    has_new: bool = False,
    token_bytes: int = 2048,
) -> Reads:
    """Plan what the queries of R sequences read; sequence i has tokens `query_starts[i]` to `query_starts[i + 1]`.

    Arrays are as the tensors of `attend`, in host memory; nothing is modified. `has_new` says that the new keys and
    values will be given; `token_bytes`, what key and value of a token have in a layer, decides which runs are so short
    that they are copied. IndexError for a needed position without a page, ValueError for a sequence of fewer tokens
    than it has queries.
    """
    # Numbers of sequences as tuples: for a few sequences, arithmetic on arrays costs more.
    tokens, numbers, table_rows = (tuple(each.tolist()) for each in (query_starts, lengths, rows))
    counts = tuple(end - start for start, end in zip(tokens, tokens[1:]))
    firsts = tuple(length - count if row >= 0 else 0 for length, count, row in zip(numbers, counts, table_rows))
    if firsts and min(firsts) < 0:
        raise ValueError(f"sequences of {list(numbers)} tokens cannot have {list(counts)} new ones among them")
    lowest = [0] * len(firsts) if starts is None else [max(0, start) for start in starts.tolist()]
    needed = lowest
    if window:
        needed = [max(low, first + 1 - window) for low, first in zip(needed, firsts)]
    if chunk:
        needed = [max(low, first - first % chunk) for low, first in zip(needed, firsts)]
    ends = [
        (first if has_new else length) if count and row >= 0 else 0
        for first, length, count, row in zip(firsts, numbers, counts, table_rows)
    ]
    pages, from_column = look_up(page_table, v2p, table_rows, needed, ends, page_size)
    question = _Question(
        queries=Queries(
            token_starts=tokens,
            rows=table_rows,
            firsts=firsts,
            counts=counts,
            starts=tuple(lowest),
            window=window,
            chunk=chunk,
            has_new=has_new,
            token_bytes=token_bytes,
        ),
        needed=tuple(needed),
        ends=tuple(ends),
        pages=pages.astype(np.int32).tobytes(),
        from_column=from_column,
        page_size=page_size,
    )
    # In decode all layers of a kind, which a compiled graph lets plan on their own, ask the same.
    return answer(question) if max(counts, default=0) <= 1 else answer.__wrapped__(question)


class _Question(NamedTuple):
    """All that a plan depends on; `pages` are the bytes of int32 [sequences, columns]."""

    queries: Queries
    needed: tuple[int, ...]
    ends: tuple[int, ...]
    pages: bytes
    from_column: int
    page_size: int


@lru_cache(maxsize=8)
def answer(question: _Question) -> Reads:
    """The plan for this question."""
    rows = question.queries.rows
    numbers = np.frombuffer(question.pages, np.int32).reshape(len(rows), -1)
    pages = Pages(numbers, question.from_column)
    stretches = find_stretches(pages, rows, question.needed, question.ends, question.page_size)
    return Reads(queries=question.queries, stretches=stretches)
