"""Each kernel, compiled for GPUs that are not here: nothing spills, and what is aligned moves 16 bytes at once."""

import os
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process, and not compiled", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from compiled_kernels import ALIGNED, OTHERS, TARGETS, figures  # noqa: E402


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ALIGNED | OTHERS)
def test_no_spills_and_wide_accesses(name, target):
    found = figures((ALIGNED | OTHERS)[name], target)
    assert found.spilled_bytes == 0
    assert found.registers <= 168
    if name in ALIGNED:
        assert set(found.stores) == {128}
        assert found.loads[128] > 0
        if " to " not in name:  # a copy, which reads as wide as it writes; page numbers and entries are read beside
            assert found.loads[128] == found.stores[128]


def test_none_spills_with_the_assembler_of_a_cuda_toolkit(monkeypatch):
    """Importing FlashInfer points Triton to one, where there is one, for sm_100; it chooses registers for itself."""
    assembler = shutil.which("ptxas")
    if assembler is not None:
        monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", assembler)
    for name in (
        "write three: bfloat16 to e5m2, float32, bfloat16 to int8",
        "write: bfloat16 to int8, scaled by number",
    ):
        assert figures(ALIGNED[name], 100).spilled_bytes == 0
