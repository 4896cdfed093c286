"""Schemas of the ops, and what each runs: the plain torch reference, Triton on CUDA, and shapes for fake tensors.

Only the uint8 arena, small tensors, names and integers cross an op's boundary; typed views are made inside, since
compiled code loses writes through views of another dtype. An op mutates what its schema marks, returns fresh tensors
and never waits for a device. Where it writes, a negative index is skipped, and an index that is named twice in one call
gets one of the two values, no matter which. Dtypes in a list go by name (`dtype_name`): opcheck takes no list of them.
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_uma.ops import reference
from torch_uma.ops.attend import attend
from torch_uma.ops.attention import wide_dtype
from torch_uma.ops.page_index import page_index

SCHEMAS = (
    "relocate(Tensor(a!) arena, Tensor src_pages, Tensor dst_pages, int origin_bytes, int page_bytes) -> ()",
    "remap(Tensor(a!) table, Tensor index, Tensor values) -> ()",
    "write_rows(Tensor(a!) arena, Tensor[] rows, Tensor entries, int origin_bytes, int entry_bytes,"
    " int[] offsets_bytes, str[] dtypes, Tensor?[] scales) -> ()",
    "gather_rows(Tensor arena, Tensor entries, int origin_bytes, int entry_bytes, int[] offsets_bytes, int[] widths,"
    " str[] dtypes, ScalarType? out_dtype, Tensor?[] scales) -> Tensor[]",
    "locate(Tensor page_table, Tensor v2p, Tensor rows, Tensor positions, int page_size, int tokens_per_entry)"
    " -> Tensor",
    "allocate(Tensor(a!) page_table, Tensor(b!) taken, Tensor stack, Tensor rows, Tensor lengths, int page_tokens)"
    " -> ()",
    "release(Tensor(a!) page_table, Tensor(b!) taken, Tensor(c!) stack, Tensor rows, Tensor old_lengths,"
    " Tensor new_lengths, int page_tokens) -> ()",
    "page_index(Tensor page_table, Tensor v2p, Tensor rows, Tensor lengths, int page_size, int capacity,"
    " Tensor? first_pages=None) -> (Tensor, Tensor, Tensor)",
)

REFERENCES: dict[str, Callable[..., Any]] = {
    "relocate": reference.relocate,
    "remap": reference.remap,
    "write_rows": reference.write_rows,
    "gather_rows": reference.gather_rows,
    "locate": reference.locate,
    "allocate": reference.allocate,
    "release": reference.release,
    "page_index": page_index,
}

ATTEND = (
    "attend(Tensor arena, Tensor query, Tensor query_starts, Tensor page_table, Tensor v2p, Tensor rows,"
    " Tensor lengths, int origin_bytes, int entry_bytes, int page_size, int[] offsets_bytes, int[] dims,"
    " int num_kv_heads, str[] dtypes, float scale, *, int window=0, int chunk=0, float softcap=0.0,"
    " Tensor? starts=None, Tensor? sinks=None, Tensor? mask=None, Tensor? bias=None, int first_column=0,"
    " Tensor? indices=None, Tensor? new_key=None, Tensor? new_value=None) -> (Tensor, Tensor)"
)


def _nothing(*_: object) -> None:
    """Shapes of an op that only writes."""


def _gathered(
    arena: Tensor,
    entries: Tensor,
    origin_bytes: int,
    entry_bytes: int,
    offsets_bytes: Sequence[int],
    widths: Sequence[int],
    dtypes: Sequence[str],
    out_dtype: torch.dtype | None,
    scales: Sequence[Tensor | None],
) -> list[Tensor]:
    return [
        arena.new_empty((*entries.shape, width), dtype=out_dtype or reference.dtype_of(name))
        for width, name in zip(widths, dtypes, strict=True)
    ]


def _located(
    page_table: Tensor, v2p: Tensor, rows: Tensor, positions: Tensor, page_size: int, per_entry: int
) -> Tensor:
    return torch.empty_like(positions, dtype=torch.int64, memory_format=torch.contiguous_format)


def _indexed(
    page_table: Tensor,
    v2p: Tensor,
    rows: Tensor,
    lengths: Tensor,
    page_size: int,
    capacity: int,
    first_pages: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = rows.shape[0]
    return page_table.new_empty(num_rows + 1), page_table.new_empty(capacity), page_table.new_empty(num_rows)


def _attended(arena: Tensor, query: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor]:
    dims = others[9]
    out = query.new_empty((*query.shape[:2], dims[1]))
    return out, query.new_empty(query.shape[:2], dtype=wide_dtype(query.dtype))


@functools.cache
def _on_cuda(name: str) -> Callable[..., Any]:
    """The Triton kernel of an op; the reference where there is no Triton. Neither is imported before the first call."""
    if importlib.util.find_spec("triton") is None:
        return REFERENCES[name]
    from torch_uma.ops import triton as kernels

    kernel: Callable[..., Any] = getattr(kernels, name)
    return kernel


def _launch(name: str, *arguments: Any, **options: Any) -> Any:
    return _on_cuda(name)(*arguments, **options)


_FAKES: dict[str, Callable[..., object]] = {"gather_rows": _gathered, "locate": _located, "page_index": _indexed}

_library = torch.library.Library("torch_uma", "DEF")
for _schema in SCHEMAS:
    _name = _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, REFERENCES[_name], "CompositeExplicitAutograd")
    _library.impl(_name, functools.partial(_launch, _name), "CUDA")
    torch.library.register_fake(f"torch_uma::{_name}", _FAKES.get(_name, _nothing), lib=_library)

_library.define(ATTEND, tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("attend", attend, "CompositeExplicitAutograd")
torch.library.register_fake("torch_uma::attend", _attended, lib=_library)
