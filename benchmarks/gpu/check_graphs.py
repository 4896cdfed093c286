"""Captured graphs: a decode of several steps with allocation in it, pages moved between replays."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import torch_uma
from gpu.check_ops import dense
from gpu.decode import KV_HEADS, WINDOW, Decode, layers_of
from gpu.device import Device
from gpu.report import Report
from torch_uma import CachePool

SECTION = "Graphs"
NUM_STEPS = 6


def check_graphs(report: Report, device: Device) -> None:
    """All of them."""
    report.run(SECTION, "K steps in one graph, pages moved between replays", partial(_replay, device))


def _replay(device: Device) -> str:
    """Against dense attention in fp64 over what was written, through multi-steps in which rows stop early."""
    num_layers, dim, num_rows, num_replays = 4, 32, 5, device.size(12, 3)
    pool = CachePool(
        layers_of(num_layers, dim, torch.float32), memory="8MiB", page_size=4, max_tokens=400, device=device.torch
    )
    torch_uma.testing.poison(pool)
    batch = pool.batch([pool.add() for _ in range(num_rows)])
    written: list[list[Tensor]] = [[] for _ in range(num_rows)]
    with pool.begin_steps(batch, NUM_STEPS) as multi:
        decode = Decode(device, pool, multi, num_layers, dim)
        replay = device.captured(decode.run, decode.run)
    for number in range(num_replays):
        torch_uma.testing.scramble(pool, number)
        decode.refill()
        with device.without_syncs(), pool.begin_steps(batch, NUM_STEPS) as multi:
            stops = torch.tensor([NUM_STEPS, number % (NUM_STEPS + 1), 1, NUM_STEPS, 3])
            multi.stacks.limits.copy_((stops + torch.from_numpy(multi.past)).to(device.torch, non_blocking=True))
            replay()
            multi.commit(stops.tolist())
        assert multi.stacks.lengths.tolist() == [sequence.length for sequence in batch]
        new, queries, attended = (part.cpu().clone() for part in (decode.new, decode.queries, decode.attended))
        for step in range(NUM_STEPS):
            for row in range(num_rows):
                if step >= int(stops[row]):
                    assert not attended[step, :, row].any()
                    continue
                written[row].append(new[step, row])
                key, value = torch.stack(written[row]).unbind(1)
                for layer in range(num_layers):
                    exact = dense(queries[step, row], key, value, KV_HEADS, WINDOW if layer % 2 else 0)
                    torch.testing.assert_close(attended[step, layer, row].double(), exact, rtol=1e-4, atol=1e-5)
        pool.check()
    return f"{num_replays} replays of {NUM_STEPS} steps"
