"""Memory for requests as benchmarks drive it, whoever's it is; and a pool of ours in that form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

import torch_uma
from torch_uma.errors import OutOfMemory
from torch_uma.plan import Plan


class Pools(Protocol):
    """Memory for requests."""

    def add(self) -> Any | None:
        """A request without tokens; None if there is no room."""

    def extend(self, request: Any, num_tokens: int) -> bool:
        """Take memory for so many more tokens; False if there is no room."""

    def batch(self, requests: Sequence[Any]) -> Any:
        """Requests that decode together."""

    def decode(self, batch: Any) -> list[Tensor]:
        """Take a token for every request; [rows] int64 or [rows, 1], where each attention pool is to write them."""

    def finish(self, request: Any) -> None:
        """Give back what a request holds."""

    def compact(self) -> int:
        """Pack what is live; the bytes moved."""

    def copiers(self) -> list[tuple[Any, str]]:
        """What copies pages meanwhile, as an owner and the name of its attribute."""

    def check(self) -> None:
        """AssertionError or an error of the library's if its books are not in order."""


class OurPools:
    """Requests in a pool of ours."""

    def __init__(self, plan: Plan, max_requests: int, max_tokens: int) -> None:
        self.pool = torch_uma.CachePool(plan, max_sequences=max_requests, max_tokens=max_tokens, device="cpu")
        self.attention = [subpool for subpool in plan.subpools if not subpool.is_state]

    def add(self) -> torch_uma.Sequence | None:
        try:
            return self.pool.add()
        except OutOfMemory:
            return None

    def extend(self, request: torch_uma.Sequence, num_tokens: int) -> bool:
        try:
            self.pool.begin([request], num_tokens).commit()
        except OutOfMemory:
            return False
        return True

    def batch(self, requests: Sequence[torch_uma.Sequence]) -> torch_uma.Batch:
        return self.pool.batch(requests)

    def decode(self, batch: torch_uma.Batch) -> list[Tensor]:
        step = self.pool.begin(batch, 1)
        positions = torch.from_numpy(step.past)[:, None]
        places = [step.entries(subpool, positions) for subpool in self.attention]
        step.commit()
        return places

    def finish(self, request: torch_uma.Sequence) -> None:
        request.free()
        self.pool.sequences.settle()  # which the next call would do otherwise

    def compact(self) -> int:
        return self.pool.compact()

    def copiers(self) -> list[tuple[Any, str]]:
        return [(self.pool.allocator, "mover")]

    def check(self) -> None:
        self.pool.check()


def grown(pools: Pools, tokens: Iterable[int]) -> Any | None:
    """A request that has grown so; None, and nothing taken, where there is no room."""
    request = pools.add()
    if request is None or all(pools.extend(request, num_tokens) for num_tokens in tokens):
        return request
    pools.finish(request)
    return None
