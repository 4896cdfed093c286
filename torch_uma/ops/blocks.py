"""What queries read, as values: blocks of queries, and for each the runs of entries that it reads.

Owns these words, and how queries are cut into blocks: which runs are read in place, by twos, and which are copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_uma.lifespans import spread
from torch_uma.ops.stretches import Stretch, Stretches

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
        runs: what is read, in no order.
    """

    sequence: int
    num_sequences: int
    first_token: int
    skipped: int
    num_tokens: int
    apart: int
    position: int
    runs: tuple[Run, ...]


class Queries(NamedTuple):
    """The new tokens of sequences, before they are cut into blocks.

    Attributes:
        token_starts: the packed token with which each sequence begins, and the end.
        rows: of the page table; none is read of a negative one.
        firsts: position of the first query of each sequence.
        counts: how many each has.
        starts: first position that is seen.
        window, chunk: how far back a query sees; 0 for all.
        has_new: keys of the new tokens come from the caller.
        token_bytes: what key and value of a token have in a layer.
    """

    token_starts: tuple[int, ...]
    rows: tuple[int, ...]
    firsts: tuple[int, ...]
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    window: int
    chunk: int
    has_new: bool
    token_bytes: int

    def blocks(self, stretches: Stretches) -> Iterator[Block]:
        """Blocks of all queries, in order, that read these stretches."""
        found = stretches.by_sequence(len(self.rows))
        apart = self._apart(found)
        if apart is not None:
            yield from self._blocks_of(0, len(self.rows), found[0], apart)
            return
        for sequence, row in enumerate(self.rows):
            if row >= 0:
                yield from self._blocks_of(sequence, 1, found[sequence], 0)

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
