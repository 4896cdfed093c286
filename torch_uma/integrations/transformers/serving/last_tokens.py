"""The last token of every running sequence, on the device: what the next decode step is fed, read by nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from torch_uma.arena import staged
from torch_uma.batch import Batch
from torch_uma.integrations.transformers.serving.generation import Generation

if TYPE_CHECKING:
    from collections.abc import Sequence as Ordered

    from torch_uma.batch import Rows
    from torch_uma.pool import CachePool
    from torch_uma.scheduling import Forward
    from torch_uma.tables import Int64Array


class LastTokens:
    """A token for each row of a pool's tables, and whose it is: as it was sampled, whether or not the host knows it.

    A generation has one row at a time. One that it comes back to after another holds an older token.
    """

    def __init__(self, pool: CachePool) -> None:
        self._device = pool.device
        self._tokens = torch.zeros(pool.tables.num_rows, dtype=torch.int64, device=pool.device)
        self._owners: list[Generation | None] = [None] * pool.tables.num_rows
        self._rows: WeakKeyDictionary[Generation, int] = WeakKeyDictionary()
        self._held: Rows | None = None  # rows all of which are known to be held by their owners

    def feed(self, forward: Forward, batch: Batch) -> Tensor:
        """[rows of `batch`, 1] int64, the last tokens of a decode step; `batch` may have other sequences behind it."""
        rows = forward.batch.rows
        if rows is not self._held:
            generations = [request.tag for request in forward.requests]
            missing = [
                (row, generation.last_token)
                for row, generation in zip(rows.numbers.tolist(), generations, strict=True)
                if not self._holds(generation, row)
            ]
            if missing:
                where, tokens = staged(np.array(missing, np.int64).T.copy(), self._device)
                self._tokens.index_copy_(0, where, tokens)
            self._own(rows, generations)
        return self._tokens.index_select(0, batch.rows.tensor())[:, None]

    def prompt(self, forward: Forward) -> Tensor:
        """The next tokens of every sequence, one after another, int64; what was sampled is taken from where it is."""
        pieces: list[list[int]] = []
        places, rows, end_place = [], [], 0
        for request, start, count, row in zip(
            forward.requests, forward.starts.tolist(), forward.counts, forward.batch.rows.numbers.tolist(), strict=True
        ):
            piece = request.tag.text_ids(start, start + count)
            end_place += count
            if len(piece) < count:
                assert len(piece) == count - 1 and self._holds(request.tag, row)
                piece.append(0)
                places.append(end_place - 1)
                rows.append(row)
            pieces.append(piece)
        ids = staged(np.concatenate([np.array(piece, np.int64) for piece in pieces]), self._device)
        if places:
            where, rows_there = staged(np.array([places, rows], np.int64), self._device)
            ids.index_copy_(0, where, self._tokens.index_select(0, rows_there))
        return ids

    def text(self, generation: Generation, row: int, num_tokens: int) -> Tensor:
        """[num_tokens] int64, the text of the generation in this row, whose last token need not have been read yet."""
        known = generation.text_ids(0, num_tokens)
        ids = staged(np.array(known, np.int64), self._device)
        if len(known) == num_tokens:
            return ids
        assert len(known) == num_tokens - 1 and self._holds(generation, row)
        return torch.cat([ids, self._tokens[row : row + 1]])

    def keep(self, rows: Rows, places: Int64Array, generations: Ordered[Generation], tokens: Tensor) -> None:
        """Keeps `tokens` [n] int64 that were sampled for `generations`, at `places` [n] among the rows of a batch."""
        if len(places) == len(rows.numbers):
            self._tokens.index_copy_(0, rows.tensor(), tokens)
            self._own(rows, generations)
            return
        numbers = rows.numbers[places]
        self._tokens.index_copy_(0, staged(numbers, self._device), tokens)
        for row, generation in zip(numbers.tolist(), generations, strict=True):
            self._owners[row], self._rows[generation] = generation, row

    def _holds(self, generation: Generation, row: int) -> bool:
        return self._owners[row] is generation and self._rows[generation] == row

    def _own(self, rows: Rows, generations: Ordered[Generation]) -> None:
        if rows is self._held:
            return
        for row, generation in zip(rows.numbers.tolist(), generations, strict=True):
            self._owners[row], self._rows[generation] = generation, row
        self._held = rows
