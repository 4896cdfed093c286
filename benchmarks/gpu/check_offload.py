"""Sequences out of the arena and back on a device: every bit, and no wait."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import torch_uma
from gpu.decode import layers_of
from gpu.device import Device
from gpu.report import Report
from torch_uma import CachePool, Layer, Memory, Row, State
from torch_uma.content import content_of, read_pages

SECTION = "Offload"


def check_offload(report: Report, device: Device) -> None:
    """All of it."""
    report.run(SECTION, "out of the arena and back, without a wait", partial(_round_trips, device))


def _round_trips(device: Device) -> str:
    """Sequences of several lengths, while what they leave is overwritten at once and the host runs ahead."""
    state = Layer(memories=(Memory(lifetime=State(), rows=(Row(name="s", shape=(999,), dtype=torch.float32),)),))
    layers = (*layers_of(4, 32, torch.float32), state)
    pool = CachePool(layers, memory="8MiB", page_size=4, max_tokens=400, device=device.torch)
    lengths, num_trips = (1, 37, 300), device.size(20, 2)
    sequences = [pool.add() for _ in lengths]
    for sequence, length in zip(sequences, lengths):
        pool.begin([sequence], length).commit()
    pool.arena.bytes.random_(0, 256)
    expected = [_held(sequence) for sequence in sequences]
    for number in range(num_trips):
        with device.without_syncs():
            for _ in range(2):
                offloaded = [pool.offload(sequence) for sequence in sequences]
                pool.arena.bytes.fill_(0)
                sequences = [pool.restore(each) for each in reversed(offloaded)][::-1]
        torch_uma.testing.scramble(pool, number)
        for sequence, held in zip(sequences, expected):
            assert all(torch.equal(found, part) for found, part in zip(_held(sequence), held, strict=True))
    pool.check()
    return f"{num_trips} times {len(lengths)} sequences, {sum(each.num_bytes for each in offloaded):,} bytes"


def _held(sequence: torch_uma.Sequence) -> list[Tensor]:
    return [read_pages(pages).cpu() for pages in content_of([sequence], sequence.length)]
