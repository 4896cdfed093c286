"""Amounts of memory as users write them."""

from __future__ import annotations

import numpy as np
import psutil
import pytest
import torch

from torch_uma.errors import PlanError
from torch_uma.memory import free_bytes, parse_bytes, parse_memory


@pytest.mark.parametrize(
    ("memory", "num_bytes"),
    [
        ("2GiB", 2**31),
        ("512MiB", 2**29),
        ("1.5GB", 1_500_000_000),
        (" 3 kib ", 3072),
        ("4096", 4096),
        ("7B", 7),
        ("1TiB", 2**40),
        (12345, 12345),
        (np.int64(1 << 20), 1 << 20),
        (np.uint16(500), 500),
    ],
)
def test_bytes(memory: int | str, num_bytes: int) -> None:
    assert parse_bytes(memory) == num_bytes
    assert parse_memory(memory, "cpu") == num_bytes


@pytest.mark.parametrize(
    "memory", ["", "GiB", "2 gigs", "-1GiB", "1e9", "0", 0, -5, "0.2B", True, [1], b"2GiB", 0.5, np.int8(-1)]
)
def test_no_amount_of_bytes(memory: object) -> None:
    with pytest.raises(PlanError, match="memory="):
        parse_bytes(memory)


@pytest.mark.parametrize("memory", ["10000000000GiB", "9" * 400, 1 << 63])
def test_more_than_can_be_counted(memory: object) -> None:
    with pytest.raises(PlanError, match="is more than there can be"):
        parse_bytes(memory)


def test_what_may_be_nothing() -> None:
    assert [parse_bytes(memory, least=0) for memory in (0, "0", "0GiB", "1KiB")] == [0, 0, 0, 1024]
    for memory in (-1, "-1", None, "lots"):
        with pytest.raises(PlanError, match="host_memory="):
            parse_bytes(memory, name="host_memory", least=0)


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.01, float("nan")])
def test_no_fraction(fraction: float) -> None:
    with pytest.raises(PlanError, match="fraction"):
        parse_memory(fraction, "cpu")


def test_a_fraction_is_of_the_free_memory() -> None:
    total = psutil.virtual_memory().total
    assert 0 < free_bytes("cpu") <= total
    half, whole = parse_memory(0.5, torch.device("cpu")), parse_memory(1.0, "cpu")
    assert half is not None and whole is not None
    assert 0.3 < half / whole < 0.7


def test_free_memory_of_a_cuda_device_is_asked_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (1000, 4000))
    assert parse_memory(0.25, "cuda:1") == 250
    assert asked == [torch.device("cuda:1")]


def test_nothing_asked() -> None:
    assert parse_memory(None, "cpu") is None
