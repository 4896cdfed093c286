"""The run for a GPU goes to its end without one, and says what failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_uma  # noqa: F401 (registers its ops)

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

from flashinfer_model import stand_in  # noqa: E402
from gpu.check_flashinfer import CASES, GRAPHS, check_case, check_graph, question  # noqa: E402
from gpu.device import Device  # noqa: E402
from gpu.report import Report  # noqa: E402

from torch_uma.integrations.flashinfer.forms import why_not  # noqa: E402


def test_the_dry_run_goes_to_its_end_and_every_check_holds(tmp_path: Path) -> None:
    command = [str(ROOT / "benchmarks/gpu/run.sh"), str(tmp_path), "--dry"]
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    found = json.loads((tmp_path / "gpu.json").read_text())
    outcomes = {(result["section"], result["name"]): result["outcome"] for result in found["results"]}
    assert "failed" not in outcomes.values()
    names = ["relocate", "remap", "write_rows", "gather_rows", "locate", "allocate", "release", "page_index", "attend"]
    for name in names:
        assert outcomes["Ops", name] == ("ok" if hasattr(torch.ops.torch_uma, name) else "skipped")
    assert outcomes["Graphs", "K steps in one graph, pages moved between replays"] == "ok"
    assert outcomes["Offload", "out of the arena and back, without a wait"] == "ok"
    assert {"Bandwidth", "Launches", "Steps", "Models", "FlashInfer"} <= {section for section, _ in outcomes}
    text = (tmp_path / "gpu.md").read_text()
    assert text.startswith("# A run on a GPU") and "no figure means anything" in text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_asked_of_flashinfer_holds_for_a_model_of_it(case) -> None:
    device = Device(is_dry=True)
    reason = why_not(case.form, question(device, case))
    if case.form.startswith("trtllm"):  # which is for other GPUs than an H200
        assert reason is not None and "compute capability 10" in reason
        return
    assert reason is None
    check_case(device, case, stand_in()[0])
    if case in GRAPHS:
        check_graph(device, case, stand_in()[0])


def test_a_failure_is_written_down_and_the_next_check_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(tmp_path, {"device": "none"}, limit_s=60)

    def fail() -> None:
        raise ValueError("7 is not 8\nand more")

    report.run("Section", "fails", fail)
    report.run("Section", "holds", lambda: "a | b")
    report.figure("Section", "speed", 1234.5, "GB/s")
    assert report.has_failed and "Traceback" in capsys.readouterr().err
    text = (tmp_path / "gpu.md").read_text()
    assert "| fails | failed | ValueError: 7 is not 8 |" in text
    assert "| holds | ok | a / b;" in text and "| speed | 1,234 GB/s |  |" in text
    late = Report(tmp_path, {}, limit_s=-1)
    late.run("Section", "late", fail)
    assert not late.has_failed and late.results[0].note == "no time left"
    report.run("Section", "long", fail, needs_s=61)
    assert report.results[-1].note == "no time left"
