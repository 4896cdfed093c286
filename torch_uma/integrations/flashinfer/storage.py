"""Where one layer's keys and values lie in the arena, in the terms in which FlashInfer takes them: strided views.

Owns shapes, strides and offsets, worked out from a plan alone. What a form of FlashInfer makes of them is `forms`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from torch_uma.arena import Arena
from torch_uma.errors import PlanError
from torch_uma.integrations.view import View
from torch_uma.layout import Lifetime
from torch_uma.plan import Plan, SubPool


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What layers of a sub-pool can have in common, so that one plan serves them all: all but where their rows start.

    `dims` and `dtypes` are of key and value; for latents, of the latent and its rotary key, which have no heads:
    `num_kv_heads` is 1.
    """

    subpool: int
    lifetime: Lifetime
    page_size: int
    num_pages: int
    entry_bytes: int
    num_kv_heads: int
    dims: tuple[int, int]
    dtypes: tuple[torch.dtype, torch.dtype]
    is_latent: bool
    has_row_scales: bool

    @property
    def page_stride(self) -> int:
        """Elements of a key from one page to the next."""
        return self.page_size * self.entry_stride

    @property
    def entry_stride(self) -> int:
        """Elements of a key from one entry to the next."""
        return self.entry_bytes // self.dtypes[0].itemsize


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Keys and values of one layer: their geometry, and the bytes from the arena's first to those in page 0."""

    geometry: Geometry
    offsets_bytes: tuple[int, int]

    @property
    def views(self) -> tuple[View, View]:
        """Of keys and values, over the whole grid: `[pages, page_size, heads, dim]`; latents have no axis of heads."""
        return self._view(0), self._view(1)

    def tensors(self, arena: Tensor) -> tuple[Tensor, Tensor]:
        """The views over the arena's bytes."""
        key, value = self.views
        return key.over(arena), value.over(arena)

    def _view(self, which: int) -> View:
        geometry = self.geometry
        dim, dtype = geometry.dims[which], geometry.dtypes[which]
        entry = geometry.entry_bytes // dtype.itemsize
        heads = () if geometry.is_latent else (geometry.num_kv_heads,)
        return View(
            shape=(geometry.num_pages, geometry.page_size, *heads, dim),
            strides=(geometry.page_size * entry, entry, *(dim for _ in heads), 1),
            offset_bytes=self.offsets_bytes[which],
            dtype=dtype,
        )


def storage_of(plan: Plan, layer: int) -> Storage:
    """Where `layer`, or the layer that it shares, keeps keys and values. PlanError if it keeps no such pair."""
    paged = [(subpool, placed) for subpool, placed in plan.where(layer) if not subpool.is_state]
    pairs = [(subpool, placed) for subpool, placed in paged if not placed.row.name.endswith("scale")]
    names = [placed.row.name for _, placed in paged]
    if len(pairs) != 2 or pairs[0][0] is not pairs[1][0]:
        raise PlanError(
            f"layer {layer} stores {names} for its tokens, but FlashInfer reads one key and one value of each token, "
            "in pages of one sub-pool; use torch.ops.torch_uma.attend"
        )
    (subpool, key), (_, value) = pairs
    _check_tokens(layer, subpool)
    is_latent = key.row.name == "latent"
    if not is_latent and (len(key.row.shape) != 2 or len(value.row.shape) != 2):
        raise PlanError(
            f"layer {layer} stores keys of {key.row.shape} and values of {value.row.shape}; declare them as "
            "(heads, dim), so that it is known how many heads they have"
        )
    num_kv_heads = 1 if is_latent else key.row.shape[0]
    if not is_latent and value.row.shape[0] != num_kv_heads:
        raise PlanError(f"layer {layer} has {num_kv_heads} heads of keys, but {value.row.shape[0]} of values")
    dims = (prod(key.row.shape) // num_kv_heads, prod(value.row.shape) // num_kv_heads)
    geometry = Geometry(
        subpool=subpool.index,
        lifetime=subpool.lifetime,
        page_size=subpool.page_size,
        num_pages=subpool.num_pages,
        entry_bytes=subpool.entry_bytes,
        num_kv_heads=num_kv_heads,
        dims=dims,
        dtypes=(key.row.dtype, value.row.dtype),
        is_latent=is_latent,
        has_row_scales=len(paged) > len(pairs),
    )
    first = subpool.origin_bytes
    return Storage(geometry=geometry, offsets_bytes=(first + key.offset_bytes, first + value.offset_bytes))


def clear_sink(arena: Arena) -> None:
    """Clear the sink, so that a padded row that is sent to page 0 of any grid reads zeros. Writes the arena.

    A sink of stale bytes would give such rows NaN; nothing that counts lies there.
    """
    arena.bytes[: arena.plan.sink_bytes].zero_()


def _check_tokens(layer: int, subpool: SubPool) -> None:
    if subpool.tokens_per_entry != 1:
        raise PlanError(
            f"layer {layer} has one entry for {subpool.tokens_per_entry} tokens, but FlashInfer counts an entry as a "
            "token, so its causal mask and windows would be wrong; expand the keys that are read and attend to those"
        )
