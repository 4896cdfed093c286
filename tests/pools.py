"""Small pools of every kind of memory, and a plain model of what should be in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from arenas import books

from torch_uma.layout import Chunk, Full, Layer, Lifetime, Memory, Row, State, Window
from torch_uma.plan import SubPool, plan
from torch_uma.pool import CachePool
from torch_uma.sequence import Sequence
from torch_uma.step import Step
from torch_uma.testing import poison


def layer(lifetime: Lifetime, tokens_per_entry: int = 1, width: int = 4) -> Layer:
    row = Row(name="x", shape=(width,), dtype=torch.float32)
    return Layer(memories=(Memory(lifetime=lifetime, rows=(row,), tokens_per_entry=tokens_per_entry),))


KINDS: dict[str, list[Layer]] = {
    "full": [layer(Full())],
    "state": [layer(State(), width=12)],
    "window": [layer(Window(5))],
    "chunk": [layer(Chunk(6))],
    "hybrid": [layer(Full()), layer(Window(7), width=8), layer(State(), width=20)],
    "every": [
        layer(Full()),
        layer(Window(7), width=8),
        layer(Window(1), width=12),
        layer(Chunk(5)),
        layer(Full(), tokens_per_entry=4),
        layer(State(), width=20),
    ],
}


def make_pool(
    kinds: str | list[Layer] = "every", *, memory: int = 1 << 14, page_size: int = 3, **arguments: Any
) -> CachePool:
    """A pool on the CPU, poisoned."""
    layers = KINDS[kinds] if isinstance(kinds, str) else kinds
    made = plan(layers, memory=memory, page_size=page_size)
    pool = CachePool(made, device="cpu", **{"max_sequences": 12, **arguments})
    poison(pool)
    return pool


def snapshot(pool: CachePool) -> dict[str, Any]:
    """Everything that a pool knows, in a form that `==` compares."""
    allocator = pool.allocator
    sequences = pool.sequences
    names = (
        "length",
        "first",
        "end",
        "capacity",
        "last_needing",
        "references",
        "may_share",
        "torn",
        "live",
        "last_epoch",
    )
    return {
        "allocator": books(allocator),
        "sequences": {name: getattr(sequences, name).tolist() for name in names},
        "num_shared": sequences.num_shared,
        "cells": pool.tables.mirror[: pool.tables.v2p_base].tolist(),
        "epoch": pool.epoch,
    }


class Content:
    """What every sequence should hold: a number for each of its tokens, and one for its state.

    Tokens are written where the device's tables say, and read where the host's tables say.
    """

    def __init__(self, pool: CachePool) -> None:
        self.pool = pool
        self.tokens: dict[Sequence, list[int]] = {}
        self.states: dict[Sequence, int | None] = {}
        self.num_written = 0

    def add(self, sequence: Sequence) -> None:
        self.tokens[sequence], self.states[sequence] = [], None

    def fork(self, source: Sequence, copy: Sequence) -> None:
        self.tokens[copy], self.states[copy] = list(self.tokens[source]), self.states[source]

    def free(self, sequence: Sequence) -> None:
        del self.tokens[sequence], self.states[sequence]

    def crop(self, sequence: Sequence, num_tokens: int) -> None:
        if num_tokens < len(self.tokens[sequence]):
            del self.tokens[sequence][num_tokens:]
            if num_tokens == 0:
                self.states[sequence] = None

    def write(self, step: Step) -> list[list[int]]:
        """Write a step's new tokens and states into the arena; returns the numbers, for `commit`."""
        counts = torch.from_numpy(np.broadcast_to(step.num_new_tokens, step.rows.shape).copy())
        ahead = torch.arange(int(counts.max())).expand(len(counts), -1)
        values = self.num_written + 1 + torch.arange(ahead.numel()).view(ahead.shape)
        self.num_written += values.numel()
        is_new = ahead < counts[:, None]
        positions = torch.where(is_new, torch.from_numpy(step.past)[:, None] + ahead, -1)
        for subpool in self.pool.plan.subpools:
            grid = self._numbers(subpool)
            if subpool.is_state:
                step.state_touched = True
                self.states.update(dict.fromkeys(step.sequences))
                last = values.gather(1, counts[:, None] - 1)
                grid[torch.from_numpy(step.slots().astype(np.int64)), 0] = last[:, 0].float()
                continue
            entries = step.entries(subpool, positions)
            stored = entries >= 0
            grid[entries[stored], (positions % subpool.tokens_per_entry)[stored]] = values[stored].float()
        return [row[:count] for row, count in zip(values.tolist(), counts.tolist(), strict=True)]

    def commit(self, step: Step, values: list[list[int]]) -> None:
        for sequence, new in zip(step.sequences, values, strict=True):
            self.tokens[sequence] += new
            self.states[sequence] = new[-1]

    def abort(self, step: Step) -> list[Sequence]:
        """The states that were there before are not any more; returns whose."""
        return [sequence for sequence, past in zip(step.sequences, step.past.tolist(), strict=True) if past]

    def verify(self) -> None:
        """Every token that a later query reads, and every state, is where the tables say."""
        allocator, tables = self.pool.allocator, self.pool.tables
        for sequence, tokens in self.tokens.items():
            row, length = sequence._row, len(tokens)
            assert self.pool.sequences.length[row] == length
            for subpool in self.pool.plan.subpools:
                grid = self._numbers(subpool)
                origin = int(tables.origin[subpool.index, row])
                if subpool.is_state:
                    state = self.states[sequence]
                    if state is not None:
                        assert grid[allocator.v2p[tables.mirror[origin]], 0] == state, (sequence, subpool.name)
                    continue
                positions = np.arange(subpool.lifetime.first_needed(length), length)
                ids = tables.mirror[origin + positions // subpool.page_tokens]
                assert (ids >= 0).all(), (sequence, subpool.name)
                within = positions % subpool.page_tokens // subpool.tokens_per_entry
                entries = allocator.v2p[ids].astype(np.int64) * subpool.page_size + within
                found = grid[torch.from_numpy(entries), torch.from_numpy(positions % subpool.tokens_per_entry)]
                assert found.tolist() == tokens[len(tokens) - len(positions) :], (sequence, subpool.name)

    def _numbers(self, subpool: SubPool) -> torch.Tensor:
        """[entries, numbers] fp32 over the whole grid."""
        grid = self.pool.arena.bytes[subpool.origin_bytes :][: subpool.num_pages * subpool.page_bytes]
        return grid.view(torch.float32).view(subpool.num_pages * subpool.page_size, -1)


def advance(content: Content, sequences: list[Sequence], num_new_tokens: int | list[int]) -> None:
    """One whole step, written, committed and checked."""
    step = content.pool.begin(sequences, num_new_tokens)
    values = content.write(step)
    content.pool.check()
    step.commit()
    content.commit(step, values)
    content.pool.check()
    content.verify()
