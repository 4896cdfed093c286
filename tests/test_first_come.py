"""The bound that replays are compared with: by hand where it is small, and as it was published where it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import torch_uma

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

from first_come import ExactFit, first_come
from geometries import gpt_oss_20b, qwen3_5_4b


def test_a_sequence_holds_its_states_its_windows_and_all_of_its_tokens() -> None:
    fit = ExactFit(state_bytes=1000, kinds=((10, None), (1, 4)))
    assert [fit.held_bytes(n) for n in (0, 1, 4, 9)] == [0, 1011, 1044, 1094]
    paged = ExactFit(state_bytes=1000, kinds=((10, None), (1, 4)), page_size=4)
    assert [paged.held_bytes(n) for n in (0, 1, 4, 9)] == [0, 1044, 1044, 1128]


def test_the_last_one_goes_and_comes_back_in_its_turn() -> None:
    # 3 and 3 tokens fit beside each other, 4 and 4 do not: the second goes in round 2, and waits for the first.
    served = first_come(ExactFit(state_bytes=0, kinds=((1, None),)), 7, [(3, 3), (3, 3)], max_running=8)
    # Rounds: 1 both, 2 and 3 the first alone, 4 and 5 the second: its four tokens again, and one more.
    assert (served.num_rounds, served.preemptions, served.mean_running) == (5, 1, 6 / 5)


def test_a_prompt_is_run_in_chunks_of_what_decoding_leaves() -> None:
    served = first_come(
        ExactFit(state_bytes=0, kinds=((1, None),)), 100, [(3, 4), (5, 1)], max_running=8, step_tokens=4
    )
    # Chunks of 3 and 1, then 1 and 3, then 1 and 1, which ends the second; the first has one token left to be given.
    assert (served.num_rounds, served.preemptions, served.mean_running) == (4, 0, 7 / 4)


@pytest.mark.parametrize(
    "layers, lengths, num_requests, mean_running, preemptions, num_rounds",
    [
        (gpt_oss_20b(), (512, 128), 512, 281.4, 48, 233),
        (gpt_oss_20b(), (16384, 1024), 128, 18.2, 11, 7205),
        (qwen3_5_4b(), (512, 128), 512, 102.1, 27, 642),
        (qwen3_5_4b(torch.bfloat16), (512, 128), 512, 166.8, 29, 393),
    ],
    ids=["gpt-oss", "gpt-oss long", "qwen3.5", "qwen3.5 bf16"],
)
def test_published_figures(
    layers: tuple[torch_uma.Layer, ...],
    lengths: tuple[int, int],
    num_requests: int,
    mean_running: float,
    preemptions: int,
    num_rounds: int,
) -> None:
    plan = torch_uma.plan(layers, memory="8GiB")
    served = first_come(ExactFit.of(plan), plan.arena_bytes, [lengths] * num_requests, max_running=1024)
    assert served.mean_running == pytest.approx(mean_running, abs=0.05)
    assert (served.preemptions, served.num_rounds) == (preemptions, num_rounds)
