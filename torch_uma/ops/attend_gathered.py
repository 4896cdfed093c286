"""Attention on any device, without a look at a number: all that may be seen is gathered, and masked where it is not.

Owns the way of `attend` for accelerators, by the other ops, which have kernels there. Sizes follow from those of the
tensors alone, so it can be captured in a graph, and it costs as much as the page table is wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_uma.ops.attention import weigh, wide_dtype, with_sinks

# So many numbers of keys and values are gathered at a time.
_MOST_GATHERED = 2**24


def attend_gathered(
    arena: Tensor,
    query: Tensor,
    query_starts: Tensor,
    page_table: Tensor,
    v2p: Tensor,
    rows: Tensor,
    lengths: Tensor,
    origin_bytes: int,
    entry_bytes: int,
    page_size: int,
    offsets_bytes: Sequence[int],
    dims: Sequence[int],
    num_kv_heads: int,
    dtypes: Sequence[str],
    scale: float,
    *,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    starts: Tensor | None = None,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    first_column: int = 0,
    indices: Tensor | None = None,
    new_key: Tensor | None = None,
    new_value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `attend` gives, with its arguments."""
    num_tokens, num_heads, _ = query.shape
    wide = wide_dtype(query.dtype)
    out = query.new_empty((num_tokens, num_heads, dims[1]))
    lse = query.new_empty((num_tokens, num_heads), dtype=wide)
    if num_tokens == 0 or len(rows) == 0:
        return out.zero_(), lse.fill_(-math.inf)
    tokens = _Tokens(num_tokens, query_starts, rows, lengths)
    lowest = tokens.lowest(window, chunk, starts)
    columns = page_table.shape[1] * page_size
    every = torch.arange(columns, device=query.device).unsqueeze(0)
    per_token = (columns if indices is None else indices.shape[1]) * num_kv_heads * sum(dims)
    at_once = max(1, _MOST_GATHERED // max(1, per_token))
    for first in range(0, num_tokens, at_once):
        some = slice(first, min(num_tokens, first + at_once))
        position = tokens.position[some]
        keys_at = every if indices is None else indices[some]
        seen = (keys_at >= lowest[some]) & (keys_at <= position) & (keys_at >= 0) & (tokens.rows[some] >= 0)
        offset = keys_at - tokens.first_position[some]
        is_new = seen & (offset >= 0) if new_key is not None else torch.zeros_like(seen)
        stored_at = torch.where(seen & ~is_new, keys_at, -1)
        entries = torch.ops.torch_uma.locate(page_table, v2p, tokens.rows[some, 0], stored_at, page_size, 1)
        seen = (entries >= 0) | is_new
        widths = [num_kv_heads * dim for dim in dims]
        found = torch.ops.torch_uma.gather_rows(
            arena, entries, origin_bytes, entry_bytes, offsets_bytes, widths, dtypes, wide, [None] * len(widths)
        )
        key, value = (each.unflatten(-1, (num_kv_heads, -1)) for each in found)
        if new_key is not None and new_value is not None:
            token = (tokens.first_token[some] + offset).clamp(0, num_tokens - 1)
            chosen = is_new[..., None, None]
            key = torch.where(chosen, new_key[token].to(wide), key)
            value = torch.where(chosen, new_value[token].to(wide), value)
        grouped = query[some].to(wide).mul(scale).unflatten(1, (num_kv_heads, -1))
        scores = (grouped @ key.permute(0, 2, 3, 1)).flatten(1, 2)
        if softcap:
            scores = scores.div(softcap).tanh().mul(softcap)
        if mask is not None:
            inside, at = tokens.columns(mask.unsqueeze(1), some, keys_at - first_column)
            seen = seen & (at.squeeze(1) | ~inside)
        if bias is not None:
            inside, at = tokens.columns(bias, some, keys_at - first_column)
            scores = scores + torch.where(inside.unsqueeze(1), at.to(wide), 0.0)
        scores = torch.where(seen.unsqueeze(1), scores, -math.inf)
        values, sums = weigh(scores.unflatten(1, (num_kv_heads, -1)), value.transpose(1, 2))
        out[some] = values.flatten(1, 2).to(out.dtype)
        lse[some] = sums.flatten(1, 2)
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


class _Tokens:
    """For each packed token its sequence and its place in it, as columns `[T, 1]`."""

    def __init__(self, num_tokens: int, query_starts: Tensor, rows: Tensor, lengths: Tensor) -> None:
        token = torch.arange(num_tokens, device=query_starts.device)
        sequence = torch.searchsorted(query_starts, token, right=True).sub_(1).clamp_(max=len(rows) - 1)
        self.sequence = sequence.unsqueeze(1)
        self.first_token = query_starts[sequence].unsqueeze(1)
        count = query_starts[sequence + 1].unsqueeze(1) - self.first_token
        self.first_position = lengths[sequence].unsqueeze(1) - count
        self.place = token.unsqueeze(1) - self.first_token
        self.position = self.first_position + self.place
        self.rows = torch.where(self.place < count, rows[sequence].unsqueeze(1), -1)

    def lowest(self, window: int, chunk: int, starts: Tensor | None) -> Tensor:
        """The first position that each query may see, `[T, 1]`."""
        lowest = torch.zeros_like(self.position) if starts is None else starts[self.sequence]
        if window:
            lowest = torch.maximum(lowest, self.position - (window - 1))
        if chunk:
            lowest = torch.maximum(lowest, self.position - self.position % chunk)
        return lowest

    def columns(self, given: Tensor, some: slice, column: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the columns there are, `[t, n]`, and what `[R, H, q, K]` has there: `[t, H, n]`."""
        num_sequences, _, num_places, num_columns = given.shape
        inside = (column >= 0) & (column < num_columns)
        sequence = self.sequence[some].clamp(max=num_sequences - 1)
        place = self.place[some].clamp(max=num_places - 1)
        return inside, given[sequence, :, place, column.clamp(0, num_columns - 1)].movedim(-1, 1)
