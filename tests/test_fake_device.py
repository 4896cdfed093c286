"""What a CUDA graph captures neither waits for the device nor takes a tensor of the host, seen without a device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_captured_forwards_and_attention_stay_on_the_device() -> None:
    tests = Path(__file__).resolve().parent
    path = os.pathsep.join(map(str, [tests.parent, tests.parent / "examples"]))
    command = [sys.executable, str(tests / "fake_device.py"), "llama", "gpt_oss", "gemma2"]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
