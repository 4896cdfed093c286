"""How many requests are resident at their final length in a given number of bytes.

For each geometry, page size and length mix, three policies on the same code: the arena; fixed pools at the split that
is best for the worst of the mixes; fixed pools at the default split of a widely used engine. A request of prompt +
output = L tokens stores L tokens. The requests are really allocated (books and tables; the arena itself takes no
memory), after random churn: the pool is filled with requests of mixed lengths, which then leave one by one, in random
order, while requests of length L take their room.

The reference is the exact fit: bytes of the arena over bytes of a request with one-token pages and without any
padding, a window of n tokens counted as n (rounded up to pages where the page does not divide it).

    python benchmarks/capacity.py --json capacity.json
    python benchmarks/capacity.py --geometry gpt-oss-20b --page-size 16 1
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from geometries import GEOMETRIES
from records import Record, parser, publish, record

import torch_uma
from torch_uma.errors import OutOfMemory, PlanError
from torch_uma.layout import Chunk, State, Window
from torch_uma.plan import Plan, SubPool
from torch_uma.simulate.splits import default_split

MIXES = ((128, 128), (512, 128), (1024, 512), (4096, 512), (16384, 1024))


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The exact fit of one length."""

    num_requests: int
    left_bytes: int


def exact_bytes(subpool: SubPool, num_tokens: int, page_size: int) -> float:
    """Bytes that a request of `num_tokens` tokens cannot do without in one sub-pool."""
    entry_bytes = sum(placed.row.num_bytes for placed in subpool.layout.rows)
    match subpool.lifetime:
        case State():
            return entry_bytes
        case Window(window):
            num_tokens = min(num_tokens, math.ceil(window / page_size) * page_size)
        case Chunk():
            num_tokens -= subpool.lifetime.first_needed(num_tokens)
    return num_tokens / subpool.tokens_per_entry * entry_bytes


def exact_fit(plan: Plan, num_tokens: int, page_size: int) -> Fit:
    request_bytes = sum(exact_bytes(subpool, num_tokens, page_size) for subpool in plan.subpools)
    num_requests = int(plan.arena_bytes // request_bytes)
    return Fit(num_requests=num_requests, left_bytes=int(plan.arena_bytes - num_requests * request_bytes))


def best_split(plan: Plan, page_size: int) -> dict[str, float]:
    """The shares, among those right for some length, under which the worst of the mixes fares best."""

    def worst_ratio(shares: Mapping[str, float]) -> float:
        ratios = []
        for mix in MIXES:
            fitting = min(
                int(shares[subpool.name] * plan.arena_bytes // (subpool.page_bytes * pages))
                for subpool, pages in zip(plan.subpools, plan.demand(sum(mix)))
                if pages
            )
            ratios.append(fitting / max(1, exact_fit(plan, sum(mix), page_size).num_requests))
        return min(ratios)

    candidates = []
    for eighth in range(7 * 8, 15 * 8):
        demand_bytes = [
            subpool.page_bytes * pages for subpool, pages in zip(plan.subpools, plan.demand(round(2 ** (eighth / 8))))
        ]
        candidates.append(
            {subpool.name: taken / sum(demand_bytes) for subpool, taken in zip(plan.subpools, demand_bytes)}
        )
    return max(candidates, key=worst_ratio)


def num_resident(plan: Plan, num_tokens: int, split: Mapping[str, float] | None, seed: int) -> int:
    """Requests of `num_tokens` tokens that are resident at once, after churn."""
    chance = random.Random(seed)
    lengths = [sum(mix) for mix in MIXES if plan.num_sequences(sum(mix))]
    rows = plan.num_sequences(min(num_tokens, *lengths)) + 1
    longest = max(num_tokens, *lengths)
    pool = torch_uma.CachePool(plan, device="meta", max_sequences=rows, max_tokens=longest, split=split)
    leaving: list[torch_uma.Sequence] = []
    try:
        while len(leaving) < rows - 1:
            leaving.append(pool.add(chance.choice(lengths)))
    except OutOfMemory:
        pass  # full, as wanted
    chance.shuffle(leaving)
    resident = 0
    while True:
        try:
            pool.add(num_tokens)
            resident += 1
        except OutOfMemory:
            if not leaving:
                pool.check()
                return resident
            leaving.pop().free()


def measure(name: str, memory: str, page_size: int, seed: int) -> list[Record]:
    records = []
    plan = torch_uma.plan(GEOMETRIES[name](), memory=memory, page_size=page_size)
    splits = {"arena": None, "split_best": best_split(plan, page_size), "split_default": default_split(plan)}
    page_of_each_bytes = sum(subpool.page_bytes for subpool in plan.subpools if not subpool.is_state)
    for prompt, output in MIXES:
        exact = exact_fit(plan, prompt + output, page_size)
        for policy, split in splits.items():
            try:
                value = num_resident(plan, prompt + output, split, seed)
            except PlanError:
                value = 0  # a split that leaves some kind without room for one sequence
            case = f"{name}/page{page_size}/{prompt}+{output}"
            may_miss_one = exact.num_requests < 100 and exact.left_bytes < plan.sink_bytes + page_of_each_bytes
            records.append(
                record(
                    case,
                    "resident_over_exact_fit",
                    value,
                    "requests",
                    reference=exact.num_requests,
                    policy=policy,
                    may_miss_one=may_miss_one,
                )
            )
    return records


def shortfalls(records: list[Record]) -> list[Record]:
    """The arena's figures below the bound: 0.99 at larger pages, 0.999 at one-token pages, one less where few fit."""
    missed = []
    for entry in records:
        bound = 0.999 if "/page1/" in entry["case"] else 0.99
        spared = entry["may_miss_one"] and entry["value"] >= entry["reference"] - 1
        if entry["policy"] == "arena" and entry["ratio"] < bound and not spared:
            missed.append(entry)
    return missed


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--geometry", nargs="+", choices=sorted(GEOMETRIES), default=list(GEOMETRIES))
    options.add_argument("--page-size", nargs="+", type=int, default=[16, 1])
    options.add_argument("--memory", default="8GiB")
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    records = [
        entry
        for name in arguments.geometry
        for page_size in arguments.page_size
        for entry in measure(name, arguments.memory, page_size, arguments.seed)
    ]
    publish(records, arguments.json)
    missed = shortfalls(records)
    print(f"seed {arguments.seed}: {len(records)} figures, {len(missed)} of the arena's below the bound")
    for entry in missed:
        print("  below:", entry["case"], entry["value"], "of", entry["reference"])


if __name__ == "__main__":
    main()
