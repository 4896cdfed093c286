"""How the next tokens of requests are chosen: as `generate()` does for each alone, for all rows of a forward."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Generator, Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from torch_uma.arena import staged
from torch_uma.errors import SequenceError

Text: TypeAlias = Tensor | Listed[int] | Listed[Tensor]
"""Prompt and new tokens of a request: int64 [tokens] on the logits' device, numbers of the host, or pieces of the first
kind, one after another, of which the last may be a token that the host has not seen yet."""

_READ_NO_TEXT = frozenset(
    {
        EpsilonLogitsWarper,
        EtaLogitsWarper,
        InfNanRemoveLogitsProcessor,
        LogitNormalization,
        MinPLogitsWarper,
        SuppressTokensLogitsProcessor,
        TemperatureLogitsWarper,
        TopHLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
        TypicalLogitsWarper,
    }
)
_BIASES = frozenset({NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor})  # of one token they read no text either


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampling:
    """What is done with logits before a token is chosen.

    Requests with equal options share one object where no processor reads their text: it is what rows are grouped by.
    """

    processors: tuple[LogitsProcessor, ...]
    do_sample: bool
    reads_text: bool

    def scores(self, ids: Tensor, logits: Tensor) -> Tensor:
        """What the processors make of logits [rows, vocabulary], for texts [rows, tokens]; leaves the logits alone."""
        scores = logits.to(torch.float32, copy=True)
        for processor in self.processors:
            scores = processor(ids, scores)
        return scores


_SHARED: WeakValueDictionary[Hashable, Sampling] = WeakValueDictionary()


def sampling_of(
    processors: Iterable[LogitsProcessor], own: Iterable[LogitsProcessor], do_sample: bool, device: torch.device
) -> Sampling:
    """The sampling with these processors, those of `own` among them: they are of the user, and stay as they are.

    The others hold tensors of the host, which it puts on the device without waiting for it.
    """
    processors, kept = tuple(processors), {id(processor) for processor in own}
    if reads_text := not all(map(_reads_no_text, processors)):
        return _placed(Sampling(processors=processors, do_sample=do_sample, reads_text=reads_text), kept, device)
    key = (do_sample, device, tuple((type(each), _value(vars(each))) for each in processors))
    shared = _SHARED.get(key)
    if shared is None:
        made = Sampling(processors=processors, do_sample=do_sample, reads_text=reads_text)
        shared = _SHARED[key] = _placed(made, kept, device)
    return shared


def _placed(sampling: Sampling, kept: set[int], device: torch.device) -> Sampling:
    """The same, with the tensors of its processors on the device."""
    for processor in sampling.processors:
        if id(processor) not in kept:
            for name, value in vars(processor).items():
                if isinstance(value, Tensor) and value.device != device:
                    setattr(processor, name, staged(value.numpy(), device))
    return sampling


def _reads_no_text(processor: LogitsProcessor) -> bool:
    if isinstance(processor, SequenceBiasLogitsProcessor) and type(processor) in _BIASES:
        return all(len(ids) == 1 for ids in processor.sequence_bias)
    return type(processor) in _READ_NO_TEXT


def _value(parameter: object) -> Hashable:
    """A parameter of a processor as a value that can be compared."""
    if isinstance(parameter, Tensor):
        return _value(parameter.tolist())
    if isinstance(parameter, dict):
        return tuple((key, _value(value)) for key, value in parameter.items())
    if isinstance(parameter, list | tuple):
        return tuple(map(_value, parameter))
    assert isinstance(parameter, Hashable)
    return parameter


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Rows of a forward that are processed together: which they are, and the same on the device; None for all."""

    sampling: Sampling
    rows: tuple[int, ...]
    index: Tensor | None


@lru_cache(maxsize=64)
def _together(samplings: tuple[Sampling | None, ...], device: torch.device) -> tuple[bool, tuple[_Rows, ...]]:
    """Whether rows are chosen by their logits alone, and the others by what is done with them; None reads its text.

    A batch stays what it is for many steps, in which nothing is put on the device.
    """
    rows_of: dict[Sampling, list[int]] = {}
    for row, sampling in enumerate(samplings):
        if sampling is not None:
            rows_of.setdefault(sampling, []).append(row)
    groups = [
        _Rows(
            sampling=sampling,
            rows=tuple(rows),
            index=None if len(rows) == len(samplings) else staged(np.array(rows, np.int64), device),
        )
        for sampling, rows in rows_of.items()
        if sampling.processors or sampling.do_sample
    ]
    return sum(len(group.rows) for group in groups) < len(samplings), tuple(groups)


@torch.no_grad()
def choose(
    samplings: Listed[Sampling],
    logits: Tensor,
    texts: Listed[Text | None] | None = None,
    generators: Listed[Generator | None] | None = None,
    *,
    logprobs: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The next token of each row of logits [rows, vocabulary], int64 [rows], and float32 [rows] of log probabilities.

    `texts` are asked for where a sampling reads them, `generators` (on the logits' device) where it samples; without
    one, tokens are drawn from torch's own. A row's tokens do not depend on the other rows: they are those of
    `generate()` with the row's text and the same generator. Log probabilities, if asked for, are of the logits as the
    model gave them. Changes nothing but the generators. Does not wait for the device where no processor does: those of
    transformers that are applied at every step do not, but for `eta_cutoff`, `top_h` and words to avoid or to favour at
    their first. Where processors leave a row no token, it gets any. SequenceError where rows do not match, or a text is
    missing.
    """
    num_rows, device = len(samplings), logits.device
    for name, given in (("logits", logits), ("texts", texts), ("generators", generators)):
        if given is not None and len(given) != num_rows:
            raise SequenceError(f"{num_rows} rows are to be chosen for, but there are {name} for {len(given)}")
    shared = tuple([None if sampling.reads_text else sampling for sampling in samplings])
    by_logits, groups = _together(shared, device)
    tokens = logits.argmax(-1) if by_logits else torch.empty(num_rows, dtype=torch.int64, device=device)
    for group in groups:
        chosen = group.sampling.scores(
            torch.empty((len(group.rows), 0), dtype=torch.int64, device=device),
            logits if group.index is None else logits.index_select(0, group.index),
        )
        chosen = _pick(group.sampling, chosen, None if generators is None else [generators[row] for row in group.rows])
        tokens = chosen if group.index is None else tokens.index_copy_(0, group.index, chosen)
    if None in shared:
        for row, sampling in enumerate(samplings):
            if sampling.reads_text:
                text = None if texts is None else texts[row]
                if text is None:
                    raise SequenceError(f"row {row} has a processor that reads its text; give `texts` for it")
                scores = sampling.scores(_ids(text, device), logits[row : row + 1])
                drawn_from = None if generators is None else [generators[row]]
                tokens[row : row + 1] = _pick(sampling, scores, drawn_from)
    if not logprobs:
        return tokens, None
    return tokens, logits.to(torch.float32).log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def _ids(text: Text, device: torch.device) -> Tensor:
    """A text as [1, tokens] on the device."""
    if isinstance(text, Tensor):
        return text[None]
    if len(text) and isinstance(text[0], Tensor):
        return torch.cat([torch.as_tensor(piece).reshape(-1) for piece in text])[None]
    return staged(np.array(text, np.int64), device)[None]


def _pick(sampling: Sampling, scores: Tensor, generators: Listed[Generator | None] | None) -> Tensor:
    """The tokens [rows] for scores [rows, vocabulary]."""
    if not sampling.do_sample:
        return scores.argmax(-1)
    # What torch.multinomial does for one sample, without its look at the numbers, for which it waits for the device.
    probabilities = scores.softmax(-1)
    noise = torch.empty_like(probabilities)
    if generators is None or all(generator is None for generator in generators):
        noise.exponential_()
    else:
        for row, generator in zip(noise, generators):
            row.exponential_(generator=generator)
    return probabilities.div_(noise).argmax(-1)
