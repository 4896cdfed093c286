"""Host cost of the books, in microseconds of thread CPU time: a decode step, and each call of the allocator by itself.

A decode step of 256 or 1,024 sequences over four sub-pools (state, two windows, full), with 1 % turnover: free 1 % of
the sequences and admit as many, extend all by a token, release what fell behind the two windows, stage the tables. In
batch form, and from a dict. Also with an arena sixteen times as large, which must not cost more.

    python benchmarks/host_step.py --json host_step.json
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from records import Record, parser, publish, record

import torch_uma
from torch_uma import Full, Layer, Memory, Row, State, Window
from torch_uma.allocator import Allocator
from torch_uma.moves import pack

STEPS = 300


def four_subpools(memory: str) -> torch_uma.Plan:
    """State, windows of 1,024 and 128 tokens, full; entries small enough for books to be all that is measured."""
    rows = (Row(name="k", shape=(16,), dtype=torch.bfloat16), Row(name="v", shape=(16,), dtype=torch.bfloat16))
    lifetimes = (Full(), Window(128), Window(1024))
    layers = [Layer(memories=(Memory(lifetime=lifetime, rows=rows),)) for lifetime in lifetimes]
    state = Row(name="recurrent", shape=(512,), dtype=torch.float32)
    layers.append(Layer(memories=(Memory(lifetime=State(), rows=(state,)),)))
    return torch_uma.plan(layers, memory=memory, page_size=16)


def decode_step(num_sequences: int, form: str, memory: str, seed: int) -> float:
    """Median microseconds of one decode step of that many sequences."""
    chance = random.Random(seed)
    pool = torch_uma.CachePool(four_subpools(memory), device="cpu", max_sequences=2 * num_sequences, max_tokens=8192)
    sequences = [pool.add() for _ in range(num_sequences)]
    for sequence in sequences:
        pool.begin([sequence], chance.randrange(1, 3000)).commit()
    batch = pool.batch(sequences)
    turnover = 0.0
    micros = []
    for _ in range(STEPS):
        turnover += num_sequences / 100
        leaving = chance.sample(sequences, int(turnover))
        turnover -= len(leaving)
        prompts = [chance.randrange(1, 3000) for _ in leaving]
        places = {id(sequence): place for place, sequence in enumerate(sequences)}
        start = time.thread_time_ns()
        for sequence in leaving:
            sequence.free()
        joining = pool.add_many([1] * len(leaving))
        if leaving:
            batch.replace(leaving, joining)
        for old, new in zip(leaving, joining):
            sequences[places[id(old)]] = new
        step = pool.begin(batch if form == "batch" else dict.fromkeys(sequences, 1), 1)
        step.commit()
        micros.append((time.thread_time_ns() - start) / 1e3)
        for sequence, prompt in zip(joining, prompts):  # the prefill of what was admitted is another step
            pool.begin([sequence], prompt).commit()
    return statistics.median(micros[STEPS // 3 :])


def each(call: Callable[[], object], times: int = 400) -> float:
    """Least microseconds of one call, over five rounds."""
    best = float("inf")
    for _ in range(5):
        start = time.thread_time_ns()
        for _ in range(times):
            call()
        best = min(best, (time.thread_time_ns() - start) / 1e3 / times)
    return best


def one_page(allocator: Allocator, index: int) -> tuple[float, float]:
    """Median microseconds to allocate and to free one page."""
    allocating, freeing = [], []
    for _ in range(5):
        start = time.thread_time_ns()
        pages = [allocator.reserve_one(index) for _ in range(500)]
        middle = time.thread_time_ns()
        for page in pages:
            allocator.release_one(page)
        freeing.append((time.thread_time_ns() - middle) / 1e3 / 500)
        allocating.append((middle - start) / 1e3 / 500)
    return statistics.median(allocating), statistics.median(freeing)


def allocator_calls(memory: str) -> list[Record]:
    plan = four_subpools(memory)
    allocator = Allocator(plan)
    free_pages = [band.grid.num_pages for band in allocator.bands]
    allocator.reserve([100, free_pages[1] // 8, free_pages[2] // 8, free_pages[3] // 8])
    full = allocator.bands[-1]
    records = []
    for index, subpool in enumerate(plan.subpools):
        allocating, freeing = one_page(allocator, index)
        records.append(record(f"{memory}/{subpool.name}", "allocate_one_us", allocating, "us"))
        records.append(record(f"{memory}/{subpool.name}", "free_one_us", freeing, "us"))
    gap_pages = (full.start_bytes() - allocator.bands[2].end_bytes()) // full.grid.page_bytes
    asked = {
        "quote_in_place_us": (1, 16, 16, 16),
        "quote_redistribute_us": (0, 0, 0, gap_pages + 5),
        "quote_refused_us": (0, 0, 0, allocator.stats().gap_bytes // full.grid.page_bytes + 50),
    }
    hows = {"quote_in_place_us": "in_place", "quote_redistribute_us": "redistribute", "quote_refused_us": "refused"}
    for metric, demand in asked.items():
        quote = allocator.quote(demand)
        assert quote.how == hows[metric] and None not in (quote.relief or {}).values(), (metric, quote)
        records.append(record(memory, metric, each(partial(allocator.quote, demand)), "us"))
    return records


def compaction(seed: int) -> list[Record]:
    """Planning of some 2,500 moves in 10,000 pages."""
    rows = (Row(name="k", shape=(2048,), dtype=torch.bfloat16),)
    layers = [Layer(memories=(Memory(lifetime=Full(), rows=rows),))]
    allocator = Allocator(torch_uma.plan(layers, memory="700MiB", page_size=16))
    pages = allocator.reserve([10000])
    allocator.release(np.random.default_rng(seed).permutation(pages)[:5000])
    planned = pack(allocator.bands[0], None, 1 << 30)
    assert planned is not None
    case = f"{len(planned[0].sources)} moves in 10,000 pages"
    micros = each(lambda: pack(allocator.bands[0], None, 1 << 30), 20)
    return [record(case, "plan_compaction_us", micros, "us")]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    records = []
    for num_sequences in (256, 1024):
        for form in ("batch", "dict"):
            for memory in ("256MiB", "4GiB"):
                micros = decode_step(num_sequences, form, memory, arguments.seed)
                records.append(record(f"{num_sequences} sequences/{form}/{memory}", "decode_step_us", micros, "us"))
    for memory in ("256MiB", "4GiB"):
        records += allocator_calls(memory)
    records += compaction(arguments.seed)
    publish(records, arguments.json)


if __name__ == "__main__":
    main()
