"""Multi-steps: several steps of one token each, which a graph takes on the device without the host.

Owns their order: what the host reserves is loaded once, a graph hands it out token by token, and the host ends it with
what each row has taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from torch_uma.batch import Batch
from torch_uma.counts import whole_or_each
from torch_uma.errors import SequenceError
from torch_uma.step import OpenStep
from torch_uma.supply import Supply
from torch_uma.tables import Int64Array

if TYPE_CHECKING:
    from torch_uma.integrations.transformers import UnifiedCache
    from torch_uma.pool import CachePool
    from torch_uma.stacks import Stacks


class MultiStep(OpenStep):
    """An open multi-step: the pages for `num_steps` tokens of every sequence of a batch are on stacks on the device.

    Made by `pool.begin_steps()`; `commit` or `abort` ends it, and so does the end of a `with` block, by `abort`. In
    between, `stacks.advance()` is called up to `num_steps` times, or a graph that has it in it is replayed as often, on
    the arena's stream: it takes a token for each row that has not stopped. Calls beyond that take nothing. `stacks` is
    the same object, with the same tensors, for every multi-step of `num_steps` over the same batch, as long as the
    batch does not change; and for every other number with the same next power of two. The host writes no table that the
    graph writes, and releases no page: those of windows and chunks that die with the tokens are released by `commit`.
    """

    __slots__ = ("_supply", "num_steps", "stacks")

    def __init__(self, pool: CachePool, batch: Batch, num_steps: int, epoch: int) -> None:
        self.num_steps = num_steps
        self._supply = Supply(pool.sequences, batch.rows.numbers, num_steps)
        try:  # only now, as a refusal must leave no tensors behind
            self.stacks: Stacks = batch.rows.stacks(num_steps)
        except BaseException:
            self._supply.abort()
            raise
        super().__init__(pool, batch, self._supply, epoch)
        self.device_cells = self._supply.cells

    def cache(self) -> UnifiedCache:
        """The transformers cache of the forward passes, one after each `stacks.advance()`.

        `model(tokens, cache=cache, **cache.inputs())` is then over [rows, 1] tokens, for models whose attention reads
        the arena; SequenceError for others, and for those with states.
        """
        from torch_uma.integrations.transformers.cache import UnifiedCache

        return UnifiedCache._of_multi_step(self)

    def load(self) -> None:
        """Make the stacks ready, once the tables are up to date; for the pool, which does so."""
        self.stacks.load(self._supply, self.num_steps)

    def pinned_pages(self) -> Int64Array:
        """[n] int64, the pages of the rows and those on the stacks."""
        return np.union1d(super().pinned_pages(), np.concatenate(self._supply.stacks))

    def commit(self, taken_tokens: Iterable[int]) -> None:
        """End it, where row i has taken `taken_tokens[i]` tokens before it stopped: lengths grow by that.

        It must be what the device has taken, `lengths - past` there, which comes back with the sampled tokens; to keep
        fewer, crop or free the sequence afterwards. Raises SequenceError for other than one number from 0 to
        `num_steps` for each row, with nothing changed. A state that was touched has seen `num_steps` tokens: a row that
        took fewer can only be cropped to 0 or freed.
        """
        counts = whole_or_each(taken_tokens, "a number of taken tokens", least=0, error=SequenceError)
        if isinstance(counts, int) or len(counts) != len(self.rows) or max(counts) > self.num_steps:
            raise SequenceError(
                f"{counts} tokens were taken by {len(self.rows)} rows in {self.num_steps} steps; give one number for "
                "each row, in order, of at most as many as there were steps"
            )
        taken = np.array(counts, np.int64)
        self._close()
        self._supply.commit(taken)
        self._tear(taken < self.num_steps)

    def _close(self) -> None:
        super()._close()
        self.stacks.unload()

    def __enter__(self) -> MultiStep:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.is_open:
            self.abort()
