"""What the rows of a cache keep of their past, so that `crop` can take back tokens that are still speculative.

Windows and chunks keep their pages and convolutions their inputs, so that any number of these tokens can be taken back.
A recurrent state cannot be computed backwards: it has one checkpoint, where these tokens begin, in rows of the pool
that hold no tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch

from torch_uma.errors import SequenceError
from torch_uma.growth import Growth
from torch_uma.integrations.transformers.stores import stores_of
from torch_uma.layout import Layer, State
from torch_uma.past import exchange_states, keep_past, let_past_go, rewind
from torch_uma.tables import Int64Array

if TYPE_CHECKING:
    from torch_uma.books import Sequences
    from torch_uma.sequence import Sequence


class Recording:
    """The past of rows of one length, from `length` tokens on.

    Attributes:
        num_tokens: so many of a step's last tokens may be taken back; None for all since the last crop.
        length: tokens of each row that are not speculative any more.
    """

    def __init__(self, num_tokens: int | None, length: int) -> None:
        self.num_tokens = num_tokens
        self.length = length
        self._room_end = np.zeros((0, 0), np.int64)  # of `length` tokens, [sub-pools, rows]
        self._checkpoint: list[Sequence] = []  # one for each row
        self._has_checkpoint = False  # of `length` tokens
        self._inputs: dict[tuple[int, str], tuple[int, torch.Tensor]] = {}  # by state row, and the length they reach to

    def begin(self, sequences: list[Sequence], num_new_tokens: int) -> None:
        """Have everything kept that is needed to take tokens of the next step back. SequenceError, OutOfMemory."""
        books, rows, past = sequences[0].pool.sequences, _rows_of(sequences), sequences[0].length
        start = past + num_new_tokens - (self.num_tokens or 0)
        keep_past(books, rows, self.length if self.num_tokens is None else max(self.length, start))
        if past == self.length:
            self._room_end = books.end.take(rows, axis=1)
            if past and not self._has_checkpoint and is_recurrent(books.allocator.plan.layers):
                self._save(books, sequences)

    def note_inputs(self, layer: int, name: str, past: int, inputs: torch.Tensor, width: int) -> None:
        """Note the inputs [rows, channels, width + new] of a convolution in a step after `past` tokens."""
        end = past + inputs.shape[-1] - width
        reached, known = self._inputs.get((layer, name), (past, inputs[..., :width]))
        num_known = known.shape[-1] - (reached - past)  # what lies behind are inputs of a step that was aborted
        if num_known > width:
            inputs = torch.cat([known[..., :num_known], inputs[..., width:]], dim=-1)
        if self.num_tokens is not None:
            inputs = inputs[..., -(width + self.num_tokens) :].clone()
        self._inputs[layer, name] = end, inputs

    def crop(self, sequences: list[Sequence], num_tokens: int) -> None:
        """Shorten the rows to `num_tokens`, which from then on are not speculative, and let go of their past.

        SequenceError for what is not kept, OutOfMemory; then nothing has changed.
        """
        pool, rows, length = sequences[0].pool, _rows_of(sequences), sequences[0].length
        books = pool.sequences
        restores = 0 < num_tokens < length
        states: dict[tuple[int, str], torch.Tensor] = {}
        if restores and is_recurrent(pool.plan.layers):
            self._check_checkpoint(length, num_tokens)
        elif restores and books.lifespans.states:
            states = self._states_at(pool.plan.layers, length, num_tokens)
            _own_states(books, rows)
        if num_tokens and length > self.length:
            rewind(books, rows, num_tokens, self._room_end)
        else:
            for sequence in sequences:
                sequence.crop(num_tokens)
            let_past_go(books, rows)
        if restores and self._has_checkpoint:
            exchange_states(books, rows, _rows_of(self._checkpoint))
        for (layer, name), state in states.items():
            store = stores_of(pool)[layer].state
            assert store is not None
            slots = torch.from_numpy(_slots_of(books, rows)).to(pool.device)
            store.grids[name].index_copy_(0, slots, state.to(store.grids[name].dtype))
        self._start_at(num_tokens)

    def stop(self, sequences: list[Sequence]) -> None:
        """Let go of the past of rows, as it is not to be kept any more."""
        if sequences:
            let_past_go(sequences[0].pool.sequences, _rows_of(sequences))
        self.forget()

    def forget(self) -> None:
        """Give up what is kept: the rows are gone."""
        for sequence in self.take():
            sequence.free()
        self._start_at(0)

    def take(self) -> list[Sequence]:
        """The sequences of the checkpoint, which are the caller's to free."""
        taken, self._checkpoint, self._has_checkpoint = self._checkpoint, [], False
        return taken

    def _start_at(self, length: int) -> None:
        self.length = length
        self._has_checkpoint = False
        self._inputs.clear()

    def _save(self, books: Sequences, sequences: list[Sequence]) -> None:
        pool = sequences[0].pool
        if len(self._checkpoint) != len(sequences):
            for sequence in self.take():
                sequence.free()
            self._checkpoint = pool.add_many([0] * len(sequences))
        rows, kept = _rows_of(sequences), _rows_of(self._checkpoint)
        _own_states(books, kept)
        for k in books.lifespans.states:
            origin = books.tables.origin[k]
            books.copy(k, books.tables.mirror[origin[rows]], books.tables.mirror[origin[kept]])
        self._has_checkpoint = True

    def _check_checkpoint(self, length: int, num_tokens: int) -> None:
        if self._has_checkpoint and num_tokens == self.length:
            return
        there = f"a checkpoint of {self.length}" if self._has_checkpoint else "no checkpoint"
        raise SequenceError(
            f"cannot crop from {length} to {num_tokens} tokens: there is {there}, and the recurrent states of other "
            "lengths are gone; crop to it and run the tokens behind it again, or fork the cache with copy.deepcopy()"
        )

    def _states_at(self, layers: Iterable[Layer], length: int, num_tokens: int) -> dict[tuple[int, str], torch.Tensor]:
        """The states [rows, channels, width] of all convolutions when the rows had `num_tokens` tokens."""
        states = {}
        for layer, declared in enumerate(layers):
            for memory in declared.memories:
                for row in memory.rows if isinstance(memory.lifetime, State) else ():
                    reached, inputs = self._inputs.get((layer, row.name), (-1, torch.empty(0)))
                    end = inputs.shape[-1] - (length - num_tokens)
                    if reached != length or end < row.shape[-1]:
                        raise SequenceError(
                            f"cannot crop from {length} to {num_tokens} tokens: of {row.name!r} of layer {layer} no "
                            "past was recorded to that length; call activate_past_recording() before the forward"
                        )
                    states[layer, row.name] = inputs[..., end - row.shape[-1] : end]
        return states


def is_recurrent(layers: Iterable[Layer]) -> bool:
    """Whether any layer has a state that is more than the last inputs of a convolution."""
    return any(
        isinstance(memory.lifetime, State) and any(not row.name.startswith("conv") for row in memory.rows)
        for layer in layers
        for memory in layer.memories
    )


def _own_states(books: Sequences, rows: Int64Array) -> None:
    """Copy the states that rows share with forks, as they are to be written."""
    if books.num_shared:
        Growth(books, rows, 0).commit()


def _slots_of(books: Sequences, rows: Int64Array) -> Int64Array:
    ids = books.tables.mirror[books.tables.origin[books.lifespans.states[0], rows]]
    slots: Int64Array = books.allocator.v2p[ids].astype(np.int64)
    return slots


def _rows_of(sequences: list[Sequence]) -> Int64Array:
    return np.array([sequence.row for sequence in sequences], np.int64)
