"""Attention of some queries over keys and values at hand, with its log-sum-exp, and the merge of several such results.

Owns the numbers and knows no pages. Queries are `[B, H, M, D]`, keys and values `[B, H, N, D]`, masks are added to the
scores and broadcast to `[B, H, M, N]`; log-sum-exps are `[B, H, M]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_flash: Callable[..., tuple[Tensor, Tensor]] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

# So many scores are made at a time, and so many numbers of partial results are held.
_MOST_SCORES = 2**20
_MOST_NUMBERS = 2**22
_FEWEST_KEYS = 256

# Up to so many numbers of partial results are summed at once, more than that one result after another.
_FEW_NUMBERS = 2**17


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scores and log-sum-exps of such queries are."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def flash(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Torch's flash attention for the CPU: all of one dtype and head size, the numbers of a head side by side."""
    assert key.shape[2], "without keys it divides by zero, which ends the process"
    out, lse = _flash(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)
    if mask is not None:  # it gives 0, and not -inf, where all is masked
        lse = lse.masked_fill((mask == -math.inf).all(-1), -math.inf)
    return out, lse


def plain(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attention in plain torch, for dtypes and head sizes that differ and for soft caps; wide."""
    query = query.to(wide_dtype(query.dtype)) * scale
    results = []
    for i in range(query.shape[0]):  # one by one, or else a product of strided keys would copy them
        own = mask if mask is None or mask.dim() == 2 else mask[i if mask.shape[0] > 1 else 0]
        results.append(_plain(query[i], key[i], value[i], own, softcap))
    outs, lses = zip(*results)
    return torch.stack(outs), torch.stack(lses)


def _plain(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, softcap: float) -> tuple[Tensor, Tensor]:
    """The same for one of the batch, some keys at a time."""
    merge = Merge()
    step = max(_FEWEST_KEYS, _MOST_SCORES // max(1, query.shape[0] * max(query.shape[1:])))
    for first in range(0, key.shape[1], step):
        scores = torch.bmm(query, key[:, first : first + step].to(query.dtype).mT)
        if softcap:
            scores = scores.div_(softcap).tanh_().mul_(softcap)
        if mask is not None:
            scores += mask[..., first : first + step]
        out, lse = weigh(scores, value[:, first : first + step].to(query.dtype))
        merge.add(out.unsqueeze(0), lse.unsqueeze(0))
    return merge.result()


def weigh(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Values weighted by the softmax of scores `[..., M, N]`, where -inf is not seen, and their log-sum-exp."""
    lse = scores.logsumexp(-1)
    return (scores - _finite(lse).unsqueeze(-1)).exp_() @ value, lse


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """`out` `[T, H, D]` and `lse` `[T, H]` if one more key is seen, of logit `sinks` `[H]` and without a value."""
    sinks = sinks.to(lse.dtype)
    return (out * torch.sigmoid(lse - sinks).unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, sinks)


class Merge:
    """Gathers results over disjoint keys into the result over all of them."""

    def __init__(self) -> None:
        self._outs: list[Tensor] = []
        self._lses: list[Tensor] = []
        self._held = 0

    def add(self, outs: Tensor, lses: Tensor) -> None:
        """Take in results `[results, ..., D]`; how much is held at a time is bounded."""
        self._outs.append(outs)
        self._lses.append(lses)
        self._held += outs.numel()
        if self._held > _MOST_NUMBERS and len(self._outs) > 1:
            out, lse = self.result()
            self._outs, self._lses, self._held = [out.unsqueeze(0)], [lse.unsqueeze(0)], out.numel()

    def result(self) -> tuple[Tensor, Tensor]:
        """The result over all keys, `[..., D]`; wide, if there were several."""
        lses = torch.cat(self._lses)
        lse = lses.logsumexp(0)
        weights = (lses - _finite(lse)).exp_().unsqueeze(-1)
        if self._held <= _FEW_NUMBERS:
            return (torch.cat(self._outs) * weights).sum(0), lse
        total = weights.new_zeros((*lse.shape, self._outs[0].shape[-1]))
        for out, weight in zip((out for outs in self._outs for out in outs), weights):
            total.addcmul_(out.to(total.dtype), weight)
        return total, lse


def _finite(lse: Tensor) -> Tensor:
    """Zero where nothing is seen, so that differences from it are no NaN."""
    return lse.masked_fill(lse == -math.inf, 0.0)
