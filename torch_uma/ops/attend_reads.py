"""Attention on the host by a plan: every run of entries is attended to where it lies, and the results are merged.

Owns how the queries of a block meet the keys of a run. Few queries a sequence are packed: those of the heads that share
a head of keys stand below one another, `[B, kv heads, tokens x group, D]`, so that keys are read once. Many stay where
they are, `[kv heads, group, tokens, D]`, and the keys repeat with stride 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_uma.ops.attend_pieces import attend_pieces, is_served
from torch_uma.ops.attention import Merge, flash, plain, wide_dtype, with_sinks
from torch_uma.ops.blocks import MOST_PACKED, Block, Run, Sees
from torch_uma.ops.reads import Reads
from torch_uma.ops.reference import dtype_of

# A plan keeps so many masks for the next layer.
_MOST_BANDS = 8

# Results of so few tokens are put together at the end, since each copy to its place has a cost of its own.
_FEW_TOKENS = 256


def attend_reads(
    arena: Tensor,
    query: Tensor,
    reads: Reads,
    origin_bytes: int,
    entry_bytes: int,
    offsets_bytes: Sequence[int],
    dims: Sequence[int],
    num_kv_heads: int,
    dtypes: Sequence[str],
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    first_column: int = 0,
    new_key: Tensor | None = None,
    new_value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `attend` gives for a batch that is planned: `[T, Hq, Dv]` as `query`, and log-sum-exps `[T, Hq]`.

    Arguments are those of `attend`, in host memory; `new_key` and `new_value` are given if and only if `reads` was
    planned so. One plan serves all layers that share a page table and a window; it may keep masks for the next.
    """
    if reads.queries.has_new != (new_key is not None):
        raise ValueError("new keys and values are given to a plan that was made for them, and to no other")
    if query.stride(2) != 1:
        query = query.contiguous()
    num_tokens, num_heads, width = query.shape
    is_bare = softcap == 0.0 and mask is None and bias is None
    if is_bare and dims[0] == dims[1] and query.dtype == dtype_of(dtypes[0]) == dtype_of(dtypes[1]):
        result = None
        run = reads.only_run
        if run is not None and reads.blocks[0].num_sequences == num_tokens:
            size, numbers = query.element_size(), arena.view(query.dtype)
            first = numbers.storage_offset() + origin_bytes // size
            entry = entry_bytes // size
            shape = (num_tokens, num_kv_heads, run.num_tokens, width)
            strides = (run.apart * entry, width, entry, 1)
            key, value = (
                numbers.as_strided(shape, strides, first + offset // size + run.first * entry)
                for offset in offsets_bytes
            )
            out, lse = flash(query.reshape(num_tokens, num_kv_heads, -1, width), key, value, scale)
            result = out.reshape(num_tokens, num_heads, width), lse.reshape(num_tokens, num_heads)
        elif reads.pieces is not None and is_served(query.dtype):
            result = attend_pieces(
                arena, query, reads.pieces, origin_bytes, entry_bytes, offsets_bytes, num_kv_heads, scale
            )
        if result is not None:
            return result if sinks is None else with_sinks(*result, sinks)
    keys = _Rows(arena, dtype_of(dtypes[0]), origin_bytes, entry_bytes, offsets_bytes[0], num_kv_heads, dims[0])
    values = _Rows(arena, dtype_of(dtypes[1]), origin_bytes, entry_bytes, offsets_bytes[1], num_kv_heads, dims[1])
    keys.new, values.new = new_key, new_value
    columns = None if mask is None and bias is None else _Columns(mask, bias, first_column, num_kv_heads)
    call = _Call(query, keys, values, reads, scale, softcap, columns)
    covered = sum(block.num_sequences * block.num_tokens for block in reads.blocks)
    alone = all(block.num_sequences == 1 for block in reads.blocks)
    if covered == num_tokens and (len(reads.blocks) == 1 or (num_tokens <= _FEW_TOKENS and alone)):
        results = [call.attend(block) for block in reads.blocks]
        outs = [out.reshape(-1, num_heads, dims[1]) for out, _ in results]
        lses = [lse.reshape(-1, num_heads) for _, lse in results]
        out, lse = (outs[0], lses[0]) if len(results) == 1 else (torch.cat(outs), torch.cat(lses))
        out = out.to(query.dtype)
    else:
        out = query.new_zeros((num_tokens, num_heads, dims[1]))
        lse = query.new_full((num_tokens, num_heads), -math.inf, dtype=wide_dtype(query.dtype))
        for block in reads.blocks:
            block_out, block_lse = call.attend(block)
            _tokens(out, block, num_kv_heads).copy_(block_out)
            _tokens(lse.unsqueeze(2), block, num_kv_heads).copy_(block_lse.unsqueeze(-1))
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)


def attend_run(query: Tensor, keys: Tensor, values: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """Attention of the last token of each row, over views of its run that end with it: `[rows, 1, Hq, D]`.

    `query` is `[rows, Hq, 1, D]`; `keys` and `values` are `[rows, kv heads, tokens, D]` on the host and of its dtype,
    with the numbers of a head side by side. Nothing is modified.
    """
    num_rows, num_heads, _, width = query.shape
    if query.stride(3) != 1:
        query = query.contiguous()
    out, lse = flash(query.reshape(num_rows, keys.shape[1], -1, width), keys, values, scale)
    out = out.reshape(num_rows, num_heads, width)
    if sinks is not None:
        out, _ = with_sinks(out, lse.reshape(num_rows, num_heads), sinks)
    return out.unsqueeze(1)


def _tokens(packed: Tensor, block: Block, num_kv_heads: int) -> Tensor:
    """What `[T, heads, D]` has of a block: `[B, tokens, kv heads, group, D]`."""
    num_sequences, apart = block.num_sequences, block.apart
    if packed.shape[0] != num_sequences * apart:
        packed = packed.narrow(0, block.first_token, num_sequences * apart)
    tokens = packed.view(num_sequences, apart, num_kv_heads, -1, packed.shape[2])
    return tokens if block.num_tokens == apart else tokens.narrow(1, block.skipped, block.num_tokens)


def _hide(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to scores to leave some out."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)


class _Rows:
    """The keys, or the values, of one layer: in the arena, and those of the new tokens."""

    def __init__(
        self,
        arena: Tensor,
        dtype: torch.dtype,
        origin_bytes: int,
        entry_bytes: int,
        offset_bytes: int,
        num_heads: int,
        dim: int,
    ) -> None:
        size = dtype.itemsize
        self.dtype = dtype
        self.dim = dim
        self.new: Tensor | None = None
        self._numbers = arena.view(dtype)
        self._first = self._numbers.storage_offset() + (origin_bytes + offset_bytes) // size
        self._end = self._numbers.storage_offset() + self._numbers.shape[0]
        self._entry = entry_bytes // size
        self.num_heads = num_heads

    def of(self, run: Run, num_sequences: int, width: int) -> Tensor:
        """The run's rows `[B, heads, keys, width]`; what is behind `dim` numbers of a row is anything."""
        if run.entries is None and not run.is_new:
            first = self._first + run.first * self._entry
            strides = (run.apart * self._entry, self.dim, self._entry, 1)
            if width > self.dim:
                last = first + (num_sequences - 1) * strides[0] + (run.num_tokens - 1) * self._entry
                if last + (self.num_heads - 1) * self.dim + width > self._end:
                    return pad(self.of(run, num_sequences, self.dim), (0, width - self.dim))
            return self._numbers.as_strided((num_sequences, self.num_heads, run.num_tokens, width), strides, first)
        rows = self._gather(run.entries) if run.entries is not None else self._given(run, num_sequences)
        return pad(rows, (0, width - self.dim)) if width > self.dim else rows

    def _given(self, run: Run, num_sequences: int) -> Tensor:
        """Rows of the new tokens."""
        assert self.new is not None
        tokens = self.new.narrow(0, run.first, (num_sequences - 1) * run.apart + run.num_tokens)
        if tokens.stride(2) != 1:
            tokens = tokens.contiguous()
        stride = tokens.stride()
        size = (num_sequences, self.num_heads, run.num_tokens, self.dim)
        return tokens.as_strided(size, (run.apart * stride[0], stride[1], stride[0], 1))

    def _gather(self, entries: Tensor) -> Tensor:
        """A copy of the rows of these entries."""
        num_entries = (self._end - self._first - self.num_heads * self.dim) // self._entry + 1
        size = (num_entries, self.num_heads, self.dim)
        rows = self._numbers.as_strided(size, (self._entry, self.dim, 1), self._first)
        return rows.index_select(0, entries).transpose(0, 1).unsqueeze(0)


class _Columns:
    """Mask and bias of all queries, by column."""

    def __init__(self, mask: Tensor | None, bias: Tensor | None, first_column: int, num_kv_heads: int) -> None:
        self._mask = None if mask is None else mask.unsqueeze(1)
        self._bias = bias
        self._first_column = first_column
        self._num_kv_heads = num_kv_heads

    def of(self, block: Block, run: Run, dtype: torch.dtype) -> Tensor:
        """What is added to the scores, `[B, kv heads, group, tokens, keys]`, with 1 where it is the same for all."""
        total: Tensor | None = None
        if self._mask is not None:
            seen = self._cut(self._mask, block, run)
            total = _hide(~seen, dtype)
        if self._bias is not None:
            bias = self._cut(self._bias, block, run).to(dtype)
            total = bias if total is None else total + bias
        assert total is not None
        num_heads = total.shape[1]
        heads = (1, 1) if num_heads == 1 else (self._num_kv_heads, num_heads // self._num_kv_heads)
        return total.view(total.shape[0], *heads, *total.shape[2:])

    def _cut(self, columns: Tensor, block: Block, run: Run) -> Tensor:
        low, high = run.position, run.position + run.num_tokens - 1
        if run.positions is not None:
            low, high = int(run.positions.min()), int(run.positions.max())
        first = low - self._first_column
        if first < 0 or high - self._first_column >= columns.shape[3]:
            raise ValueError(
                f"mask and bias cover positions {self._first_column} to {self._first_column + columns.shape[3] - 1},"
                f" but {low} to {high} are read"
            )
        if columns.shape[2] not in (1, block.apart):
            raise ValueError(f"mask and bias are for {columns.shape[2]} queries a sequence, not for {block.apart}")
        if columns.shape[0] > 1:
            columns = columns.narrow(0, block.sequence, block.num_sequences)
        if columns.shape[2] > 1:
            columns = columns.narrow(2, block.skipped, block.num_tokens)
        if run.positions is not None:
            return columns.index_select(3, run.positions - self._first_column)
        return columns.narrow(3, first, run.num_tokens)


class _Call:
    """One call: what is the same for all its blocks."""

    def __init__(
        self,
        query: Tensor,
        keys: _Rows,
        values: _Rows,
        reads: Reads,
        scale: float,
        softcap: float,
        columns: _Columns | None,
    ) -> None:
        self._query = query
        self._keys = keys
        self._values = values
        self._reads = reads
        self._scale = scale
        self._softcap = softcap
        self._columns = columns
        given = [] if keys.new is None or values.new is None else [keys.new.dtype, values.new.dtype]
        same = all(dtype == query.dtype for dtype in (keys.dtype, values.dtype, *given))
        self._is_plain = softcap != 0.0 or values.dim > keys.dim or not same
        self._mask_dtype = wide_dtype(query.dtype)

    def attend(self, block: Block) -> tuple[Tensor, Tensor]:
        """`[B, tokens, kv heads, group, D]`, and the log-sum-exps without D."""
        query = _tokens(self._query, block, self._keys.num_heads)
        num_sequences, num_tokens, num_kv_heads, group, width = query.shape
        packed = self._is_plain or num_tokens <= MOST_PACKED
        if packed:
            query = query.transpose(1, 2).reshape(num_sequences, num_kv_heads, num_tokens * group, width)
        else:
            query = query[0].permute(1, 2, 0, 3)
        runs = block.runs if self._columns is None else [each for run in block.runs for each in run.each()]
        if len(runs) == 1 and runs[0].second is None:
            out, lse = self._attend(block, runs[0], query, num_sequences, packed)
        else:
            merge = Merge()
            two = query.expand(2, -1, -1, -1) if num_sequences == 1 and packed else query
            for run in runs:
                if run.second is not None:
                    merge.add(*self._attend(block, run, two, 2, packed))
                else:
                    out, lse = self._attend(block, run, query, num_sequences, packed)
                    one = num_sequences == 1 and packed
                    merge.add(out if one else out.unsqueeze(0), lse if one else lse.unsqueeze(0))
            out, lse = merge.result()
        if out.shape[-1] > self._values.dim:
            out = out[..., : self._values.dim]
        if packed:
            shape = (num_sequences, num_kv_heads, num_tokens, group)
            return out.view(*shape, -1).transpose(1, 2), lse.reshape(shape).transpose(1, 2)
        return out.permute(2, 0, 1, 3).unsqueeze(0), lse.permute(2, 0, 1).unsqueeze(0)

    def _attend(self, block: Block, run: Run, query: Tensor, batch: int, packed: bool) -> tuple[Tensor, Tensor]:
        """One run for each of the batch, laid out as the queries are."""
        mask = None
        if run.sees is not Sees.ALL or self._columns is not None:
            mask = self._mask(block, run, packed)
        width = self._keys.dim
        key = self._keys.of(run, batch, width)
        if self._is_plain:
            value = self._values.of(run, batch, self._values.dim)
            return plain(query, key, value, self._scale, mask, self._softcap)
        value = self._values.of(run, batch, width)
        if not packed:
            key, value = (each.transpose(0, 1).expand(-1, query.shape[1], -1, -1) for each in (key, value))
        return flash(query, key, value, self._scale, mask, mask is None and run.sees is Sees.CAUSAL)

    def _mask(self, block: Block, run: Run, packed: bool) -> Tensor | None:
        """What is added to the scores of the block for the run, as its queries are laid out; None for nothing."""
        group = self._query.shape[1] // self._keys.num_heads
        banded = run.sees is Sees.BAND or (run.sees is Sees.CAUSAL and (packed or self._columns is not None))
        if self._columns is None:
            return self._band(block, run, group if packed else 1) if banded else None
        mask = self._columns.of(block, run, self._mask_dtype)
        if banded:
            mask = mask + self._band(block, run, 1)
        if not packed:
            return mask[0]
        if mask.shape[2:4] == (1, 1):
            return mask[:, :, 0]
        mask = mask.expand(-1, -1, group, block.num_tokens, -1)
        return mask.transpose(2, 3).flatten(2, 3)

    def _band(self, block: Block, run: Run, group: int) -> Tensor:
        """0 where a query may see a key by its position, else -inf: `[tokens x group, keys]`."""
        bands = self._reads.bands
        ahead = block.position - run.position
        shape = (ahead, block.num_tokens, run.num_tokens, group, self._mask_dtype, id(run.positions))
        band = bands.get(shape)
        if band is None:
            keys = torch.arange(run.num_tokens) if run.positions is None else run.positions
            behind = torch.arange(ahead, ahead + block.num_tokens).unsqueeze(1) - keys
            hidden = behind < 0
            if self._reads.queries.window:
                hidden |= behind >= self._reads.queries.window
            band = _hide(hidden, self._mask_dtype)
            band = band.repeat_interleave(group, 0) if group > 1 else band
            if len(bands) < _MOST_BANDS:
                bands[shape] = band
        return band
