"""Fixed pools to compare with: the split that widely used engines begin with, and the best one for some traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch_uma.errors import PlanError
from torch_uma.layout import Full
from torch_uma.plan import Plan
from torch_uma.simulate.report import Report

STATE_TO_REST = 0.9  # bytes for states over bytes for the rest
WINDOW_TO_FULL = 0.8  # tokens for a window over tokens for full attention
_GOLDEN = (5**0.5 - 1) / 2
_NUM_EVENLY = 5

_Merit = tuple[int, float]  # completed requests, new tokens a second
_NONE: _Merit = (0, 0.0)


def default_split(
    plan: Plan, *, state_to_rest: float = STATE_TO_REST, window_to_full: float = WINDOW_TO_FULL
) -> dict[str, float]:
    """Shares of the arena by fixed ratios, knowing nothing of the traffic: those of a widely used engine by default."""
    weights = {
        subpool.name: subpool.bytes_per_token * (1.0 if isinstance(subpool.lifetime, Full) else window_to_full)
        for subpool in plan.subpools
        if not subpool.is_state
    }
    rest = sum(weights.values())
    states = [subpool.name for subpool in plan.subpools if subpool.is_state]
    weights |= {name: (state_to_rest * rest if rest else 1.0) / len(states) for name in states}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def best_split(
    plan: Plan, run: Callable[[Mapping[str, float]], Report], *, num_tries: int = 12
) -> tuple[dict[str, float], Report]:
    """The split under which `run` gets through its requests soonest, and how; found by search, one share at a time.

    Throughput rises to the best share and falls behind it: so the search looks at some, evenly apart, and then closer
    and closer around the best of them by golden section, `num_tries` for each share but one, seven at least. A split
    under which `run` raises PlanError, as a pool of it cannot hold a request, is none; PlanError if there is no other.
    """
    search = _Search(run)
    shares = default_split(plan)
    search.look(shares)
    for subpool in plan.subpools[:-1]:
        search.narrow(search.best or shares, subpool.name, num_tries)
    if search.best is None or search.report is None:
        raise PlanError("no split was found in which every pool can hold a request; give the arena more memory")
    return search.best, search.report


class _Search:
    """Splits that were looked at, and the best of them so far."""

    def __init__(self, run: Callable[[Mapping[str, float]], Report]) -> None:
        self._run = run
        self._merit = _NONE
        self.best: dict[str, float] | None = None
        self.report: Report | None = None

    def look(self, split: dict[str, float]) -> _Merit:
        """How good a split is."""
        try:
            report = self._run(split)
        except PlanError:
            return _NONE
        merit = (report.num_completed, report.new_tokens_per_s)
        if merit > self._merit:
            self._merit, self.best, self.report = merit, split, report
        return merit

    def narrow(self, split: dict[str, float], name: str, num_tries: int) -> None:
        """Look at so many shares for one, closer and closer to the best, the others in their proportions."""

        def look(share: float) -> _Merit:
            return self.look(_with_share(split, name, share))

        evenly = [place / (_NUM_EVENLY + 1) for place in range(1, _NUM_EVENLY + 1)]
        merits = [look(share) for share in evenly]
        best = merits.index(max(merits))
        low, high = ([0.0, *evenly, 1.0][best + place] for place in (0, 2))
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        at_left, at_right = look(left), look(right)
        for _ in range(num_tries - _NUM_EVENLY - 2):
            if at_left >= at_right:
                high, right, at_right = right, left, at_left
                left = high - _GOLDEN * (high - low)
                at_left = look(left)
            else:
                low, left, at_left = left, right, at_right
                right = low + _GOLDEN * (high - low)
                at_right = look(right)


def _with_share(split: Mapping[str, float], name: str, share: float) -> dict[str, float]:
    """The same with another share for one, the others in their proportions."""
    others = sum(other for key, other in split.items() if key != name)
    return {key: share if key == name else other / others * (1 - share) for key, other in split.items()}
