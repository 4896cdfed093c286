"""Sequences out of the arena and back, against a plain copy of as many bytes; and what the host does for one of them.

Pages are scattered before they go. The host memory of the plain copy is got in the same way. Host time is that of a
call over four sub-pools with small entries, so that next to nothing is copied; on CUDA, until the call has returned.

OMP_NUM_THREADS=1 python benchmarks/offload.py --json offload.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from geometries import GEOMETRIES
from host_step import four_subpools
from records import Record, parser, publish, record
from torch import Tensor

import torch_uma
from torch_uma.arena import host_memory


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--device", default="cpu")
    options.add_argument("--num-tokens", type=int, default=2000)
    options.add_argument("--geometries", nargs="+", default=["gpt-oss-20b", "three-kinds"], choices=list(GEOMETRIES))
    options.add_argument("--rounds", type=int, default=9)
    arguments = options.parse_args()
    device, num_tokens, rounds = torch.device(arguments.device), arguments.num_tokens, arguments.rounds
    records: list[Record] = []
    for name in arguments.geometries:
        plan = torch_uma.plan(GEOMETRIES[name](), memory="1GiB", num_tokens=num_tokens)
        records += speed(f"{name}, {num_tokens:,} tokens", plan, device, num_tokens, rounds)
    records += host_time(f"four sub-pools, {num_tokens:,} tokens", device, num_tokens, 20 * rounds)
    publish(records, arguments.json)


def speed(case: str, plan: torch_uma.Plan, device: torch.device, num_tokens: int, rounds: int) -> list[Record]:
    """Bytes a second both ways, and the ratios to plain copies in the same round."""
    pool = torch_uma.CachePool(plan, device=device)
    pool.arena.bytes.fill_(1)
    sequence = made(pool, num_tokens)
    ours: dict[str, list[float]] = {"offload": [], "restore": []}
    plain: dict[str, list[float]] = {"offload": [], "restore": []}
    for turn in range(rounds + 1):
        torch_uma.testing.scramble(pool, turn)
        took, offloaded = timed(partial(pool.offload, sequence), device)
        ours["offload"].append(took)
        # Always somewhere else, as the pages are: a cache may hold the last place.
        some = pool.arena.bytes[turn * offloaded.num_bytes % (plan.arena_bytes - offloaded.num_bytes) :]
        some = some[: offloaded.num_bytes]
        took, hosts = timed(partial(to_host, some), device)
        plain["offload"].append(took)
        took, sequence = timed(partial(pool.restore, offloaded), device)
        ours["restore"].append(took)
        plain["restore"].append(timed(partial(from_host, hosts, some), device)[0])
    pool.check()
    records = []
    for name in ours:
        seconds, others = ours[name][1:], plain[name][1:]  # the first round gets the memory
        speeds = [offloaded.num_bytes / statistics.median(each) / 1e9 for each in (seconds, others)]
        ratio = statistics.median(other / own for own, other in zip(seconds, others))
        records.append(record(case, f"{name}_speed", speeds[0], "GB/s", reference=speeds[1], ratio=ratio))
    return records


def host_time(case: str, device: torch.device, num_tokens: int, rounds: int) -> list[Record]:
    """Median microseconds of a call, in CPU time of its thread."""
    pool = torch_uma.CachePool(four_subpools("256MiB"), device=device)
    sequence = made(pool, num_tokens)
    micros: dict[str, list[float]] = {"offload": [], "restore": []}
    for _ in range(rounds):
        start = time.thread_time_ns()
        offloaded = pool.offload(sequence)
        middle = time.thread_time_ns()
        sequence = pool.restore(offloaded)
        micros["offload"].append((middle - start) / 1e3)
        micros["restore"].append((time.thread_time_ns() - middle) / 1e3)
    return [record(case, f"{name}_host_time", statistics.median(took), "us") for name, took in micros.items()]


def made(pool: torch_uma.CachePool, num_tokens: int) -> torch_uma.Sequence:
    sequence = pool.add(num_tokens)
    pool.begin([sequence], num_tokens).commit()
    return sequence


def to_host(plain: Tensor) -> list[Tensor]:
    """A copy in new host memory."""
    if plain.is_cuda:
        return [torch.empty_like(plain, device="cpu", pin_memory=True).copy_(plain, non_blocking=True)]
    return [host_memory(len(plain)).copy_(plain)]


def from_host(hosts: list[Tensor], plain: Tensor) -> None:
    """Copy it back and give the memory up, as `restore` does."""
    plain.copy_(hosts.pop(), non_blocking=True)


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """The seconds until what was called has been done, on the device too, and what it gave; CPU time of one thread."""
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - start, result


if __name__ == "__main__":
    main()
