"""A round as it is decided, and what it is decided from: how things stand, and what a scheduler may do at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch_uma.allocator import Allocator
from torch_uma.books import Sequences
from torch_uma.scheduling.decoding import Decoding
from torch_uma.scheduling.request import Request
from torch_uma.scheduling.waiting import Waiting

Chunk = tuple[Request, int]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a scheduler may do at most: see its arguments.

    `num_reserved`: decode steps that are sure to fit. `gather_tokens`: of prompts in a round, for which nobody is held
    back; none where nobody is to be.
    """

    max_running: int
    step_tokens: int
    host_bytes: int
    is_chunked: bool
    num_reserved: int
    gather_tokens: int


class Decision(NamedTuple):
    """A round before it is applied. `chunks`: whose prompts are run by how many tokens, those of `admitted` too.

    `num_held_back`: who could have come in, summed over the rounds since somebody did, or nobody waited.
    """

    dropped: tuple[Request, ...]
    offloaded: tuple[Request, ...]
    resumed: tuple[Request, ...]
    admitted: tuple[Request, ...]
    chunks: tuple[Chunk, ...]
    num_preempted: int
    num_held_back: int = 0


GO_ON = Decision((), (), (), (), (), 0)


class Standing(NamedTuple):
    """How things stand before a round.

    `prompts`: who runs a prompt, by rank. `num_completed`: the last round whose tokens are known. `host_bytes`: in use.
    `num_held_back`: as of the last decision.
    """

    books: Sequences
    allocator: Allocator
    prompts: Sequence[Request]
    decoding: Decoding
    waiting: Waiting
    round: int
    num_completed: int
    host_bytes: int
    num_held_back: int
