"""Attention that reads keys and values from the arena, where they lie.

Owns what the op `attend` means, and its two ways. On the host, `plan_reads` says once for all layers of a kind which
runs of entries are read, and `attend_reads` attends to each run in place. Elsewhere nothing may be read back, so what
every column of the page table names is gathered, and masked where it is not seen. Before either, a substitute is asked
that somebody may have registered for the arena, such as the adapter to FlashInfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torch_uma.ops import reference, substitutes
from torch_uma.ops.attend_gathered import attend_gathered
from torch_uma.ops.attend_reads import attend_reads as attend_reads
from torch_uma.ops.attend_reads import attend_run as attend_run
from torch_uma.ops.reads import Reads as Reads
from torch_uma.ops.reads import plan_reads as plan_reads


def attend(
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
    """Causal attention of the new tokens of R sequences: `[T, Hq, Dv]` as `query`, and log-sum-exps `[T, Hq]`.

    The log-sum-exps are float32, or float64 for such queries. A query that sees nothing gives 0 and -inf; tokens behind
    the last sequence and those of a negative row see nothing. Nothing is modified, and only memory of seen positions is
    relied on: anything else may be NaN.

    Args:
        query: [T, Hq, Dk], the new tokens of one sequence after another.
        query_starts: int64 [R + 1]; sequence i has tokens `query_starts[i]` to `query_starts[i + 1]`.
        page_table, v2p, rows: as for `locate`; there must be a page for each position that is seen.
        lengths: int64 [R], tokens of each sequence with the new ones, which are its last.
        offsets_bytes, dims, dtypes: of key and value within an entry, each `[num_kv_heads, dim]`; they may overlap.
        num_kv_heads: a divisor of Hq; head h of the queries reads head `h // (Hq // num_kv_heads)`.
        window: a query sees the last `window` positions, its own included; 0 for all.
        chunk: a query sees from the last multiple of `chunk` on; 0 for all.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 for no cap.
        starts: int64 [R], the first position of each sequence that is seen, or read.
        sinks: [Hq], the logit of one more key, without a value, that each query sees.
        mask: bool [R or 1, q or 1, K], where all sequences have q queries; False hides position `first_column + j`.
        bias: float [R or 1, Hq or 1, q or 1, K], added to the scores of these positions.
        first_column: position of the first column of mask and bias. These must cover what is seen: on the host it is a
            ValueError if they do not, elsewhere such a position is neither masked nor biased.
        indices: int64 [T, n], distinct positions of which a query sees no others; -1 for none.
        new_key, new_value: [T, num_kv_heads, dim], both or neither; read in place of what the arena has of the new
            tokens, which need not be there. The page table must still have columns for their positions, except on the
            host.
    """
    if (new_key is None) != (new_value is None):
        raise ValueError("new keys are given with new values, or neither")
    where = (arena, query, query_starts, page_table, v2p, rows, lengths, origin_bytes, entry_bytes, page_size)
    what = (offsets_bytes, dims, num_kv_heads, dtypes, scale)
    options: dict[str, Any] = {
        "window": window,
        "chunk": chunk,
        "softcap": softcap,
        "starts": starts,
        "sinks": sinks,
        "mask": mask,
        "bias": bias,
        "first_column": first_column,
        "indices": indices,
        "new_key": new_key,
        "new_value": new_value,
    }
    served = substitutes.ask(*where, *what, **options)
    if served is not None:
        return served
    if indices is None and reference.on_host(arena):
        reads = plan_reads(
            page_table.numpy(),
            v2p.numpy(),
            rows.numpy(),
            lengths.numpy(),
            query_starts.numpy(),
            page_size,
            window=window,
            chunk=chunk,
            starts=None if starts is None else starts.numpy(),
            has_new=new_key is not None,
            token_bytes=num_kv_heads * sum(dim * reference.dtype_of(name).itemsize for dim, name in zip(dims, dtypes)),
        )
        return attend_reads(
            arena,
            query,
            reads,
            origin_bytes,
            entry_bytes,
            offsets_bytes,
            dims,
            num_kv_heads,
            dtypes,
            scale,
            softcap=softcap,
            sinks=sinks,
            mask=mask,
            bias=bias,
            first_column=first_column,
            new_key=new_key,
            new_value=new_value,
        )
    return attend_gathered(*where, *what, **options)
