"""A user's handle on one sequence of a pool. What the sequence holds is in the pool's books."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import numpy as np

from torch_uma.lifespans import NEVER
from torch_uma.tables import Int64Array

if TYPE_CHECKING:
    from torch_uma.pool import CachePool


class Sequence:
    """One request's logical content in a pool: made by `pool.add()` or `fork()`, used until `free()`.

    Every method raises SequenceError after `free()` or, where it changes something, while the sequence is in an open
    step; ThreadError from a second thread; ClosedError once the pool is closed. None waits for the device.
    """

    __slots__ = ("__weakref__", "_pool", "_row")

    def __init__(self, pool: CachePool, row: int) -> None:
        self._pool = pool
        self._row = row

    @property
    def pool(self) -> CachePool:
        """The pool whose memory the sequence uses."""
        return self._pool

    @property
    def row(self) -> int:
        """Its row in the pool's tables."""
        return self._pool.row_of(self)

    @property
    def length(self) -> int:
        """Tokens that it holds, those of an open step not included."""
        return int(self._pool.sequences.length[self._pool.row_of(self)])

    @property
    def capacity(self) -> int:
        """Tokens up to which it can grow without another page, in every sub-pool; `max_tokens` at most."""
        capacity = self._pool.sequences.capacity[:, self._pool.row_of(self)]
        return min(int(capacity.min(initial=NEVER)), self._pool.tables.max_tokens)

    @property
    def num_pages(self) -> tuple[int, ...]:
        """Pages that it holds in each sub-pool, shared ones and room reserved ahead included."""
        return tuple(len(pages) for pages in self.pages)

    @property
    def pages(self) -> tuple[Int64Array, ...]:
        """[n] int64 virtual ids for each sub-pool, in the order of the tokens that they hold."""
        books, row = self._pool.sequences, self._pool.row_of(self)
        held = []
        for origin, first, end in zip(books.tables.origin[:, row], books.first[:, row], books.end[:, row], strict=True):
            ids = books.tables.mirror[origin + first : origin + end]
            held.append(ids[ids >= 0].astype(np.int64))
        return tuple(held)

    @property
    def last_epoch(self) -> int:
        """The last step that read or wrote it, 0 if none; what another stream waits for (`pool.event`)."""
        return int(self._pool.sequences.last_epoch[self._pool.row_of(self)])

    def fork(self) -> Sequence:
        """Make a second sequence with the same content, sharing the pages that hold it.

        Takes a row but no pages: the last partial page and the state are copied in the next step of whichever side
        writes first.
        """
        row = self._pool.idle_row(self)
        self._pool.sequences.check_whole(np.array([row]))
        return Sequence(self._pool, self._pool.sequences.fork(row))

    def crop(self, num_tokens: int) -> None:
        """Shorten to `num_tokens` tokens and give back the pages behind them, room reserved ahead included.

        The present length changes nothing; 0 empties the sequence and starts its state afresh. Otherwise SequenceError
        if window pages that are needed then have been released, or if a state would have to be older than the one kept.
        """
        self._pool.sequences.crop(self._pool.idle_row(self), num_tokens)

    def check_crop(self, num_tokens: int) -> None:
        """Raise what `crop` would raise now; changes nothing."""
        self._pool.sequences.check_crop(self._pool.idle_row(self), num_tokens)

    def free(self) -> None:
        """Give back everything that it holds; the sequence cannot be used any more."""
        self._pool.sequences.free(self._pool.idle_row(self))
        self._row = -1

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a sequence cannot be copied or pickled, as what it holds lies in the memory of its pool; fork() makes a "
            "second one with the same content"
        )

    def __repr__(self) -> str:
        if self._row < 0 or self._pool.closed:
            return "Sequence(freed)"
        return f"Sequence(row {self._row}, {int(self._pool.sequences.length[self._row])} tokens)"
