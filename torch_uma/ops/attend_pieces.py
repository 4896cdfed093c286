"""Attention of single queries to pieces of keys in the arena, on the host, by a loop in C over torch's flash attention.

Owns the call of that loop and the merge of what the pieces of a query give. A call from Python for each piece would
cost more than a short piece itself.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_uma.ops.native import native, torch_functions
from torch_uma.ops.pieces import Pieces

# Numbers of torch's C interface, for the dtypes whose log-sum-exps are float32.
_DTYPES = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}


_ARRAYS = ("tokens", "counts", "entries", "starts", "copied", "firsts")


class _Call(ctypes.Structure):
    """`struct call` of attend_pieces.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("torch", "query", "keys", "values")),
        *((name, ctypes.c_void_p) for name in ("outs", "lses", "merged_outs", "merged_lses")),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
        *((name, ctypes.c_int64) for name in ("num_pieces", "num_queries", "num_heads", "group", "dim")),
        *((name, ctypes.c_int64) for name in ("entry_bytes", "num_threads")),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_int32) for name in ("dtype", "item_bytes")),
        ("next", ctypes.c_int64),
        ("error", ctypes.c_int32),
    )


def is_served(dtype: torch.dtype) -> bool:
    """Whether there is a loop in C for queries, keys and values of this dtype."""
    return dtype in _DTYPES and native() is not None and torch_functions() is not None


def attend_pieces(
    arena: Tensor,
    query: Tensor,
    pieces: Pieces,
    origin_bytes: int,
    entry_bytes: int,
    offsets_bytes: Sequence[int],
    num_kv_heads: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """What `attend_reads` gives, where keys and values are as wide as the queries, and of their dtype."""
    library = native()
    assert library is not None
    query = query.contiguous()
    num_tokens, num_heads, dim = query.shape
    num_pieces, num_queries = len(pieces.tokens), len(pieces.queries)
    call = _prepare(pieces, query.dtype, num_heads, num_kv_heads, dim, entry_bytes, scale)
    out = outs = query.new_empty((num_pieces, num_heads, dim))
    lse = lses = query.new_empty((num_pieces, num_heads), dtype=torch.float32)
    first = arena.data_ptr() + origin_bytes
    call.query, call.keys, call.values = query.data_ptr(), first + offsets_bytes[0], first + offsets_bytes[1]
    call.outs, call.lses, call.num_threads = outs.data_ptr(), lses.data_ptr(), torch.get_num_threads()
    is_merged = num_queries < num_pieces
    if is_merged:
        out = query.new_empty((num_queries, num_heads, dim), dtype=torch.float32)
        lse = lses.new_empty((num_queries, num_heads))
        if query.dtype == torch.float32:
            call.merged_outs, call.merged_lses = out.data_ptr(), lse.data_ptr()
    error = library.torch_uma_attend_pieces(ctypes.byref(call))
    if error:
        raise RuntimeError(f"attention over {num_pieces} pieces of keys failed with error {error} of torch's")
    if is_merged and query.dtype != torch.float32:
        wide = outs.float()
        call.outs, call.merged_outs, call.merged_lses = wide.data_ptr(), out.data_ptr(), lse.data_ptr()
        library.torch_uma_merge_pieces(ctypes.byref(call))
        out = out.to(query.dtype)
    if num_queries == num_tokens:
        return out, lse
    queries = torch.from_numpy(pieces.queries)
    all_out = query.new_zeros(query.shape).index_copy_(0, queries, out)
    return all_out, lse.new_full((num_tokens, num_heads), -math.inf).index_copy_(0, queries, lse)


def _prepare(
    pieces: Pieces, dtype: torch.dtype, num_heads: int, num_kv_heads: int, dim: int, entry_bytes: int, scale: float
) -> _Call:
    """The call, but for the addresses of a layer; what layers have in common is put together once."""
    shape = (dtype, num_heads, num_kv_heads, dim, entry_bytes, scale)
    template = pieces.calls.get(shape)
    if template is None:
        functions = torch_functions()
        assert functions is not None
        template = pieces.calls[shape] = _Call(
            torch=ctypes.addressof(functions),
            num_pieces=len(pieces.tokens),
            num_queries=len(pieces.queries),
            num_heads=num_kv_heads,
            group=num_heads // num_kv_heads,
            dim=dim,
            entry_bytes=entry_bytes,
            scale=scale,
            dtype=_DTYPES[dtype],
            item_bytes=dtype.itemsize,
            **{name: getattr(pieces, name).ctypes.data for name in _ARRAYS},
        )
    return _Call.from_buffer_copy(template)
