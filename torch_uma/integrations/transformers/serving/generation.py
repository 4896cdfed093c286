"""One generation of a serving loop: its prompt, what it asks for, what it has brought so far, and how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Generator

from torch_uma.integrations.transformers.serving.sampling import Sampling
from torch_uma.integrations.transformers.serving.stopping import Stopping

if TYPE_CHECKING:
    from torch_uma.scheduling import Request

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Generation:
    """What became of one prompt: made by `ServingLoop.submit`, to be read, and written by the loop only.

    Attributes:
        prompt: its token ids.
        tokens: the new ones that have been read so far, the one that ended it included.
        logprobs: the log-probability of each of these before temperature and the like, where they were asked for.
        finish_reason: None while it goes on; then "stop" (its text has come to an end), "length" (it has got all tokens
            that it may have, or its `max_time` is over), "cancelled" or "error".
        error: what was raised where that is the reason.
        tag: the caller's own.
        sampling, stopping, generator: how its tokens are chosen and from which numbers, and when it ends.
    """

    def __init__(
        self,
        prompt: list[int],
        sampling: Sampling,
        stopping: Stopping,
        *,
        generator: Generator | None,
        with_logprobs: bool,
        tag: Any,
    ) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        self.logprobs: list[float] | None = [] if with_logprobs else None
        self.finish_reason: FinishReason | None = None
        self.error: BaseException | None = None
        self.tag = tag
        self.sampling = sampling
        self.stopping = stopping
        self.generator = generator
        self._request: Request | None = None

    @property
    def request(self) -> Request:
        """Its request of the scheduler, which knows where it stands."""
        assert self._request is not None
        return self._request

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of its text: the prompt, and what was read so far."""
        return len(self.prompt) + len(self.tokens)

    @property
    def last_token(self) -> int:
        """The last token of its text that was read."""
        return (self.tokens or self.prompt)[-1]

    def text_ids(self, start: int, end: int) -> list[int]:
        """Tokens `start` to `end` of its text, prompt and new ones, as far as they were read."""
        num_prompt_tokens = len(self.prompt)
        if end <= num_prompt_tokens:
            return self.prompt[start:end]
        return self.prompt[start:] + self.tokens[max(start - num_prompt_tokens, 0) : end - num_prompt_tokens]

    def add(self, token: int, logprob: float) -> None:
        """Note that a token was read."""
        self.tokens.append(token)
        if self.logprobs is not None:
            self.logprobs.append(logprob)

    def take_back(self) -> None:
        """The last token counts as not read."""
        self.tokens.pop()
        if self.logprobs is not None:
            self.logprobs.pop()

    def text(self, tokenizer: Any, **options: Any) -> str:
        """The new tokens as text, without special tokens unless `options` of `tokenizer.decode` say otherwise."""
        text: str = tokenizer.decode(self.tokens, **{"skip_special_tokens": True, **options})
        return text

    def __repr__(self) -> str:
        state = self.finish_reason or "unfinished"
        return f"Generation({len(self.prompt)} + {len(self.tokens)} tokens, {state})"


class Event(NamedTuple):
    """What one step brought for one generation: new tokens, and why it has ended if it has, as in `finish_reason`."""

    generation: Generation
    tokens: list[int]
    finish_reason: FinishReason | None
