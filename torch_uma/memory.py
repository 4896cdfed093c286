"""How much memory a user asked for: text, bytes or a share of what is free, turned into bytes."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from torch_uma.errors import PlanError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_MOST_BYTES = (1 << 63) - 1
_FORMS = 'give bytes (2147483648) or text ("2GiB", "512MiB", "1.5GB")'


def parse_bytes(memory: Any, *, name: str = "memory", least: int = 1) -> int:
    """Bytes of an integer or of text such as "2GiB"; PlanError for anything else and for less than `least`, 0 or 1.

    `name` is what errors call it. PlanError, too, for more than 64 bits can count.
    """
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", memory)
        if match is None or match[2].upper() not in _UNITS:
            raise PlanError(f"{name}={memory!r} is not an amount of memory; {_FORMS}")
        num_bytes = int(min(float(match[1]) * _UNITS[match[2].upper()], 1 << 64))
    elif isinstance(memory, (int, np.integer)) and not isinstance(memory, bool):
        num_bytes = int(memory)
    else:
        raise PlanError(f"{name}={memory!r} is not an amount of memory in bytes; {_FORMS}")
    if num_bytes < least:
        raise PlanError(f"{name}={memory!r} is {'negative' if num_bytes < 0 else 'not positive'}; {_FORMS}")
    if num_bytes > _MOST_BYTES:
        raise PlanError(f"{name}={memory!r} is more than there can be, {_MOST_BYTES} bytes; {_FORMS}")
    return num_bytes


def parse_memory(memory: int | float | str | None, device: torch.device | str) -> int | None:
    """Bytes that `memory` means on `device`: bytes, text, a fraction in (0, 1] of the free memory, or None for None.

    Raises PlanError for anything else. A fraction on CUDA asks the driver, which does not wait for the device's work.
    """
    if memory is None:
        return None
    if isinstance(memory, float):
        if not 0 < memory <= 1:
            raise PlanError(f"memory={memory!r} is not a fraction in (0, 1] of the free memory; otherwise {_FORMS}")
        return int(memory * free_bytes(device))
    return parse_bytes(memory)


def free_bytes(device: torch.device | str) -> int:
    """Free bytes of a CUDA device, or of the host for any other device."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil  # type: ignore[import-untyped]

    return int(psutil.virtual_memory().available)
