"""Whom to take out of memory so that what has to fit does: the choice alone, as arithmetic over shares."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from torch_uma.tables import Int64Array

Fits = Callable[[Int64Array], bool]


def choose_victims(
    fits: Fits,
    stages: Int64Array,
    shares: Int64Array,
    priorities: Int64Array,
    costs: npt.NDArray[np.float64],
    arrivals: Int64Array,
    at_least: int = 0,
) -> list[int] | None:
    """Indexes of those who have to go for `fits(stages)` to hold, [stages, sub-pools]; None if no choice would do.

    Who goes takes his share with him, `shares` [n, stages, sub-pools]. Nobody of a higher priority goes where those of
    lower ones would do. Of those who would do alone, the one that costs least goes: which frees enough on the side that
    binds. Where nobody does, they go from the lowest priority and the least cost on, and of equals the last to arrive
    first; and whoever did not have to stays. `at_least` so many go, whether they have to or not.
    """
    if not at_least and fits(stages):
        return []
    order = np.lexsort((-arrivals, costs, priorities))
    gone = shares[order].cumsum(axis=0)
    if len(order) < max(1, at_least) or not fits(stages - gone[-1]):
        return None
    too_few, enough = max(0, at_least - 1), len(order)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if fits(stages - gone[middle - 1]):
            enough = middle
        else:
            too_few = middle
    if at_least <= 1:
        candidates = np.flatnonzero(priorities <= priorities[order[enough - 1]])
        for victim in candidates[np.lexsort((-arrivals[candidates], costs[candidates]))].tolist():
            if fits(stages - shares[victim]):
                return [victim]
    victims: list[int] = order[:enough].tolist()
    left = stages - gone[enough - 1]
    for victim in order[:enough][::-1].tolist():
        if len(victims) > at_least and fits(left + shares[victim]):
            left = left + shares[victim]
            victims.remove(victim)
    return victims
