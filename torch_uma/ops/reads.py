"""Which entries the queries of a batch read, as a value: planned from page numbers, without a look at the arena.

Owns the order of the work on the host: queries in blocks, for each block the runs of consecutive entries that it reads,
and how much of each run its queries see. All layers that share a page table share one plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_uma.lifespans import spread

Integers = npt.NDArray[np.integer[Any]]

MOST_PACKED = 16
"""Up to so many new tokens a sequence, the queries of a group of heads read their keys together."""

# Queries in one block. With a window, a larger one reads more keys that each query does not see.
_BLOCK_TOKENS = 1024
_SMALL_BLOCK_TOKENS = 128
_MIDDLE_BLOCK_TOKENS = 256

# Runs of fewer bytes cost less to copy together, so many bytes at a time, than to attend to one by one.
# Where many queries look at each run, what is merged costs more.
_SHORT_RUN_BYTES = 2**16
_MORE_SHORT = 4
_COPY_BYTES = 2**20


class Sees(Enum):
    """Which keys of a run the queries of its block see: all of them, those up to their own, or those in a band."""

    ALL = "all"
    CAUSAL = "causal"
    BAND = "band"


class Run(NamedTuple):
    """Keys of consecutive positions, one run a sequence of its block; or two runs of one sequence; or copied keys.

    Attributes:
        position: of the first key.
        num_tokens: how many keys.
        first: entry of the first key; its token, if it is one of the new keys.
        apart: entries, or tokens, from one sequence's run to that of the next, or from one of two to the other.
        is_new: the keys are given by the caller, and not stored.
        sees: what of the run is seen.
        second: position of the first key of the other of two runs.
        entries, positions: int64 [num_tokens]: where copied keys lie and stand; they are in no order.
    """

    position: int
    num_tokens: int
    first: int
    apart: int
    is_new: bool
    sees: Sees
    second: int | None = None
    entries: Tensor | None = None
    positions: Tensor | None = None

    def each(self) -> tuple[Run, ...]:
        """The two runs, or the one, on their own."""
        if self.second is None:
            return (self,)
        return (
            self._replace(apart=0, second=None),
            self._replace(position=self.second, first=self.first + self.apart, apart=0, second=None),
        )


class Block(NamedTuple):
    """Consecutive queries of one sequence, or of several that lie alike, and what they read.

    Attributes:
        sequence: the first sequence.
        num_sequences: how many.
        first_token: the packed token with which the first sequence begins.
        skipped: its tokens before the first query of the block.
        num_tokens: queries of each sequence.
        apart: tokens from one sequence to the next.
        position: of the first query.
        runs: what is read, by position.
    """

    sequence: int
    num_sequences: int
    first_token: int
    skipped: int
    num_tokens: int
    apart: int
    position: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What a batch reads: its blocks, in order; a query in none of them sees nothing.

    Attributes:
        blocks: blocks of queries.
        window: as planned for; 0 for none.
        has_new: the keys of the new tokens come from the caller.
        bands: masks of the blocks, kept by whoever applies the plan for the next layer.
    """

    blocks: tuple[Block, ...]
    window: int
    has_new: bool
    bands: dict[tuple[object, ...], Tensor] = field(default_factory=dict, compare=False, repr=False)


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
    counts = np.diff(query_starts)
    firsts = lengths - counts
    if (firsts < 0).any():
        raise ValueError(f"sequences of {lengths.tolist()} tokens cannot have {counts.tolist()} new ones among them")
    starts = np.zeros_like(firsts) if starts is None else np.maximum(starts, 0)
    needed = starts
    if window:
        needed = np.maximum(needed, firsts + (1 - window))
    if chunk:
        needed = np.maximum(needed, firsts - firsts % chunk)
    ends = np.where((counts > 0) & (rows >= 0), firsts if has_new else lengths, 0)
    runs = _find_runs(page_table, v2p, rows, needed, ends, page_size)
    batch = _Batch(
        token_starts=query_starts.tolist(),
        rows=rows.tolist(),
        firsts=firsts.tolist(),
        counts=counts.tolist(),
        starts=starts.tolist(),
        runs=runs,
        window=window,
        chunk=chunk,
        has_new=has_new,
        short=_SHORT_RUN_BYTES // token_bytes,
        at_once=max(1, _COPY_BYTES // token_bytes),
    )
    return Reads(blocks=tuple(batch.blocks()), window=window, has_new=has_new)


def _find_runs(
    page_table: Integers, v2p: Integers, rows: Integers, needed: Integers, ends: Integers, page_size: int
) -> list[list[tuple[int, int, int]]]:
    """For each row its runs `(position, end position, first entry)` over the positions `[needed, ends)`."""
    runs: list[list[tuple[int, int, int]]] = [[] for _ in range(len(rows))]
    reading = needed < ends
    if not reading.any():
        return runs
    low = needed // page_size
    high = np.where(reading, -(-ends // page_size), 0)
    from_column, to_column = int(low[reading].min()), int(high.max())
    if to_column > page_table.shape[1]:
        raise IndexError(f"a sequence of {to_column} pages has a page table of {page_table.shape[1]} columns")
    ids = page_table[np.maximum(rows, 0), from_column:to_column]
    pages = v2p[ids]
    columns = np.arange(from_column, to_column)
    inside = (columns >= low[:, None]) & (columns < high[:, None])
    absent = inside & ((ids < 0) | (pages < 0))
    if absent.any():
        at, column = np.argwhere(absent)[0].tolist()
        raise IndexError(f"row {rows[at]} has no page for position {(from_column + column) * page_size}")
    begins = inside.copy()
    begins[:, 1:] &= ~inside[:, :-1] | (np.diff(pages, axis=1) != 1)
    of, at = begins.nonzero()
    position = np.maximum((at + from_column) * page_size, needed[of])
    entry = pages[of, at].astype(np.int64) * page_size + position % page_size
    until = ends[of]
    same = of[1:] == of[:-1]
    until[:-1][same] = position[1:][same]
    for row, first, end, first_entry in zip(of.tolist(), position.tolist(), until.tolist(), entry.tolist()):
        runs[row].append((first, end, first_entry))
    return runs


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """What is known of each sequence before its queries are cut into blocks."""

    token_starts: list[int]
    rows: list[int]
    firsts: list[int]
    counts: list[int]
    starts: list[int]
    runs: list[list[tuple[int, int, int]]]
    window: int
    chunk: int
    has_new: bool
    short: int
    at_once: int

    def blocks(self) -> Iterator[Block]:
        apart = self._apart()
        if apart is not None:
            yield from self._blocks_of(0, len(self.rows), apart)
            return
        for sequence, row in enumerate(self.rows):
            if row >= 0:
                yield from self._blocks_of(sequence, 1, 0)

    def _apart(self) -> int | None:
        """Entries from one sequence to the next, if all are alike and can be read as one."""
        if len(self.rows) < 2 or min(self.rows) < 0 or not 0 < self.counts[0] <= MOST_PACKED:
            return None
        if any(each.count(each[0]) < len(each) for each in (self.counts, self.firsts, self.starts)):
            return None
        if not any(self.runs):
            return 0
        if any(len(runs) != 1 for runs in self.runs):
            return None
        entries = [runs[0][2] for runs in self.runs]
        apart = entries[1] - entries[0]
        alike = apart >= 0 and all(after - before == apart for before, after in zip(entries, entries[1:]))
        return apart if alike else None

    def _blocks_of(self, sequence: int, num_sequences: int, apart: int) -> Iterator[Block]:
        first, count, start = self.firsts[sequence], self.counts[sequence], self.starts[sequence]
        stored = _Stored(self.runs[sequence], apart, self.short, self.at_once)
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
        tokens = _BLOCK_TOKENS
        if self.window:
            tokens = _SMALL_BLOCK_TOKENS if self.window < _MIDDLE_BLOCK_TOKENS else _MIDDLE_BLOCK_TOKENS
        return min(tokens, self.chunk - position % self.chunk) if self.chunk else tokens


class _Span(NamedTuple):
    """Positions about a block: seen by its first query from `low`, by its last from `high`; queries `[first, end)`."""

    low: int
    high: int
    first: int
    end: int


class _Stored(NamedTuple):
    """The runs of one sequence in the arena, and from how many tokens on one is worth a call of its own."""

    runs: list[tuple[int, int, int]]
    apart: int
    short: int
    at_once: int

    def read(self, span: _Span) -> list[Run]:
        """What the block reads of these: long runs in place, by twos if its queries are few, short ones copied."""
        long: list[Run] = []
        whole: list[tuple[int, int, int]] = []  # short runs that all queries see
        other: list[tuple[int, int, int]] = []
        few = span.end - span.first <= MOST_PACKED
        short = self.short if few else self.short * _MORE_SHORT
        for position, until, entry in self.runs:
            at, until = max(position, span.low), min(until, span.end)
            if at >= until:
                continue
            entry += at - position
            if until - at >= short or len(self.runs) == 1:
                long.extend(_seen(span, Run(at, until - at, entry, self.apart, False, Sees.ALL)))
            elif at < span.high:
                other.append((at, until, entry))
            else:
                cut = max(at, min(until, span.first + 1))
                if at < cut:
                    whole.append((at, cut, entry))
                if cut < until:
                    other.append((cut, until, entry + cut - at))
        if few and len(long) > 1:
            long = list(self._by_twos(long, whole))
        return [*long, *self._copied(whole, Sees.ALL), *self._copied(other, Sees.BAND)]

    def _by_twos(self, runs: list[Run], short: list[tuple[int, int, int]]) -> Iterator[Run]:
        """Any two runs lie at one stride, so two of equal length take one call; what is over may be `short`."""
        waiting: Run | None = None
        for run in sorted(runs, key=lambda run: run.num_tokens):
            if run.sees is not Sees.ALL:
                yield run
            elif waiting is None:
                waiting = run
            else:
                num_tokens = waiting.num_tokens
                low, high = (waiting, run) if waiting.first < run.first else (run, waiting)
                yield low._replace(num_tokens=num_tokens, apart=high.first - low.first, second=high.position)
                over = run.num_tokens - num_tokens
                waiting = None
                if over >= self.short:
                    waiting = _cut(run, run.position + num_tokens, run.position + run.num_tokens, Sees.ALL)
                elif over:
                    short.append((run.position + num_tokens, run.position + run.num_tokens, run.first + num_tokens))
        if waiting is not None:
            yield waiting

    def _copied(self, short: list[tuple[int, int, int]], sees: Sees) -> Iterator[Run]:
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
