"""Stacks: what a graph needs to take tokens and pages by itself, as tensors at fixed addresses.

Owns these tensors for one batch and multi-steps up to some length. The host loads them before each; `advance`, which
runs inside of a graph, takes one token for each row. Nothing here is read back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from torch_uma.arena import keep_address, staged

if TYPE_CHECKING:
    from torch_uma.pool import CachePool
    from torch_uma.supply import Supply
    from torch_uma.tables import IdArray


class Stacks:
    """The tensors of multi-steps of up to `most_steps` over the rows `numbers` [rows] int64, on the device of the pool.

    Attributes:
        lengths: [rows] int64, tokens of each row so far.
        limits: [rows] int64, the length at which each row stops.
        rows: [rows] int64, the rows of the tables that took the last token, -1 for one that had stopped.
        positions: [rows, 1] int64, of the last token, -1 for a row that had stopped.
        taken: [paged] of [1] int64, pages that were handed out.
        pages: [paged] of [most pages] int32, the stacks.
        entries: [paged] of [rows, 1] int64, where the last token lies, -1 for a row that had stopped.

    [paged] is the order of the sub-pools that hold tokens.
    """

    def __init__(self, pool: CachePool, numbers: Tensor, most_steps: int) -> None:
        self._tables = pool.tables
        self._epochs = pool.guard.epochs
        self._numbers = numbers
        self.paged = [subpool for subpool in pool.plan.subpools if not subpool.is_state]
        num_rows = len(numbers)

        def made(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return keep_address(torch.zeros(shape, dtype=dtype, device=pool.device))

        with self._epochs.on_stream(), torch.inference_mode(False):  # they are kept for multi-steps in any mode
            self.lengths, self.limits, self.rows = made(num_rows), made(num_rows), made(num_rows)
            self.positions = made(num_rows, 1)
            self._reach = [made(num_rows) for _ in self.paged]
            self.taken = [made(1) for _ in self.paged]
            most_pages = [num_rows * -(-most_steps // subpool.page_tokens) for subpool in self.paged]
            self.pages = [made(count, dtype=torch.int32) for count in most_pages]
            self.entries = [made(num_rows, 1) for _ in self.paged]

    def load(self, supply: Supply, num_steps: int) -> None:
        """Make ready for a multi-step, on the arena's stream, with one copy from the host. Does not wait for it."""
        targets: list[tuple[Tensor, IdArray]] = [(self.lengths, supply.past), (self.limits, supply.past + num_steps)]
        for subpool, reach, pages in zip(self.paged, self._reach, self.pages):
            targets += [(reach, supply.reach[subpool.index]), (pages, supply.stacks[subpool.index])]
        with self._epochs.on_stream():
            loaded = staged(np.concatenate([values for _, values in targets]), self.lengths.device)
            parts = loaded.split([len(values) for _, values in targets])
            for (target, _), part in zip(targets, parts, strict=True):
                target[: len(part)].copy_(part)
            for taken in self.taken:
                taken.zero_()

    def unload(self) -> None:
        """Let no row take any more, so that a graph that is replayed once too often takes nothing. Does not wait."""
        with self._epochs.on_stream():
            self.limits.copy_(self.lengths)

    def advance(self) -> None:
        """Take one token for each row that has not stopped, and a page for each whose pages end there.

        For use inside of a graph: ops on tensors alone, no wait. Writes page tables and all attributes but the stacks.
        """
        goes_on = self.lengths < self.limits
        rows = torch.where(goes_on, self._numbers, -1)
        positions = torch.where(goes_on, self.lengths, -1).unsqueeze(1)
        for subpool, reach, taken, pages, entries in zip(self.paged, self._reach, self.taken, self.pages, self.entries):
            page_table = self._tables.page_table(subpool.index)
            takers = torch.where(self.lengths >= reach, rows, -1)
            torch.ops.torch_uma.allocate(page_table, taken, pages, takers, self.lengths, subpool.page_tokens)
            located = torch.ops.torch_uma.locate(
                page_table, self._tables.v2p, rows, positions, subpool.page_size, subpool.tokens_per_entry
            )
            entries.copy_(located)
        self.rows.copy_(rows)
        self.positions.copy_(positions)
        self.lengths.add_(goes_on)

    def stop(self, stopped: Tensor) -> None:
        """Let rows where `stopped` [rows] bool is set take no more tokens. For use inside of a graph."""
        self.limits.copy_(torch.where(stopped, self.lengths, self.limits))
