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


class _Call(ctypes.Structure):
    """`struct call` of attend_pieces.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("torch", "query", "keys", "values", "out", "lse")),
        *((name, ctypes.c_void_p) for name in ("tokens", "counts", "entries", "starts", "copied")),
        *((name, ctypes.c_int64) for name in ("num_pieces", "num_heads", "group", "dim", "entry_bytes")),
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
    library, functions = native(), torch_functions()
    assert library is not None and functions is not None
    num_tokens, num_heads, dim = query.shape
    query = query.contiguous()
    num_pieces, num_queries = len(pieces.tokens), len(pieces.queries)
    outs = query.new_empty((num_pieces, num_heads, dim))
    lses = query.new_empty((num_pieces, num_heads), dtype=torch.float32)
    first = arena.data_ptr() + origin_bytes
    numbers = (pieces.tokens, pieces.counts, pieces.entries, pieces.starts, pieces.copied)
    call = _Call(
        *(ctypes.addressof(functions), query.data_ptr(), *(first + offset for offset in offsets_bytes)),
        *(outs.data_ptr(), lses.data_ptr(), *(each.ctypes.data for each in numbers)),
        *(num_pieces, num_kv_heads, num_heads // num_kv_heads, dim, entry_bytes),
        *(scale, _DTYPES[query.dtype], query.element_size(), 0, 0),
    )
    error = library.torch_uma_attend_pieces(ctypes.byref(call), ctypes.c_int64(torch.get_num_threads()))
    if error:
        raise RuntimeError(f"attention over {num_pieces} pieces of keys failed with error {error} of torch's")
    out, lse = outs, lses
    if num_queries < num_pieces:
        outs = outs.float()
        out, lse = outs.new_empty((num_queries, num_heads, dim)), lses.new_empty((num_queries, num_heads))
        library.torch_uma_merge_pieces(
            *(ctypes.c_void_p(each) for each in (outs.data_ptr(), lses.data_ptr(), pieces.firsts.ctypes.data)),
            *(ctypes.c_int64(each) for each in (num_queries, num_heads, dim)),
            *(ctypes.c_void_p(each.data_ptr()) for each in (out, lse)),
        )
        out = out.to(query.dtype)
    if num_queries == num_tokens:
        return out, lse
    queries = torch.from_numpy(pieces.queries)
    all_out = query.new_zeros(query.shape).index_copy_(0, queries, out)
    return all_out, lse.new_full((num_tokens, num_heads), -math.inf).index_copy_(0, queries, lse)
