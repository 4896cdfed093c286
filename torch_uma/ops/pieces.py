"""What single queries read, as a value: for each its keys in pieces, one call of an attention kernel each.

Owns how stretches become pieces: long ones are cut, so that threads get equally much, and short ones are put together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torch_uma.lifespans import spread
from torch_uma.ops.stretches import Int64Array, Stretches

# Stretches of fewer bytes cost less to copy than to attend to one by one.
_SHORT_BYTES = 2**20

# So many tokens are copied for one piece; no piece in place is cut into smaller ones.
_PIECE_TOKENS = 512

# Pieces for each thread, or else the last one to finish would keep the others waiting.
_PIECES_A_THREAD = 4


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Pieces of keys that single queries see whole, ordered by their queries.

    Attributes:
        tokens: int64 [pieces], the packed token whose query it is for.
        counts: int64 [pieces], how many keys.
        entries: int64 [pieces], the entry of the first; -1 for keys that are copied.
        starts: int64 [pieces], where the entries of copied keys begin in `copied`.
        copied: int64, the entries of all copied keys.
        queries: int64 [queries], the packed tokens that see anything, ascending.
        firsts: int64 [queries + 1], the first piece of each, and the number of all.
        calls: what whoever applies them keeps for the next layer.
    """

    tokens: Int64Array
    counts: Int64Array
    entries: Int64Array
    starts: Int64Array
    copied: Int64Array
    queries: Int64Array
    firsts: Int64Array
    calls: dict[tuple[object, ...], Any] = field(default_factory=dict, compare=False, repr=False)


def cut(stretches: Stretches, query_tokens: Int64Array, token_bytes: int) -> Pieces:
    """The pieces of sequences whose only queries are the packed tokens `query_tokens`, ascending.

    `token_bytes` is what key and value of a token take in a layer.
    """
    sequence, position, end, entry = stretches
    counts = end - position
    num_stretches = np.bincount(sequence, minlength=len(query_tokens))
    is_short = (counts * token_bytes < _SHORT_BYTES) & (num_stretches[sequence] > 1)
    most = max(_PIECE_TOKENS, int(counts.sum()) // (_PIECES_A_THREAD * torch.get_num_threads()))
    if not is_short.any():
        owners, counts, entries = _split(sequence, counts, entry, most)
        starts = copied = entries[:0]
    else:
        copied = spread(entry[is_short], counts[is_short])
        totals = np.bincount(sequence, counts * is_short, len(query_tokens)).astype(np.int64)
        some = totals.nonzero()[0]
        begins = (totals.cumsum() - totals)[some]
        short = _split(some, totals[some], begins, _PIECE_TOKENS)
        long = _split(sequence[~is_short], counts[~is_short], entry[~is_short], most)
        owners, counts = (np.concatenate([ours, theirs]) for ours, theirs in zip(short[:2], long[:2]))
        order = owners.argsort(kind="stable")
        owners, counts = owners[order], counts[order]
        entries = np.concatenate([np.full_like(short[2], -1), long[2]])[order]
        starts = np.concatenate([short[2], np.zeros_like(long[2])])[order]
    num_pieces = np.bincount(owners, minlength=len(query_tokens))
    seeing = num_pieces.nonzero()[0]
    firsts = np.zeros(len(seeing) + 1, np.int64)
    num_pieces[seeing].cumsum(out=firsts[1:])
    return Pieces(
        tokens=query_tokens[owners],
        counts=counts,
        entries=entries,
        starts=starts,
        copied=copied,
        queries=query_tokens[seeing],
        firsts=firsts,
    )


def _split(
    owners: Int64Array, counts: Int64Array, starts: Int64Array, most: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The same ranges, each as so many equal ones, but for a token, that none is of more than `most`."""
    if not len(counts) or counts.max() <= most:
        return owners, counts, starts
    num_parts = -(-counts // most)
    part = spread(np.zeros_like(counts), num_parts)
    owners, counts, starts, num_parts = (each.repeat(num_parts) for each in (owners, counts, starts, num_parts))
    begin = part * counts // num_parts
    return owners, (part + 1) * counts // num_parts - begin, starts + begin
