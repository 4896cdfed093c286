"""From declared layers and a budget to sub-pools: pure arithmetic, no device memory.

Owns the order of the bands, the page grids and what a sequence of some length takes. It knows no model library: a model
or config is read by `integrations`, imported when asked for. The bytes of the arena, from low to high:

    sink | state -> up | longest window .. shortest window (floats) | full of few bytes a token (floats) | full, down <-
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from torch_uma.counts import whole
from torch_uma.errors import PlanError
from torch_uma.kind import Kind, group
from torch_uma.layout import EntryLayout, Layer, Lifetime, PlacedRow, State
from torch_uma.memory import parse_bytes
from torch_uma.placement import Grid, lowest_spans
from torch_uma.precision import kept_as
from torch_uma.summary import summarize

ARENA_ALIGNMENT_BYTES = 256

Growth = Literal["up", "down", "float"]


@dataclass(frozen=True, kw_only=True)
class SubPool:
    """All rows of one lifetime and one number of tokens per entry: an entry layout and a grid of pages over the arena.

    Physical page `p` is the bytes `[origin_bytes + p * page_bytes, origin_bytes + (p + 1) * page_bytes)`. The pages
    `[first_page, num_pages)` can be handed out; page 0 of an attention grid lies in the sink. `index` is the place of
    the band in the arena, 0 the lowest. A page holds `page_size` entries, an entry `tokens_per_entry`
    tokens or a state.
    """

    index: int
    name: str
    lifetime: Lifetime
    tokens_per_entry: int
    page_size: int
    layout: EntryLayout
    origin_bytes: int
    first_page: int
    num_pages: int
    grows: Growth

    @property
    def is_state(self) -> bool:
        """Whether a page is the state of one sequence instead of tokens."""
        return isinstance(self.lifetime, State)

    @property
    def entry_bytes(self) -> int:
        """Bytes from one entry to the next."""
        return self.layout.entry_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes from one page to the next."""
        return self.page_size * self.layout.entry_bytes

    @property
    def page_tokens(self) -> int:
        """Tokens that a page holds; of no meaning for a state."""
        return self.page_size * self.tokens_per_entry

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one more token takes for as long as it is needed, padding included; 0 for a state."""
        return 0.0 if self.is_state else self.entry_bytes / self.tokens_per_entry

    @property
    def grid(self) -> Grid:
        """The page grid in the form that `placement` takes."""
        return Grid(
            origin_bytes=self.origin_bytes,
            page_bytes=self.page_bytes,
            first_page=self.first_page,
            num_pages=self.num_pages,
            grows=self.grows,
        )

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages that a sequence of `num_tokens` tokens holds between steps; a state is held from length 0 on."""
        if self.is_state:
            return 1
        first_page = self.lifetime.first_needed(num_tokens) // self.page_tokens
        return -(-num_tokens // self.page_tokens) - first_page

    def row(self, layer: int, name: str) -> PlacedRow:
        """The row that `layer` stores here under `name`; KeyError if it stores none."""
        for placed in self.layout.rows:
            if placed.layer == layer and placed.row.name == name:
                return placed
        raise KeyError(f"layer {layer} stores no row {name!r} in sub-pool {self.name!r}")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The sub-pools of an arena, from its low end to its high end, and the layers that they were made from."""

    subpools: tuple[SubPool, ...]
    arena_bytes: int
    sink_bytes: int
    layers: tuple[Layer, ...]

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one more token takes over all sub-pools for as long as each needs it."""
        return sum(subpool.bytes_per_token for subpool in self.subpools)

    def demand(self, num_tokens: int) -> tuple[int, ...]:
        """Pages per sub-pool that a sequence of `num_tokens` tokens holds between steps."""
        return tuple(subpool.num_pages_for(num_tokens) for subpool in self.subpools)

    def bytes_per_sequence(self, num_tokens: int) -> int:
        """Bytes of the pages that a sequence of `num_tokens` tokens holds between steps."""
        return sum(subpool.page_bytes * subpool.num_pages_for(num_tokens) for subpool in self.subpools)

    def num_sequences(self, num_tokens: int) -> int:
        """How many sequences of `num_tokens` tokens fit at once, exactly; `sys.maxsize` if one holds no page."""
        demand = self.demand(num_tokens)
        if not any(demand):
            return sys.maxsize
        grids = [subpool.grid for subpool in self.subpools]
        fitting, refused = 0, self.arena_bytes // self.bytes_per_sequence(num_tokens) + 1
        while refused - fitting > 1:
            middle = (fitting + refused) // 2
            if lowest_spans(grids, [middle * pages for pages in demand]) is None:
                refused = middle
            else:
                fitting = middle
        return fitting

    def where(self, layer: int) -> list[tuple[SubPool, PlacedRow]]:
        """The sub-pool and place of every row that `layer` uses, its own or those of the layer that it shares.

        PlanError for a layer that the plan does not have.
        """
        layer = whole(layer, "a layer", least=0, error=PlanError)
        if layer >= len(self.layers):
            raise PlanError(f"there is no layer {layer}; the plan has {len(self.layers)}, counted from 0")
        shares = self.layers[layer].shares
        if shares is not None:
            return self.where(shares)
        placed = [(subpool, row) for subpool in self.subpools for row in subpool.layout.rows]
        return [(subpool, row) for subpool, row in placed if row.layer == layer]

    def __str__(self) -> str:
        return summarize(self)


def plan(
    source: Any,
    *,
    memory: int | str,
    page_size: int = 16,
    num_tokens: int = 1,
    dtype: torch.dtype | None = None,
    draft: Any = None,
    pad_entries: bool = False,
    kv_dtype: torch.dtype | str | None = None,
) -> Plan:
    """Plan an arena of `memory` bytes (or "8GiB") for a transformers model or config, or for a sequence of Layer.

    A page holds `page_size` entries. `dtype` is the dtype of activations, without it what the model or config says.
    `draft` is a second source whose layers are numbered after those of the first and stored in the same entries.
    `pad_entries` keeps strides off multiples of 4 KiB. `kv_dtype` keeps keys, values and latents in fewer bits than
    the model computes them in: float8_e4m3fn, float8_e5m2 (saturated, without scales) or bfloat16. Raises PlanError for
    what cannot be planned, above all a budget that does not hold one sequence of `num_tokens` tokens.
    """
    layers = _layers_of(source, dtype)
    if draft is not None:
        layers += tuple(_renumbered(layer, len(layers)) for layer in _layers_of(draft, dtype))
    layers = kept_as(layers, kv_dtype)
    page_size = whole(page_size, "page_size of a plan", least=1, error=PlanError)
    num_tokens = whole(num_tokens, "num_tokens of a plan", least=0, error=PlanError)
    arena_bytes = parse_bytes(memory) // ARENA_ALIGNMENT_BYTES * ARENA_ALIGNMENT_BYTES
    if arena_bytes < ARENA_ALIGNMENT_BYTES:
        raise PlanError(f"memory={memory!r} is no room for an arena; give at least {ARENA_ALIGNMENT_BYTES} bytes")
    kinds = group(layers, page_size, pad_entries)
    result = _carve(kinds, arena_bytes, layers)
    if result.num_sequences(num_tokens) < 1:
        needed_bytes = _needed_bytes(kinds, layers, result.bytes_per_sequence(num_tokens), num_tokens)
        raise PlanError(
            f"one sequence of {num_tokens} tokens needs an arena of {needed_bytes} bytes, but there are {arena_bytes}; "
            "give more memory, fewer tokens or a smaller page_size"
        )
    return result


def _layers_of(source: Any, dtype: torch.dtype | None) -> tuple[Layer, ...]:
    if isinstance(source, Sequence) and not isinstance(source, str):
        layers = tuple(source)
        if not layers:
            raise PlanError("there are no layers to plan for")
        for layer in layers:
            if not isinstance(layer, Layer):
                raise PlanError(f"a sequence of Layer was expected, but it holds {layer!r}")
    else:
        from torch_uma.integrations.transformers.declare import declare

        layers = declare(source, dtype=dtype)
    _check_shares(layers)
    return layers


def _renumbered(layer: Layer, offset: int) -> Layer:
    return layer if layer.shares is None else Layer(shares=layer.shares + offset, name=layer.name)


def _check_shares(layers: tuple[Layer, ...]) -> None:
    for index, layer in enumerate(layers):
        if layer.shares is None:
            continue
        if not 0 <= layer.shares < len(layers):
            raise PlanError(f"layer {index} shares layer {layer.shares}, but the layers are 0 to {len(layers) - 1}")
        if not layers[layer.shares].memories:
            raise PlanError(f"layer {index} shares layer {layer.shares}, which stores nothing; name one that does")


def _carve(kinds: list[Kind], arena_bytes: int, layers: tuple[Layer, ...]) -> Plan:
    """Fix the grids: each origin suits the end of the arena that its band grows from, since views never change."""
    growth = _growth(kinds)
    sink_bytes = 0
    for kind, grows in zip(kinds, growth, strict=True):
        if not isinstance(kind.lifetime, State):
            origin_bytes = arena_bytes % kind.page_bytes if grows == "down" else 0
            sink_bytes = max(sink_bytes, origin_bytes + kind.page_bytes)
    subpools = []
    for index, (kind, grows) in enumerate(zip(kinds, growth, strict=True)):
        if isinstance(kind.lifetime, State):
            origin_bytes = sink_bytes
        elif grows == "up":
            origin_bytes = sink_bytes % kind.page_bytes
        elif grows == "down":
            origin_bytes = arena_bytes % kind.page_bytes
        else:
            origin_bytes = 0
        subpools.append(
            SubPool(
                index=index,
                name=kind.name,
                lifetime=kind.lifetime,
                tokens_per_entry=kind.tokens_per_entry,
                page_size=kind.page_size,
                layout=kind.layout,
                origin_bytes=origin_bytes,
                # The first page that begins above the sink, which holds page 0 of every attention grid.
                first_page=-(-(sink_bytes - origin_bytes) // kind.page_bytes),
                num_pages=max(0, arena_bytes - origin_bytes) // kind.page_bytes,
                grows=grows,
            )
        )
    return Plan(subpools=tuple(subpools), arena_bytes=arena_bytes, sink_bytes=sink_bytes, layers=layers)


def _growth(kinds: list[Kind]) -> list[Growth]:
    if len(kinds) == 1:
        return ["up" if isinstance(kinds[0].lifetime, State) else "down"]
    floats: list[Growth] = ["float"] * (len(kinds) - 2)
    return ["up", *floats, "down"]


def _needed_bytes(kinds: list[Kind], layers: tuple[Layer, ...], sequence_bytes: int, num_tokens: int) -> int:
    """An arena size at which one sequence of `num_tokens` tokens fits and a step smaller does not."""
    # The grids cost the sink, less than two pages of one kind, and less than a page between any two bands.
    grid_bytes = 3 * sum(kind.page_bytes for kind in kinds)
    refused = (sequence_bytes - 1) // ARENA_ALIGNMENT_BYTES
    fitting = (sequence_bytes + grid_bytes) // ARENA_ALIGNMENT_BYTES + 1
    while fitting - refused > 1:
        middle = (fitting + refused) // 2
        if _carve(kinds, middle * ARENA_ALIGNMENT_BYTES, layers).num_sequences(num_tokens) < 1:
            refused = middle
        else:
            fitting = middle
    return fitting * ARENA_ALIGNMENT_BYTES
