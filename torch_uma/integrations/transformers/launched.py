"""A round whose forwards were launched: the tokens that they sampled, on their way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_uma.integrations.transformers.generation import Generation

if TYPE_CHECKING:
    from torch_uma.scheduling import Round


class Launched:
    """What the forwards of a round sampled. On CUDA it is copied to pinned memory, and waited for when it is read."""

    def __init__(self, round_: Round) -> None:
        self.round = round_
        self._generations: list[Generation] = []
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self._event: torch.cuda.Event | None = None

    def add(self, generations: Sequence[Generation], tokens: Tensor, logprobs: Tensor | None) -> None:
        """A forward has sampled `tokens` [n] int64; `logprobs` [n] float32, unless nobody asks for them."""
        self._generations += generations
        self._tokens.append(tokens)
        self._logprobs.append(torch.full_like(tokens, 0, dtype=torch.float32) if logprobs is None else logprobs)

    def send(self) -> None:
        """No forward follows: the copy to the host begins, and nobody waits for it."""
        if self._tokens and self._tokens[0].is_cuda:
            self._tokens, self._logprobs = [_to_host(self._tokens)], [_to_host(self._logprobs)]
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[tuple[Generation, int, float]]:
        """Each generation that sampled, its token and the log-probability of that, 0 if not asked for.

        Waits for the device.
        """
        if self._event is not None:
            self._event.synchronize()
        tokens = [token for of_forward in self._tokens for token in of_forward.tolist()]
        logprobs = [logprob for of_forward in self._logprobs for logprob in of_forward.tolist()]
        return list(zip(self._generations, tokens, logprobs, strict=True))


def _to_host(pieces: list[Tensor]) -> Tensor:
    """The pieces as one tensor in pinned memory, once the stream is there."""
    together = torch.cat(pieces)
    return torch.empty(together.shape, dtype=together.dtype, pin_memory=True).copy_(together, non_blocking=True)
