"""What the benchmark of changing traffic counts beside a replay."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import torch_uma
from torch_uma.simulate import Attention, Work

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

from geometries import GEOMETRIES
from traffic import PHASES, Model, Watch, measure, search, traffic

WORK = Work(
    weight_bytes=8e9,
    token_flops=8e9,
    head_flops=1e9,
    state_bytes=5e7,
    attention=(Attention(window=None, num_layers=8, token_bytes=4096, pair_flops=16384),),
)


@pytest.fixture(scope="module")
def model() -> Model:
    plan = torch_uma.plan(GEOMETRIES["qwen3.5-4b"](), memory="1GiB")
    return Model(name="qwen", plan=plan, work=WORK, is_packed=False)


def test_every_phase_is_served_to_its_end_by_every_policy(model: Model) -> None:
    phases = traffic(8, 40, seed=0)
    splits = search(model, phases, 1)
    assert set(splits) == {"default split", "best of all", *(f"best of {name}" for name in PHASES)}
    records = {(each["case"], each["metric"], each["policy"]): each for each in measure(model, phases, splits)}
    for name, phase in zip(PHASES, phases):
        new_tokens = sum(arrival.num_new_tokens for arrival in phase)
        rates = {policy: records[(f"qwen/{name}", "new_tokens_per_s", policy)] for policy in ("arena", *splits)}
        done = {policy: rate["value"] * rate["lasted_s"] for policy, rate in rates.items()}
        assert done["arena"] == pytest.approx(new_tokens) and max(done.values()) <= new_tokens * 1.000001
        best = max(rates[policy]["value"] for policy in splits if done[policy] > new_tokens * 0.999999)
        (ratio,) = (each for key, each in records.items() if key[:2] == (f"qwen/{name}", "arena_over_best_split"))
        assert ratio["reference"] == best and ratio["value"] == rates["arena"]["value"]
    assert records[("qwen/all", "moved_bytes", "arena")]["value"] > 0


def test_decoding_reads_its_keys_and_states_once(model: Model) -> None:
    read = []
    phases = traffic(2, 2, seed=0)
    watch = Watch(model.work)

    def see(scheduler: torch_uma.scheduling.Scheduler, round: torch_uma.scheduling.Round) -> None:
        watch(scheduler, round)
        for forward in round.forwards:
            if forward.is_decode:
                keys = int((forward.starts + 1).sum())
                read.append(keys * 8 * 4096 + len(forward.requests) * 5e7)

    arrivals = [arrival for phase in phases for arrival in phase]
    torch_uma.simulate.replay(model.plan, arrivals, work=WORK, device=torch_uma.simulate.DEVICES["h200"], on_round=see)
    assert read and watch.decode_bytes == pytest.approx(sum(read))


def test_the_keys_of_a_window_are_no_more_than_it(model: Model) -> None:
    work = Work(
        weight_bytes=0,
        token_flops=1,
        head_flops=0,
        attention=(Attention(window=4, num_layers=2, token_bytes=10, pair_flops=1),),
    )
    with torch_uma.CachePool(model.plan, device="meta", max_sequences=2, max_tokens=64) as pool:
        batch = pool.batch([pool.add(32), pool.add(32)])
        forward = torch_uma.scheduling.Forward(
            requests=(),
            batch=batch,
            num_new_tokens=1,
            starts=np.array([2, 30]),
            samples=np.ones(2, bool),
            is_decode=True,
        )
        assert work.cache_bytes(forward) == 2 * 10 * (3 + 4)
