"""Which pages of a sequence are needed at which length: lifetimes as vector arithmetic over sub-pools and rows.

Owns the numbers that a step needs of the plan, one array over the sub-pools each. Full attention counts as a window,
and as a chunk, that no sequence outgrows, and so does a state, whose one page is held from the first to the last.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from torch_uma.layout import Chunk, Window
from torch_uma.plan import Plan

Int64Array = npt.NDArray[np.int64]

NEVER = 1 << 40
"""A length that no sequence reaches."""

EVERY = (slice(None), None)

Indexes: TypeAlias = Int64Array | tuple[slice, None]


class Lifespans:
    """Page arithmetic of a plan; `k` is an array of sub-pool indexes that broadcasts against the other argument.

    It may be `EVERY`, too, for every sub-pool in a row of its own.

    Attributes:
        page_tokens: [sub-pools] int64; `NEVER` for a state, whose page holds any number of tokens.
        paged, states: indexes of the sub-pools that hold tokens, and of those that hold states.
        window, chunk: [sub-pools] int64 tokens; `NEVER` for what is none.
        full, windows: indexes of the paged sub-pools that keep every token, and of those that keep a window.
    """

    def __init__(self, plan: Plan) -> None:
        subpools = plan.subpools
        self.num_subpools = len(subpools)
        self.page_tokens = np.array([NEVER if s.is_state else s.page_tokens for s in subpools], np.int64)
        self.window = np.array(
            [s.lifetime.num_tokens if isinstance(s.lifetime, Window) else NEVER for s in subpools], np.int64
        )
        self.chunk = np.array(
            [s.lifetime.num_tokens if isinstance(s.lifetime, Chunk) else NEVER for s in subpools], np.int64
        )
        self.paged = tuple(s.index for s in subpools if not s.is_state)
        self.states = tuple(s.index for s in subpools if s.is_state)
        self.full = tuple(k for k in self.paged if self.window[k] == NEVER and self.chunk[k] == NEVER)
        self.windows = tuple(k for k in self.paged if self.window[k] < NEVER)
        self._has_chunks = bool((self.chunk < NEVER).any())
        # So few new tokens take at most one page more and never leave a gap in front of it.
        self.step_tokens = max(1, min((int(self.page_tokens[k]) for k in self.paged), default=NEVER) - 1)

    def num_pages(self, k: Indexes, lengths: Int64Array) -> Int64Array:
        """Columns that `lengths` tokens reach over, dead ones included."""
        num_pages: Int64Array = -(-lengths // self.page_tokens[k])
        return num_pages

    def window_pages(self, k: int) -> int:
        """Pages of what one query reads of a window, wherever it begins within a page."""
        page_tokens = int(self.page_tokens[k])
        return (int(self.window[k]) + page_tokens - 2) // page_tokens + 1

    def first_needed_page(self, k: Indexes, lengths: Int64Array) -> Int64Array:
        """First column that a query at position `lengths` reads."""
        needed = lengths + 1 - self.window[k]
        needed = np.maximum(needed, lengths - lengths % self.chunk[k] if self._has_chunks else 0)
        pages: Int64Array = needed // self.page_tokens[k]
        return pages

    def last_needing(self, k: Int64Array, pages: Int64Array) -> Int64Array:
        """The greatest length at which column `pages` is still needed."""
        end = (pages + 1) * self.page_tokens[k]
        chunk = self.chunk[k]
        last: Int64Array = np.minimum(end + self.window[k] - 2, -(-end // chunk) * chunk - 1)
        return last


def spread(starts: Int64Array, counts: Int64Array) -> Int64Array:
    """The ranges `[starts[i], starts[i] + counts[i])` one after another."""
    ends = counts.cumsum()
    return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)
