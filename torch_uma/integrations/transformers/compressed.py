"""Layers of compressed attention: beside a window of keys, one entry for each whole group of tokens.

Owns what DeepSeek-V4 (`modeling_deepseek_v4.py`) calls on such a layer. A compressor projects each token to a value and
a gate. Those of tokens whose group is not whole yet wait in a buffer, which is a state; a whole group becomes one
entry, kept for ever; and where groups overlap, a part of the last one is kept for the next, as a state too. The
indexer, which chooses among entries, has a compressor of its own. `name` says whose: "compressor" or "indexer".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from torch_uma.errors import SequenceError
from torch_uma.integrations.transformers.given import GivenStep
from torch_uma.integrations.transformers.keep import check_no_gradients, check_stored, fetch, has_dtype, write
from torch_uma.integrations.transformers.places import StepPlaces
from torch_uma.integrations.transformers.steps import OwnSteps
from torch_uma.integrations.transformers.stores import COMPRESSOR
from torch_uma.layout import Full, Memory, Row, State

_Method = TypeVar("_Method", bound=Callable[..., Any])
_untraced: Callable[[_Method], _Method] = partial(
    torch.compiler.disable, reason="how many tokens wait for the others of their group changes from step to step"
)


def memories_of(layer: Any) -> list[Memory]:
    """What one of transformers' cache layers holds of this after a forward: states, and entries of groups of tokens."""
    if not hasattr(layer, "compressed_kv"):
        return []
    rate, states, entries = layer.compress_rate, [], []
    for name, compressed in layer.compressed_kv.items():
        entries.append(Row(name=name, shape=tuple(compressed.shape[2:]), dtype=compressed.dtype))
        for kind, shape in (
            ("buffer", lambda held: (rate - 1, *held.shape[2:])),
            ("overlap", lambda held: held.shape[1:]),
        ):
            for part in ("kv", "gate"):
                held = getattr(layer, f"{kind}_{part}", {}).get(name)
                if held is not None:
                    states.append(Row(name=f"{name}_{kind}_{part}", shape=tuple(shape(held)), dtype=held.dtype))
    return [
        Memory(lifetime=State(), rows=tuple(states)),
        Memory(lifetime=Full(), rows=tuple(entries), tokens_per_entry=rate),
    ]


class Groups:
    """Entries of groups of tokens of one layer, and the tokens that wait for theirs: to be mixed into a layer."""

    _layer: int
    _steps: GivenStep | OwnSteps

    @_untraced
    def store_compression_weights(self, name: str, kv: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, int]:
        """Takes values and gates [batch, num_new_tokens, width]; returns those of whole groups, and their position.

        The others wait. OutOfMemory, GradientError; SequenceError for rows of unequal length.
        """
        places = self._enter(f"{name} buffer", kv, kv.shape[1])
        states, rate = places.state(self._layer), self._rate(places)
        num_waiting = places.max_past % rate
        whole = []
        for part, new in (("kv", kv), ("gate", gate)):
            buffer = states[f"{name}_buffer_{part}"]
            if num_waiting:
                new = torch.cat([buffer[:, :num_waiting].to(new.dtype), new], dim=1)
            num_whole = new.shape[1] // rate * rate
            buffer[:, : new.shape[1] - num_whole].copy_(new[:, num_whole:])
            whole.append(new[:, :num_whole])
        return whole[0], whole[1], places.max_past - num_waiting

    @_untraced
    def update_overlap_state(
        self, name: str, chunk_kv: Tensor, chunk_gate: Tensor, head_dim: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Takes whole groups [batch, groups, group tokens, width]; keeps the first `head_dim` of the last one's width.

        Returns what was kept of the group before them, None if there was none.
        """
        places = self._enter(f"{name} overlap", chunk_kv)
        states, rate = places.state(self._layer), self._rate(places)
        before: list[Tensor | None] = []
        for part, chunk in (("kv", chunk_kv), ("gate", chunk_gate)):
            overlap = states[f"{name}_overlap_{part}"]
            before.append(overlap.clone() if places.max_past >= rate else None)
            overlap.copy_(chunk[:, -1, :, :head_dim])
        return before[0], before[1]

    @_untraced
    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """Stores the entries [batch, groups, width] of the groups that are whole now; returns those of all groups.

        What it returns may be a view of the arena, good until the next forward. GradientError.
        """
        places = self._enter(name, compressed)
        store, new = places.stores[self._layer].groups[name], (compressed.unsqueeze(1),)
        check_stored(store, new)
        subpool = store.subpool
        num_before = places.max_past // subpool.tokens_per_entry
        num_groups = num_before + compressed.shape[1]
        run = places.tokens[subpool.index].run
        if run is not None and has_dtype(store, new):
            first_page, pages_between_rows = run
            grid = store.grids[0]
            entries = grid.as_strided(
                (places.batch_size, num_groups, *grid.shape[2:]),
                (pages_between_rows * grid.stride(0), *grid.stride()[1:]),
                grid.storage_offset() + first_page * grid.stride(0),
            )
            entries[:, num_before:].copy_(compressed)
            return entries
        positions = torch.arange(num_groups, device=compressed.device) * subpool.tokens_per_entry
        where = places.step.entries(subpool, positions.expand(places.batch_size, -1))
        write(places.arena, store, where[:, num_before:], new)
        (fetched,) = fetch(places.arena, store, where, compressed.dtype)
        return fetched

    def _enter(self, call: str, like: Tensor, num_new_tokens: int | None = None) -> StepPlaces:
        """The places of the step, which changes states from now on. SequenceError for rows of unequal length."""
        check_no_gradients(like)
        places = self._steps.enter(self._layer, call, num_new_tokens=num_new_tokens, like=like)
        assert places is not None
        if not places.is_even:
            raise SequenceError(
                f"layer {self._layer} makes one entry of a group of tokens, for all rows at once, but they hold "
                f"{places.past.tolist()} tokens; step sequences of one length together"
            )
        places.step.state_touched = True  # in place: a step that aborts now cannot put it back
        return places

    def _rate(self, places: StepPlaces) -> int:
        return places.stores[self._layer].groups[COMPRESSOR].subpool.tokens_per_entry
