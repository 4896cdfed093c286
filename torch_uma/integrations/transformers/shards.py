"""A cache over a model whose layers run on several devices: a pool on each, and one step over all of them.

Owns that the rows in all pools are the same ones: they grow, shrink and change places together, or not at all. What a
layer reads and writes lies on its own device, so nothing here moves a tensor from one to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from torch_uma.errors import OutOfMemory, SequenceError
from torch_uma.integrations.transformers.devices import Shard
from torch_uma.integrations.transformers.places import StepPlaces
from torch_uma.integrations.transformers.rows import CacheRows
from torch_uma.integrations.transformers.steps import OwnSteps
from torch_uma.layout import Full

if TYPE_CHECKING:
    from torch_uma.pool import CachePool

_Result = TypeVar("_Result")


class ShardedRows:
    """The batch rows of one cache in several pools; for whoever changes them as `CacheRows` are in one.

    `rows`: those in the pool of each of the `shards`. Whatever fails in one of them changes nothing in any.
    """

    def __init__(self, shards: Sequence[Shard], rows: Sequence[CacheRows]) -> None:
        self.shard_of = {layer: number for number, shard in enumerate(shards) for layer in shard.indices}
        self._shards = shards
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows[0])

    @property
    def pool(self) -> CachePool | None:
        """The pool of the first layer, which stands for all where one is enough to know."""
        return self._rows[0].pool

    @property
    def pools(self) -> tuple[CachePool, ...]:
        """The pools, as far as they are made."""
        return tuple(pool for rows in self._rows for pool in rows.pools)

    def of_layer(self, layer: int) -> CacheRows:
        """The rows in the pool of a layer."""
        return self._rows[self.shard_of[layer]]

    @property
    def length(self) -> int:
        """Tokens in every row."""
        return self._rows[0].length

    @property
    def max_tokens(self) -> int | None:
        """The length for which the rows are given room at once, None for as much as they need, doubled."""
        return self._rows[0].max_tokens

    @property
    def may_have_runs(self) -> bool:
        """False: nobody compiles a forward over several devices, for which runs would have to last."""
        return False

    @property
    def recording(self) -> None:
        """None: no past is kept over several devices."""

    def record(self, num_tokens: int | None) -> None:
        """Nothing where layers keep all their tokens; SequenceError where a past would have to be kept."""
        layers = [layer for shard in self._shards for layer in shard.layers]
        if any(memory.lifetime != Full() for layer in layers for memory in layer.memories):
            raise SequenceError(
                "over several devices a cache keeps no past of windows and states, so it cannot take back tokens of "
                "them; generate without speculation, or with the model on one device"
            )

    def stop_recording(self) -> None:
        """Nothing, as there is none."""

    def add(self, num_rows: int, device: torch.device) -> None:
        """Makes `num_rows` empty rows where there are none, and the pools if there are none. All of them or none."""
        with self._unmade():
            self._each(lambda rows: rows.add(num_rows, device))

    def expect(self, num_rows: int, max_tokens: int) -> None:
        """Gives the rows room for `max_tokens` tokens each, and makes `num_rows` of them where there are none."""
        # Whoever has no room comes first, and says so before anything has changed.
        order = sorted(self._rows, key=lambda rows: rows.has_room(max_tokens))
        with self._unmade():
            self._each(lambda rows: rows.expect(num_rows, max_tokens), order=order)

    def select(self, rows: Iterable[int]) -> None:
        """Row i becomes what row `rows[i]` was; rows that are taken twice share pages. Nothing changes if it fails."""
        wanted = list(rows)
        chosen = self._each(lambda rows: rows.choose(wanted), CacheRows.let_go)
        for here, sequences in zip(self._rows, chosen, strict=True):
            here.take(sequences)

    def fork(self) -> ShardedRows:
        """Rows with the same content, for another cache. All of them or none."""
        return ShardedRows(self._shards, self._each(CacheRows.fork, lambda _, fork: fork.free()))

    def crop(self, num_tokens: int) -> None:
        """Shortens every row."""
        self._each(lambda rows: rows.check_crop(num_tokens))
        self._each(lambda rows: rows.crop(num_tokens))

    def free(self) -> None:
        """Gives up the rows."""
        self._each(CacheRows.free)

    def abandon(self, opened: tuple[StepPlaces, ...]) -> None:
        """`free` for a finalizer; `opened` is of the step that is open over the rows, empty if none is."""
        for number, rows in enumerate(self._rows):
            rows.abandon(opened[number : number + 1])

    def begin(self, num_new_tokens: int, *, in_place: bool, is_fixed: bool) -> tuple[StepPlaces, ...]:
        """Opens a step over all rows in every pool, or in none; returns its places, one for each pool."""

        def begin(rows: CacheRows) -> StepPlaces:
            return rows.begin(num_new_tokens, in_place=in_place, is_fixed=is_fixed)[0]

        return tuple(self._each(begin, lambda _, places: places.step.abort()))

    def state(self, layer: int, name: str) -> torch.Tensor | None:
        """A copy of the state row `name` of `layer`, [rows, *shape]; None while no row has one."""
        return self.of_layer(layer).state(layer, name)

    def _each(
        self,
        act: Callable[[CacheRows], _Result],
        undo: Callable[[CacheRows, _Result], object] = lambda rows, result: None,
        *,
        order: Sequence[CacheRows] | None = None,
    ) -> list[_Result]:
        """What `act` returns for the rows in each pool; if it fails for one, `undo` of those before it."""
        done: list[tuple[CacheRows, _Result]] = []
        try:
            for rows in self._rows if order is None else order:
                with self._says_device(rows):
                    done.append((rows, act(rows)))
        except BaseException:
            for rows, result in done:
                undo(rows, result)
            raise
        return [result for _, result in done]

    @contextmanager
    def _says_device(self, rows: CacheRows) -> Iterator[None]:
        try:
            yield
        except OutOfMemory as error:
            device = self._shards[self._rows.index(rows)].device
            raise OutOfMemory(f"on {device}: {error}", error.quote) from error

    @contextmanager
    def _unmade(self) -> Iterator[None]:
        """Unmakes, if the block fails, the rows and the pools that it has made."""
        before = [(rows.pool, rows.max_tokens) for rows in self._rows]
        is_new = not len(self)
        try:
            yield
        except BaseException:
            if is_new:
                for rows, (pool, max_tokens) in zip(self._rows, before, strict=True):
                    rows.free()
                    rows.pool, rows.max_tokens = pool, max_tokens
            raise


class ShardedSteps(OwnSteps):
    """The step that the current forward pass is in, in all pools at once: it begins, ends and is aborted in each.

    A forward over several devices is not compiled: it runs from hook to hook, which are no part of a graph.
    """

    rows: ShardedRows

    def enter(self, layer: int, name: str, **options: Any) -> StepPlaces | None:
        """Returns the places of the step that this call belongs to on the device of `layer`."""
        if super().enter(layer, name, **options) is None:
            return None
        return self._opened[self.rows.shard_of[layer]]

    def _announce(self, num_new_tokens: int) -> None:
        """Nothing: there is no graph whose step would have to begin before it."""

    announce = _announce
