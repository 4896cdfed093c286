"""The recount of a pool: what sequences, tables and allocator say of each other, from what the rows hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from torch_uma.books import Sequences
from torch_uma.errors import InvariantError
from torch_uma.lifespans import NEVER

if TYPE_CHECKING:
    from torch_uma.step import OpenStep


def recount(books: Sequences, open_steps: Iterable[OpenStep]) -> None:
    """Raise InvariantError with everything that does not hold. Waits for the device, whose tables are compared.

    - a row holds the pages from the first needed one to its end, and no others but in front, if it keeps its past;
    - a page is live if and only if a row or an open step refers to it, and `references` says how many do;
    - a row that is not in use holds nothing;
    - after a flush the device's tables equal the host's, but for what an open multi-step extends there.
    """
    steps = list(open_steps)
    faults = [*_row_faults(books, steps), *_reference_faults(books, steps), *_table_faults(books, steps)]
    if faults:
        raise InvariantError("; ".join(faults))


def _row_faults(books: Sequences, steps: list[OpenStep]) -> Iterator[str]:
    in_step = {row for step in steps for row in step.rows.tolist()}
    for subpool in books.allocator.plan.subpools:
        k = subpool.index
        low, high = books.allocator.id_base[k : k + 2]
        columns = books.tables.columns[k]
        for row in range(len(books.length)):
            origin = int(books.tables.origin[k, row])
            ids = books.tables.mirror[origin : origin + columns]
            held = np.flatnonzero(ids >= 0).tolist()
            where = f"row {row} of {subpool.name!r}"
            if not books.live[row]:
                if held:
                    yield f"{where} is not in use, but holds the columns {held[:8]}"
                continue
            if any(not low <= page < high for page in ids[held]):
                yield f"{where} holds pages of another sub-pool"
            length = int(books.length[row])
            first, end = int(books.first[k, row]), int(books.end[k, row])
            page_tokens = NEVER if subpool.is_state else subpool.page_tokens
            kept = int(books.kept[row])
            needed = 0 if subpool.is_state else subpool.lifetime.first_needed(min(length, kept)) // page_tokens
            if first > needed or (first < needed and kept == NEVER):
                yield f"{where} holds columns from {first} on, but {length} tokens need those from {needed} on"
            if int(books.capacity[k, row]) != end * page_tokens or end * page_tokens < length:
                capacity = int(books.capacity[k, row])
                yield f"{where} ends at column {end}, with a capacity of {capacity} for {length} tokens"
            inside = held and first <= held[0] and held[-1] < end
            from_needed = [column for column in held if column >= needed]
            if (row in in_step and held and not inside) or (
                row not in in_step and (from_needed != list(range(needed, end)) or (held and not inside))
            ):
                yield f"{where} should hold the columns [{needed}, {end}), but holds {held[:8]} .. {held[-8:]}"


def _reference_faults(books: Sequences, steps: list[OpenStep]) -> Iterator[str]:
    allocator = books.allocator
    cells = books.tables.mirror[: books.tables.v2p_base]
    remembered = [step.displaced for step in steps if step.displaced is not None]
    ids = np.concatenate([cells, *remembered])
    counted = np.bincount(ids[ids >= 0], minlength=len(books.references))
    for page in np.flatnonzero(counted != books.references)[:8].tolist():
        yield f"page {page} is referred to {counted[page]} times, but its count is {books.references[page]}"
    if int(np.maximum(counted - 1, 0).sum()) != books.num_shared:
        yield f"{int(np.maximum(counted - 1, 0).sum())} references are shared, but the count is {books.num_shared}"
    live = allocator.v2p >= 0
    for subpool in allocator.plan.subpools:
        base = allocator.id_base[subpool.index]
        live[base : base + subpool.first_page] = False  # the sink
    for page in np.flatnonzero(live != (counted > 0))[:8].tolist():
        yield f"page {page} is {'live' if live[page] else 'dead'}, but {counted[page]} rows refer to it"


def _table_faults(books: Sequences, steps: list[OpenStep]) -> Iterator[str]:
    tables = books.tables
    tables.flush()
    live = np.flatnonzero(books.references)
    stale = live[tables.mirror[tables.v2p_base + live] != books.allocator.v2p[live]]
    if len(stale):
        yield f"{len(stale)} pages have come or moved without a note to the tables, the first is {int(stale[0])}"
    lengths = books.length.copy()
    for step in steps:
        lengths[step.rows] = step.past + step.num_new_tokens
    if (tables.mirror[tables.length_base :] != lengths).any():
        yield "the lengths in the tables are not those of the sequences"
    if tables.tensor.device.type == "meta":
        return
    is_same = tables.tensor.cpu().numpy() == tables.mirror
    for step in steps:
        is_same[step.device_cells] = True
    differing = np.flatnonzero(~is_same)
    if len(differing):
        yield f"{len(differing)} cells of the device's tables differ from the host's, the first is {int(differing[0])}"
