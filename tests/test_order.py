"""The order of a batch by where its states lie: as few of them move as any order allows."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from torch_uma.scheduling.order import slot_order


def num_moved(slots: list[int], order: list[int]) -> int:
    """States that have to move for all to lie side by side in this order, at the best place."""
    ordered = [slots[place] for place in order]
    starts = range(min(slots) - len(slots), max(slots) + 1)
    return min(sum(slot != start + at for at, slot in enumerate(ordered)) for start in starts)


@pytest.mark.parametrize("seed", range(3))
def test_no_other_order_moves_fewer_states(seed: int) -> None:
    print("seed", seed)
    random = np.random.default_rng(seed)
    for _ in range(60):
        count = int(random.integers(1, 6))
        slots = random.choice(int(random.integers(count, 3 * count + 1)), count, replace=False).tolist()
        order = slot_order(np.array(slots, np.int64)).tolist()
        assert sorted(order) == list(range(count))
        best = min(num_moved(slots, list(other)) for other in permutations(range(count)))
        assert num_moved(slots, order) == best, slots


def test_what_lies_side_by_side_stays_where_it_is() -> None:
    random = np.random.default_rng(0)
    for count in (0, 1, 2, 50):
        slots = 7 + random.permutation(count)
        assert slots[slot_order(slots)].tolist() == list(range(7, 7 + count))


def test_a_finish_in_the_middle_moves_one() -> None:
    random = np.random.default_rng(0)
    for gone in range(40):
        slots = np.delete(random.permutation(40), gone)
        order = slot_order(slots)
        gap = set(range(40)) - set(slots.tolist())
        assert num_moved(slots.tolist(), order.tolist()) == (0 if gap <= {0, 39} else 1)
