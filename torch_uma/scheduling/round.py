"""What a scheduler has decided for one round: what was done, and the forwards that are to be run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torch_uma.batch import Batch
from torch_uma.scheduling.request import Request
from torch_uma.tables import Int64Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Forward:
    """One step of the pool: `with pool.step(forward.batch, forward.num_new_tokens) as cache:` around a model's forward.

    Attributes:
        requests: in the order of the batch.
        batch: their sequences.
        num_new_tokens: of each request; a list where they are unequal, whose tokens are packed.
        starts: [n] int64 tokens that each holds before: its next tokens are `text[start : start + num_new_tokens]`.
        samples: [n] bool, whether what follows its last token is its next one, and not a part of its prompt.
        is_decode: one token each, and each samples.
    """

    requests: tuple[Request, ...]
    batch: Batch
    num_new_tokens: int | list[int]
    starts: Int64Array
    samples: npt.NDArray[np.bool_]
    is_decode: bool

    @property
    def counts(self) -> list[int]:
        """New tokens of each request."""
        counts = self.num_new_tokens
        return counts if isinstance(counts, list) else [counts] * len(self.requests)


@dataclass(frozen=True, kw_only=True, eq=False)
class Round:
    """What happens between two calls of `schedule()`. True if there is a forward to run.

    Attributes:
        number: rounds are numbered from 1, and completed in that order.
        forwards: to be run, in this order.
        last_tokens: requests that get their last token in this round.
        admitted, resumed: requests that got memory: for their whole text, or for what they had offloaded.
        dropped, offloaded: requests that were retracted, to be recomputed or resumed later.
    """

    number: int
    forwards: tuple[Forward, ...] = ()
    last_tokens: tuple[Request, ...] = ()
    admitted: tuple[Request, ...] = ()
    resumed: tuple[Request, ...] = ()
    dropped: tuple[Request, ...] = ()
    offloaded: tuple[Request, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.forwards)
