"""What one HTTP request asks of the engine, and the pieces in which it is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from server.errors import ApiError
from server.text import Text
from torch_uma import Generation


class Piece(NamedTuple):
    """What came of the generation at a place of a call; `logprobs` of the tokens where they were asked for."""

    place: int
    text: str
    tokens: list[int]
    logprobs: list[float] | None
    finish_reason: str | None


class Call:
    """The generations that one HTTP request asks for; made, and iterated over once, in an asyncio loop.

    Args:
        prompts: token ids of each, in order.
        options: of `ServingLoop.submit`, the same for all.
        seed: of the first; each has one more than the one before it.
        stops: where their texts end.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        options: dict[str, Any],
        *,
        seed: int | None = None,
        stops: Sequence[str] = (),
    ) -> None:
        self.prompts, self.options, self.seed, self.stops = prompts, options, seed, stops
        self.asyncio_loop = asyncio.get_running_loop()
        self.arrived = time.perf_counter()
        self.answers: list[Answer] = []  # of the engine's thread, as what is in them
        self._pieces: asyncio.Queue[Piece | ApiError] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        """Pieces as they come, until every generation has ended; raises ApiError if the engine fails."""
        num_open = len(self.prompts)
        while num_open:
            piece = await self._pieces.get()
            if isinstance(piece, ApiError):
                raise piece.with_traceback(None)  # others are told the same one
            num_open -= piece.finish_reason is not None
            yield piece

    def take(self, news: Piece | ApiError) -> None:
        """Hear news, in the asyncio loop."""
        self._pieces.put_nowait(news)


class Answer:
    """One generation of a call."""

    def __init__(self, call: Call, index: int, generation: Generation, text: Text) -> None:
        self.call, self.index, self.generation, self.text = call, index, generation, text
        self.is_open = True
        self.num_tokens = 0
        self.latest = call.arrived  # when something of it was last heard
