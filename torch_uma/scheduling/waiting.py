"""Who waits, in the order in which they are to be served."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from torch_uma.scheduling.request import Request


class Waiting:
    """The requests that wait, by rank, which is a request's own and never changes: the lower comes first."""

    def __init__(self) -> None:
        self._order: list[Request] = []

    def put(self, request: Request) -> None:
        """From now on it waits."""
        insort(self._order, request, key=_rank)

    def take(self, request: Request) -> None:
        """It waits no longer."""
        place = bisect_left(self._order, request.rank, key=_rank)
        assert self._order[place] is request
        del self._order[place]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
