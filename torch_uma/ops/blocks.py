"""What queries read, as values: queries in blocks, for each the runs of entries that it reads.

Owns the words in which a plan is put: blocks, runs, and how much of a run the queries of its block see.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from torch import Tensor


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
