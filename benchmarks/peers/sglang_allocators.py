"""Our pool beside SGLang's own allocators, over the same bytes and under the same requests, on a CPU.

Owns the comparison. SGLang 0.5.23 is driven as it is, by `sglang_pools`: `unified` is its `--enable-unified-memory`,
`at once` the same where what leaves a window is given back at once instead of in lots of 128 tokens, `static` its fixed
pools at its own ratios. Where it is not installed, a sentence says so. Three figures, any of them by name:

- `fit`: requests of some length that are in memory at once, after the arena was full of others that left in random
  order; over the exact fit, which is as many as there are bytes for, with pages of one token and no padding; and the
  bytes that none of them could use. Prompts come in chunks of 512 tokens, answers in strides of 16.
- `host`: thread CPU time of a decode step of 256 requests, where each token is to be written in every attention pool
  included; of an admission with 1,024 tokens of prompt; and of a finish. Before every third step 1 % finish and as many
  are admitted. The contestants take turns; entries are small, so that books are what is timed. Medians.
- `compaction`: thread CPU time of packing the arena when half of the requests have left, without the copies, which a
  GPU makes in another way; and the bytes that move. Medians.

    PYTHONPATH=.:benchmarks python -m peers.sglang_allocators --json sglang.json
    PYTHONPATH=.:benchmarks python -m peers.sglang_allocators --figures fit --models gpt-oss-20b --memory 2GiB
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from capacity import MIXES, exact_bytes
from geometries import GEOMETRIES, Layers, attention, recurrent
from records import Record, parser, publish, record

import torch_uma
from peers.installed import version_of
from peers.pools import OurPools, Pools, grown
from torch_uma.layout import Full, State, Window
from torch_uma.plan import Plan
from torch_uma.simulate.splits import default_split

VERSION = "0.5.23"
FIGURES = ("fit", "host", "compaction")
MODELS = ("gpt-oss-20b", "qwen3.5-4b")
CHUNK_TOKENS = 512
STRIDE_TOKENS = 16
BATCH = 256
TURN = 10  # turnovers until the next contestant's turn
PROMPT_TOKENS = 1024
MAX_TOKENS = 20480
# Small entries with the kinds of the models.
SMALL: dict[str, Layers] = {
    "window and full": (attention(Window(128), 1, 16), attention(Full(), 1, 16)),
    "state and full": (recurrent((32, 3), (2, 8, 16)), attention(Full(), 1, 16)),
}


def why_not() -> str | None:
    """A sentence if SGLang is not installed, or not the one that this is written for."""
    found = version_of("sglang")
    if found == VERSION:
        return None
    return (
        f"SGLang's allocators are driven where SGLang {VERSION} is installed, and here is {found}: "
        f"`pip install --no-deps sglang=={VERSION}` and what its modules import; no GPU is needed"
    )


def growth(mix: tuple[int, int], chance: random.Random) -> tuple[int, ...]:
    """How a request of a mix grows: its prompt by chunks, its answer, up to 112 tokens shorter, by strides."""
    prompt, answer = mix
    answer -= STRIDE_TOKENS * chance.randrange(128 // STRIDE_TOKENS)
    whole, rest = divmod(prompt, CHUNK_TOKENS)
    return (CHUNK_TOKENS,) * whole + (rest,) * bool(rest) + (STRIDE_TOKENS,) * (answer // STRIDE_TOKENS)


def num_resident(pools: Pools, wanted: Iterable[tuple[int, ...]], others: Iterable[tuple[int, ...]], seed: int) -> int:
    """How many of the wanted are in memory at once, after the pool was full of others that left in random order."""
    leaving = []
    for tokens in others:
        request = grown(pools, tokens)
        if request is None:
            break
        leaving.append(request)
    random.Random(seed).shuffle(leaving)
    for resident, tokens in enumerate(wanted):
        while grown(pools, tokens) is None:
            if not leaving:
                pools.check()
                return resident
            pools.finish(leaving.pop())
    raise AssertionError("there was room for all")


def exact_bytes_of(plan: Plan, page_size: int, num_tokens: int) -> float:
    return sum(exact_bytes(subpool, num_tokens, page_size) for subpool in plan.subpools)


def contestants(layers: Layers, plan: Plan, page_size: int, max_requests: int) -> dict[str, Callable[[], Pools]]:
    """By name; the static ones only with pages of one token, as they fill larger ones by a kernel."""
    from peers.sglang_pools import SGLangPools

    kinds = {State: "state", Window: "window"}
    split = default_split(plan)
    shares = {kinds.get(type(subpool.lifetime), "full"): split[subpool.name] for subpool in plan.subpools}
    theirs = partial(
        SGLangPools, layers, plan.arena_bytes, page_size=page_size, max_requests=max_requests, max_tokens=MAX_TOKENS
    )
    made: dict[str, Callable[[], Pools]] = {
        "torch_uma": partial(OurPools, plan, max_requests, MAX_TOKENS),
        "unified": theirs,
    }
    if "window" in shares:
        made["at once"] = partial(theirs, eviction_tokens=1)
    if page_size == 1:
        made["static"] = partial(theirs, shares=shares)
    return made


def fit(name: str, memory: str, page_size: int, seed: int) -> list[Record]:
    """A model's requests of every mix of which one fits at all, in every contestant's memory."""
    layers, chance = GEOMETRIES[name](), random.Random(seed)
    plan = torch_uma.plan(layers, memory=memory, page_size=page_size)
    max_requests = plan.num_sequences(min(map(sum, MIXES)) // 2) + 2
    others = [growth(chance.choice(MIXES), chance) for _ in range(max_requests)]
    records = []
    for mix in MIXES:
        wanted = [growth(mix, chance) for _ in range(max_requests)]
        needed = list(accumulate(exact_bytes_of(plan, page_size, sum(tokens)) for tokens in wanted))
        exact = bisect(needed, plan.arena_bytes)
        if not exact:
            continue
        for policy, make in contestants(layers, plan, page_size, max_requests).items():
            resident = num_resident(make(), wanted, others, seed)
            gc.collect()  # SGLang's parts refer to one another, and one arena at a time is enough
            records.append(
                record(
                    f"{name}/page{page_size}/{mix[0]}+{mix[1]}",
                    "resident_over_exact_fit",
                    resident,
                    "requests",
                    reference=exact,
                    policy=policy,
                    unusable_bytes=round(plan.arena_bytes - (needed[resident - 1] if resident else 0)),
                )
            )
    return records


class Timed:
    """One contestant's requests; in every step some finish, as many come, and all decode a few tokens."""

    def __init__(self, pools: Pools, lengths: Sequence[int]) -> None:
        self.pools = pools
        self.micros: dict[str, list[float]] = {"admission": [], "finish": [], "decode": [], "decode_after_turnover": []}
        self.requests = [grown(pools, (length,)) for length in lengths]

    def step(self, leaving: Sequence[int]) -> None:
        for place in leaving:
            self.time("finish", partial(self.pools.finish, self.requests[place]))
            self.requests[place] = self.time("admission", partial(grown, self.pools, (PROMPT_TOKENS,)))
        assert None not in self.requests, "there is room for all"
        batch = self.pools.batch(self.requests)
        self.time("decode_after_turnover", partial(self.pools.decode, batch))
        for _ in range(2):  # three tokens in all: with two, the lots of 128 would always be due in the same one of them
            self.time("decode", partial(self.pools.decode, batch))

    def time(self, what: str, call: Callable[[], Any]) -> Any:
        start = time.thread_time_ns()
        result = call()
        self.micros[what].append((time.thread_time_ns() - start) / 1e3)
        return result

    def share_of_lists(self, steps: Sequence[Sequence[int]]) -> float:
        """Of the CPU time of steps, what torch takes to sort and to join lists of ids."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for leaving in steps:
                self.step(leaving)
        micros = {entry.key: entry.self_cpu_time_total for entry in profiler.key_averages()}
        return float((micros.get("aten::sort", 0) + micros.get("aten::cat", 0)) / sum(micros.values()))


def turnover(num_turnovers: int, chance: random.Random) -> list[list[int]]:
    """Which of the requests finish each time: 1 % of them."""
    numbers = [number * BATCH // 100 for number in range(num_turnovers + 1)]
    return [chance.sample(range(BATCH), later - earlier) for earlier, later in zip(numbers, numbers[1:])]


def host(name: str, num_turnovers: int, seed: int) -> list[Record]:
    """The first third is left out."""
    layers, chance = SMALL[name], random.Random(seed)
    num_bytes = torch_uma.plan(layers, memory="1TiB", page_size=16).bytes_per_sequence(2 * PROMPT_TOKENS)
    plans = {size: torch_uma.plan(layers, memory=num_bytes * BATCH * 3 // 2, page_size=size) for size in (1, 16)}
    makers = contestants(layers, plans[1], 1, BATCH + 8) | {
        "torch_uma, 16": partial(OurPools, plans[16], BATCH + 8, MAX_TOKENS)
    }
    lengths = [chance.randrange(64, PROMPT_TOKENS) for _ in range(BATCH)]
    timed = {policy: Timed(make(), lengths) for policy, make in makers.items()}
    leaving_of = turnover(num_turnovers, chance)
    for first in range(0, num_turnovers, TURN):
        for one in timed.values():
            for leaving in leaving_of[first : first + TURN]:
                one.step(leaving)
    ours = {what: _median(micros) for what, micros in timed["torch_uma"].micros.items()}
    records = [
        record(name, f"{what}_us", _median(micros), "us", reference=ours[what], policy=policy)
        for policy, one in timed.items()
        for what, micros in one.micros.items()
    ]
    for policy, one in timed.items():
        one.pools.check()
        share = one.share_of_lists(leaving_of[:TURN])
        records.append(record(name, "share_of_sorting_and_joining_lists", share, "of the time", policy=policy))
    return records


def _median(micros: Sequence[float]) -> float:
    return statistics.median(micros[len(micros) // 3 :])


class Stopwatch:
    """A call, and how long it took."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.micros = 0.0

    def __call__(self, *arguments: Any) -> Any:
        start = time.thread_time_ns()
        result = self.call(*arguments)
        self.micros += (time.thread_time_ns() - start) / 1e3
        return result


def packed(pools: Pools, seed: int) -> tuple[int, float]:
    """Fill, let half of the requests go, and compact: bytes moved and microseconds, those of copying left out."""
    chance, requests = random.Random(seed), []
    while (request := grown(pools, growth(chance.choice(MIXES[:4]), chance))) is not None:
        requests.append(request)
    for request in chance.sample(requests, len(requests) // 2):
        pools.finish(request)
    copiers = []
    for owner, name in pools.copiers():
        copiers.append(Stopwatch(getattr(owner, name)))
        setattr(owner, name, copiers[-1])
    whole = Stopwatch(pools.compact)
    moved_bytes = whole()
    pools.check()
    return moved_bytes, whole.micros - sum(copier.micros for copier in copiers)


def compaction(name: str, num_rounds: int, seed: int) -> list[Record]:
    """Of some 10,000 pages of 16 tokens."""
    plan = torch_uma.plan(SMALL[name], memory="16MiB", page_size=16)
    makers = contestants(SMALL[name], plan, 16, plan.num_sequences(min(map(sum, MIXES)) // 2) + 2)
    rounds = [
        {policy: packed(makers[policy](), seed + number) for policy in ("torch_uma", "unified")}
        for number in range(num_rounds)
    ]
    medians = {
        policy: [statistics.median(figures) for figures in zip(*(one[policy] for one in rounds))]
        for policy in rounds[0]
    }
    ours = medians["torch_uma"][1]
    return [
        record(name, "compaction_us", micros, "us", reference=ours, policy=policy, moved_bytes=moved_bytes)
        for policy, (moved_bytes, micros) in medians.items()
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--figures", nargs="+", choices=FIGURES, default=list(FIGURES))
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options.add_argument("--page-size", nargs="+", type=int, default=[16, 1])
    options.add_argument("--memory", default="4GiB", help="of `fit`; SGLang writes all of it")
    options.add_argument("--turnovers", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    if (sentence := why_not()) is not None:
        sys.exit(sentence)
    torch.set_num_threads(1)
    records: list[Record] = []
    if "host" in arguments.figures:
        records += [entry for name in SMALL for entry in host(name, arguments.turnovers, arguments.seed)]
    if "compaction" in arguments.figures:
        records += [entry for name in SMALL for entry in compaction(name, 9, arguments.seed)]
    if "fit" in arguments.figures:
        for name in arguments.models:
            for page_size in arguments.page_size:
                records += fit(name, arguments.memory, page_size, arguments.seed)
    publish(records, arguments.json)


if __name__ == "__main__":
    main()
