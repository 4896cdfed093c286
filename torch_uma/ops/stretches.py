"""Where the tokens of sequences lie: page numbers become stretches of consecutive entries.

Owns the look at page tables on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.integer[Any]]
Int64Array = npt.NDArray[np.int64]

Stretch = tuple[int, int, int]
"""Positions `[first, end)` of one sequence that lie one after another, and the entry of the first."""


class Stretches(NamedTuple):
    """The stretches of several sequences, one sequence after another, each in order: [stretches] int64.

    Attributes:
        sequence: the number of its sequence.
        position, end: its positions.
        entry: the entry of the first.
    """

    sequence: Int64Array
    position: Int64Array
    end: Int64Array
    entry: Int64Array

    def by_sequence(self, num_sequences: int) -> list[list[Stretch]]:
        """The stretches of each sequence."""
        found: list[list[Stretch]] = [[] for _ in range(num_sequences)]
        for sequence, position, end, entry in zip(*(each.tolist() for each in self)):
            found[sequence].append((position, end, entry))
        return found


class Pages(NamedTuple):
    """Physical pages of several sequences, -1 for none.

    Attributes:
        numbers: [sequences, columns].
        from_column: the column of the page tables that is the first of these.
    """

    numbers: Integers
    from_column: int


def look_up(
    page_table: Integers, v2p: Integers, rows: Sequence[int], needed: Sequence[int], ends: Sequence[int], page_size: int
) -> Pages:
    """The pages of the positions `[needed, ends)` of each row, and maybe others; IndexError without such columns."""
    spans = [(first // page_size, -(-end // page_size)) for first, end in zip(needed, ends) if first < end]
    low, high = min((low for low, _ in spans), default=0), max((high for _, high in spans), default=0)
    if high > page_table.shape[1]:
        raise IndexError(f"a sequence of {high} pages has a page table of {page_table.shape[1]} columns")
    ids = page_table[[max(0, row) for row in rows], low:high]
    numbers = v2p[ids]
    numbers[ids < 0] = -1
    return Pages(numbers, low)


def find_stretches(
    pages: Pages, rows: Sequence[int], needed: Sequence[int], ends: Sequence[int], page_size: int
) -> Stretches:
    """The stretches of each row over the positions `[needed, ends)`; IndexError where one has no page."""
    numbers, from_column = pages
    if not numbers.size:
        return Stretches(*(np.empty(0, np.int64) for _ in range(4)))
    low = [first // page_size - from_column for first in needed]
    high = [-(-end // page_size) - from_column if first < end else 0 for first, end in zip(needed, ends)]
    absent = numbers < 0
    begins = np.ones(numbers.shape, bool)
    np.not_equal(numbers[:, 1:] - numbers[:, :-1], 1, out=begins[:, 1:])
    if min(low) < 0 or max(low) > 0 or min(high) < numbers.shape[1]:
        columns = np.arange(numbers.shape[1])
        first, last = np.array(low)[:, None], np.array(high)[:, None]
        inside = (columns >= first) & (columns < last)
        absent &= inside
        begins = (begins | (columns == first)) & inside
    if absent.any():
        at, column = np.argwhere(absent)[0].tolist()
        raise IndexError(f"row {rows[at]} has no page for position {(from_column + column) * page_size}")
    sequence, column = begins.nonzero()
    begin = (from_column + column) * page_size
    position = np.maximum(begin, np.array(needed)[sequence])
    end = np.array(ends)[sequence]
    np.copyto(end[:-1], position[1:], where=sequence[1:] == sequence[:-1])
    entry = numbers[sequence, column].astype(np.int64) * page_size + (position - begin)
    return Stretches(sequence, position, end, entry)
