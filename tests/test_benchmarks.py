"""Every benchmark starts as its own text says: as a script, whose folder then comes first among the modules' places."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

from records import publish, record  # noqa: E402

SCRIPTS = [script for script in sorted(BENCHMARKS.glob("*.py")) if "__main__" in script.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_benchmark_says_how_it_is_called(script: Path) -> None:
    run = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "--json" in run.stdout


def test_a_figure_has_a_ratio_to_what_is_not_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    records = [record("case", "metric", 3.0, "s", reference) for reference in (None, 2.0, 0.0)]
    assert [entry.get("ratio") for entry in records] == [None, 1.5, None]
    publish(records, None)
    assert capsys.readouterr().out.splitlines() == [
        "case  metric 3 s",
        "case  metric 3 s  1.5000 of 2",
        "case  metric 3 s",
    ]
