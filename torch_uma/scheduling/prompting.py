"""The requests that run a prompt, by rank, and those whose prompt the last round has run to its end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch_uma.scheduling.decision import Chunk
from torch_uma.scheduling.request import Request
from torch_uma.scheduling.round import Forward

if TYPE_CHECKING:
    from torch_uma.pool import CachePool


class Prompting:
    """Who runs a prompt, and the forwards over pieces of prompts.

    `is_packed`: whether a forward may be over unequally many new tokens. `is_even`: whether it must be over requests of
    one length.

    Attributes:
        requests: who runs a prompt, by rank.
        through: whose prompt the last round has run to its end; they decode from the next one on.
    """

    def __init__(self, pool: CachePool, *, is_packed: bool, is_even: bool) -> None:
        self._pool = pool
        self._is_packed = is_packed
        self._is_even = is_even
        self.requests: list[Request] = []
        self.through: list[Request] = []

    def __len__(self) -> int:
        return len(self.requests) + len(self.through)

    def join(self, requests: Iterable[Request]) -> None:
        """These run their prompts from now on."""
        self.requests += requests
        self.requests.sort(key=lambda request: request.rank)

    def leave(self, request: Request) -> bool:
        """Let go of a request; False if it is not among them."""
        for requests in (self.requests, self.through):
            if request in requests:
                requests.remove(request)
                return True
        return False

    def pass_on(self) -> list[Request]:
        """Those who are through, who are no more among them."""
        through, self.through = self.through, []
        return through

    def done(self) -> tuple[Request, ...]:
        """Those who are through and get no token but this one."""
        return tuple(request for request in self.through if request.num_tokens == request.max_tokens)

    def forwards(self, chunks: Iterable[Chunk]) -> list[Forward]:
        """The forwards over pieces of prompts: equally long ones together, or all of them packed."""
        groups: dict[object, list[Chunk]] = {}
        for request, count in chunks:
            assert request.sequence is not None
            start = request.sequence.length if self._is_even else 0
            groups.setdefault(None if self._is_packed else (start, count), []).append((request, count))
        return [self._forward(group) for group in groups.values()]

    def _forward(self, chunks: list[Chunk]) -> Forward:
        requests = tuple(request for request, _ in chunks)
        counts = [count for _, count in chunks]
        batch = self._pool.batch([request.sequence for request in requests if request.sequence is not None])
        starts = self._pool.sequences.length[batch.rows.numbers]
        samples = starts + counts == [request.num_to_run for request in requests]
        for request, is_through in zip(requests, samples.tolist()):
            if is_through:
                request.sample()
                self.requests.remove(request)
                self.through.append(request)
        return Forward(
            requests=requests,
            batch=batch,
            num_new_tokens=counts[0] if len(set(counts)) == 1 else counts,
            starts=starts,
            samples=samples,
            is_decode=False,
        )
