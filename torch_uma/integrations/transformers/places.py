"""Where the tokens and states of one step lie, as tensors: prepared once for all layers, before the first of them runs.

Owns the translation from a step of the pool to what a layer writes to and reads from. No place changes while a forward
pass runs, so that a traced forward only sees tensors: index tensors beside the arena, and views of states.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from torch_uma.arena import staged
from torch_uma.errors import SequenceError
from torch_uma.integrations.transformers.fixed import fixed_tokens
from torch_uma.integrations.transformers.packing import Packing
from torch_uma.integrations.transformers.stores import StateStore, Tensors, TokenStore, grid_over, stores_of
from torch_uma.layout import Chunk, Full, Lifetime, Window
from torch_uma.ops.reads import Reads, plan_reads
from torch_uma.ops.reference import on_host
from torch_uma.plan import SubPool
from torch_uma.runs import Run
from torch_uma.tables import Int64Array

if TYPE_CHECKING:
    from torch_uma.pool import CachePool
    from torch_uma.step import Step


@dataclass(frozen=True, kw_only=True)
class TokenPlaces:
    """Where one step's tokens lie in one sub-pool.

    `write`: int64 entries [batch, num_new_tokens], -1 for a token that is not stored. `run`: the first page and the
    pages from row to row, if every row's tokens lie one after the other. `appends`: new tokens follow those read,
    because not all of them are stored. `has_new`: attention in the arena is given new keys and values, as they may not
    be stored. A token that is alone is, and is read in the arena with the others, unless it may be the last to need
    itself.
    """

    write: torch.Tensor
    run: Run | None
    appends: bool
    has_new: bool


class StepPlaces:
    """Where everything lies that one step of the pool reads and writes.

    `whole`: prepare also what only a traced forward needs, and every layer's state at once. `in_place`: the model's
    attention reads keys and values in the arena, so they are not fetched for it. `is_fixed`: otherwise it reads keys
    and values of a fixed size, where they can be had, also in a forward that is not traced. A forward is over
    [batch_size, num_new_tokens], which are the rows and what each takes, or, in a `packing`, 1 and what all take.
    """

    def __init__(self, pool: CachePool, step: Step, *, whole: bool, in_place: bool, is_fixed: bool = False) -> None:
        self.step = step
        step.writes_first = True  # `update` of a layer does
        self.in_place = in_place
        self.arena = pool.arena.bytes
        self.past = step.past
        self.max_past = int(step.past.max())
        self.num_rows = len(step.past)
        self.packing: Packing | None = None
        if isinstance(step.num_new_tokens, int):
            self.batch_size, self.num_new_tokens = self.num_rows, step.num_new_tokens
            self._most_new_tokens = step.num_new_tokens  # of one row
        else:
            self.packing = Packing(step, self.arena.device)
            self.batch_size, self.num_new_tokens = 1, self.packing.num_tokens
            self._most_new_tokens = int(step.num_new_tokens.max())
        # Of a compiled forward: one is to come; the calls that were traced; it has come to the last layer.
        self.is_announced = False
        self.traced: set[tuple[int, str, bool]] = set()
        self.is_traversed = False
        self.unused: int | None = None  # the layer whose reading was handed out last, until it is used
        self.is_even = self.packing is None and bool((step.past == self.max_past).all())
        self.fresh = self.max_past == 0
        self.rows = step.rows_on_device
        self.v2p = pool.tables.v2p
        self._tables = pool.tables
        self.tokens: dict[int, TokenPlaces] = {}
        self.stores = stores_of(pool)
        self._extents: dict[int, tuple[int, int]] = {}  # by layer, since a traced forward cannot compute them
        self._fetched: dict[int, torch.Tensor] = {}
        self._reads: dict[int, tuple[torch.Tensor | None, Reads]] = {}
        self._states: dict[int, Tensors] = {}
        self._copy: torch.Tensor | None = None  # of the states, [rows, page_bytes] uint8
        # On the host, where arithmetic on a few numbers has a fraction of the cost that it has with tensors.
        self._host_past = step.past.astype(np.int64)[:, None]
        self._past = staged(self._host_past, self.arena.device)  # [rows, 1]
        if self.packing is None:
            self._host_positions = self._host_past + np.arange(self.num_new_tokens)
            self._positions = staged(self._host_positions, self.arena.device)
        else:
            self._positions = self.packing.positions
        self.fixed = fixed_tokens(step, self.stores) if whole and not in_place else None
        self.is_fixed = is_fixed and self.fixed is not None
        self.is_on_host = on_host(self.arena)
        self.plans_reads = in_place and self.is_on_host
        for subpool in pool.plan.subpools:
            if subpool.is_state:
                self._place_states(subpool)
            else:
                self.tokens[subpool.index] = self._place_tokens(subpool)
                if whole and not in_place and self.fixed is None and subpool.tokens_per_entry == 1:
                    self.read(subpool)
        for layer, store in enumerate(self.stores):
            if whole and store.state is not None:
                self.state(layer)
            if whole and store.paged and not in_place:
                self.extent(layer)

    # Not kept: a trace makes them part of its graph, and a forward that runs on the host asks for none of them.

    @property
    def lengths(self) -> torch.Tensor:
        """[rows] int64, tokens of each row with those of the step."""
        return self._past.squeeze(1) + self.num_new_tokens if self.packing is None else self.packing.lengths

    @property
    def longest_past(self) -> torch.Tensor:
        """0-d int64, tokens of the longest row before the step."""
        return self._past.amax()

    @property
    def columns_in_front(self) -> torch.Tensor:
        """[rows, 1] int64, columns in front of each row where all rows end at one column."""
        return self.max_past - self._past

    def positions_at(self, columns: torch.Tensor) -> torch.Tensor:
        """[rows] int64, the positions at a column for each row, of rows that end at one; 0 in front of a row."""
        return columns if self.is_even else (columns - self.columns_in_front[:, 0]).clamp(min=0)

    @property
    def query_starts(self) -> torch.Tensor:
        """[rows + 1] int64, the new tokens of the rows before each, and of all."""
        if self.packing is not None:
            return self.packing.query_starts
        return torch.arange(self.num_rows + 1, device=self.arena.device) * self.num_new_tokens

    def hand_out(self, layer: int) -> None:
        """Note that a layer's reading is handed out; SequenceError if nobody has used the one before, on the host."""
        self.check_used()
        self.unused = layer

    def check_used(self) -> None:
        """SequenceError if nobody has used the last reading that was handed out."""
        if self.unused is not None:
            raise SequenceError(
                f"the attention of layer {self.unused} did not read the arena: this model does not go through "
                "transformers' attention interface; use attn_implementation='sdpa' or 'eager'"
            )

    def extent(self, layer: int) -> tuple[int, int]:
        """First column and number of columns of the keys that a layer reads, of rows that end at one column."""
        if layer not in self._extents:
            store = next(iter(self.stores[layer].paged.values()))
            self._extents[layer] = extent(store.subpool.lifetime, self.past.tolist(), self.num_new_tokens)
        return self._extents[layer]

    def mask_sizes(self, layer: int) -> tuple[int, int | torch.Tensor] | None:
        """Number of columns of fixed keys and the position of the first, where the forward reads such; else None."""
        is_traced = torch.compiler.is_compiling()
        if self.fixed is None or not (self.is_fixed or is_traced):
            return None
        fixed = self.fixed[layer, next(iter(self.stores[layer].paged))]
        return fixed.num_columns, fixed.offset(self.longest_past if is_traced else self.max_past)

    def page_table(self, subpool: SubPool) -> torch.Tensor:
        """The page tables of all rows of the pool, [all rows, columns] int32 at a fixed address."""
        return self._tables.page_table(subpool.index)

    def read(self, subpool: SubPool) -> torch.Tensor:
        """The int64 entries [rows, num_read] of what a layer reads, -1 in front of a row that is shorter."""
        if subpool.index not in self._fetched:
            offset, length = extent(subpool.lifetime, self.past.tolist(), self.num_new_tokens)
            end = offset + length - (self.num_new_tokens if self.tokens[subpool.index].appends else 0)
            # Rows are aligned at their ends: a column before a row's first token has a negative position.
            columns = torch.arange(offset, end, device=self.arena.device)
            self._fetched[subpool.index] = self.step.entries(subpool, columns - self.columns_in_front)
        return self._fetched[subpool.index]

    def read_from_start(self, subpool: SubPool) -> torch.Tensor:
        """The same of full attention where all rows begin with column 0: -1 behind a row that is shorter."""
        columns = torch.arange(self.max_past + self.num_new_tokens, device=self.arena.device)
        return self.step.entries(subpool, torch.where(columns < self.lengths[:, None], columns, -1))

    def read_past(self, subpool: SubPool) -> torch.Tensor:
        """The int64 entries [rows, longest past] of full attention before the step, -1 in front of shorter rows."""
        columns = torch.arange(self.max_past, device=self.arena.device)
        return self.step.entries(subpool, columns - self.columns_in_front)

    def reads(self, store: TokenStore, starts: torch.Tensor | None) -> Reads:
        """What a layer's attention reads in the arena, where `starts` [rows] are the first tokens that are seen.

        On the host only; planned once for all layers that come with the same numbers.
        """
        subpool = store.subpool
        known = self._reads.get(subpool.index)
        where = self.tokens[subpool.index]
        if known is None or not _is_same(known[0], starts):
            lifetime = subpool.lifetime
            reads = plan_reads(
                self.page_table(subpool).numpy(),
                self.v2p.numpy(),
                self.step.rows,
                self.past + self.step.num_new_tokens,
                self._token_starts(),
                subpool.page_size,
                window=lifetime.num_tokens if isinstance(lifetime, Window) else 0,
                chunk=lifetime.num_tokens if isinstance(lifetime, Chunk) else 0,
                starts=None if starts is None else starts.numpy(),
                has_new=where.has_new,
                token_bytes=sum(placed.row.num_bytes for placed in store.rows),
            )
            known = self._reads[subpool.index] = (starts, reads)
        return known[1]

    def _token_starts(self) -> Int64Array:
        """`query_starts` on the host."""
        if self.packing is not None:
            return self.packing.token_starts
        return np.arange(self.num_rows + 1) * self.num_new_tokens

    def inputs(self) -> Tensors:
        """The position ids [batch, new]; and for attention to rows that are fetched, and aligned at their ends, or for
        a choice among their keys, the attention mask [rows, longest past + new], unless nothing is masked.
        """
        if self.fixed is not None or (self.in_place and (self.is_even or not self._chooses_columns)):
            return {"position_ids": self._positions}
        columns = torch.arange(self.max_past + self.num_new_tokens, device=self.arena.device)
        attention_mask = (columns >= self.max_past - self._past).long()
        return {"attention_mask": attention_mask, "position_ids": self._positions}

    @property
    def _chooses_columns(self) -> bool:
        """Whether layers choose single keys, by index keys that end at one column."""
        return any(store.index is not None and len(store.index.rows[0].row.shape) == 1 for store in self.stores)

    def state(self, layer: int) -> Tensors:
        """The state of `layer` by row name, [rows, *shape] in the order of the batch: live, to be changed in place.

        Views of the arena if the rows lie side by side, otherwise of a copy that `keep_states` writes back. Their
        strides are the same.
        """
        if layer not in self._states:
            store = self.stores[layer].state
            assert store is not None
            if self.views_states:
                self._states[layer] = store.views(int(self._slots[0]), self.num_rows)
            else:
                self._states[layer] = self._copied(store)
        return self._states[layer]

    def keep_states(self) -> None:
        """Writes the copy of the states, if there is one, back into the arena."""
        if self._copy is not None:
            self.step.state_touched = True
            self._state_pages.index_copy_(0, staged(self._slots, self.arena.device), self._copy)

    def _place_states(self, subpool: SubPool) -> None:
        self._slots = self.step.slots()
        self.views_states = bool((np.diff(self._slots) == 1).all())
        self._state_pages = self.step.pool.arena.pages(subpool)
        if self.step.fresh.any():
            fresh = staged(self._slots[self.step.fresh], self.arena.device)
            self._state_pages.index_fill_(0, fresh, 0)

    def _copied(self, store: StateStore) -> Tensors:
        if self._copy is None:
            slots = staged(self._slots, self.arena.device)
            self._copy = self._state_pages.index_select(0, slots)
        return {
            name: grid_over(self._copy.view(-1), placed, store.subpool.page_bytes, placed.offset_bytes)
            for name, placed in store.rows.items()
        }

    def _place_tokens(self, subpool: SubPool) -> TokenPlaces:
        lifetime = subpool.lifetime
        is_full = isinstance(lifetime, Full)
        # A new token that not even the next query needs is not stored.
        appends = isinstance(lifetime, Window) and self._most_new_tokens >= lifetime.num_tokens
        if isinstance(lifetime, Chunk):
            new = self.past + self.step.num_new_tokens
            appends = bool((new - new % lifetime.num_tokens > self.past).any())
        # Attention in place takes runs of windows as they come, and no room for them.
        is_viewed = isinstance(lifetime, Window) and not self.in_place and not appends
        run = self.step.run(subpool) if (is_full or is_viewed) and self.packing is None else None
        return TokenPlaces(
            write=self._entries(subpool) if run is None else self._entries_of(subpool, run),
            run=run if self.is_even else None,
            appends=appends,
            has_new=self.num_new_tokens > 1 or lifetime == Window(1) or isinstance(lifetime, Chunk),
        )

    def _entries(self, subpool: SubPool) -> torch.Tensor:
        """Those of the new tokens."""
        return self.step.entries(subpool, self._positions) if self.packing is None else self.packing.entries(subpool)

    def _entries_of(self, subpool: SubPool, run: Run) -> torch.Tensor:
        """Those of the new tokens in a run, without a look at the page tables."""
        first_page, pages_between_rows = run
        first_pages = first_page + pages_between_rows * np.arange(self.num_rows)[:, None]
        within = self._host_positions // subpool.tokens_per_entry
        return staged(first_pages * subpool.page_size + within, self.arena.device)


def extent(lifetime: Lifetime, past: Iterable[int], num_new_tokens: int) -> tuple[int, int]:
    """First column and number of columns of keys that a step reads, when rows of `past` tokens end at one column."""
    lengths = set(past)
    max_past = max(lengths)
    offset = min(max_past - length + lifetime.first_needed(length) for length in lengths)
    return offset, max_past + num_new_tokens - offset


def _is_same(some: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if some is None or other is None:
        return some is other
    return torch.equal(some, other)
