"""What sequences hold at their lengths: on which pages it lies, and sequences made for content that lies elsewhere.

Pages are copied whole. Neither pages that are dead at a sequence's length, nor room ahead or a past that it keeps, are
part of its content; a sequence without tokens has none, and its state is not begun.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torch_uma.arena import staged
from torch_uma.lifespans import spread
from torch_uma.sequence import Sequence

if TYPE_CHECKING:
    from torch_uma.pool import CachePool


class Pages(NamedTuple):
    """Pages of one sub-pool: `numbers[places]` is what they hold, in 16 or 8 bytes at a time.

    `numbers` [pages of the grid, numbers of a page] is a view of the arena, `places` [n] int64 are on its device.
    """

    numbers: Tensor
    places: Tensor


def content_of(sequences: list[Sequence], num_tokens: int) -> list[Pages]:
    """Where it lies that these sequences of one pool hold at `num_tokens` tokens, which each of them has in the tables.

    One element for each sub-pool, and in it row by row, by column; none without tokens, or on the meta device, which
    has no bytes. To be used on the arena's stream, before anything moves. Does not synchronise.
    """
    pool = sequences[0].pool
    if not num_tokens or pool.device.type == "meta":
        return []
    books, subpools = pool.sequences, pool.plan.subpools
    rows = np.array([sequence.row for sequence in sequences])
    every, lengths = np.arange(len(subpools)), np.full(len(subpools), num_tokens)
    first = books.lifespans.first_needed_page(every, lengths)
    counts = books.lifespans.num_pages(every, lengths) - first
    starts = books.tables.origin[:, rows] + first[:, None]
    ids = books.tables.mirror[spread(starts.ravel(), counts.repeat(len(rows)))]
    assert (ids >= 0).all(), (num_tokens, rows)
    places = staged(books.allocator.v2p[ids].astype(np.int64), pool.device)
    # The widest numbers that are moved as they are; all pages begin and end at multiples of 16 bytes.
    dtype = torch.complex128 if pool.device.type == "cpu" else torch.int64
    return [
        Pages(pool.arena.pages(subpool).view(dtype), own)
        for subpool, own in zip(subpools, places.split((counts * len(rows)).tolist()))
    ]


@contextmanager
def made_for_content(pool: CachePool, num_sequences: int, num_tokens: int) -> Iterator[list[Sequence]]:
    """New sequences of `num_tokens` tokens, whose content the block writes, on the arena's stream; none if it raises.

    Raises OutOfMemory or SequenceError, and then nothing has changed. Does not synchronise.
    """
    sequences = pool.add_many([num_tokens] * num_sequences)
    try:
        # The step pins the pages meanwhile, and tells other streams when they are written.
        step = pool.begin(sequences, num_tokens) if num_tokens else None
        try:
            with pool.guard.epochs.on_stream():
                yield sequences
        except BaseException:
            if step is not None:
                step.abort()
            raise
        if step is not None:
            step.commit()
    except BaseException:
        for sequence in sequences:
            sequence.free()
        raise
