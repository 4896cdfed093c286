"""What the indexers of sparse attention call: index keys, stored beside the keys that they choose among, and fetched.

Owns how they are handed over: of all tokens at once, as a view where one run covers the batch and else copied, with as
many columns as stock attention has keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_uma.errors import SequenceError
from torch_uma.integrations.transformers.given import GivenStep
from torch_uma.integrations.transformers.keep import (
    Rows,
    append,
    check_no_gradients,
    check_stored,
    fetch,
    gather,
    has_dtype,
    views,
    write,
)
from torch_uma.integrations.transformers.places import StepPlaces
from torch_uma.integrations.transformers.steps import OwnSteps
from torch_uma.integrations.transformers.stores import TokenStore, stores_of


class IndexKeys:
    """Index keys of one layer, and their positions where the model keeps those: to be mixed into a layer."""

    _layer: int
    _steps: GivenStep | OwnSteps
    _position_ids: Tensor | None = None  # as the model set them last

    def update_indexer(self, index_keys: Tensor) -> Tensor:
        """Stores new index keys [batch, num_new_tokens, width]; returns those of all tokens.

        It may return a view of the arena, good until the next forward; rows that are shorter have zeros in front.
        OutOfMemory, GradientError.
        """
        return self._update(index_keys.unsqueeze(1)).squeeze(1)

    def update_index(self, index_keys: Tensor) -> Tensor:
        """The same of keys [batch, 1, num_new_tokens, width] that score blocks, which begin with a sequence.

        Unequally long rows all begin with column 0, and have zeros behind their last token. SequenceError for such with
        attention that does not read the arena, whose own keys end at one column.
        """
        return self._update(index_keys)

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions [axes, batch, tokens] of all index keys, aligned as these; None where the model keeps none.

        None also before the first token. In a forward they are those from before it; what a model sets is stored with
        the index keys.
        """
        if isinstance(self._steps, GivenStep):
            places = self._steps.places
            store = places.stores[self._layer].positions
            if store is None or places.fresh:
                return None
            return _positions(places.arena, places.read_past(store.subpool), store)
        rows = self._steps.at_rest().of_layer(self._layer)
        if rows.pool is None or rows.length == 0:
            return None
        store = stores_of(rows.pool)[self._layer].positions
        return None if store is None else _positions(rows.pool.arena.bytes, rows.entries(store.subpool), store)

    @indexer_position_ids.setter
    def indexer_position_ids(self, position_ids: Tensor) -> None:
        self._position_ids = position_ids

    def _update(self, index_keys: Tensor) -> Tensor:
        check_no_gradients(index_keys)
        if torch.compiler.is_compiling() and self._steps.in_place:
            raise SequenceError(
                f"layer {self._layer} chooses among all keys, whose number changes from step to step, while attention "
                "by 'torch_uma' compiles without it; compile with 'sdpa' or 'eager'"
            )
        num_new_tokens = index_keys.shape[2]
        places = self._steps.enter(self._layer, "index", num_new_tokens=num_new_tokens, like=index_keys)
        assert places is not None
        stores = places.stores[self._layer]
        assert stores.index is not None
        check_stored(stores.index, (index_keys,))
        if (stores.positions is None) != (self._position_ids is None):
            raise SequenceError(
                f"layer {self._layer} {'gives no' if self._position_ids is None else 'gives'} positions with its index "
                "keys, other than the pool was made for; use a pool that was made of this model"
            )
        if stores.positions is not None and self._position_ids is not None:
            new = self._position_ids[..., -num_new_tokens:].expand(-1, places.batch_size, -1)
            where = places.tokens[stores.positions.subpool.index]
            write(places.arena, stores.positions, where.write, (new.permute(1, 2, 0).unsqueeze(1),))
            self._position_ids = None
        if places.fixed is not None and (places.is_fixed or torch.compiler.is_compiling()):
            (fetched,) = places.fixed[self._layer, "index"].update(places.longest_past, (index_keys,))
        elif len(stores.index.rows[0].row.shape) == 1 or places.is_even:
            (fetched,) = _put(places, stores.index, (index_keys,))
        else:
            (fetched,) = _put_from_start(places, stores.index, (index_keys,))
        self._steps.leave(self._layer, "index")
        return fetched


def _put(places: StepPlaces, store: TokenStore, new: Rows) -> Rows:
    """Store new rows [batch, 1, new, width]; returns those of all tokens."""
    where = places.tokens[store.subpool.index]
    if torch.compiler.is_compiling() or where.run is None or not has_dtype(store, new):
        write(places.arena, store, where.write, new)
        return gather(places, store, where.appends, new)
    if places.is_on_host:
        return append(store, where.run, places, new)
    write(places.arena, store, where.write, new)
    return views(store, where.run, places, new)


def _put_from_start(places: StepPlaces, store: TokenStore, new: Rows) -> Rows:
    """The same for rows of unequal length, which all begin with column 0."""
    if not places.in_place:
        raise SequenceError(
            f"layer {store.rows[0].layer} attends to blocks of tokens that begin with a sequence, while the keys of "
            f"sequences with {places.past.tolist()} tokens end at one column; step sequences of one length together, "
            "or call model.set_attn_implementation('torch_uma')"
        )
    write(places.arena, store, places.tokens[store.subpool.index].write, new)
    (fetched,) = fetch(places.arena, store, places.read_from_start(store.subpool), new[0].dtype)
    return (fetched.unsqueeze(1),)


def _positions(arena: Tensor, entries: Tensor, store: TokenStore) -> Tensor:
    """[axes, batch, tokens]."""
    (fetched,) = fetch(arena, store, entries)
    return fetched.permute(2, 0, 1)
