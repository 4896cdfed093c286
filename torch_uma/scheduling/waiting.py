"""Who waits, in which order: by priority, which grows while a request waits, and then by arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import merge

from torch_uma.scheduling.request import Clock, Request


class Waiting:
    """The requests that wait, oldest first for each priority; `patience_rounds` of it are worth one priority more.

    Those that wait no longer, as they were cancelled, are passed over, and go when they come to the front.
    """

    def __init__(self, clock: Clock, patience_rounds: int) -> None:
        self._clock = clock
        self._patience_rounds = patience_rounds
        self._lines: dict[int, deque[Request]] = {}

    def put(self, request: Request) -> None:
        """From the present round on it waits, at the place that its arrival gives it."""
        request.waits_from = self._clock.round
        line = self._lines.setdefault(request.priority, deque())
        if not line or line[-1].arrival < request.arrival:
            line.append(request)
            return
        # One that was retracted arrived before most of those that wait.
        place = next(place for place, other in enumerate(line) if other.arrival > request.arrival)
        line.insert(place, request)

    def take(self, request: Request) -> None:
        """It waits no longer, and has the rank that it has now until it waits again."""
        request.rank = self.rank(request)
        request.waited_rounds += self._clock.round - request.waits_from
        line = self._lines[request.priority]
        self._tidy(line)
        line.remove(request)  # among the first, as they are taken in order

    def rank(self, request: Request) -> tuple[int, int]:
        """What the order is by: the lower rank comes first."""
        waited_rounds = request.waited_rounds + self._clock.round - request.waits_from
        return (-request.priority - waited_rounds // self._patience_rounds, request.arrival)

    def __iter__(self) -> Iterator[Request]:
        for priority, line in list(self._lines.items()):
            self._tidy(line)
            if not line:
                del self._lines[priority]
        if len(self._lines) == 1:
            (line,) = self._lines.values()
            return (request for request in line if _waits(request))
        return (request for request in merge(*self._lines.values(), key=self.rank) if _waits(request))

    @staticmethod
    def _tidy(line: deque[Request]) -> None:
        while line and not _waits(line[0]):
            line.popleft()


def _waits(request: Request) -> bool:
    return request.state in ("waiting", "offloaded")
