"""The bound that replays are compared with: by hand where it is small, and as it was published where it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import torch_uma

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

from first_come import ExactFit, first_come
from geometries import GEOMETRIES
from traces import EXACT, bound
from workloads import MODELS, workloads


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


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("place", [0, 3], ids=["512+128", "16384+1024"])
def test_published_figures(name: str, place: int) -> None:
    workload = workloads(None)[place]
    served = bound(torch_uma.plan(GEOMETRIES[name](), memory="8GiB"), workload, 1)
    mean_running, preemptions, num_rounds = EXACT[workload.name][MODELS.index(name)]
    assert served.mean_running == pytest.approx(mean_running, abs=0.05)
    assert (served.preemptions, served.num_rounds) == (preemptions, num_rounds)
