"""Decode steps as compiled graphs of a few batch sizes, filled up with idle sequences.

Owns the fillers: sequences of the pool that take one token in a step and give it back behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo

from torch_uma.batch import Batch
from torch_uma.errors import OutOfMemory, SequenceError

if TYPE_CHECKING:
    from torch_uma.batch import Rows
    from torch_uma.integrations.transformers.cache import UnifiedCache
    from torch_uma.pool import CachePool
    from torch_uma.sequence import Sequence

_ROOM_FOR_GRAPHS = 64
"""Graphs that torch may keep of one model while another batch size is compiled, which is not a recompilation."""


def filled_size(num_rows: int, most_rows: int) -> int:
    """Rows of the graph for so many: 1, 2, 4, 8, 16, 32, 48, 64, 96, 128, ... and at most `most_rows`."""
    size = 1 << (num_rows - 1).bit_length()
    if size >= 64 and num_rows <= size // 4 * 3:
        size = size // 4 * 3
    return min(size, most_rows)


def most_fillers(most_rows: int) -> int:
    """Fillers that a step of up to `most_rows` sequences can have."""
    return max(filled_size(num_rows, most_rows) - num_rows for num_rows in range(1, most_rows + 1))


class CompiledDecode:
    """The compiled form of a model, and the batches that it takes: those of a loop, filled up to few sizes.

    Where the pool has no room for the fillers, a step runs as it is, by the model itself. Rows that the loop may want
    for its sequences are not taken.
    """

    def __init__(self, model: Any, pool: CachePool, most_rows: int) -> None:
        self._model = model
        self._compiled = torch.compile(model, fullgraph=True, dynamic=False)
        self._pool = pool
        self._most_rows = most_rows
        self._most_fillers = pool.tables.num_rows - most_rows
        self._fillers: list[Sequence] = []
        self._filled: tuple[Rows, Batch] | None = None
        self._sizes: set[int] = set()  # that have their graph

    @contextmanager
    def step(self, batch: Batch) -> Iterator[tuple[UnifiedCache, Batch]]:
        """A step of one token each: its cache, and what it is over, which is `batch` with fillers behind it or alone.

        Raises what `pool.step` raises of `batch` alone.
        """
        with ExitStack() as stack:
            stepped = self._fill_up(batch) or batch
            try:
                cache = stack.enter_context(self._pool.step(stepped, 1))
            except OutOfMemory:
                if stepped is batch:
                    raise
                stepped = batch
                cache = stack.enter_context(self._pool.step(stepped, 1))
            yield cache, stepped
        for filler in self._fillers[: len(stepped) - len(batch)]:
            filler.crop(0)

    def model(self, num_rows: int) -> Any:
        """What to call for so many rows: the compiled model, or the model itself for a number that has no graph."""
        return self._compiled if num_rows == filled_size(num_rows, self._most_rows) else self._model

    @contextmanager
    def graph(self, num_rows: int) -> Iterator[None]:
        """Around the call for so many rows: the first makes their graph, whatever others there are."""
        if num_rows in self._sizes:
            yield
            return
        with torch._dynamo.config.patch(recompile_limit=_ROOM_FOR_GRAPHS):
            yield
        self._sizes.add(num_rows)

    def close(self) -> None:
        """Frees the fillers."""
        for filler in self._fillers:
            filler.free()
        self._fillers, self._filled = [], None

    def _fill_up(self, batch: Batch) -> Batch | None:
        """`batch` with fillers behind it, kept for as long as its sequences are the same; None if there are no rows."""
        num_missing = filled_size(len(batch), self._most_rows) - len(batch)
        if num_missing > self._most_fillers:
            return None
        if not num_missing:
            return batch
        if self._filled is not None and self._filled[0] is batch.rows:
            return self._filled[1]
        try:
            while len(self._fillers) < num_missing:
                self._fillers.append(self._pool.add())
        except SequenceError:  # others have the rows
            return None
        filled = self._pool.batch([*batch.sequences, *self._fillers[:num_missing]])
        self._filled = (batch.rows, filled)
        return filled
