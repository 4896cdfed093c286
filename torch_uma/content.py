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
from torch_uma.ops import host_copy
from torch_uma.sequence import Sequence

if TYPE_CHECKING:
    from torch_uma.pool import CachePool


class Pages(NamedTuple):
    """Pages of one size: the rows `places` of `grid`, uint8 [pages, page_bytes]; [n] int64 on the grid's device."""

    grid: Tensor
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
    return [
        Pages(pool.arena.pages(subpool), own)
        for subpool, own in zip(subpools, places.split((counts * len(rows)).tolist()))
    ]


def copy_pages(source: Pages, target: Pages) -> None:
    """Copy pages over as many others on the same device; none is both read and written."""
    if source.grid.device.type == "cpu":
        page_bytes = source.grid.shape[1]
        sources, targets = source.places.numpy() * page_bytes, target.places.numpy() * page_bytes
        host_copy.copy_pages(target.grid.view(-1), sources, targets, page_bytes, source=source.grid.view(-1))
    else:
        write_pages(read_pages(source), target)


def read_pages(pages: Pages) -> Tensor:
    """What pages hold, [n, page_bytes / 8] int64, in one gather."""
    return pages.grid.view(torch.int64).index_select(0, pages.places)  # they begin and end at multiples of 16 bytes


def write_pages(held: Tensor, pages: Pages) -> None:
    """Write what `read_pages` gave into pages, in one scatter."""
    pages.grid.view(torch.int64).index_copy_(0, pages.places, held)


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
