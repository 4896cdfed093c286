"""Rows that live equally long, grouped: a sub-pool before it has a place in an arena."""

from __future__ import annotations

from dataclasses import dataclass

from torch_uma.errors import PlanError
from torch_uma.layout import Chunk, EntryLayout, Full, Layer, Lifetime, Memory, Row, State, Window, lay_out


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Rows of one lifetime and one number of tokens per entry, over all layers."""

    lifetime: Lifetime
    tokens_per_entry: int
    page_size: int
    layout: EntryLayout

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.layout.entry_bytes

    @property
    def name(self) -> str:
        match self.lifetime:
            case State():
                return "state"
            case Window(num_tokens):
                name = f"window_{num_tokens}"
            case Chunk(num_tokens):
                name = f"chunk_{num_tokens}"
            case Full():
                name = "full"
        return name if self.tokens_per_entry == 1 else f"{name}_per{self.tokens_per_entry}"

    @property
    def band_order(self) -> tuple[float, ...]:
        """Sort key from the low end up: state, windows from the longest, full from the fewest bytes a token."""
        match self.lifetime:
            case State():
                return (0,)
            case Full():
                return (2, self.layout.entry_bytes / self.tokens_per_entry, self.tokens_per_entry)
            case Window(num_tokens):
                return (1, -num_tokens, 0, self.tokens_per_entry)
            case Chunk(num_tokens):
                return (1, -num_tokens, 1, self.tokens_per_entry)


def group(layers: tuple[Layer, ...], page_size: int, pad_entries: bool) -> list[Kind]:
    """Group the layers' rows into kinds, in band order."""
    grouped: dict[tuple[Lifetime, int], list[tuple[int, Row]]] = {}
    for index, layer in enumerate(layers):
        for memory in layer.memories:
            rows = grouped.setdefault((memory.lifetime, memory.tokens_per_entry), [])
            _check_names(rows, index, memory)
            rows.extend((index, row) for row in memory.rows)
    if not grouped:
        raise PlanError("no layer stores anything, so there is nothing to plan for")
    kinds = [
        Kind(
            lifetime=lifetime,
            tokens_per_entry=tokens_per_entry,
            page_size=1 if isinstance(lifetime, State) else page_size,
            layout=lay_out(rows, pad_entry=pad_entries),
        )
        for (lifetime, tokens_per_entry), rows in grouped.items()
    ]
    return sorted(kinds, key=lambda kind: kind.band_order)


def _check_names(rows: list[tuple[int, Row]], index: int, memory: Memory) -> None:
    taken = {row.name for layer, row in rows if layer == index}
    twice = sorted(taken & {row.name for row in memory.rows})
    if twice:
        raise PlanError(f"layer {index} stores {twice} twice with the lifetime {memory.lifetime}; rename the rows")
