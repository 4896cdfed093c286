"""What one request needs of an arena at its fullest, and whether that can be had."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torch_uma.allocator import Allocator
from torch_uma.lifespans import Lifespans
from torch_uma.placement import Quote, lowest_spans
from torch_uma.scheduling.outlook import fullest
from torch_uma.tables import Int64Array


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a request of `num_tokens` tokens, prompt and answer, needs. True if it could be admitted now.

    Attributes:
        num_tokens: of its text at most; the last of them is never stored.
        pages, bytes: at its fullest, by name of the sub-pool.
        fits_empty: whether an arena without anybody else would hold it to its end, however often its text is run again:
            with every sub-pool at its fullest at the same time.
        now: whether its prompt fits now, at what cost, or what would help; None where that was not asked.
    """

    num_tokens: int
    pages: dict[str, int]
    bytes: dict[str, int]
    fits_empty: bool
    now: Quote | None = None

    def __bool__(self) -> bool:
        return self.fits_empty and bool(self.now)

    def __str__(self) -> str:
        parts = ", ".join(f"{self.bytes[name]:,} bytes of {name}" for name in self.pages if self.pages[name])
        return f"{self.num_tokens} tokens need {parts or 'nothing'}; {sum(self.bytes.values()):,} bytes in all"


def need_of(allocator: Allocator, lifespans: Lifespans, num_tokens: int, now: Quote | None = None) -> Need:
    """The need of a request whose text is `num_tokens` long at its end."""
    subpools = allocator.plan.subpools
    last = max(1, num_tokens - 1)
    moments = _full_moments(lifespans, last)
    most = fullest(lifespans, moments - 1, moments).max(axis=1)
    return Need(
        num_tokens=num_tokens,
        pages={s.name: count for s, count in zip(subpools, most.tolist())},
        bytes={s.name: count * s.page_bytes for s, count in zip(subpools, most.tolist())},
        fits_empty=lowest_spans(allocator.room.grids, most.tolist()) is not None,
        now=now,
    )


def _full_moments(lifespans: Lifespans, last: int) -> Int64Array:
    """Lengths up to `last` among which every sub-pool is at its fullest.

    A window is so once in every page; a chunk at its end, one of as many as there are places in a page to begin at.
    """
    paged = list(lifespans.paged)
    page_tokens = int(lifespans.page_tokens[paged].max(initial=1))
    moments = [np.arange(max(1, last - page_tokens), last + 1)]
    for chunk in {int(chunk) for chunk in lifespans.chunk[paged].tolist()}:
        moments.append(chunk * np.arange(max(1, last // chunk - page_tokens + 1), last // chunk + 1))
    return np.unique(np.concatenate(moments))
