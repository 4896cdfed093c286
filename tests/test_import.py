"""What `import torch_uma` costs and gives."""

import subprocess
import sys

import pytest

import torch_uma


def in_new_interpreter(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True)


def import_milliseconds() -> float:
    """What importing torch_uma takes of the processor, whatever else it does, once torch is there."""
    code = (
        "import time, torch; start = time.process_time(); import torch_uma; print(1000 * (time.process_time() - start))"
    )
    return float(in_new_interpreter("-c", code).stdout)


def test_import_adds_at_most_100_ms_to_torch():
    assert min(import_milliseconds() for _ in range(3)) <= 100


def test_import_brings_no_library_but_torch_and_numpy():
    loaded = "import sys, torch_uma; print(*{name.partition('.')[0] for name in sys.modules})"
    names = in_new_interpreter("-c", loaded).stdout.split()
    assert "torch_uma" in names
    assert not {"transformers", "accelerate", "triton", "flashinfer", "ray"} & set(names)


def test_every_public_name_resolves():
    for name in torch_uma.__all__:
        assert getattr(torch_uma, name) is not None


def test_what_costs_time_is_imported_when_it_is_asked_for():
    code = (
        "import sys, torch_uma; assert not {'torch_uma.simulate', 'torch_uma.testing'} & set(sys.modules); "
        "torch_uma.simulate.read_trace, torch_uma.testing.scramble; assert 'transformers' not in sys.modules"
    )
    in_new_interpreter("-c", code)


def test_plan_is_the_function_whatever_is_imported_in_which_order():
    code = (
        "import torch_uma.plan, torch_uma; from torch_uma import plan; assert plan is torch_uma.plan and callable(plan)"
    )
    in_new_interpreter("-c", code)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        torch_uma.no_such_name  # noqa: B018


def test_importing_registers_the_ops():
    in_new_interpreter("-c", "import torch, torch_uma; torch.ops.torch_uma.relocate.default")
