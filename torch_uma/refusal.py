"""What to say of a demand that does not fit, and of page ids that cannot be used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torch_uma.band import Band
from torch_uma.errors import OutOfMemory
from torch_uma.placement import Quote
from torch_uma.plan import Plan


def out_of_memory(plan: Plan, free_bytes: int, quote: Quote) -> OutOfMemory:
    """The error for a refused quote."""
    names = [subpool.name for subpool in plan.subpools]
    wanted = ", ".join(f"{count} of {name}" for name, count in zip(names, quote.demand) if count)
    help_by = [f"{pages} of {name}" for name, pages in (quote.relief or {}).items() if pages is not None]
    if not quote.fits_empty:
        advice = "it would not fit an empty arena: ask for less, or give the arena more memory"
    elif help_by:
        advice = f"releasing pages would help: {' or '.join(help_by)}"
    else:
        advice = "no release of one kind alone would help"
    return OutOfMemory(
        f"asked for pages ({wanted}), but {quote.binding} does not fit; {free_bytes:,} of {plan.arena_bytes:,} bytes "
        f"are free; {advice}",
        quote,
    )


def unusable_ids(bands: Sequence[Band], names: Sequence[str], ids: npt.NDArray[np.integer], subpool: int | None) -> str:
    """Say what is wrong with the first of these ids that cannot be used."""
    tables = bands[0].tables
    num_ids = tables.base[-1]
    for page in ids.tolist():
        if not 0 <= page < num_ids:
            return f"page {page} is no page id; ids of this arena are 0 to {num_ids - 1}"
        kind = tables.kind_cells[page]
        if page - tables.base[kind] < bands[kind].first_page:
            return f"page {page} is the sink of {names[kind]!r}; it is never handed out and cannot be given back"
        if tables.v2p_cells[page] < 0:
            return f"page {page} of {names[kind]!r} is not live; was it released before?"
        if subpool is not None and kind != subpool:
            return f"page {page} is one of {names[kind]!r}, not of {names[subpool]!r}"
    raise AssertionError(f"all of {ids.tolist()[:8]} can be used")


def named_twice(ids: npt.NDArray[np.integer]) -> list[int]:
    """The first few ids that stand in `ids` more than once."""
    values, counts = np.unique(ids, return_counts=True)
    return [int(value) for value in values[counts > 1][:8]]
