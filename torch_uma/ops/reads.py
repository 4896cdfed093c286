"""The plan of what a batch reads, from page numbers alone.

Owns the order of the work on the host: how queries are cut into blocks, which runs are read in place and which copied.
Where each sequence has a single query it sees whole stretches, which go as pieces to a loop in C.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_uma.lifespans import spread
from torch_uma.ops.blocks import Block, Run, Sees
from torch_uma.ops.pieces import Pieces, cut
from torch_uma.ops.stretches import Integers, Pages, Stretch, Stretches, find_stretches, look_up

MOST_PACKED = 16
"""Up to so many new tokens a sequence, the queries of a group of heads read their keys together."""

# Queries in one block; of queries that a window hides something from, whose block reads as many keys more.
_BLOCK_TOKENS = 512
_WINDOW_BLOCK_TOKENS = 128

# Runs of fewer bytes cost less to copy together, so many bytes at a time, than to attend to one by one.
# Where many queries look at each run, what is merged costs more.
_SHORT_RUN_BYTES = 2**17
_MORE_SHORT = 4
_COPY_BYTES = 2**21


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What a batch reads.

    Attributes:
        window: as planned for; 0 for none.
        has_new: the keys of the new tokens come from the caller.
        batch: what the blocks are made of, when somebody asks for them.
        bands: masks of the blocks, kept by whoever applies the plan for the next layer.
    """

    window: int
    has_new: bool
    batch: _Batch
    bands: dict[tuple[object, ...], Tensor] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Blocks of queries, in order; a query in none of them sees nothing."""
        return tuple(self.batch.blocks())

    @cached_property
    def only_run(self) -> Run | None:
        """The run, if one query of each sequence reads just one, in the arena, and sees all of it."""
        batch = self.batch
        if self.has_new or len(batch.stretches.entry) != len(batch.rows) or batch.counts.count(1) < len(batch.rows):
            return None
        if len(self.blocks) != 1 or len(self.blocks[0].runs) != 1:
            return None
        return self.blocks[0].runs[0]

    @cached_property
    def pieces(self) -> Pieces | None:
        """The same as pieces, if no sequence has more than one query and all keys are in the arena."""
        batch = self.batch
        if self.has_new or max(batch.counts, default=0) != 1:
            return None
        query_tokens = np.array(batch.token_starts[:-1])
        return cut(batch.stretches, query_tokens, batch.token_bytes)


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
        token_starts=tokens,
        rows=table_rows,
        firsts=firsts,
        counts=counts,
        starts=tuple(lowest),
        needed=tuple(needed),
        ends=tuple(ends),
        pages=pages.astype(np.int32).tobytes(),
        from_column=from_column,
        page_size=page_size,
        window=window,
        chunk=chunk,
        has_new=has_new,
        token_bytes=token_bytes,
    )
    # In decode all layers of a kind, which a compiled graph lets plan on their own, ask the same.
    return answer(question) if max(counts, default=0) <= 1 else answer.__wrapped__(question)


class _Question(NamedTuple):
    """All that a plan depends on."""

    token_starts: tuple[int, ...]
    rows: tuple[int, ...]
    firsts: tuple[int, ...]
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    needed: tuple[int, ...]
    ends: tuple[int, ...]
    pages: bytes  # int32
    from_column: int
    page_size: int
    window: int
    chunk: int
    has_new: bool
    token_bytes: int


@lru_cache(maxsize=8)
def answer(question: _Question) -> Reads:
    """The plan for this question."""
    rows, needed, ends = question.rows, question.needed, question.ends
    numbers = np.frombuffer(question.pages, np.int32).reshape(len(rows), -1)
    batch = _Batch(
        token_starts=question.token_starts,
        rows=rows,
        firsts=question.firsts,
        counts=question.counts,
        starts=question.starts,
        stretches=find_stretches(Pages(numbers, question.from_column), rows, needed, ends, question.page_size),
        window=question.window,
        chunk=question.chunk,
        has_new=question.has_new,
        token_bytes=question.token_bytes,
    )
    return Reads(window=question.window, has_new=question.has_new, batch=batch)


def plan_run(num_sequences: int, num_tokens: int, first: int, apart: int) -> Reads:
    """The plan of one query each of sequences of `num_tokens` tokens that lie in one run each, `apart` entries apart.

    What `plan_reads` finds for them, without a look at page tables. `first` is the first entry of the first sequence.
    """
    numbers = np.arange(num_sequences)
    batch = _Batch(
        token_starts=tuple(range(num_sequences + 1)),
        rows=(0,) * num_sequences,
        firsts=(num_tokens - 1,) * num_sequences,
        counts=(1,) * num_sequences,
        starts=(0,) * num_sequences,
        stretches=Stretches(numbers, 0 * numbers, 0 * numbers + num_tokens, first + apart * numbers),
        window=0,
        chunk=0,
        has_new=False,
        token_bytes=1,
    )
    return Reads(window=0, has_new=False, batch=batch)


class _Batch(NamedTuple):
    """What is known of each sequence before its queries are cut into blocks."""

    token_starts: tuple[int, ...]
    rows: tuple[int, ...]
    firsts: tuple[int, ...]
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    stretches: Stretches
    window: int
    chunk: int
    has_new: bool
    token_bytes: int

    def blocks(self) -> Iterator[Block]:
        stretches = self.stretches.by_sequence(len(self.rows))
        apart = self._apart(stretches)
        if apart is not None:
            yield from self._blocks_of(0, len(self.rows), stretches[0], apart)
            return
        for sequence, row in enumerate(self.rows):
            if row >= 0:
                yield from self._blocks_of(sequence, 1, stretches[sequence], 0)

    def _apart(self, stretches: list[list[Stretch]]) -> int | None:
        """Entries from one sequence to the next, if all are alike and can be read as one."""
        if len(self.rows) < 2 or min(self.rows) < 0 or not 0 < self.counts[0] <= MOST_PACKED:
            return None
        if any(each.count(each[0]) < len(each) for each in (self.counts, self.firsts, self.starts)):
            return None
        if not any(stretches):
            return 0
        if any(len(each) != 1 for each in stretches):
            return None
        entries = [each[0][2] for each in stretches]
        apart = entries[1] - entries[0]
        alike = apart >= 0 and all(after - before == apart for before, after in zip(entries, entries[1:]))
        return apart if alike else None

    def _blocks_of(self, sequence: int, num_sequences: int, stretches: list[Stretch], apart: int) -> Iterator[Block]:
        first, count, start = self.firsts[sequence], self.counts[sequence], self.starts[sequence]
        short, at_once = max(1, _SHORT_RUN_BYTES // self.token_bytes), max(1, _COPY_BYTES // self.token_bytes)
        stored = _Stored(stretches, apart, short, at_once)
        position, end = max(first, start), first + count
        while position < end:
            until = min(end, position + self._block_tokens(position))
            low = max(start, position - self.window + 1 if self.window else 0)
            if self.chunk:
                low = max(low, position - position % self.chunk)
            span = _Span(low, max(low, until - self.window) if self.window else low, position, until)
            runs = stored.read(span)
            if self.has_new and until > first:
                at = max(low, first)
                token = self.token_starts[sequence] + at - first
                runs.extend(_seen(span, Run(at, until - at, token, count, True, Sees.ALL)))
            yield Block(
                sequence=sequence,
                num_sequences=num_sequences,
                first_token=self.token_starts[sequence],
                skipped=position - first,
                num_tokens=until - position,
                apart=count,
                position=position,
                runs=tuple(runs),
            )
            position = until

    def _block_tokens(self, position: int) -> int:
        """So many queries from `position` on make a block; none reaches over the end of a chunk."""
        hides = 0 < self.window < position + _BLOCK_TOKENS
        tokens = _WINDOW_BLOCK_TOKENS if hides else _BLOCK_TOKENS
        return min(tokens, self.chunk - position % self.chunk) if self.chunk else tokens


class _Span(NamedTuple):
    """Positions about a block: seen by its first query from `low`, by its last from `high`; queries `[first, end)`."""

    low: int
    high: int
    first: int
    end: int


class _Stored(NamedTuple):
    """The runs of one sequence in the arena, and from how many tokens on one is worth a call of its own."""

    runs: list[Stretch]
    apart: int
    short: int
    at_once: int

    def read(self, span: _Span) -> list[Run]:
        """What the block reads of these: long runs in place, by twos if its queries are few, short ones copied."""
        cut_up: list[Run] = []
        long: list[Stretch] = []  # long runs that all queries see
        whole: list[Stretch] = []  # short runs that all queries see
        other: list[Stretch] = []
        few = span.end - span.first <= MOST_PACKED
        short = self.short if few else self.short * _MORE_SHORT
        for position, until, entry in self.runs:
            at, until = max(position, span.low), min(until, span.end)
            if at >= until:
                continue
            entry += at - position
            if until - at >= short or len(self.runs) == 1:
                if few and span.high <= at and until <= span.first + 1:
                    long.append((at, until, entry))
                else:
                    cut_up.extend(_seen(span, Run(at, until - at, entry, self.apart, False, Sees.ALL)))
            elif at < span.high:
                other.append((at, until, entry))
            else:
                cut = max(at, min(until, span.first + 1))
                if at < cut:
                    whole.append((at, cut, entry))
                if cut < until:
                    other.append((cut, until, entry + cut - at))
        return [*cut_up, *self._by_twos(long, whole), *self._copied(whole, Sees.ALL), *self._copied(other, Sees.BAND)]

    def _by_twos(self, long: list[Stretch], short: list[Stretch]) -> Iterator[Run]:
        """Any two runs lie at one stride, so two of equal length take one call; what is over may be `short`."""
        waiting: Stretch | None = None
        for stretch in sorted(long, key=lambda stretch: stretch[1] - stretch[0]):
            if waiting is None:
                waiting = stretch
                continue
            (first, end, entry), (second, second_end, second_entry) = waiting, stretch
            num_tokens = end - first
            over = (second + num_tokens, second_end, second_entry + num_tokens)
            if second_entry < entry:
                first, entry, second, second_entry = second, second_entry, first, entry
            yield Run(first, num_tokens, entry, second_entry - entry, False, Sees.ALL, second)
            waiting = None
            if over[1] - over[0] >= self.short:
                waiting = over
            elif over[0] < over[1]:
                short.append(over)
        if waiting is not None:
            first, end, entry = waiting
            yield Run(first, end - first, entry, self.apart, False, Sees.ALL)

    def _copied(self, short: list[Stretch], sees: Sees) -> Iterator[Run]:
        if len(short) < 2:
            for at, until, entry in short:
                yield Run(at, until - at, entry, self.apart, False, sees)
            return
        first, until, entry = np.array(short).T
        positions = torch.from_numpy(spread(first, until - first))
        entries = torch.from_numpy(spread(entry, until - first))
        for some, at in zip(entries.split(self.at_once), positions.split(self.at_once)):
            yield Run(0, len(some), 0, 0, False, sees, entries=some, positions=at)


def _seen(span: _Span, run: Run) -> Iterator[Run]:
    """The run, cut where what is seen of it changes."""
    end = run.position + run.num_tokens
    if run.position < span.high:
        yield _cut(run, run.position, end, Sees.BAND)
    elif end <= span.first + 1:
        yield run
    else:
        if run.position < span.first:
            yield _cut(run, run.position, span.first, Sees.ALL)
        at = max(run.position, span.first)
        yield _cut(run, at, end, Sees.CAUSAL if (at, end) == (span.first, span.end) else Sees.BAND)


def _cut(run: Run, position: int, end: int, sees: Sees) -> Run:
    """The part of a run at positions `[position, end)`."""
    first = run.first + position - run.position
    return run._replace(position=position, num_tokens=end - position, first=first, sees=sees)
