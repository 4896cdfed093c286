"""Where the tokens and states of one step lie, as tensors: prepared once for all layers, before the first of them runs.

Owns the translation from a step of the pool to what a layer writes to and reads from. Nothing here changes while a
forward pass runs, so that a traced forward only sees tensors: index tensors beside the arena, and views of states.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.utils.dlpack
from numpy.typing import NDArray

from torch_uma.errors import PlanError
from torch_uma.layout import Chunk, Full, Lifetime, Memory, PlacedRow, State
from torch_uma.ops.reference import dtype_name
from torch_uma.plan import SubPool

if TYPE_CHECKING:
    from torch_uma.arena import Arena
    from torch_uma.pool import CachePool
    from torch_uma.step import Step

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """The rows of one attention layer: keys, then values, in one sub-pool. Each grid is [pages, page_size, *shape].

    `offsets_bytes`, `widths` (elements of a row) and `dtypes` are what the ops take.
    """

    subpool: SubPool
    rows: tuple[PlacedRow, PlacedRow]
    grids: tuple[torch.Tensor, torch.Tensor]
    offsets_bytes: tuple[int, int]
    widths: tuple[int, int]
    dtypes: tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class StateStore:
    """The state rows of one layer by name. Each grid is [pages, *shape]."""

    subpool: SubPool
    grids: Tensors


@dataclass(frozen=True, kw_only=True)
class Store:
    """What one layer stores in the arena; a layer that stores nothing has neither."""

    tokens: TokenStore | None
    state: StateStore | None


@dataclass(frozen=True, kw_only=True)
class TokenPlaces:
    """Where one step's tokens lie in one sub-pool.

    `write`: int64 entries [rows, num_new_tokens], -1 for a token that is not stored. `run`: the first page and the
    pages from row to row, if every row's tokens lie one after the other. `appends`: new tokens follow those read,
    because not all of them are stored.
    """

    write: torch.Tensor
    run: tuple[int, int] | None
    appends: bool


class StepPlaces:
    """Where everything lies that one step of the pool reads and writes.

    `whole`: prepare also what only a traced forward needs, and every layer's state at once.
    """

    def __init__(self, pool: CachePool, step: Step, *, whole: bool) -> None:
        self.step = step
        self.arena = pool.arena.bytes
        self.past = step.past
        self.max_past = int(step.past.max())
        self.num_new_tokens: int = step.num_new_tokens
        self.num_rows = len(step.past)
        self.fresh = bool(step.fresh.all())
        self.tokens: dict[int, TokenPlaces] = {}
        self.stores = stores_of(pool)
        # By layer, since a traced forward cannot compute them.
        self.extents: dict[int, tuple[int, int]] = {}
        self._reads: dict[int, torch.Tensor] = {}
        self._states: dict[int, Tensors] = {}
        for subpool in pool.plan.subpools:
            if subpool.is_state:
                self._place_states(subpool, pool)
            else:
                self.tokens[subpool.index] = self._place_tokens(subpool)
                if whole:
                    self.read(subpool)
        for layer, store in enumerate(self.stores):
            if whole and store.state is not None:
                self.state(layer)
            if whole and store.tokens is not None:
                lifetime = store.tokens.subpool.lifetime
                self.extents[layer] = extent(lifetime, self.past, self.num_new_tokens)

    def read(self, subpool: SubPool) -> torch.Tensor:
        """The int64 entries [rows, num_read] of what a layer reads, -1 in front of a row that is shorter."""
        if subpool.index not in self._reads:
            offset, length = extent(subpool.lifetime, self.past, self.num_new_tokens)
            end = offset + length - (self.num_new_tokens if self.tokens[subpool.index].appends else 0)
            # Rows are aligned at their ends: a column before a row's first token has a negative position.
            columns = torch.arange(offset, end, device=self.arena.device)
            self._reads[subpool.index] = self.step.entries(subpool, columns - (self.max_past - self._past_tensor()))
        return self._reads[subpool.index]

    def inputs(self) -> Tensors:
        """The attention mask [rows, longest past + new] and position ids [rows, new] of rows aligned at their ends."""
        past = self._past_tensor()
        columns = torch.arange(self.max_past + self.num_new_tokens, device=self.arena.device)
        return {
            "attention_mask": (columns >= self.max_past - past).long(),
            "position_ids": past + torch.arange(self.num_new_tokens, device=self.arena.device),
        }

    def state(self, layer: int) -> Tensors:
        """The state of `layer` by row name, [rows, *shape] in the order of the batch: live, to be changed in place.

        Views of the arena if the rows lie at one stride, otherwise copies that `keep_state` writes back.
        """
        if layer not in self._states:
            store = self.stores[layer].state
            assert store is not None
            self._states[layer] = {name: self._rows_of(grid) for name, grid in store.grids.items()}
        return self._states[layer]

    def keep_state(self, layer: int) -> None:
        """Writes the working copy of a layer's state back into the arena, if it is a copy."""
        store = self.stores[layer].state
        if store is None or self._slot_stride is not None or layer not in self._states:
            return
        self.step.state_touched = True
        for name, rows in self._states.pop(layer).items():
            store.grids[name].index_copy_(0, self._slots, rows)

    def keep_states(self) -> None:
        """Writes every working copy back into the arena."""
        for layer in list(self._states):
            self.keep_state(layer)

    @property
    def views_states(self) -> bool:
        """Whether states are served as views of the arena, instead of copies."""
        return self._slot_stride is not None

    def _rows_of(self, grid: torch.Tensor) -> torch.Tensor:
        if self._slot_stride is None:
            return grid.index_select(0, self._slots)
        shape = (self.num_rows, *grid.shape[1:])
        strides = (self._slot_stride * grid.stride(0), *grid.stride()[1:])
        return grid.as_strided(shape, strides, grid.storage_offset() + self._first_slot * grid.stride(0))

    def _place_states(self, subpool: SubPool, pool: CachePool) -> None:
        slots = self.step.slots()
        self._first_slot = int(slots[0])
        self._slot_stride = _stride(slots)
        self._slots = torch.from_numpy(slots).to(self.arena.device)
        if self.step.fresh.any():
            entries = self.arena[subpool.origin_bytes :][: subpool.num_pages * subpool.page_bytes]
            fresh = self._slots[torch.from_numpy(self.step.fresh).to(self.arena.device)]
            entries.view(subpool.num_pages, subpool.page_bytes).index_fill_(0, fresh, 0)

    def _place_tokens(self, subpool: SubPool) -> TokenPlaces:
        new = self._past_tensor() + torch.arange(self.num_new_tokens, device=self.arena.device)
        first_needed = [subpool.lifetime.first_needed(int(past) + self.num_new_tokens) for past in self.past]
        appends = bool((np.array(first_needed) > self.past).any())
        reads_all = isinstance(subpool.lifetime, Full) and (self.past == self.max_past).all()
        return TokenPlaces(
            write=self.step.entries(subpool, new),
            run=self.step.run(subpool) if reads_all else None,
            appends=appends,
        )

    def _past_tensor(self) -> torch.Tensor:
        return torch.from_numpy(self.past.astype(np.int64)).to(self.arena.device).unsqueeze(1)  # [rows, 1]


def extent(lifetime: Lifetime, past: NDArray[np.int64], num_new_tokens: int) -> tuple[int, int]:
    """First column and number of columns of keys that a step reads, when rows of `past` tokens end at one column."""
    max_past = int(past.max())
    offset = min(max_past - length + lifetime.first_needed(length) for length in map(int, np.unique(past)))
    return offset, max_past + num_new_tokens - offset


_STORES: WeakKeyDictionary[Arena, tuple[Store, ...]] = WeakKeyDictionary()


def stores_of(pool: CachePool) -> tuple[Store, ...]:
    """What each layer of the pool's plan stores; made once for an arena."""
    if pool.arena not in _STORES:
        layers = range(len(pool.plan.layers))
        with torch.inference_mode(False):  # tensors made in inference mode could not be written outside of it
            _STORES[pool.arena] = tuple(_store(pool, layer) for layer in layers)
    return _STORES[pool.arena]


def check_served(index: int, memory: Memory) -> None:
    """Raise PlanError if no layer of the cache serves keys and values that are stored so."""
    if len(memory.rows) != 2 or memory.tokens_per_entry != 1 or isinstance(memory.lifetime, Chunk):
        raise PlanError(
            f"layer {index} stores {[row.name for row in memory.rows]} of {memory.tokens_per_entry} tokens for "
            f"{memory.lifetime}; UnifiedCache serves layers that store one key and one value for each token, needed "
            "for ever or in a window"
        )


def _store(pool: CachePool, layer: int) -> Store:
    if pool.plan.layers[layer].shares is not None:
        return Store(tokens=None, state=None)
    tokens, state = None, None
    for memory in pool.plan.layers[layer].memories:
        if not isinstance(memory.lifetime, State):
            check_served(layer, memory)
    paged: list[tuple[SubPool, PlacedRow]] = []
    states: list[tuple[SubPool, PlacedRow]] = []
    for subpool, placed in pool.plan.where(layer):
        (states if subpool.is_state else paged).append((subpool, placed))
    if paged:
        subpool = paged[0][0]
        key, value = (placed for _, placed in paged)
        tokens = TokenStore(
            subpool=subpool,
            rows=(key, value),
            grids=(pool.arena.view(subpool, layer, key.row.name), pool.arena.view(subpool, layer, value.row.name)),
            offsets_bytes=(key.offset_bytes, value.offset_bytes),
            widths=(prod(key.row.shape), prod(value.row.shape)),
            dtypes=(dtype_name(key.row.dtype), dtype_name(value.row.dtype)),
        )
    if states:
        subpool = states[0][0]
        state_grids = {placed.row.name: _state_grid(pool.arena.bytes, subpool, placed) for _, placed in states}
        state = StateStore(subpool=subpool, grids=state_grids)
    return Store(tokens=tokens, state=state)


def _state_grid(arena: torch.Tensor, subpool: SubPool, placed: PlacedRow) -> torch.Tensor:
    """A view [pages, *shape] with a storage of its own over the arena's memory.

    A compiled graph may then change a state in place while ops write into the arena: functionalisation refuses changes
    through views of one storage with two dtypes, and the bytes never overlap.
    """
    row = placed.row
    alias = arena.view(row.dtype)
    if not alias.is_meta:
        alias = torch.utils.dlpack.from_dlpack(alias)
    strides = tuple(prod(row.shape[axis + 1 :]) for axis in range(len(row.shape)))
    return alias.as_strided(
        (subpool.num_pages, *row.shape),
        (subpool.page_bytes // row.dtype.itemsize, *strides),
        (subpool.origin_bytes + placed.offset_bytes) // row.dtype.itemsize,
    )


def _stride(slots: NDArray[np.int64]) -> int | None:
    """Pages from row to row if that is the same positive number for all rows."""
    if len(slots) == 1:
        return 1
    steps = np.diff(slots)
    return int(steps[0]) if steps[0] > 0 and (steps == steps[0]).all() else None
