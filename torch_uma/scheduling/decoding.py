"""The requests that get a token in every round, in the order of their batch."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torch_uma.errors import SequenceError
from torch_uma.lifespans import NEVER
from torch_uma.scheduling.order import slot_order
from torch_uma.scheduling.request import Clock, Request
from torch_uma.scheduling.round import Forward
from torch_uma.tables import Int64Array

if TYPE_CHECKING:
    from torch_uma.batch import Batch
    from torch_uma.pool import CachePool


class Decoding:
    """Who decodes, as arrays; whoever joins or leaves is in them, or no more, after `settle`.

    With recurrent states the order is that of the states in the arena, so that few of them move when somebody leaves.
    `is_even`: whether a forward must be over requests of one length.

    Attributes:
        requests: in the order of the batch.
        rows: [n] int64, their rows in the pool's tables.
        last_rounds: [n] int64, the round that gives each its last token.
        first_end: the least of these; no round if nobody decodes.
        priorities: [n] int64, as submitted.
    """

    def __init__(self, pool: CachePool, clock: Clock, *, is_even: bool) -> None:
        self._pool = pool
        self._clock = clock
        self._is_even = is_even
        self._leaving: set[Request] = set()
        self._joining: list[Request] = []
        self._batch: Batch | None = None
        self.requests: tuple[Request, ...] = ()
        self.rows: Int64Array = np.zeros(0, np.int64)
        self.last_rounds = self.priorities = self._ahead = self.rows
        self.first_end = NEVER
        self._samples = np.zeros(0, np.bool_)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_staying(self) -> int:
        """How many there are without those who leave, and with those who join."""
        return len(self.requests) + len(self._joining) - len(self._leaving)

    def join(self, requests: Iterable[Request]) -> None:
        """From the next `settle` on, these are in it; all have a sequence."""
        self._joining += requests

    def leave(self, request: Request) -> None:
        """From the next `settle` on, it is not; its sequence may be freed at once."""
        if request in self._joining:
            self._joining.remove(request)
        else:
            self._leaving.add(request)

    def settle(self) -> None:
        """Let those join and leave who are to."""
        joining, self._joining = self._joining, []
        leaving, self._leaving = self._leaving, set()
        if not joining and not leaving:
            return
        if leaving:
            stays = [request not in leaving for request in self.requests]
            self.requests = tuple(compress(self.requests, stays))
            self._select(np.array(stays, np.bool_))
        if joining:
            now = self._clock.round
            new = [(_row(r), now + r.max_tokens - r.num_tokens, r.priority, r.num_tokens - 1 - now) for r in joining]
            old = np.stack([self.rows, self.last_rounds, self.priorities, self._ahead])
            columns = np.concatenate([old, np.array(new, np.int64).T], axis=1)
            self.rows, self.last_rounds, self.priorities, self._ahead = columns
            self.requests += tuple(joining)
        books = self._pool.sequences
        if books.lifespans.states and len(self.rows) > 1:
            cells = books.tables.origin[books.lifespans.states[0], self.rows]
            order = slot_order(books.allocator.v2p[books.tables.mirror[cells]].astype(np.int64))
            self.requests = itemgetter(*order.tolist())(self.requests)
            self._select(order)
        self._batch = None
        self.first_end = int(self.last_rounds.min(initial=NEVER))
        self._samples = np.ones(len(self.rows), np.bool_)

    def _select(self, chosen: npt.NDArray[Any]) -> None:
        self.rows, self.last_rounds = self.rows[chosen], self.last_rounds[chosen]
        self.priorities, self._ahead = self.priorities[chosen], self._ahead[chosen]

    def check_launched(self) -> None:
        """Raise SequenceError if a forward of the last round has not been run."""
        behind = self._pool.sequences.length.take(self.rows) != self._ahead + self._clock.round
        if behind.any():
            raise SequenceError(
                f"round {self._clock.round} is not through: {self.requests[int(behind.argmax())]!r} has not had its "
                "token; run the forwards of a round before schedule(), or abandon() it"
            )

    def forwards(self) -> list[Forward]:
        """The forward of this round over all of them; one for each length, where the rows of one have to be equal."""
        if not self.requests:
            return []
        starts = self._pool.sequences.length.take(self.rows)
        if not self._is_even or (starts == starts[0]).all():
            if self._batch is None:
                self._batch = self._pool.batch([request.sequence for request in self.requests if request.sequence])
            return [_forward(self.requests, self._batch, starts, self._samples)]
        made = []
        for start in np.unique(starts).tolist():
            chosen = np.flatnonzero(starts == start)
            requests = tuple(self.requests[place] for place in chosen.tolist())
            batch = self._pool.batch([request.sequence for request in requests if request.sequence])
            made.append(_forward(requests, batch, starts[chosen], self._samples[chosen]))
        return made


def _row(request: Request) -> int:
    assert request.sequence is not None
    return request.sequence.row


def _forward(
    requests: tuple[Request, ...], batch: Batch, starts: Int64Array, samples: npt.NDArray[np.bool_]
) -> Forward:
    assert len(batch) == len(requests)
    return Forward(
        requests=requests,
        batch=batch,
        num_new_tokens=1,
        starts=starts,
        samples=samples,
        is_decode=True,
    )
