"""How fast a device computes and copies: the numbers of a roofline."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_uma.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device by its sustained speeds.

    `flops_per_s`: of matrix products in bf16. `bytes_per_s`: of its memory, read or written. `host_bytes_per_s`: copies
    to the host or back, one way. `forward_s`: what a forward costs besides, however little it computes: launches,
    and the host's work.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    host_bytes_per_s: float
    forward_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "bytes_per_s", "host_bytes_per_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise PlanError(f"{name} of a device is a positive number, not {getattr(self, name)!r}")
        if not 0 <= self.forward_s < math.inf:
            raise PlanError(f"forward_s of a device is a number that is not negative, not {self.forward_s!r}")

    def bound_s(self, flops: float, num_bytes: float) -> float:
        """The least time for so much work, whichever takes longer."""
        return max(flops / self.flops_per_s, num_bytes / self.bytes_per_s)


# 4.3 TB/s of copies and 790 TFLOP/s in bf16 were measured on one; the host link is PCIe 5.0 x16 as specified.
DEVICES = {
    "h200": Device(name="h200", flops_per_s=790e12, bytes_per_s=4.3e12, host_bytes_per_s=55e9, forward_s=0.3e-3),
}
