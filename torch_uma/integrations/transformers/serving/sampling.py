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
from torch_uma.errors import ProcessorError, SequenceError

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


_SHARED: WeakValueDictionary[Hashable, Sampling] = WeakValueDictionary()


def sampling_of(
    processors: Iterable[LogitsProcessor], own: Iterable[LogitsProcessor], do_sample: bool, device: torch.device
) -> Sampling:
    """The sampling with these processors, those of `own` among them: they are of the user, and stay as they are.

    The others hold tensors of the host, which it puts on the device without waiting for it.
    """
    processors, kept = tuple(processors), {id(processor) for processor in own}
    made = Sampling(
        processors=processors,
        do_sample=do_sample,
        reads_text=any(id(each) in kept or not _reads_no_text(each) for each in processors),
    )
    if not made.reads_text:
        key = (do_sample, device, tuple((type(each), _value(vars(each))) for each in processors))
        shared = _SHARED.setdefault(key, made)
        if shared is not made:
            return shared
    for processor in processors:
        if id(processor) not in kept:
            for name, value in vars(processor).items():
                if isinstance(value, Tensor) and value.device != device:
                    setattr(processor, name, staged(value.numpy(), device))
    return made


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

    def scores(self, ids: Tensor, logits: Tensor) -> Tensor:
        """What the processors make of logits [rows, vocabulary] and texts [rows, tokens]; leaves both alone."""
        scores = logits.to(torch.float32, copy=True)
        try:
            for processor in self.sampling.processors:
                scores = processor(ids, scores)
            if not isinstance(scores, Tensor) or scores.shape != logits.shape:
                given = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                raise ValueError(f"scores of {tuple(logits.shape)} were made into {given}")
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ProcessorError(f"a processor of rows {list(self.rows)} failed: {error}", self.rows) from error
        return scores

    def pick(self, scores: Tensor, generators: Listed[Generator | None] | None) -> Tensor:
        """The tokens [rows] for scores [rows, vocabulary], with the generators of all rows of the forward."""
        if not self.sampling.do_sample:
            return scores.argmax(-1)
        # As torch.multinomial draws one of each row, but that it looks at the numbers first, and waits for them.
        probabilities = scores.softmax(-1)
        noise = torch.empty_like(probabilities)
        own = [None if generators is None else generators[row] for row in self.rows]
        if any(own):
            for row, generator in zip(noise, own):
                row.exponential_(generator=generator)
        else:
            noise.exponential_()
        return probabilities.div_(noise).argmax(-1)


@lru_cache(maxsize=64)
def _together(samplings: tuple[Sampling | None, ...], device: torch.device) -> tuple[bool, tuple[_Rows, ...]]:
    """Whether rows are chosen by their logits alone, and the others by what is done with them; None reads its text.

    A batch stays what it is for many steps, in which nothing is put on the device.
    """
    rows_of: dict[Sampling, list[int]] = {}
    for row, sampling in enumerate(samplings):
        if sampling is not None:
            rows_of.setdefault(sampling, []).append(row)
    groups = tuple(
        _Rows(
            sampling=sampling,
            rows=tuple(rows),
            index=None if len(rows) == len(samplings) else staged(np.array(rows, np.int64), device),
        )
        for sampling, rows in rows_of.items()
        if sampling.processors or sampling.do_sample
    )
    return len(groups) < len(rows_of), groups


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
    one, tokens are drawn from torch's own. With one, a row's tokens do not depend on the other rows: they are
    those of `generate()` for its text after the same seed. Log probabilities, if asked for, are of the logits as the
    model gave them. Where processors leave a row no token, it gets any. Changes nothing but the generators.

    Does not wait for the device, unless a processor does: of those of transformers `eta_cutoff` and `top_h`, and others
    when they are first called. SequenceError where rows do not match or a text is missing; ProcessorError, which names
    the rows, where a processor raises: no token was drawn then, and the other rows can be chosen for without them.
    """
    num_rows, device = len(samplings), logits.device
    for name, given in (("logits", logits), ("texts", texts), ("generators", generators)):
        if given is not None and len(given) != num_rows:
            raise SequenceError(f"{num_rows} rows are to be chosen for, but there are {name} for {len(given)}")
    shared = tuple([None if sampling.reads_text else sampling for sampling in samplings])
    by_logits, groups = _together(shared, device)
    scored: list[tuple[_Rows, Tensor]] = []
    for group in groups:
        no_text = torch.empty((len(group.rows), 0), dtype=torch.int64, device=device)
        its_logits = logits if group.index is None else logits.index_select(0, group.index)
        scored.append((group, group.scores(no_text, its_logits)))
    if None in shared:
        for row, sampling in enumerate(samplings):
            if sampling.reads_text:
                alone = _Rows(sampling=sampling, rows=(row,), index=None)
                ids = _ids(row, None if texts is None else texts[row], device)
                scored.append((alone, alone.scores(ids, logits[row : row + 1])))
    tokens = (
        logits.to(torch.float32).argmax(-1) if by_logits else torch.empty(num_rows, dtype=torch.int64, device=device)
    )
    for group, scores in scored:  # after all processors, of which one may raise: no generator was used then
        chosen = group.pick(scores, generators)
        if len(group.rows) == num_rows:
            tokens = chosen
        elif group.index is None:
            tokens[group.rows[0] : group.rows[0] + 1] = chosen
        else:
            tokens.index_copy_(0, group.index, chosen)
    if not logprobs:
        return tokens, None
    return tokens, logits.to(torch.float32).log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def _ids(row: int, text: Text | None, device: torch.device) -> Tensor:
    """A row's text as [1, tokens] on the device."""
    if text is None:
        raise SequenceError(f"row {row} has a processor that reads its text; give `texts` for it")
    if isinstance(text, Tensor):
        return text[None]
    if len(text) and isinstance(text[0], Tensor):
        return torch.cat([torch.as_tensor(piece).reshape(-1) for piece in text])[None]
    return staged(np.array(text, np.int64), device)[None]
