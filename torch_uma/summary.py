"""A plan as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_uma.plan import Plan, SubPool

_COLUMNS = (
    "sub-pool",
    "grows",
    "entry bytes",
    "padding",
    "tokens/entry",
    "page bytes",
    "origin",
    "pages",
    "token bytes",
)
_LENGTHS = (256, 1536, 4608, 17408)


def summarize(plan: Plan) -> str:
    """The sub-pools from the low end to the high end, then what sequences of some lengths take and how many fit."""
    sequences = [("tokens", "bytes a sequence", "sequences that fit")]
    sequences += [(f"{n:,}", f"{plan.bytes_per_sequence(n):,}", f"{plan.num_sequences(n):,}") for n in _LENGTHS]
    lines = [
        f"arena of {plan.arena_bytes:,} bytes, sink {plan.sink_bytes:,}, {len(plan.layers)} layers; from the low end:",
        *_align([_COLUMNS, *map(_cells, plan.subpools)]),
        f"bytes a token: {plan.bytes_per_token:,.0f} over all sub-pools",
        *_align(sequences),
    ]
    return "\n".join(lines)


def _cells(subpool: SubPool) -> tuple[str, ...]:
    return (
        subpool.name,
        subpool.grows,
        f"{subpool.entry_bytes:,}",
        f"{subpool.layout.padding_bytes:,}",
        "-" if subpool.is_state else f"{subpool.tokens_per_entry:,}",
        f"{subpool.page_bytes:,}",
        f"{subpool.origin_bytes:,}",
        f"{subpool.num_pages - subpool.first_page:,}",
        "-" if subpool.is_state else f"{subpool.bytes_per_token:,.0f}",
    )


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
