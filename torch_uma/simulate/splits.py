"""Fixed pools to compare with: the split that widely used engines begin with, and the best one for some traffic."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch_uma.layout import Full
from torch_uma.plan import Plan
from torch_uma.simulate.report import Report

STATE_TO_REST = 0.9  # bytes for states over bytes for the rest
WINDOW_TO_FULL = 0.8  # tokens for a window over tokens for full attention
_GOLDEN = (5**0.5 - 1) / 2


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

    The search of one share is by golden section, as throughput rises to its best split and falls behind it. Whatever
    fails, as a pool of it cannot hold a request, counts as no throughput.
    """
    names = [subpool.name for subpool in plan.subpools]
    best = default_split(plan)
    report = run(best)
    for name in names[: len(names) - 1]:
        low, high = 0.01, 0.99
        for _ in range(num_tries):
            left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
            tried = {share: run(_with_share(best, name, share)) for share in (left, right)}
            for share, other in tried.items():
                if _merit(other) > _merit(report):
                    best, report = _with_share(best, name, share), other
            if _merit(tried[left]) >= _merit(tried[right]):
                high = right
            else:
                low = left
    return best, report


def _with_share(split: Mapping[str, float], name: str, share: float) -> dict[str, float]:
    """The same with another share for one, the others in their proportions."""
    others = sum(other for key, other in split.items() if key != name)
    return {key: share if key == name else other / others * (1 - share) for key, other in split.items()}


def _merit(report: Report) -> tuple[int, float]:
    return report.num_completed, report.new_tokens_per_s
