"""Sequences of one pool made anew in another pool of the same layers, with what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_uma.content import content_of, copy_pages, made_for_content

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
    with made_for_content(pool, len(sequences), length) as made:
        for old, new in zip(content_of(sequences, length), content_of(made, length)):
            copy_pages(old, new)
    return made
