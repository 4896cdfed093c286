"""Compaction against a plain copy of as many bytes, in turns: some 2,500 of 10,000 pages of 64 KiB move in one launch.

Both copy with torch's number of threads, or `--threads`.

python benchmarks/compaction.py --json compaction.json
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import torch
from records import parser, publish, record
from torch.utils._python_dispatch import TorchDispatchMode

import torch_uma
from torch_uma import Full, Layer, Memory, Row

NUM_PAGES = 10_000


class Launches(TorchDispatchMode):
    """Counts the calls of `relocate`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.count += op is torch.ops.torch_uma.relocate.default
        return op(*args, **(kwargs or {}))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    chance = random.Random(arguments.seed)
    row = Row(name="k", shape=(2048,), dtype=torch.bfloat16)
    plan = torch_uma.plan([Layer(memories=(Memory(lifetime=Full(), rows=(row,)),))], memory="640MiB", page_size=16)
    pool = torch_uma.CachePool(plan, device="cpu", max_sequences=NUM_PAGES, max_tokens=16)
    pool.arena.bytes.fill_(1)
    sequences = pool.add_many([16] * NUM_PAGES)
    compacting, copying, moved = [], [], []
    for _ in range(arguments.rounds):
        chance.shuffle(sequences)
        for sequence in sequences[NUM_PAGES // 2 :]:
            sequence.free()
        del sequences[NUM_PAGES // 2 :]
        pool.stats()  # what was let go of is released now, not within the measurement
        with Launches() as launches:
            start = time.perf_counter()
            moved.append(pool.compact())
            compacting.append(time.perf_counter() - start)
        assert launches.count == 1, launches.count
        source = torch.ones(moved[-1], dtype=torch.uint8)
        destination = torch.ones(moved[-1], dtype=torch.uint8)
        start = time.perf_counter()
        destination.copy_(source)
        copying.append(time.perf_counter() - start)
        sequences += pool.add_many([16] * (NUM_PAGES - len(sequences)))
    pool.check()
    gigabytes_per_s = [bytes_ / seconds / 1e9 for bytes_, seconds in zip(moved, compacting)]
    plain = [bytes_ / seconds / 1e9 for bytes_, seconds in zip(moved, copying)]
    case = f"{moved[-1] // plan.subpools[0].page_bytes:,} of {NUM_PAGES:,} pages, {arguments.threads} threads"
    ratio = statistics.median(ours / theirs for ours, theirs in zip(gigabytes_per_s, plain))
    speed = statistics.median(gigabytes_per_s)
    publish(
        [record(case, "compaction_speed", speed, "GB/s", reference=statistics.median(plain), ratio=ratio)],
        arguments.json,
    )


if __name__ == "__main__":
    main()
