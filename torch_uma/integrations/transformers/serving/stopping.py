"""When a request ends: what `generate()` asks after each new token, asked of numbers on the host."""

from __future__ import annotations

import time
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StopStringCriteria

Reason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StopStrings:
    """Strings that end a text as soon as a token completes one of them."""

    criterion: StopStringCriteria
    completing: frozenset[int]
    """Tokens that end one of the strings: after no other need the text be looked at."""

    def end(self, prompt: Listed[int], tokens: Listed[int]) -> bool:
        """Whether the last of the new tokens completes a string, which may begin in the prompt."""
        if tokens[-1] not in self.completing:
            return False
        longest = self.criterion.maximum_token_len
        last = list(tokens[-longest:])
        if len(last) < longest:
            last = list(prompt[len(last) - longest :]) + last
        return bool(self.criterion(torch.tensor([last]), None))


@lru_cache(maxsize=32)
def stop_strings(tokenizer: PreTrainedTokenizerBase, strings: tuple[str, ...]) -> StopStrings:
    """These strings, made once for a tokenizer: all its words are looked through."""
    criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=list(strings))
    ends = criterion.embedding_vec[:, criterion.max_valid_positions * len(strings) : -1]
    return StopStrings(criterion=criterion, completing=frozenset((ends > 0).any(-1).nonzero()[:, 0].tolist()))


@dataclass(frozen=True, kw_only=True, eq=False)
class Stopping:
    """When one request ends."""

    prompt: Listed[int]
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    strings: StopStrings | None = None
    deadline_s: float | None = None
    """As of `time.time()`; it runs from when the request is made, waiting for its turn included."""
    criteria: tuple[StoppingCriteria, ...] = ()
    """Those of the user. They are given the text, int64 [1, tokens] on the host, and no scores."""

    def reason(self, tokens: Listed[int]) -> Reason | None:
        """Why the request ends with the last of its new tokens, at least one; None if it goes on.

        To be asked once after each new token, which is part of what was generated whatever the answer is. A request
        that runs out of tokens or of time has "length". Does not synchronise.
        """
        if tokens[-1] in self.eos_token_ids or (self.strings is not None and self.strings.end(self.prompt, tokens)):
            return "stop"
        if self.criteria:
            text = torch.tensor([[*self.prompt, *tokens]])
            if any(bool(criterion(text, None)) for criterion in self.criteria):
                return "stop"
        is_late = self.deadline_s is not None and time.time() > self.deadline_s
        return "length" if is_late or len(tokens) >= self.max_new_tokens else None
