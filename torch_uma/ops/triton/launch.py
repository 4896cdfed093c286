"""A launch of a kernel as a value, so that what would run can be looked at where nothing can.

Owns what a launch is, how much of a machine it takes, how work is cut into blocks, and the one place that launches.
Shapes alone decide a launch, never a number on a device, so each can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Programs for each multiprocessor, at most: with 4 or 8 warps each they hide the latency of memory, and they loop.
_PROGRAMS_PER_MULTIPROCESSOR = 8


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What launches depend on.

    Attributes:
        num_multiprocessors: how many programs are worth while.
        converts_float8: whether it has instructions that convert float8.
    """

    num_multiprocessors: int
    converts_float8: bool


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A kernel, and with what it runs.

    Attributes:
        kernel: what `triton.jit` made.
        num_programs: at least 1.
        arguments: by position, tensors among them.
        constants: by name, those that a kernel is compiled for.
        num_warps: of each program.
        most_registers: of each thread; None leaves it to the assembler, which may spill so that more programs fit.
    """

    kernel: Any
    num_programs: int
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    num_warps: int = 4
    most_registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What the kernel takes by name. As in torch, products are rounded before a sum, and assertions are made."""
        as_torch = {"enable_fp_fusion": False, "debug": True, "sanitize_overflow": False}
        is_limited = self.most_registers is not None and not torch.version.hip  # whose compiler knows no such option
        limits = {"maxnreg": self.most_registers} if is_limited else {}
        return {**self.constants, **as_torch, **limits, "num_warps": self.num_warps}

    def run(self, tensor: Tensor) -> None:
        """Run on the device of `tensor` and its current stream; does not wait for it."""
        with torch.cuda.device_of(tensor):
            self.kernel[(self.num_programs,)](*self.arguments, **self.options)


@functools.cache
def machine_of(device: torch.device) -> Machine:
    """The machine that `device` is; a host, where Triton interprets, has two multiprocessors."""
    if device.type != "cuda":
        return Machine(num_multiprocessors=2, converts_float8=False)
    properties = torch.cuda.get_device_properties(device)
    capable = torch.version.cuda is not None and (properties.major, properties.minor) >= (8, 9)
    return Machine(num_multiprocessors=properties.multi_processor_count, converts_float8=capable)


def num_programs(machine: Machine, num_tiles: int) -> int:
    """Programs for so many tiles: one for each, or as many as the machine runs, which then loop."""
    return max(1, min(num_tiles, machine.num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR))


def block_of(size: int, *, least: int, most: int) -> int:
    """The power of two whose multiples cover `size` with least waste, the largest of such; all of a small `size`.

    `least` and `most` are powers of two; it is below `least` only where `size` is.
    """
    if size <= least:
        return 1 << (size - 1).bit_length()
    blocks = [1 << power for power in range(least.bit_length() - 1, most.bit_length())]
    return min(reversed(blocks), key=lambda block: -(-size // block) * block)
