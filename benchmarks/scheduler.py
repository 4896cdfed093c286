"""Host cost of the scheduler in the steady state, in microseconds of thread CPU time a round, without a model.

n requests decode, a token each in every round, over pools of the meta device: the books are real, the memory is not.
`scheduler_us` is `schedule()` and `complete()`, `with_pool_us` that and `begin` and `commit` of every forward; both are
medians, and `..._mean_us` are the means, in which the rounds that begin a page count as well. The cases:

- `decode`: nobody waits.
- `waiting`: 256 requests wait and do not fit, as sequences of others fill the arena up to what the running need soon.
- `overlap`: a round is completed when the next one has been scheduled and launched.
- `churn`: in every round one request comes to its end, and one is admitted and runs its prompt.

    python benchmarks/scheduler.py --json scheduler.json
    python benchmarks/scheduler.py --running 256 --geometries gpt-oss-20b --cases churn
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator

import torch
from geometries import GEOMETRIES
from records import Record, parser, publish, record

import torch_uma
from torch_uma.scheduling import Round, Scheduler

CASES = ("decode", "waiting", "overlap", "churn")
MAX_TOKENS = 4096
PROMPT_TOKENS = (64, 1024)
OTHERS_TOKENS = 2048  # of each sequence that fills the arena


class Loop:
    """A scheduler whose rounds are timed; forwards are steps of the pool that nobody runs a model in."""

    def __init__(self, geometry: str, num_running: int, case: str, num_rounds: int, seed: int) -> None:
        self.chance = random.Random(seed)
        self.case = case
        self.num_running = num_running
        layers = GEOMETRIES[geometry]()
        num_bytes = torch_uma.plan(layers, memory="1TiB").bytes_per_sequence(MAX_TOKENS)
        self.pool = torch_uma.CachePool(
            layers,
            memory=num_bytes * (num_running + 16),
            page_size=16,
            device="meta",
            max_sequences=4 * num_running + 256,
            max_tokens=MAX_TOKENS,
        )
        self.scheduler = Scheduler(self.pool, max_running=num_running if case == "churn" else None, step_tokens=1 << 16)
        self.scheduler_us: list[float] = []
        self.with_pool_us: list[float] = []
        self.in_flight: Round | None = None
        self.others: list[torch_uma.Sequence] = []
        setup_rounds = 8 + num_running * sum(PROMPT_TOKENS) // (1 << 16)
        for number in range(num_running):  # in churn, one ends in each round after all have begun
            self.submit(setup_rounds + number if case == "churn" else MAX_TOKENS - PROMPT_TOKENS[1])
        for _ in range(setup_rounds):
            self.round()
        assert len(self.scheduler.running) >= num_running - setup_rounds, self.scheduler.stats()
        if case == "churn":
            for _ in range(2 * num_rounds):
                self.submit(num_running)
        if case == "waiting":
            self.others = list(self.fill())
            for _ in range(256):
                self.scheduler.submit(MAX_TOKENS - 64, 64)

    def submit(self, max_new_tokens: int) -> None:
        self.scheduler.submit(self.chance.randint(*PROMPT_TOKENS), max(2, min(max_new_tokens, MAX_TOKENS // 2)))

    def fill(self) -> Iterator[torch_uma.Sequence]:
        """Sequences of others, for as long as there is room for one."""
        while self.pool.quote(OTHERS_TOKENS).fits:
            yield self.pool.add(OTHERS_TOKENS)

    def make_room(self) -> None:
        """See that what the running take soon is free, which is less than the 16 steps that admission leaves them."""
        pages = [0] * len(self.pool.plan.subpools)
        pages[-1] = self.num_running // 2
        while not self.pool.allocator.fits(pages):
            self.others.pop().free()

    def round(self) -> None:
        if self.case == "waiting" and self.others:
            self.make_room()
        start = time.thread_time_ns()
        round = self.scheduler.schedule()
        scheduled = time.thread_time_ns()
        for forward in round.forwards:
            self.pool.begin(forward.batch, forward.num_new_tokens).commit()
        launched = time.thread_time_ns()
        is_overlapped = self.case == "overlap"
        known, self.in_flight = (self.in_flight, round) if is_overlapped else (round, None)
        if known is not None:
            self.scheduler.complete(known)
        end = time.thread_time_ns()
        self.scheduler_us.append((end - launched + scheduled - start) / 1e3)
        self.with_pool_us.append((end - start) / 1e3)


def measure(geometry: str, num_running: int, case: str, num_rounds: int, seed: int) -> list[Record]:
    """One case: what a round costs."""
    loop = Loop(geometry, num_running, case, num_rounds, seed)
    loop.scheduler_us.clear()
    loop.with_pool_us.clear()
    before = loop.scheduler.stats()
    for _ in range(num_rounds):
        loop.round()
    after = loop.scheduler.stats()
    num_finished = after.finished - before.finished
    least, most = (0.9 * num_rounds, num_rounds) if case == "churn" else (0, 0)  # the prompts took several rounds
    assert least <= num_finished <= most, f"{num_finished} have finished"
    assert after.dropped == before.dropped, "somebody was retracted"
    assert len(loop.scheduler.waiting) >= (256 if case == "waiting" else 0)
    loop.scheduler.close()
    name = f"{geometry}/{case}/{num_running}"
    return [
        record(name, metric, value, "us")
        for kind, micros in (("scheduler", loop.scheduler_us), ("with_pool", loop.with_pool_us))
        for metric, value in (
            (f"{kind}_us", statistics.median(micros)),
            (f"{kind}_mean_us", statistics.fmean(micros)),
        )
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--geometries", nargs="+", choices=GEOMETRIES, default=["gpt-oss-20b", "qwen3.5-4b"])
    options.add_argument("--running", nargs="+", type=int, default=[64, 256, 1024, 4096])
    options.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options.add_argument("--rounds", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    records: list[Record] = []
    for geometry in arguments.geometries:
        for num_running in arguments.running:
            for case in arguments.cases:
                records += measure(geometry, num_running, case, arguments.rounds, arguments.seed)
    publish(records, arguments.json)


if __name__ == "__main__":
    main()
