"""A decode of several steps as one graph, without a model: pages taken, rows written and attended to on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gpu.device import Device
from torch_uma import CachePool, Full, Layer, Memory, Row, Window
from torch_uma.multistep import MultiStep
from torch_uma.ops import dtype_name
from torch_uma.plan import SubPool

WINDOW = 40
HEADS, KV_HEADS = 8, 2


def layers_of(num_layers: int, dim: int, dtype: torch.dtype) -> list[Layer]:
    """Layers of keys and values, every second one with a window."""
    rows = tuple(Row(name=name, shape=(KV_HEADS, dim), dtype=dtype) for name in ("k", "v"))
    lifetimes = (Full(), Window(WINDOW))
    return [Layer(memories=(Memory(lifetime=lifetimes[i % 2], rows=rows),)) for i in range(num_layers)]


class Decode:
    """`num_steps` steps over every row of a batch, of random queries, keys and values.

    Attributes:
        new: [steps, rows, 2, KV_HEADS * dim], keys and values of each token, the same in every layer.
        queries: [steps, rows, HEADS, dim].
        attended: [steps, layers, rows, HEADS, dim], what `run` leaves.
    """

    def __init__(self, device: Device, pool: CachePool, multi: MultiStep, num_layers: int, dim: int) -> None:
        self.pool, self.stacks, self.num_steps, self.dim = pool, multi.stacks, multi.num_steps, dim
        self.dtype = pool.plan.layers[0].memories[0].rows[0].dtype
        num_rows = len(multi.rows)
        options: dict[str, Any] = {"dtype": self.dtype, "device": device.torch}
        self.new = torch.empty((self.num_steps, num_rows, 2, KV_HEADS * dim), **options)
        self.queries = torch.empty((self.num_steps, num_rows, HEADS, dim), **options)
        self.attended = torch.full((self.num_steps, num_layers, num_rows, HEADS, dim), torch.nan, **options)
        self._starts = torch.arange(num_rows + 1, device=device.torch)
        self._where = [self._layer(layer) for layer in range(num_layers)]
        self.refill()

    def refill(self) -> None:
        """Fresh random numbers, and poison where results will be."""
        self.new.normal_()
        self.queries.normal_()
        self.attended.fill_(torch.nan)

    def run(self) -> None:
        """All steps; what a graph captures."""
        for step in range(self.num_steps):
            self.stacks.advance()
            for layer, (place, subpool, offsets_bytes) in enumerate(self._where):
                where = (self.pool.arena.bytes, subpool.origin_bytes, subpool.entry_bytes)
                self._write(step, place, where, offsets_bytes)
                self.attended[step, layer].copy_(self._attend(step, subpool, where, offsets_bytes))

    def _write(self, step: int, place: int, where: tuple[Tensor, int, int], offsets_bytes: list[int]) -> None:
        arena, origin_bytes, entry_bytes = where
        rows = [self.new[step, :, i].unsqueeze(1) for i in range(2)]
        names = [dtype_name(self.dtype)] * 2
        torch.ops.torch_uma.write_rows(
            arena, rows, self.stacks.entries[place], origin_bytes, entry_bytes, offsets_bytes, names, [None] * 2
        )

    def _attend(self, step: int, subpool: SubPool, where: tuple[Tensor, int, int], offsets_bytes: list[int]) -> Tensor:
        lifetime = subpool.lifetime
        attended, _ = torch.ops.torch_uma.attend(
            where[0],
            self.queries[step],
            self._starts,
            self.pool.tables.page_table(subpool.index),
            self.pool.tables.v2p,
            self.stacks.rows,
            self.stacks.lengths,
            *where[1:],
            subpool.page_size,
            offsets_bytes,
            [self.dim, self.dim],
            KV_HEADS,
            [dtype_name(self.dtype)] * 2,
            self.dim**-0.5,
            window=lifetime.num_tokens if isinstance(lifetime, Window) else 0,
        )
        result: Tensor = attended
        return result

    def _layer(self, layer: int) -> tuple[int, SubPool, list[int]]:
        placed = self.pool.plan.where(layer)
        subpool = placed[0][0]
        return self.stacks.paged.index(subpool), subpool, [row.offset_bytes for _, row in placed]
