"""What a forward costs, against counting every query, key and token one by one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from torch_uma.errors import PlanError
from torch_uma.scheduling import Forward
from torch_uma.simulate import DEVICES, Attention, Device, Work

FAST = 1e30  # so fast that it does not count


def forward(pasts: list[int], new: int | list[int], samples: list[bool] | None = None) -> Forward:
    return Forward(
        requests=(),
        batch=None,  # type: ignore[arg-type]
        num_new_tokens=new,
        starts=np.array(pasts, np.int64),
        samples=np.array([True] * len(pasts) if samples is None else samples),
        is_decode=new == 1,
    )


def device(**speeds: float) -> Device:
    return Device(name="made up", **{"flops_per_s": FAST, "bytes_per_s": FAST, "host_bytes_per_s": FAST, **speeds})


def flops_of(work: Work, run: Forward) -> float:
    return work.seconds(run, device(flops_per_s=1.0))


def bytes_of(work: Work, run: Forward) -> float:
    return work.seconds(run, device(bytes_per_s=1.0))


NOTHING: dict[str, Any] = {"weight_bytes": 0.0, "token_flops": 0.0, "head_flops": 0.0}


def test_weights_are_read_once_and_multiplied_with_every_token() -> None:
    work = Work(weight_bytes=1000.0, token_flops=7.0, head_flops=50.0)
    run = forward([0, 5, 9], [4, 1, 2], [False, True, True])
    assert flops_of(work, run) == pytest.approx(7 * 7 + 2 * 50)
    assert bytes_of(work, run) == pytest.approx(1000)
    assert bytes_of(work, forward([3] * 64, 1)) == pytest.approx(1000)


def test_a_state_is_read_and_written_once_however_many_tokens() -> None:
    work = Work(**NOTHING, state_bytes=300.0)
    assert bytes_of(work, forward([0, 5], 1)) == pytest.approx(2 * 2 * 300)
    assert bytes_of(work, forward([0, 5], 17)) == pytest.approx(2 * 2 * 300)


@pytest.mark.parametrize(
    "run",
    [
        forward([0], 1),
        forward([9], 1),
        forward([3, 4, 5, 40], 1),  # around the window
        forward([0, 0], 13),
        forward([2, 3, 4, 5, 9], 6),
        forward([0, 7, 20, 4], [5, 1, 3, 11]),
        forward([0, 7], [1, 1]),
    ],
    ids=lambda run: f"{run.starts.tolist()} {run.num_new_tokens}",
)
@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 5, 64])
def test_queries_meet_the_keys_that_they_may_see(window: int | None, is_chunked: bool, run: Forward) -> None:
    num_layers, token_bytes, pair_flops = 3, 10.0, 6.0
    work = Work(
        **NOTHING,
        attention=(
            Attention(
                window=window,
                num_layers=num_layers,
                token_bytes=token_bytes,
                pair_flops=pair_flops,
                is_chunked=is_chunked,
            ),
        ),
    )
    counts = [run.num_new_tokens] * len(run.starts) if isinstance(run.num_new_tokens, int) else run.num_new_tokens
    pairs = read = written = 0
    for past, new in zip(run.starts.tolist(), counts):
        keys: set[int] = set()
        for position in range(past, past + new):
            first = 0
            if window:
                first = position // window * window if is_chunked else max(0, position + 1 - window)
            seen = range(first, position + 1)
            pairs += len(seen)
            keys.update(seen)
        read += len(keys)
        written += new
    assert flops_of(work, run) == pytest.approx(num_layers * pair_flops * pairs)
    assert bytes_of(work, run) == pytest.approx(num_layers * token_bytes * (read + written))


def test_long_rows_do_not_overflow() -> None:
    work = Work(**NOTHING, attention=(Attention(window=None, num_layers=1, token_bytes=0.0, pair_flops=1.0),))
    assert flops_of(work, forward([1 << 20] * 500, 4096)) == pytest.approx(500 * 4096 * ((1 << 20) + 2048.5))


def test_experts_are_read_as_often_as_they_are_likely_to_be_chosen() -> None:
    seed = 3
    print(f"seed {seed}")
    draw = random.Random(seed)
    num_experts, per_token, num_tokens = 16, 2, 9
    chosen = [
        len({expert for _ in range(num_tokens) for expert in draw.sample(range(num_experts), per_token)})
        for _ in range(4000)
    ]
    work = Work(**NOTHING, expert_bytes=1600.0, num_experts=num_experts, experts_per_token=per_token)
    assert bytes_of(work, forward([0], num_tokens)) == pytest.approx(100 * sum(chosen) / len(chosen), rel=0.01)
    assert bytes_of(work, forward([5], 1)) == pytest.approx(200)
    assert bytes_of(work, forward([0], 4000)) == pytest.approx(1600)


def test_the_slower_bound_counts_for_each_part() -> None:
    """Products with weights are bound by one, attention by the other."""
    work = Work(
        weight_bytes=10.0,
        token_flops=100.0,
        head_flops=0.0,
        attention=(Attention(window=None, num_layers=2, token_bytes=50.0, pair_flops=1.0),),
    )
    seconds = work.seconds(forward([9], 1), device(flops_per_s=10.0, bytes_per_s=5.0))
    assert seconds == pytest.approx(100 / 10 + 2 * 50 * (10 + 1) / 5)


def test_a_forward_has_a_price_besides() -> None:
    work = Work(weight_bytes=0.0, token_flops=0.0, head_flops=0.0)
    assert work.seconds(forward([0], 1), device(forward_s=0.5)) == 0.5


def test_an_h200_is_as_fast_as_it_was_measured() -> None:
    h200 = DEVICES["h200"]
    assert (h200.flops_per_s, h200.bytes_per_s) == (790e12, 4.3e12)
    work = Work(weight_bytes=43e9, token_flops=0.0, head_flops=0.0)
    assert work.seconds(forward([0], 1), h200) == pytest.approx(0.01 + h200.forward_s)


@pytest.mark.parametrize(
    "wrong",
    [
        {"flops_per_s": 0.0},
        {"bytes_per_s": -1.0},
        {"host_bytes_per_s": float("nan")},
        {"forward_s": -1e-9},
        {"forward_s": float("nan")},
        {"flops_per_s": float("inf")},
        {"forward_s": float("inf")},
    ],
)
def test_a_device_has_speeds(wrong: dict[str, float]) -> None:
    with pytest.raises(PlanError, match=next(iter(wrong))):
        device(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight_bytes": float("nan")},
        {"token_flops": -1.0},
        {"state_bytes": float("inf")},
        {"num_experts": 2, "experts_per_token": 3},
    ],
)
def test_work_is_no_less_than_nothing(wrong: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="|".join([*wrong, "cannot choose 3 of 2"])):
        Work(**NOTHING | wrong)
