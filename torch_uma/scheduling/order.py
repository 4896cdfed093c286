"""The order of a batch by where its states lie, so that few of them have to move for them to lie side by side."""

from __future__ import annotations

import numpy as np

from torch_uma.tables import Int64Array


def slot_order(slots: Int64Array) -> Int64Array:
    """[n] int64 indexes of `slots`, distinct physical pages, in the order that a batch is to have.

    In the run of n pages in which most of them lie already, every one of those is at its place; the others fill up the
    places that are left. So as few as possible have to move, and a finish in the middle moves one.
    """
    count = len(slots)
    by_slot = slots.argsort(kind="stable")
    ascending = slots[by_slot]
    if count < 2 or ascending[-1] - ascending[0] == count - 1:
        return by_slot
    inside = ascending.searchsorted(ascending + count) - np.arange(count)
    start = int(inside.argmax())
    end = start + int(inside[start])
    order = np.full(count, -1, np.int64)
    order[ascending[start:end] - ascending[start]] = by_slot[start:end]
    order[order < 0] = np.concatenate([by_slot[:start], by_slot[end:]])
    return order
