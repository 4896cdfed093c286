"""A round whose forwards were launched: the tokens that are chosen from their logits, and their way to the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import repeat
from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from torch_uma.errors import ProcessorError
from torch_uma.integrations.transformers.serving.generation import Generation
from torch_uma.integrations.transformers.serving.last_tokens import LastTokens
from torch_uma.integrations.transformers.serving.sampling import Text, choose
from torch_uma.tables import Int64Array

if TYPE_CHECKING:
    from torch_uma.scheduling import Forward, Request, Round


class Launched:
    """What the forwards of a round sampled. On CUDA it is copied to pinned memory, and waited for when it is read.

    `on_failed` is told of a generation whose processors have raised, and what; it samples nothing then. `unread` is for
    who reads it: what `read` gave and was not looked at yet, None before; `ended` who came to an end in that.
    """

    def __init__(
        self, round_: Round, last_tokens: LastTokens, on_failed: Callable[[Generation, Exception], None]
    ) -> None:
        self.round = round_
        self.unread: deque[tuple[Generation, int, float]] | None = None
        self.ended: list[Request] = []
        self._last_tokens = last_tokens
        self._on_failed = on_failed
        self._generations: list[Generation] = []
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor | None] = []  # None where nobody asked
        self._event: torch.cuda.Event | None = None
        self._drawn: list[tuple[Generator, Tensor]] = []  # from whom numbers were drawn, and their states before

    def sample(self, forward: Forward, logits: Tensor) -> None:
        """Choose the next tokens for the logits [sampled, vocabulary] of a forward, and keep them for the next one."""
        rows, places = forward.batch.rows, forward.samples.nonzero()[0]
        generations: list[Generation] = [forward.requests[place].tag for place in places.tolist()]
        ends = forward.starts + forward.num_new_tokens
        self._drawn += [
            (each.generator, each.generator.get_state())
            for each in generations
            if each.generator is not None and each.sampling.do_sample
        ]
        while generations:
            try:
                tokens, logprobs = choose(
                    [generation.sampling for generation in generations],
                    logits,
                    self._texts(generations, rows.numbers[places], ends[places]),
                    [generation.generator for generation in generations],
                    logprobs=any(generation.logprobs is not None for generation in generations),
                )
                break
            except ProcessorError as error:
                for row in error.rows:
                    self._on_failed(generations[row], error)
                others = [row for row in range(len(generations)) if row not in error.rows]
                generations, places, logits = [generations[row] for row in others], places[others], logits[others]
        else:
            return
        self._last_tokens.keep(rows, places, generations, tokens)
        self._generations += generations
        self._tokens.append(tokens)
        self._logprobs.append(logprobs)

    def take_back(self) -> None:
        """Nothing was sampled, from the numbers on that were drawn first."""
        for generator, state in self._drawn:
            generator.set_state(state)

    def send(self) -> None:
        """No forward follows: the copy to the host begins, and nobody waits for it."""
        if self._tokens and self._tokens[0].is_cuda:
            self._tokens = [_to_host(tokens) for tokens in self._tokens]
            self._logprobs = [None if logprobs is None else _to_host(logprobs) for logprobs in self._logprobs]
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[tuple[Generation, int, float]]:
        """Each generation that sampled, its token and the log-probability of that, 0 if not asked for.

        Waits for the device.
        """
        if self._event is not None:
            self._event.synchronize()
        read: list[tuple[int, float]] = []
        for tokens, logprobs in zip(self._tokens, self._logprobs, strict=True):
            read += zip(tokens.tolist(), repeat(0.0) if logprobs is None else logprobs.tolist())
        return [(generation, *each) for generation, each in zip(self._generations, read, strict=True)]

    def _texts(self, generations: list[Generation], rows: Int64Array, ends: Int64Array) -> list[Text | None] | None:
        """The texts, up to `ends`, of those whose processors read them."""
        if not any(generation.sampling.reads_text for generation in generations):
            return None
        return [
            self._last_tokens.text(generation, row, end) if generation.sampling.reads_text else None
            for generation, row, end in zip(generations, rows.tolist(), ends.tolist(), strict=True)
        ]


def _to_host(tensor: Tensor) -> Tensor:
    """The same in pinned memory, once the stream is there."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
