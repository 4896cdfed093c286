"""A multi-step as the layers of a model see it: everything that changes from token to token is a tensor of its stacks.

Owns what a forward between two calls of `advance` asks of a step, in a graph or without one. Keys and values are read
in the arena, by page table, and nothing is planned on the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torch_uma.errors import SequenceError
from torch_uma.integrations.transformers.given import GivenStep
from torch_uma.integrations.transformers.places import StepPlaces, TokenPlaces
from torch_uma.integrations.transformers.stores import Tensors, stores_of
from torch_uma.layout import Lifetime

if TYPE_CHECKING:
    from torch_uma.multistep import MultiStep
    from torch_uma.pool import CachePool
    from torch_uma.stacks import Stacks


class TakingPlaces(StepPlaces):
    """Where the last token that `advance` took of each row lies. Raises SequenceError for a pool with states."""

    def __init__(self, multi: MultiStep) -> None:
        pool = multi.pool
        state = next((subpool.name for subpool in pool.plan.subpools if subpool.is_state), None)
        if state is not None:
            raise SequenceError(
                f"a model with a {state!r} would change the state of a row that has stopped; take its steps one by one"
            )
        self.step = multi  # type: ignore[assignment]  # which is asked no more than whether it is open
        self.in_place = True
        self.arena = pool.arena.bytes
        self.num_rows = self.batch_size = len(multi.rows)
        self.num_new_tokens = 1
        self.packing = self.fixed = self.unused = None
        self.is_even = self.fresh = self.is_fixed = self.plans_reads = False
        self.rows = multi.stacks.rows
        self.v2p = pool.tables.v2p
        self.stores = stores_of(pool)
        self.tokens = {
            subpool.index: TokenPlaces(write=entries, run=None, appends=False, has_new=False)
            for subpool, entries in zip(multi.stacks.paged, multi.stacks.entries, strict=True)
        }
        self._tables = pool.tables
        self._stacks: Stacks = multi.stacks

    @property
    def lengths(self) -> torch.Tensor:
        """[rows] int64, tokens of each row with the last one."""
        return self._stacks.lengths

    @property
    def longest_past(self) -> torch.Tensor:
        """0-d int64, tokens of the longest row before the last one."""
        return self._stacks.positions.amax()

    def positions_at(self, columns: torch.Tensor) -> torch.Tensor:
        """The columns themselves: rows are not aligned."""
        return columns

    def inputs(self) -> Tensors:
        """The position ids [rows, 1] of the last tokens, 0 for a row that had stopped."""
        return {"position_ids": self._stacks.positions.clamp(min=0)}


class TakingSteps(GivenStep):
    """The steps of a multi-step: as many forwards as there are calls of `advance`."""

    def __init__(self, places: TakingPlaces, pool: CachePool) -> None:
        super().__init__(places, pool)

    def length(self) -> torch.Tensor:
        """Tokens that the longest sequence held before the last one, as a tensor, since nothing may wait for it."""
        return self.places.longest_past

    def extent(self, layer: int, lifetime: Lifetime, num_new_tokens: int) -> tuple[int, int]:
        """Of the new key alone: others are not fetched, and masks of keys in the arena are made of no numbers."""
        return 0, 1

    def _check_first(self, layer: int, name: str, is_read: bool) -> None:
        """There are several forwards."""
