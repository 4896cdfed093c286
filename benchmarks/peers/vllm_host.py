"""Host time of a round in which everybody decodes: vLLM's scheduler and ours in turns, in microseconds of CPU time.

Owns the comparison, with and without vLLM's prefix caching. Both have as many bytes and prompts of the same lengths;
nobody waits, ends or is taken out. vLLM's is `schedule()`, which finds the blocks, and `update_from_output()`. Ours is
`schedule()`, `begin` and `commit` of every forward, which find the pages, and `complete()`; `scheduler_us` is without
`begin` and `commit`. Medians, and means, in which the rounds that begin a page count as well. vLLM's also looks at each
token and writes each request's output; ours counts tokens, and writes the tables of pages that a forward reads, which
vLLM leaves to its model runner.

    PYTHONPATH=.:benchmarks python -m peers.vllm_host --json host.json
"""

from __future__ import annotations

import random
import statistics
import sys

import torch
from geometries import GEOMETRIES
from records import Record, parser, publish, record
from scheduler import MAX_TOKENS, PROMPT_TOKENS, Loop
from workloads import MODELS

from peers.vllm_inputs import why_not
from peers.vllm_scheduler import Engine

TURN_ROUNDS = 20


def engine_of(model: str, num_running: int, arena_bytes: int, prefix_caching: bool, seed: int) -> Engine:
    """vLLM's with all of its prompts run."""
    engine = Engine(
        GEOMETRIES[model](), max_running=num_running, arena_bytes=arena_bytes, prefix_caching=prefix_caching
    )
    chance = random.Random(seed)
    engine.submit((chance.randint(*PROMPT_TOKENS), MAX_TOKENS // 2) for _ in range(num_running))
    while any(request.num_output_tokens < 2 for request in engine.requests):
        engine.round()
    return engine


def measure(model: str, num_running: int, num_turns: int, prefix_caching: bool, seed: int) -> Record:
    ours = Loop(model, num_running, "decode", num_turns * TURN_ROUNDS, seed)
    theirs = engine_of(model, num_running, ours.pool.plan.arena_bytes, prefix_caching, seed)
    for figures in (ours.scheduler_us, ours.with_pool_us, theirs.round_us):
        figures.clear()
    for _ in range(num_turns):
        for _ in range(TURN_ROUNDS):
            ours.round()
        for _ in range(TURN_ROUNDS):
            assert theirs.round() == num_running
    assert not any(request.num_preemptions for request in theirs.requests)
    assert len(ours.scheduler.running) == num_running and not ours.scheduler.stats().dropped
    ours.scheduler.close()
    vllm_us, vllm_mean_us = statistics.median(theirs.round_us), statistics.fmean(theirs.round_us)
    with_pool_us, with_pool_mean_us = statistics.median(ours.with_pool_us), statistics.fmean(ours.with_pool_us)
    return record(
        f"{model}/decode/{num_running}{'' if prefix_caching else '/no prefix caching'}",
        "with_pool_us",
        with_pool_us,
        "us",
        reference=vllm_us,
        with_pool_mean_us=with_pool_mean_us,
        vllm_mean_us=vllm_mean_us,
        scheduler_us=statistics.median(ours.scheduler_us),
        vllm_over_with_pool=vllm_us / with_pool_us,
        vllm_over_with_pool_mean=vllm_mean_us / with_pool_mean_us,
    )


def describe(entry: Record) -> str:
    """What stands beside a figure."""
    return (
        f"{entry['case']}: vLLM {entry['reference']:,.0f} us, ours {entry['scheduler_us']:,.0f} us and with the pool "
        f"{entry['value']:,.0f} us: {entry['vllm_over_with_pool']:.0f} times; means {entry['vllm_mean_us']:,.0f} us, "
        f"{entry['with_pool_mean_us']:,.0f} us: {entry['vllm_over_with_pool_mean']:.0f} times"
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options.add_argument("--running", type=int, default=256)
    options.add_argument("--turns", type=int, default=10, help=f"of {TURN_ROUNDS} rounds each")
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args()
    if (sentence := why_not()) is not None:
        sys.exit(sentence)
    torch.set_num_threads(1)
    records = [
        measure(model, arguments.running, arguments.turns, prefix_caching, arguments.seed)
        for model in arguments.models
        for prefix_caching in (True, False)
    ]
    publish(records, arguments.json)
    for entry in records:
        print(describe(entry))


if __name__ == "__main__":
    main()
