"""`attend` where a sequence lies in 32 runs, against one run; and its packed queries against torch's `enable_gqa`.

A step over all layers is timed, so that keys and values come from memory and not from a cache, by a plan that is made
once for the step. Prefill is of the last 256 tokens. Plans are timed on their own, and the op with its plan made anew.

python benchmarks/attend_runs.py --json attend_runs.json
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from records import Record, parser, publish, record
from torch.nn.functional import scaled_dot_product_attention

import torch_uma.ops  # noqa: F401
from torch_uma.ops.attend import Reads, attend_reads, plan_reads
from torch_uma.ops.reads import answer

PAGE_SIZE = 16
NUM_LAYERS = 4
HEAD_DIM = 64
GROUP = 4
SCALE = HEAD_DIM**-0.5
PADDING_BYTES = 128


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Sequences of equal length in an arena, each in as many runs, and the queries of their last tokens."""

    arena: torch.Tensor
    page_table: torch.Tensor
    v2p: torch.Tensor
    lengths: torch.Tensor
    query: torch.Tensor
    query_starts: torch.Tensor
    num_kv_heads: int
    entry_bytes: int

    @classmethod
    def of(
        cls, chance: random.Random, num_sequences: int, length: int, num_new: int, num_kv_heads: int, num_runs: int
    ) -> Batch:
        columns = length // PAGE_SIZE
        pieces = []
        for row in range(num_sequences):
            cuts = [0, *sorted(chance.sample(range(1, columns), num_runs - 1)), columns]
            pieces += [(row, first, end) for first, end in zip(cuts, cuts[1:])]
        if num_runs > 1:
            chance.shuffle(pieces)
        page_table = np.empty((num_sequences, columns), np.int32)
        page = 0
        for row, first, end in pieces:
            page_table[row, first:end] = np.arange(page, page + end - first)
            page += end - first + (num_runs > 1)
        entry_bytes = NUM_LAYERS * _token_bytes(num_kv_heads) + PADDING_BYTES
        arena = torch.empty(page * PAGE_SIZE * entry_bytes, dtype=torch.uint8)
        arena.view(torch.float32).normal_()
        return cls(
            arena=arena,
            page_table=torch.from_numpy(page_table),
            v2p=torch.arange(page, dtype=torch.int32),
            lengths=torch.full((num_sequences,), length),
            query=torch.randn(num_sequences * num_new, num_kv_heads * GROUP, HEAD_DIM),
            query_starts=torch.arange(num_sequences + 1) * num_new,
            num_kv_heads=num_kv_heads,
            entry_bytes=entry_bytes,
        )

    @property
    def rows(self) -> torch.Tensor:
        return torch.arange(len(self.lengths))

    def offsets_bytes(self, layer: int) -> list[int]:
        token_bytes = _token_bytes(self.num_kv_heads)
        return [layer * token_bytes, layer * token_bytes + token_bytes // 2]

    def plan_anew(self) -> None:
        """Plan as if no step had asked for the same before."""
        answer.cache_clear()
        assert self.plan().pieces is not None or self.query_starts[1] > 1

    def plan(self) -> Reads:
        tables = (self.page_table, self.v2p, self.rows, self.lengths, self.query_starts)
        page_table, v2p, rows, lengths, query_starts = (each.numpy() for each in tables)
        token_bytes = _token_bytes(self.num_kv_heads)
        return plan_reads(page_table, v2p, rows, lengths, query_starts, PAGE_SIZE, token_bytes=token_bytes)

    def layout(self, layer: int) -> tuple[Any, ...]:
        dims, dtypes = [HEAD_DIM] * 2, ["float32"] * 2
        return (self.offsets_bytes(layer), dims, self.num_kv_heads, dtypes, SCALE)

    def step(self, reads: Reads) -> None:
        """Attention of every layer, by one plan."""
        for layer in range(NUM_LAYERS):
            attend_reads(self.arena, self.query, reads, 0, self.entry_bytes, *self.layout(layer))

    def op_step(self) -> None:
        """Attention of every layer by the op, which plans each time."""
        for layer in range(NUM_LAYERS):
            torch.ops.torch_uma.attend(
                *(self.arena, self.query, self.query_starts, self.page_table, self.v2p, self.rows, self.lengths),
                *(0, self.entry_bytes, PAGE_SIZE, *self.layout(layer)),
            )

    def stock_step(self) -> None:
        """Decode of every layer by torch over views of the runs, one a sequence."""
        numbers = self.arena.view(torch.float32)
        entry = self.entry_bytes // 4
        length = int(self.lengths[0])
        size = (len(self.lengths), self.num_kv_heads, length, HEAD_DIM)
        strides = (length * entry, HEAD_DIM, entry, 1)
        query = self.query.unsqueeze(2)
        for layer in range(NUM_LAYERS):
            key, value = (numbers.as_strided(size, strides, at // 4) for at in self.offsets_bytes(layer))
            scaled_dot_product_attention(query, key, value, scale=SCALE, enable_gqa=True)


def _token_bytes(num_kv_heads: int) -> int:
    return 2 * num_kv_heads * HEAD_DIM * 4


def in_turns(rounds: int, *runs: Callable[[], object]) -> Sequence[float]:
    """Median milliseconds of each, one after another in every round."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds + 1):
        for run, taken in zip(runs, times):
            start = time.perf_counter()
            run()
            if turn:
                taken.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(taken) for taken in times]


def compare(chance: random.Random, kind: str, length: int, num_kv_heads: int, rounds: int) -> list[Record]:
    num_sequences, num_new = (4, 1) if kind == "decode" else (1, 256)
    one, many = (Batch.of(chance, num_sequences, length, num_new, num_kv_heads, num_runs) for num_runs in (1, 32))
    one_plan, many_plan = one.plan(), many.plan()
    rounds = rounds if kind == "decode" else max(3, rounds // 3)
    case = f"{kind} {length} x {num_sequences}, {num_kv_heads} kv heads"
    one_ms, many_ms, op_ms = in_turns(rounds, lambda: one.step(one_plan), lambda: many.step(many_plan), many.op_step)
    records = [
        record(case, "step_32_runs", many_ms, "ms", reference=one_ms),
        record(case, "op_step_32_runs", op_ms, "ms", reference=one_ms),
    ]
    if kind == "decode":
        packed_ms, stock_ms = in_turns(rounds, lambda: one.step(one_plan), one.stock_step)
        records.append(record(case, "step_packed", packed_ms, "ms", reference=stock_ms))
    one_us, many_us = (1e3 * ms for ms in in_turns(50, one.plan_anew, many.plan_anew))
    return [
        *records,
        record(case, "plan_1_run", one_us, "us"),
        record(case, "plan_32_runs", many_us, "us"),
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--kv-heads", type=int, nargs="+", default=[2, 8])
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    chance = random.Random(arguments.seed)
    records = []
    for num_kv_heads in arguments.kv_heads:
        for kind in ("decode", "prefill"):
            for length in (4096, 16384):
                records += compare(chance, kind, length, num_kv_heads, arguments.rounds)
    publish(records, arguments.json)


if __name__ == "__main__":
    main()
