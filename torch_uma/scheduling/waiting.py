"""Who waits, in which order: by priority, which grows while a request waits, and then by arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from torch_uma.scheduling.request import Clock, Request

_FEW_RISERS = 32  # so many are put at their new places one by one sooner than all are sorted


class Waiting:
    """The requests that wait, by rank; `patience_rounds` of waiting are worth one priority more.

    A rank changes only once in so many rounds, so the order is kept from round to round, and who is to rise is looked
    up by the round in which it does.
    """

    def __init__(self, clock: Clock, patience_rounds: int) -> None:
        self._clock = clock
        self._patience_rounds = patience_rounds
        self._order: list[Request] = []
        self._risers: dict[int, dict[Request, None]] = {}  # by round
        self._risen_until = clock.round

    def put(self, request: Request) -> None:
        """From the present round on it waits."""
        self._rise()
        request.waits_from = self._clock.round
        request.rank = self._rank_after(request, 0)
        insort(self._order, request, key=_rank)
        left_rounds = self._patience_rounds - request.waited_rounds % self._patience_rounds
        self._risers.setdefault(self._clock.round + left_rounds, {})[request] = None

    def take(self, request: Request) -> None:
        """It waits no longer, and has the rank that it has now until it waits again."""
        self._rise()
        place = bisect_left(self._order, request.rank, key=_rank)
        assert self._order[place] is request
        del self._order[place]
        request.waited_rounds += self._clock.round - request.waits_from
        left_rounds = self._patience_rounds - request.waited_rounds % self._patience_rounds
        risers = self._risers[self._clock.round + left_rounds]
        del risers[request]
        if not risers:
            del self._risers[self._clock.round + left_rounds]

    def pass_over(self, request: Request) -> None:
        """A round has brought a request nothing although it does not wait: that counts as waiting, too."""
        request.waited_rounds += 1
        request.rank = self._rank_after(request, 0)

    def __iter__(self) -> Iterator[Request]:
        self._rise()
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def _rank_after(self, request: Request, num_rounds: int) -> tuple[int, int]:
        """What the order is by, once it has waited so many rounds more: the lower rank comes first."""
        return (-request.priority - (request.waited_rounds + num_rounds) // self._patience_rounds, request.arrival)

    def _rise(self) -> None:
        """Bring the order up to the present round."""
        while self._risen_until < self._clock.round:
            self._risen_until += 1
            risers = self._risers.pop(self._risen_until, None)
            if risers is None:
                continue
            are_few = len(risers) <= _FEW_RISERS
            for request in risers:
                if are_few:
                    del self._order[bisect_left(self._order, request.rank, key=_rank)]
                request.rank = self._rank_after(request, self._risen_until - request.waits_from)
                if are_few:
                    insort(self._order, request, key=_rank)
            if not are_few:
                self._order.sort(key=_rank)
            self._risers.setdefault(self._risen_until + self._patience_rounds, {}).update(risers)


def _rank(request: Request) -> tuple[int, int]:
    return request.rank
