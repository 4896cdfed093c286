"""Where the tokens of sequences lie: page numbers become stretches of consecutive entries.

Owns the look at page tables on the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.integer[Any]]

Stretch = tuple[int, int, int]
"""Positions `[first, end)` of one sequence that lie one after another, and the entry of the first."""


def find_stretches(
    page_table: Integers, v2p: Integers, rows: list[int], needed: list[int], ends: list[int], page_size: int
) -> list[list[Stretch]]:
    """For each row its stretches, over the positions `[needed, ends)`; IndexError where one has no page."""
    low = [first // page_size for first in needed]
    high = [-(-end // page_size) if first < end else 0 for first, end in zip(needed, ends)]
    from_column = min((first for first, end in zip(low, high) if first < end), default=0)
    to_column = max(high, default=0)
    if from_column == to_column:
        return [[] for _ in rows]
    if to_column > page_table.shape[1]:
        raise IndexError(f"a sequence of {to_column} pages has a page table of {page_table.shape[1]} columns")
    ids = page_table[[max(0, row) for row in rows], from_column:to_column]
    pages = v2p[ids]
    absent = (ids | pages) < 0
    begins = np.ones(pages.shape, bool)
    np.not_equal(pages[:, 1:] - pages[:, :-1], 1, out=begins[:, 1:])
    if min(low) < from_column or max(low) > from_column or min(high) < to_column:
        columns = np.arange(from_column, to_column)
        first, end = np.array(low)[:, None], np.array(high)[:, None]
        inside = (columns >= first) & (columns < end)
        absent &= inside
        begins = (begins | (columns == first)) & inside
    if absent.any():
        at, column = np.argwhere(absent)[0].tolist()
        raise IndexError(f"row {rows[at]} has no page for position {(from_column + column) * page_size}")
    stretches: list[list[Stretch]] = [[] for _ in rows]
    before = -1
    row_of, at_column = begins.nonzero()
    starts = zip(row_of.tolist(), at_column.tolist(), pages[row_of, at_column].tolist())
    for row, column, page in starts:
        position = max((from_column + column) * page_size, needed[row])
        if row == before:
            stretches[row][-1] = (stretches[row][-1][0], position, stretches[row][-1][2])
        stretches[row].append((position, ends[row], page * page_size + position % page_size))
        before = row
    return stretches
