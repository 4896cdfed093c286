"""What each layer of a model stores in the arena: which rows of which sub-pool, and views over the whole of each grid.

Made once for an arena; nothing here depends on a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
import torch.utils.dlpack

from torch_uma.arena import keep_address
from torch_uma.errors import PlanError
from torch_uma.layout import Full, Layer, Memory, PlacedRow, State
from torch_uma.ops.reference import dtype_name
from torch_uma.plan import SubPool

if TYPE_CHECKING:
    from torch_uma.arena import Arena
    from torch_uma.pool import CachePool

Tensors = dict[str, torch.Tensor]

INDEX_KEY = "index_key"
"""The row by which a model chooses the keys that it attends to."""
INDEX_POSITION = "index_position"
"""The row of the positions of index keys, for a model that rotates them when it reads them."""
COMPRESSOR = "compressor"
"""The row that stands for a group of tokens, by which a memory of such rows is known."""

_MOST_VIEWS = 16  # of one layer's states, for batches that take turns


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """Rows of one attention layer that are written together: keys, then values; or one alone, as an index key.

    Each grid is [pages, page_size, *shape], and by entries [pages * page_size, *shape].
    `offsets_bytes`, `widths` (elements of a row) and `dtypes` are what the ops take. `is_latent`: they are the latent
    of multi-head latent attention and its rotary key. `is_shared`: other layers attend to them too.
    """

    subpool: SubPool
    rows: tuple[PlacedRow, ...]
    grids: tuple[torch.Tensor, ...]
    entry_grids: tuple[torch.Tensor, ...]
    offsets_bytes: tuple[int, ...]
    widths: tuple[int, ...]
    dtypes: tuple[str, ...]
    is_latent: bool
    is_shared: bool


@dataclass(frozen=True, kw_only=True)
class StateStore:
    """The state rows of one layer by name. Each grid is [pages, *shape]."""

    subpool: SubPool
    rows: dict[str, PlacedRow]
    grids: Tensors
    _known: dict[tuple[int, int], Tensors] = field(default_factory=dict, init=False, repr=False, compare=False)

    def views(self, first_page: int, num_pages: int) -> Tensors:
        """Consecutive states by row name, [pages, *shape]: the same tensors for the next step, at a fixed address."""
        known = self._known.get((first_page, num_pages))
        if known is None:
            if len(self._known) == _MOST_VIEWS:
                self._known.clear()
            end = first_page + num_pages
            with torch.inference_mode(False):  # they are kept for steps in any mode
                known = {name: keep_address(grid[first_page:end]) for name, grid in self.grids.items()}
            self._known[first_page, num_pages] = known
        return known


@dataclass(frozen=True, kw_only=True)
class Store:
    """What one layer stores in the arena; a layer that stores nothing has none of it. `groups`: of groups of tokens."""

    tokens: TokenStore | None = None
    index: TokenStore | None = None
    positions: TokenStore | None = None
    state: StateStore | None = None
    groups: dict[str, TokenStore] = field(default_factory=dict)

    @property
    def paged(self) -> dict[str, TokenStore]:
        """What is read for attention, by the name of its part of the step."""
        parts = {"tokens": self.tokens, "index": self.index}
        return {name: store for name, store in parts.items() if store is not None}


_STORES: WeakKeyDictionary[Arena, tuple[Store, ...]] = WeakKeyDictionary()


def stores_of(pool: CachePool) -> tuple[Store, ...]:
    """What each layer of the pool's plan stores; made once for an arena."""
    if pool.arena not in _STORES:
        layers = range(len(pool.plan.layers))
        with torch.inference_mode(False):  # tensors made in inference mode could not be written outside of it
            _STORES[pool.arena] = tuple(_store(pool, layer) for layer in layers)
    return _STORES[pool.arena]


def groups_of(layer: Layer) -> tuple[str, ...]:
    """The names of the rows of a layer of which a group of tokens has one; none if it has no such."""
    return next((names for names in map(_groups_in, layer.memories) if names), ())


def _groups_in(memory: Memory) -> tuple[str, ...]:
    names = tuple(row.name for row in memory.rows)
    return names if isinstance(memory.lifetime, Full) and names[0] == COMPRESSOR else ()


def check_served(index: int, memory: Memory) -> None:
    """Raise PlanError if no layer of the cache serves keys and values that are stored so."""
    if _groups_in(memory):
        return
    names = [row.name for row in memory.rows]
    has_index = INDEX_KEY in names
    num_others = len([name for name in names if name not in (INDEX_KEY, INDEX_POSITION)])
    is_pair = num_others == 2 or (num_others == 0 and has_index)
    is_index = has_index and isinstance(memory.lifetime, Full)
    if not is_pair or (len(names) > num_others and not is_index) or memory.tokens_per_entry != 1:
        raise PlanError(
            f"layer {index} stores {names} of {memory.tokens_per_entry} tokens for {memory.lifetime}; UnifiedCache "
            "serves layers that store one key and one value for each token, and an index key with those of full "
            "attention"
        )


def parts_of_memory(memory: Memory) -> list[str]:
    """What a forward stores of it, each by one call of its layer: "tokens", "index", or the rows of a state."""
    names = [row.name for row in memory.rows]
    if isinstance(memory.lifetime, State):
        return names
    has = {"tokens": bool(set(names) - {INDEX_KEY, INDEX_POSITION}), "index": INDEX_KEY in names}
    return [name for name in has if has[name]]


def stores_tokens(layers: Iterable[Layer]) -> bool:
    """Whether any layer stores something for attention."""
    return any(not isinstance(memory.lifetime, State) for layer in layers for memory in layer.memories)


def has_index(layers: Iterable[Layer]) -> bool:
    """Whether any layer chooses keys by index keys."""
    return any("index" in parts_of_memory(memory) for layer in layers for memory in layer.memories)


def _store(pool: CachePool, layer: int) -> Store:
    if pool.plan.layers[layer].shares is not None:
        return Store()
    state = None
    for memory in pool.plan.layers[layer].memories:
        if not isinstance(memory.lifetime, State):
            check_served(layer, memory)
    groups = groups_of(pool.plan.layers[layer])
    paged: dict[str, list[tuple[SubPool, PlacedRow]]] = {
        name: [] for name in ("tokens", INDEX_KEY, INDEX_POSITION, *groups)
    }
    states: list[tuple[SubPool, PlacedRow]] = []
    for subpool, placed in pool.plan.where(layer):
        name = placed.row.name
        (states if subpool.is_state else paged[name if name in paged else "tokens"]).append((subpool, placed))
    if states:
        subpool = states[0][0]
        rows = {placed.row.name: placed for _, placed in states}
        state_grids = {
            name: grid_over(pool.arena.bytes, placed, subpool.page_bytes, subpool.origin_bytes + placed.offset_bytes)
            for name, placed in rows.items()
        }
        state = StateStore(subpool=subpool, rows=rows, grids=state_grids)
    return Store(
        tokens=_token_store(pool, layer, paged["tokens"]),
        index=_token_store(pool, layer, paged[INDEX_KEY]),
        positions=_token_store(pool, layer, paged[INDEX_POSITION]),
        state=state,
        groups={name: made for name in groups if (made := _token_store(pool, layer, paged[name])) is not None},
    )


def _has_index_alone(layer: Layer) -> bool:
    """Whether it attends to the keys of an earlier layer, which the declaration does not name."""
    return any(parts_of_memory(memory) == ["index"] for memory in layer.memories)


def _token_store(pool: CachePool, layer: int, paged: list[tuple[SubPool, PlacedRow]]) -> TokenStore | None:
    if not paged:
        return None
    subpool = paged[0][0]
    rows = tuple(placed for _, placed in paged)
    grids = tuple(_own(pool.arena.view(subpool, layer, placed.row.name)) for placed in rows)
    return TokenStore(
        subpool=subpool,
        rows=rows,
        grids=grids,
        entry_grids=tuple(grid.flatten(0, 1) for grid in grids),
        offsets_bytes=tuple(placed.offset_bytes for placed in rows),
        widths=tuple(prod(placed.row.shape) for placed in rows),
        dtypes=tuple(dtype_name(placed.row.dtype) for placed in rows),
        is_latent=rows[0].row.name == "latent",
        is_shared=any(other.shares == layer or _has_index_alone(other) for other in pool.plan.layers),
    )


def grid_over(memory: torch.Tensor, placed: PlacedRow, page_bytes: int, first_byte: int) -> torch.Tensor:
    """A state row in every page of `memory`, from `first_byte` on: [pages, *shape], with a storage of its own.

    A compiled graph may then change a state in place while ops write into the arena: functionalisation refuses changes
    through views of one storage with two dtypes, and the bytes never overlap.
    """
    row = placed.row
    alias = _own(memory.view(row.dtype))
    strides = tuple(prod(row.shape[axis + 1 :]) for axis in range(len(row.shape)))
    num_pages = (memory.numel() - first_byte - row.num_bytes) // page_bytes + 1
    return alias.as_strided(
        (num_pages, *row.shape),
        (page_bytes // row.dtype.itemsize, *strides),
        first_byte // row.dtype.itemsize,
    )


def _own(view: torch.Tensor) -> torch.Tensor:
    """The same memory as a storage of its own: a graph takes two views of one storage for one, as large as it is."""
    return view if view.is_meta else torch.utils.dlpack.from_dlpack(view)
