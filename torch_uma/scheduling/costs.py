"""What it costs to take a request out of memory, in seconds: the exchange rate between computing and copying."""

from __future__ import annotations

from dataclasses import dataclass

from torch_uma.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Costs:
    """How long it takes to compute a token of a prompt, and to copy bytes to the host or back.

    `token_s`: seconds of a prompt's token, in prompts of a usual length. `copy_bytes_per_s`: one way. A loop that
    measures them puts its own into `scheduler.costs`. PlanError for what is no positive number.
    """

    token_s: float = 50e-6
    copy_bytes_per_s: float = 20e9

    def __post_init__(self) -> None:
        for name in ("token_s", "copy_bytes_per_s"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise PlanError(f"{name} of the costs is a positive number, not {value!r}")

    def recompute_s(self, num_tokens: int) -> float:
        """Seconds to run so many tokens again."""
        return num_tokens * self.token_s

    def offload_s(self, num_bytes: int) -> float:
        """Seconds to copy so many bytes to the host and back."""
        return 2 * num_bytes / self.copy_bytes_per_s
