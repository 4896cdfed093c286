"""Every benchmark starts as its own text says: as a script, whose folder then comes first among the modules' places."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = [
    script
    for script in sorted((Path(__file__).resolve().parent.parent / "benchmarks").glob("*.py"))
    if "__main__" in script.read_text()
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_benchmark_says_how_it_is_called(script: Path) -> None:
    run = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "--json" in run.stdout
