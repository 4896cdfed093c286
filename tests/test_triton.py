"""The kernels under Triton's interpreter: it is chosen before triton is imported, and so in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
CASES = Path(__file__).parent / "interpreted"


@pytest.mark.parametrize("name", ["copies", "rows", "tables"])
def test_interpreted(name):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES / f"{name}.py")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=CASES.parent.parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
