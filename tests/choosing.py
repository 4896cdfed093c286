"""Requests with options of their own, all rows of a step chosen for in one call, beside `generate()` for each alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from torch_uma.integrations.transformers.serving.options import resolve
from torch_uma.integrations.transformers.serving.sampling import Text, choose
from torch_uma.integrations.transformers.serving.stopping import Stopping

NUM_NEW = 8
ENDS = list(range(0, 256, 9))
"""Tokens that end a text: so many that one of them comes."""


class NoneTwice(LogitsProcessor):
    """The last token does not come again."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


class EvenSum(StoppingCriteria):
    """Ends with a text of an even sum."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        assert scores is None
        return input_ids.sum(-1) % 2 == 0


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "max_length": {"max_new_tokens": None, "max_length": 30},
    "default length": {"max_new_tokens": None},
    "eos": {"eos_token_id": ENDS},
    "min_new_tokens": {"min_new_tokens": 4, "eos_token_id": ENDS},
    "min_length": {"min_length": 22, "eos_token_id": ENDS},
    "forced_eos": {"forced_eos_token_id": [7, 11]},
    "forced_bos": {"forced_bos_token_id": 3},
    "decay": {"exponential_decay_length_penalty": (2, 1.8), "eos_token_id": ENDS},
    "repetition": {"repetition_penalty": 1.7},
    "ngrams": {"no_repeat_ngram_size": 2},
    "encoder repetition": {"encoder_repetition_penalty": 1.6},
    "encoder ngrams": {"encoder_no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[t] for t in range(3, 250, 3)]},
    "bad phrases": {"bad_words_ids": [[5], *([i, j] for i in range(60) for j in range(8))]},
    "bias": {"sequence_bias": {(7,): 4.0, (11,): -3.5}},
    "biased phrase": {"sequence_bias": {(7,): 3.0, (7, 8): 9.0, (7, 8, 9): 11.0}},
    "suppressed": {"suppress_tokens": list(range(0, 250, 2))},
    "suppressed at first": {"begin_suppress_tokens": list(range(0, 250, 2))},
    "renormalized": {"renormalize_logits": True},
    "no invalid": {"remove_invalid_values": True},
    "processor": {"logits_processor": LogitsProcessorList([NoneTwice()])},
    "criterion": {"stopping_criteria": StoppingCriteriaList([EvenSum()])},
    "prefix": {"prefix_allowed_tokens_fn": lambda batch, ids: [int(ids[-1] + 1) % 200, int(ids[0])]},
    "sample": {"do_sample": True},
    "temperature": {"do_sample": True, "temperature": 1.7},
    "all tokens": {"do_sample": True, "top_k": 0},
    "top_k": {"do_sample": True, "top_k": 7, "temperature": 0.8},
    "top_p": {"do_sample": True, "top_p": 0.6},
    "min_p": {"do_sample": True, "min_p": 0.1},
    "top_h": {"do_sample": True, "top_h": 0.5},
    "typical_p": {"do_sample": True, "typical_p": 0.5},
    "epsilon": {"do_sample": True, "epsilon_cutoff": 0.01},
    "eta": {"do_sample": True, "eta_cutoff": 0.02},
}


@dataclass
class Request:
    """A prompt with its options, and what came of it."""

    prompt: list[int]
    options: dict[str, Any]
    seed: int = 0
    config: GenerationConfig | None = None
    tokens: list[int] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return bool(self.reasons) and self.reasons[-1] is not None


def logits_of(model: PreTrainedModel, text: list[int]) -> Tensor:
    """[1, vocabulary], with the very numbers that `generate()` has without a cache."""
    return model(torch.tensor([text]), logits_to_keep=1, use_cache=False).logits[:, -1]


def on_device(text: list[int]) -> Text:
    return torch.tensor(text)


def in_pieces(text: list[int]) -> Text:
    """All but the last token, and that."""
    return [torch.tensor(text[:-1], dtype=torch.int64), torch.tensor(text[-1])]


FORMS: Sequence[Callable[[list[int]], Text]] = (list, on_device, in_pieces)


def run(
    model: PreTrainedModel, requests: Sequence[Request], tokenizer: Any = None, form: Callable[[list[int]], Text] = list
) -> None:
    """All requests to their ends, those that go on together."""
    asked = [
        resolve(model, request.prompt, request.config, tokenizer=tokenizer, **request.options) for request in requests
    ]
    generators = [torch.Generator().manual_seed(request.seed) for request in requests]
    while going := [i for i, request in enumerate(requests) if not request.is_finished]:
        texts = [requests[i].prompt + requests[i].tokens for i in going]
        logits = torch.cat([logits_of(model, text) for text in texts])
        before = logits.clone()
        tokens, logprobs = choose(
            [asked[i][0] for i in going], logits, [form(text) for text in texts], [generators[i] for i in going],
            logprobs=True,
        )  # fmt: skip
        assert torch.equal(logits, before) and tokens.dtype == torch.int64 and logprobs is not None
        assert torch.equal(logprobs, before.log_softmax(-1)[range(len(going)), tokens])
        for i, token in zip(going, tokens.tolist()):
            stopping: Stopping = asked[i][1]
            requests[i].tokens.append(token)
            requests[i].reasons.append(stopping.reason(requests[i].tokens))


def generated(model: PreTrainedModel, request: Request, tokenizer: Any = None) -> list[int]:
    """The new tokens of `generate()`."""
    torch.manual_seed(request.seed)
    ids = torch.tensor([request.prompt])
    given = {} if tokenizer is None else {"tokenizer": tokenizer}
    options = {**request.options, **given, "use_cache": False, "attention_mask": torch.ones_like(ids)}
    return model.generate(ids, request.config, **options)[0, len(request.prompt) :].tolist()


def prompt_of(rng: np.random.Generator, num_tokens: int) -> list[int]:
    return [int(token) for token in rng.integers(0, 256, num_tokens)]
