"""Sequences of one pool made anew in another pool of the same layers, with what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from torch_uma.lifespans import spread

if TYPE_CHECKING:
    from torch_uma.pool import CachePool
    from torch_uma.sequence import Sequence


def transplant(sequences: list[Sequence], pool: CachePool) -> list[Sequence]:
    """Sequences of `pool` with the tokens and states of these, which stay as they are; all are equally long.

    Both pools have the same layers and page size, and lie on one device. Room for tokens to come is not carried over.
    Raises OutOfMemory, and then `pool` holds nothing new. Does not synchronise.
    """
    length, source = sequences[0].length, sequences[0].pool
    assert all(sequence.length == length and sequence.pool is source for sequence in sequences)
    made = pool.add_many([0] * len(sequences))
    if not length:
        return made
    try:
        pool.begin(made, length).commit()
    except BaseException:
        for sequence in made:
            sequence.free()
        raise
    old_rows, new_rows = (np.array([each.row for each in of]) for of in (sequences, made))
    for subpool in pool.plan.subpools:
        k, books = subpool.index, pool.sequences
        count = books.end[k, new_rows] - books.first[k, new_rows]
        pages = []
        for held, rows in ((source.sequences, old_rows), (books, new_rows)):
            # The columns of the new ones, which hold no more than is needed.
            ids = held.tables.mirror[spread(held.tables.origin[k, rows] + books.first[k, new_rows], count)]
            assert (ids >= 0).all()
            pages.append(torch.from_numpy(held.allocator.v2p[ids].astype(np.int64)).to(pool.device))
        taken = source.arena.pages(source.plan.subpools[k]).index_select(0, pages[0])
        pool.arena.pages(subpool).index_copy_(0, pages[1], taken)
    return made
