"""The published figures beside simulated ones: every figure is there, what differs is explained, inputs are few."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

from geometries import qwen3_5_4b  # noqa: E402
from rows_h200 import GAIN_TOLERANCE, TOLERANCE, Row  # noqa: E402
from served_h200 import Setting, full_tokens_per_byte, infer_budget_bytes, infer_forward_s, serve  # noqa: E402
from workloads_h200 import GPT_OSS, GROWING, LONG, MANY, QWEN, SHORT  # noqa: E402


def _run(command: list[str]) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


def test_a_quick_run_has_every_published_figure(tmp_path: Path) -> None:
    script = str(ROOT / "benchmarks/published_h200.py")
    paths = [str(tmp_path / name) for name in ("figures.json", "figures.md")]
    _run([sys.executable, script, "--quick", "--json", paths[0], "--markdown", paths[1]])
    records = [entry for entry in json.loads(Path(paths[0]).read_text()) if "reference" in entry]
    published = [5880, 5830, 5830 / 5880, 22, 32, 1.26, 294, 233, 618, 1000, 43, 6, 1.14, 0.88]
    assert [entry["reference"] for entry in records] == pytest.approx(published)
    assert sum(entry["used_up"] for entry in records) == 3  # memory, what a forward takes, lengths
    page = Path(paths[1]).read_text()
    for entry in records:
        assert entry["value"] >= 0
        line = next(line for line in page.splitlines() if entry["case"] in line and entry["metric"] in line)
        if entry["used_up"]:
            assert "used up" in line
        elif abs(entry["ratio"] - 1) > TOLERANCE:
            assert entry["why"] and entry["why"] in line


def test_the_live_form_goes_to_its_end_without_a_gpu(tmp_path: Path) -> None:
    _run([str(ROOT / "benchmarks/gpu/live.sh"), str(tmp_path), "--dry"])
    records = json.loads((tmp_path / "live.json").read_text())
    assert {entry["policy"] for entry in records} == {"pools", "arena"}
    assert len({entry["case"] for entry in records}) == 4
    assert all(entry["value"] > 0 for entry in records if entry["metric"] in ("output tokens, 1/s", "answered"))
    page = (tmp_path / "live.md").read_text()
    assert all(entry["case"] in page for entry in records)


def test_a_difference_is_said_only_where_there_is_one() -> None:
    near = Row(workload=SHORT, figure="", published=100, simulated=109, why="because")
    assert not near.remark
    gain = Row(workload=SHORT, figure="", published=1.26, simulated=1.2, why="because", is_gain=True)
    assert GAIN_TOLERANCE < abs(gain.deviation) < TOLERANCE
    assert gain.remark == "because"
    assert Row(workload=SHORT, figure="", published=100, simulated=111, why="because").remark == "because"
    assert (
        Row(workload=SHORT, figure="", published=100, simulated=100, why="an input", used_up=True).remark == "an input"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_geometry_is_the_published_one(dtype: torch.dtype) -> None:
    assert QWEN.layers(1, dtype) == qwen3_5_4b(dtype)
    one, three = (sum(layer.memories[0].rows[-1].num_bytes for layer in QWEN.layers(n, dtype)[:1]) for n in (1, 3))
    assert three == 3 * one
    config = QWEN.config()
    attention = QWEN.layers(1, dtype)[-1].memories[0].rows[0].shape
    assert attention == (config.num_key_value_heads, config.head_dim)
    assert len(QWEN.layers(1, dtype)) == config.num_hidden_layers
    assert [kind == "full_attention" for kind in config.layer_types] == [
        layer.memories[0].rows[0].name == "k" for layer in QWEN.layers(1, dtype)
    ]


def test_experts_have_four_and_a_quarter_bits_and_states_their_dtype() -> None:
    assert GPT_OSS.work().expert_bytes == pytest.approx(24 * 32 * 3 * 2880**2 * 4.25 / 8, rel=0.01)
    assert QWEN.work().state_bytes == 24 * 2_146_304
    assert QWEN.work(torch.bfloat16).state_bytes == 24 * 1_097_728


def test_what_a_forward_takes_besides_is_inferred_so_that_pools_are_as_fast_as_was_published() -> None:
    workload = replace(SHORT, num_new_tokens=32, num_requests=64)
    setting = Setting(budget_bytes=16e9, is_split=True, forward_s=2.5e-3)
    tokens_per_s = serve(workload, setting).report.new_tokens_per_s
    assert infer_forward_s(workload, tokens_per_s, setting.budget_bytes) == pytest.approx(2.5e-3, rel=1e-6)
    assert infer_forward_s(workload, 100 * tokens_per_s, setting.budget_bytes) == 0.0


def test_a_budget_is_inferred_so_that_pools_run_as_many_as_were_published() -> None:
    workload = LONG.scaled(16)
    budget_bytes = infer_budget_bytes(workload, 22, num_tries=0)
    assert budget_bytes * full_tokens_per_byte(workload) == pytest.approx(22 * workload.mean_tokens)
    assert full_tokens_per_byte(LONG) == pytest.approx(1 / 1.9 / 32768, rel=1e-3)
    assert full_tokens_per_byte(MANY) == pytest.approx(1 / 1.8 / 24576, rel=1e-3)


def test_clients_ask_again_when_they_are_answered() -> None:
    """Of two clients, one request each at a time: never more than two are there, and nobody waits for another."""
    workload = replace(GROWING.scaled(64), num_clients=2, num_requests=7)
    served = serve(workload, Setting(budget_bytes=16e9))
    assert served.report.num_completed == 7
    assert served.running == 2
    alone = serve(replace(workload, num_clients=1, num_requests=1), Setting(budget_bytes=16e9))
    assert served.report.first_token_s["mean"] < 2 * alone.report.first_token_s["mean"]
    assert served.report.seconds == pytest.approx(4 * alone.report.seconds, rel=0.05)


def test_a_memory_too_small_for_all_clients_makes_some_wait_and_retracts_others() -> None:
    workload = replace(MANY, num_prompt_tokens=64, num_new_tokens=256, num_clients=24, num_requests=48)
    budget_bytes = infer_budget_bytes(workload, 12, num_tries=0)
    pools = serve(workload, Setting(budget_bytes=budget_bytes, is_split=True, headroom_steps=1))
    arena = serve(workload, Setting(budget_bytes=budget_bytes, headroom_steps=1))
    assert pools.report.num_completed == arena.report.num_completed == 48
    assert pools.report.retractions_per_1000 > 0
    assert pools.running < arena.running
    assert pools.report.first_token_s["mean"] > arena.report.first_token_s["mean"] > 0
