"""What a model stores: lifetimes, rows, layers, and the bytes of an entry.

Owns the words in which a model declares its memory, and the layout of one entry. It knows neither the arena nor pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

import torch

from torch_uma.errors import PlanError

ALIGNMENT_BYTES = 16
"""Every row and every entry starts at a multiple of this, so that kernels may use vector loads."""

_ALIASING_BYTES = 2048
_STRIDE_PADDING_BYTES = 64


def align_up(num_bytes: int, alignment: int) -> int:
    """Round `num_bytes` up to a multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment


@dataclass(frozen=True)
class Full:
    """Entries are needed for as long as the sequence lives."""

    def first_needed(self, length: int) -> int:
        """First position that a query at position `length` reads."""
        return 0


@dataclass(frozen=True)
class Window:
    """Entries of the last `num_tokens` tokens are needed, the query's own included."""

    num_tokens: int

    def __post_init__(self) -> None:
        _check_count("a window", self.num_tokens)

    def first_needed(self, length: int) -> int:
        """First position that a query at position `length` reads."""
        return max(0, length - self.num_tokens + 1)


@dataclass(frozen=True)
class Chunk:
    """Entries of the query's own chunk of `num_tokens` tokens are needed; chunks start at multiples of `num_tokens`."""

    num_tokens: int

    def __post_init__(self) -> None:
        _check_count("a chunk", self.num_tokens)

    def first_needed(self, length: int) -> int:
        """First position that a query at position `length` reads."""
        return length // self.num_tokens * self.num_tokens


@dataclass(frozen=True)
class State:
    """One entry a sequence, rewritten by every step."""

    def first_needed(self, length: int) -> int:
        """First position that a query at position `length` reads: its own, the state stands for all before it."""
        return length


Lifetime = Full | Window | Chunk | State


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one layer stores for one entry under one name: `shape` elements of `dtype`.

    `computed_dtype`: the dtype in which its model gives and takes them, None if any is converted.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    computed_dtype: torch.dtype | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.shape, tuple) or not all(isinstance(size, int) for size in self.shape):
            raise PlanError(f"the shape of row {self.name!r} is a tuple of whole numbers, not {self.shape!r}")
        if not isinstance(self.dtype, torch.dtype):
            raise PlanError(f"the dtype of row {self.name!r} is a torch.dtype, not {self.dtype!r}")
        if any(size < 0 for size in self.shape):
            raise PlanError(f"row {self.name!r} has the shape {self.shape}; sizes cannot be negative")

    @property
    def num_bytes(self) -> int:
        """Bytes of one entry's row, without padding; 0 for a row of zero width."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The rows of one layer that live equally long; one entry for each group of `tokens_per_entry` tokens."""

    lifetime: Lifetime
    rows: tuple[Row, ...]
    tokens_per_entry: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.lifetime, Lifetime):
            raise PlanError(f"unknown lifetime {self.lifetime!r}; use Full(), Window(n), Chunk(n) or State()")
        _check_count("a group of tokens", self.tokens_per_entry)
        if isinstance(self.lifetime, State) and self.tokens_per_entry != 1:
            raise PlanError(f"a state has one entry a sequence, not one for {self.tokens_per_entry} tokens")
        if not isinstance(self.rows, tuple) or not all(isinstance(row, Row) for row in self.rows):
            raise PlanError(f"the rows of a memory are a tuple of Row, not {self.rows!r}")
        if not self.rows:
            raise PlanError("a memory needs at least one row; a layer that stores nothing has no memories")
        names = [row.name for row in self.rows]
        if len(set(names)) < len(names):
            raise PlanError(f"row names must differ within a memory, but they are {names}")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of the model: what it stores, or the index of the layer whose memories it uses instead (`shares`).

    A layer with neither stores nothing. `name` says of what kind it is. `restarted_by` names the model whose code
    starts the layer's state anew in every forward of several tokens, whatever it was; "" if it goes on.
    """

    memories: tuple[Memory, ...] = ()
    shares: int | None = None
    name: str = ""
    restarted_by: str = ""

    def __post_init__(self) -> None:
        if self.memories and self.shares is not None:
            raise PlanError(f"a layer that shares the memories of layer {self.shares} stores nothing of its own")


@dataclass(frozen=True, kw_only=True)
class PlacedRow:
    """A layer's row and where it starts within the entry."""

    layer: int
    row: Row
    offset_bytes: int


@dataclass(frozen=True, kw_only=True)
class EntryLayout:
    """The rows of one entry, over all layers, in ascending order; `entry_bytes` is the stride from entry to entry."""

    rows: tuple[PlacedRow, ...]
    entry_bytes: int

    @property
    def padding_bytes(self) -> int:
        """Bytes of an entry that belong to no row."""
        return self.entry_bytes - sum(placed.row.num_bytes for placed in self.rows)


def lay_out(rows: Iterable[tuple[int, Row]], *, pad_entry: bool = False) -> EntryLayout:
    """Place `(layer, row)` pairs one after another, each at a multiple of 16 bytes.

    `pad_entry` keeps the entry's stride off multiples of 2 KiB, which alias in CPU caches, at a cost of 64 bytes.
    """
    placed = []
    end_bytes = 0
    for layer, row in rows:
        offset_bytes = align_up(end_bytes, ALIGNMENT_BYTES)
        placed.append(PlacedRow(layer=layer, row=row, offset_bytes=offset_bytes))
        end_bytes = offset_bytes + row.num_bytes
    entry_bytes = align_up(max(end_bytes, 1), ALIGNMENT_BYTES)
    if pad_entry and entry_bytes % _ALIASING_BYTES == 0:
        entry_bytes += _STRIDE_PADDING_BYTES
    return EntryLayout(rows=tuple(placed), entry_bytes=entry_bytes)


def _check_count(what: str, num_tokens: int) -> None:
    if not isinstance(num_tokens, int) or num_tokens < 1:
        raise PlanError(f"{what} holds at least one token, but it was given {num_tokens!r}")
