"""What one layer's attention reads in one step, and the call that does so.

A layer of the cache makes it when it stores the new tokens; the attention function of the model finds it among its
keyword arguments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from torch_uma.errors import PlanError, SequenceError
from torch_uma.integrations.transformers.places import StepPlaces
from torch_uma.integrations.transformers.stores import TokenStore
from torch_uma.layout import Chunk, Window
from torch_uma.ops.attend import attend_reads, attend_run


class Scores(NamedTuple):
    """How scores are made of the products of queries and keys.

    `softcap`: 0 for none. `sinks` [heads], `bias` [rows or 1, heads or 1, new or 1, keys]; `mask` as `attention.mask`
    makes it, or added to the scores; `indices` int64 [rows, new, n], positions of the keys of each query;
    `query_sinks` [rows, heads, new, 1], a sink of each query.
    """

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    indices: Tensor | None = None
    query_sinks: Tensor | None = None

    @property
    def is_bare(self) -> bool:
        """Whether a query sees all keys up to its own, by their products alone; sinks may be there."""
        return self.mask is self.bias is self.indices is self.query_sinks is None and self.softcap == 0.0


_UNTOLD: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By new keys, the places and store of readings that a model does not hand on to its attention."""


class Reading(NamedTuple):
    """Keys and values of one layer in one step: those in the arena, and the new ones [rows, heads, new, dim].

    `views`: all of them, [rows, heads, tokens, dim], where one view on the host covers every row.
    """

    places: StepPlaces
    store: TokenStore
    new: tuple[Tensor, Tensor]
    views: tuple[Tensor, ...] | None = None

    def attend(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """Attention of `query` [rows, heads, new, dim]: [rows, new, heads, value dim]."""
        if self.views is not None and self.places.num_new_tokens == query.shape[2] == 1 and scores.is_bare:
            keys, values = self.views
            if query.shape[3] == keys.shape[3] == values.shape[3] and query.dtype == keys.dtype == values.dtype:
                self.places.unused = None
                return attend_run(query, keys, values, scores.scale, scores.sinks)
        return self._attend(query, key, value, self.store.offsets_bytes, scores)

    def attend_head(self, query: Tensor, key: Tensor, value: Tensor, head: int, scores: Scores) -> Tensor:
        """As `attend`, of the queries of one head of the keys, `head` of `key` and `value`, alone."""
        offsets_bytes = tuple(
            offset + head * states.shape[3] * placed.row.dtype.itemsize
            for offset, states, placed in zip(self.store.offsets_bytes, (key, value), self.store.rows, strict=True)
        )
        own = slice(head, head + 1)
        return self._attend(query, key[:, own], value[:, own], offsets_bytes, scores)

    def attend_latents(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, scores: Scores
    ) -> Tensor:
        """As `attend`, where `key` and `value` are what the model made of the new latents.

        Past tokens are read as latents: the projection that would make keys and values of them is applied to the query
        and to the result instead (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). PlanError for a projection that is no
        plain linear layer.
        """
        # Where it is not the host that says what is read, the arena is looked at even if nothing is there.
        is_all_new = self.places.plans_reads and self.places.fresh
        if is_all_new and self.places.num_new_tokens > 1 and scores.indices is None:
            return self._attend(query, key, value, self.store.offsets_bytes, scores)
        projection = module.kv_b_proj
        assert isinstance(projection, torch.nn.Module)
        hooked = projection._forward_hooks or projection._forward_pre_hooks
        if type(projection) is not torch.nn.Linear or projection.bias is not None or hooked:
            raise PlanError(
                f"the latents of {type(module).__name__} are expanded by {projection}, and only a linear layer without "
                "bias or hooks can be applied to the query instead; use attn_implementation='sdpa'"
            )
        latent, rope_key = self.new
        value_dim, rank = value.shape[-1], latent.shape[-1]
        weight = projection.weight.view(query.shape[1], -1, rank)  # [heads, key dim without position + value dim, rank]
        of_keys, of_values = weight.split([weight.shape[1] - value_dim, value_dim], dim=1)
        plain, rotary = query.split([of_keys.shape[1], query.shape[-1] - of_keys.shape[1]], dim=-1)
        absorbed = torch.cat([torch.einsum("bhqd,hdr->bhqr", plain, of_keys), rotary], dim=-1)
        self._check_adjacent()
        offset_bytes = self.store.offsets_bytes[0]
        latent_key = torch.cat([latent, rope_key], dim=-1)
        attended = self._attend(absorbed, latent_key, latent, (offset_bytes, offset_bytes), scores)
        return torch.einsum("bqhr,hvr->bqhv", attended, of_values)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, offsets_bytes: tuple[int, ...], scores: Scores
    ) -> Tensor:
        """[rows, new, heads, value dim], with keys and values of these shapes at `offsets_bytes` of an entry."""
        places, subpool = self.places, self.store.subpool
        lifetime = subpool.lifetime
        num_left_out = places.num_new_tokens - query.shape[2]
        if num_left_out > 0 and self.store.is_shared:
            # Where only the last logits are asked for, layers that share keys attend with the last tokens alone.
            whole = torch.nn.functional.pad(query, (0, 0, num_left_out, 0))
            return self._attend(whole, key, value, offsets_bytes, scores)[:, num_left_out:]
        if num_left_out:
            raise SequenceError(
                f"this model attends with {query.shape[2]} queries for {places.num_new_tokens} new tokens, which the "
                "arena's plan does not know; use attn_implementation='sdpa' or 'eager'"
            )
        starts, options = self._options(scores)
        if places.tokens[subpool.index].has_new:
            options["new_key"], options["new_value"] = _packed(key), _packed(value)
        where = (subpool.origin_bytes, subpool.entry_bytes)
        dims = (key.shape[-1], value.shape[-1])
        what: tuple[Any, ...] = (offsets_bytes, dims, key.shape[1], self.store.dtypes, scores.scale)
        packed = _packed(query)
        is_traced = torch.compiler.is_compiling()
        if not is_traced:
            places.unused = None
        if places.plans_reads and scores.indices is None and not is_traced:
            attended, log_sums = attend_reads(
                places.arena, packed, places.reads(self.store, starts), *where, *what, **options
            )
        else:
            attended, log_sums = torch.ops.torch_uma.attend(
                places.arena,
                packed,
                places.query_starts,
                places.page_table(subpool),
                places.v2p,
                places.rows,
                places.lengths,
                *where,
                subpool.page_size,
                *what,
                window=lifetime.num_tokens if isinstance(lifetime, Window) else 0,
                chunk=lifetime.num_tokens if isinstance(lifetime, Chunk) else 0,
                starts=starts,
                indices=None if scores.indices is None else scores.indices.flatten(0, -2),
                **options,
            )
        result: Tensor = attended.view(places.batch_size, places.num_new_tokens, *attended.shape[1:])
        if scores.query_sinks is not None:
            # One more key without a value takes a share of all that is seen.
            shares = log_sums.view(result.shape[:3]).unsqueeze(-1) - scores.query_sinks.transpose(1, 2)
            result = result * shares.sigmoid().to(result.dtype)
        return result

    def _options(self, scores: Scores) -> tuple[Tensor | None, dict[str, Any]]:
        """First tokens that are seen, and what the ops take of the scores. SequenceError where they cannot take it."""
        options: dict[str, Any] = {"softcap": scores.softcap, "sinks": scores.sinks}
        mask, bias = scores.mask, scores.bias
        if self.places.packing is not None and not (mask is bias is scores.indices is None):
            raise SequenceError(
                "sequences that are packed into one batch row can only be attended to causally, without a mask, a bias "
                "or a choice of keys; give the model **cache.inputs() alone, or open a step for each number of tokens"
            )
        if mask is not None and mask.dtype == torch.int64 and mask.shape[1:] == (1, 1, 1):
            starts = self.places.positions_at(mask.flatten())
            self._check_chunks(starts)
            return starts, options if bias is None else options | self._columns(None, bias)
        if mask is not None or bias is not None:
            options |= self._columns(mask, bias)
        return None, options

    def _columns(self, mask: Tensor | None, bias: Tensor | None) -> dict[str, Any]:
        columns = mask if mask is not None else bias
        assert columns is not None
        if not self.places.is_even:
            raise SequenceError(
                "rows that hold unequal numbers of tokens can only be attended to causally, without a mask of another "
                "form or a bias; run them in steps of their own"
            )
        end = self.places.max_past + self.places.num_new_tokens
        num_keys = end - self.store.subpool.lifetime.first_needed(self.places.max_past)
        if columns.shape[-1] > end or not (columns.dtype == torch.bool or columns.dtype.is_floating_point):
            raise SequenceError(
                f"a mask of {columns.dtype} and {tuple(columns.shape)} for rows of {end} tokens; masks of four "
                "dimensions are bool or added to the scores, and have a column for each key"
            )
        if columns.shape[-1] < num_keys:
            raise SequenceError(
                f"a mask of {columns.shape[-1]} columns for {num_keys} keys: this model makes it of the keys it has, "
                "which are the new ones alone; use attn_implementation='sdpa' or 'eager'"
            )
        if mask is not None:
            self._check_causal(mask)
            if mask.shape[1] > 1 and mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, float("-inf"))
            if mask.dtype.is_floating_point:
                bias, mask = mask if bias is None else mask + bias, None
        return {
            "mask": None if mask is None else mask.squeeze(1),
            "bias": bias,
            "first_column": end - columns.shape[-1],
        }

    def _check_causal(self, mask: Tensor) -> None:
        num_queries, num_columns = mask.shape[-2:]
        if num_queries == 1 or torch.compiler.is_compiling():
            return
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        if seen.triu(1 + num_columns - num_queries).any():
            raise SequenceError(
                "a mask that shows later tokens, as of a prefix or of image tokens that see one another, is no use "
                "where the arena is read causally; use attn_implementation='sdpa' or 'eager'"
            )

    def _check_chunks(self, starts: Tensor) -> None:
        lifetime = self.store.subpool.lifetime
        if not isinstance(lifetime, Chunk) or torch.compiler.is_compiling():
            return
        if not (starts % lifetime.num_tokens).any():
            return
        raise SequenceError(
            f"padding of {starts.tolist()} tokens in front of the rows shifts their chunks of {lifetime.num_tokens}, "
            "of which the arena keeps the last one; pad by multiples of that, or use pool.step, which needs no padding"
        )

    def _check_adjacent(self) -> None:
        latent, rope_key = self.store.rows
        if rope_key.row.num_bytes and latent.offset_bytes + latent.row.num_bytes != rope_key.offset_bytes:
            raise PlanError(
                f"latents of {latent.row.num_bytes} bytes are not a multiple of 16, so keys cannot be read as one; "
                "use attn_implementation='sdpa'"
            )


def leave(reading: Reading) -> None:
    """Keep a reading for `find`, for as long as its keys live."""
    _UNTOLD[reading.new[0]] = (reading.places, reading.store)


def find(key: Tensor, value: Tensor) -> Reading | None:
    """The reading that was left with just this tensor of new keys."""
    known = _UNTOLD.get(key)
    return None if known is None else Reading(places=known[0], store=known[1], new=(key, value))


def _packed(states: Tensor) -> Tensor:
    """[rows, heads, tokens, dim] as [rows * tokens, heads, dim]."""
    return states.squeeze(2) if states.shape[2] == 1 else states.transpose(1, 2).flatten(0, 1)
