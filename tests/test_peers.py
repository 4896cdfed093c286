"""What other engines are handed, and what is said where they are not installed."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import pytest

from torch_uma.simulate import Arrival

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

import traces  # noqa: E402
from geometries import GEOMETRIES  # noqa: E402
from peers import installed, vllm_host, vllm_inputs, vllm_scheduler  # noqa: E402
from workloads import MODELS, Workload, workloads  # noqa: E402


def versions(found: str | None):
    def version(name: str) -> str:
        assert name == "vllm"
        if found is None:
            raise PackageNotFoundError(name)
        return found

    return version


@pytest.mark.parametrize(("found", "said"), [(None, "here is none"), ("0.34.1", "here is 0.34.1"), ("0.33.0", None)])
def test_what_is_missing_is_said_in_a_sentence(monkeypatch, found: str | None, said: str | None) -> None:
    monkeypatch.setattr(installed, "version", versions(found))
    sentence = vllm_inputs.why_not()
    if said is None:
        assert sentence is None
    else:
        assert sentence is not None and said in sentence and "pip install vllm==0.33.0" in sentence


@pytest.mark.parametrize("script", [vllm_scheduler, vllm_host], ids=["vllm_scheduler", "vllm_host"])
def test_the_scripts_end_with_that_sentence(monkeypatch, script: ModuleType) -> None:
    monkeypatch.setattr(script, "why_not", lambda: "no vLLM here")
    monkeypatch.setattr(sys, "argv", [script.__name__])
    with pytest.raises(SystemExit, match="^no vLLM here$"):
        script.main()


def test_traces_go_on_with_published_figures(monkeypatch, capsys) -> None:
    arrivals = [Arrival(at_s=0.0, num_prompt_tokens=64, num_new_tokens=3)] * 4
    short = Workload(name="512+128", arrivals=arrivals, max_running=8)
    monkeypatch.setattr(traces, "why_not", lambda: "no vLLM here")
    monkeypatch.setattr(traces, "workloads", lambda trace: [short])
    monkeypatch.setattr(sys, "argv", ["traces.py", "--page-size", "16"])
    traces.main()
    out = capsys.readouterr().out
    assert "no vLLM here" in out
    assert "vLLM 252.2 running, 63 preemptions (elsewhere)" in out


def test_figures_driven_here_stand_beside_the_published_ones(monkeypatch) -> None:
    arrivals = [Arrival(at_s=0.0, num_prompt_tokens=64, num_new_tokens=3)] * 4
    short = Workload(name="512+128", arrivals=arrivals, max_running=8)
    served = traces.Served(mean_running=2.0, preemptions=7, num_rounds=6)
    monkeypatch.setattr(traces, "drive", lambda layers, workload: served)
    (entry,) = traces.measure("gpt-oss-20b", short, [16], drives_vllm=True)
    assert entry["value"] == 4.0 and entry["over_vllm"] == 2.0
    assert "vLLM 2.0 running, 7 preemptions (252.2 and 63 elsewhere): +100.0%" in traces.describe(entry)


def test_blocks_are_those_of_the_published_plans() -> None:
    blocks = {name: vllm_inputs.block_of(GEOMETRIES[name]()) for name in MODELS}
    assert [tokens for tokens, _ in blocks.values()] == [16, 528, 272]
    # A block spans the layers of a group: 12 of gpt-oss-20b, 8 of Qwen3.5.
    assert [num_bytes * n for (_, num_bytes), n in zip(blocks.values(), (12, 8, 8))] == [393_216, 17_301_504, 8_912_896]


def test_a_workload_is_lengths_in_their_order() -> None:
    short, *_, longest = workloads(None)
    assert short.lengths == [(512, 128)] * 512 and short.max_running == 1024
    assert longest.lengths == [(16384, 1024)] * 128
