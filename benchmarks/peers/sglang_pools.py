"""SGLang's own pools and allocators on a CPU, driven as its scheduler drives them.

Owns what is SGLang's, of which nothing is replaced: the unified pool, or the static ones, with their allocators and the
rows that say where a request's tokens lie. What is not: a request is no more than SGLang's record of its memory, and a
batch the fields that its `alloc_for_decode` reads; there is no prefix cache, so a request holds one state. Pages of
one token; of more where whole pages are taken, as what else SGLang does there is a Triton kernel, which no CPU runs.

Importing this takes an installed SGLang.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from geometries import Layers
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocation import alloc_for_decode
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.common import free_kv_row_segments, free_swa_out_of_window_slots
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_memory_pool import init_unified_mamba_pools, init_unified_swa_pools
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from torch_uma.layout import Memory, State, Window

ON = {"device": "cpu", "enable_memory_saver": False}
KV_DTYPE = torch.bfloat16


class Model:
    """What SGLang's factories ask of a model with two kinds of layers: full attention, and states or one window."""

    def __init__(self, layers: Layers) -> None:
        self.memories: dict[str, Memory] = {}
        self.numbers: dict[str, list[int]] = {}
        for number, layer in enumerate(layers):
            (memory,) = layer.memories
            kind = {State: "state", Window: "window"}.get(type(memory.lifetime), "full")
            assert self.memories.setdefault(kind, memory) == memory, "all layers of a kind store the same"
            self.numbers.setdefault(kind, []).append(number)
        assert sorted(self.memories) in (["full", "state"], ["full", "window"]), sorted(self.memories)
        self.has_states = "state" in self.memories
        window = None if self.has_states else self.memories["window"].lifetime
        self.window_tokens = window.num_tokens - 1 if isinstance(window, Window) else None  # behind the newest

    def entry_bytes(self, kind: str) -> int:
        return sum(row.num_bytes for row in self.memories[kind].rows) * len(self.numbers[kind])

    def heads(self, kind: str, prefix: str = "") -> dict[str, int]:
        keys, values = self.memories[kind].rows
        return {
            f"{prefix}head_num": keys.shape[0],
            f"{prefix}head_dim": keys.shape[1],
            f"{prefix}v_head_dim": values.shape[1],
        }

    def states(self) -> Mamba2CacheParams:
        conv, recurrent = self.memories["state"].rows
        num_heads, head_dim, state_size = recurrent.shape
        shape = Mamba2StateShape(
            conv=[(conv.shape[0], conv.shape[1])],
            temporal=(num_heads, head_dim, state_size),
            intermediate_size=num_heads * head_dim,
            conv_dim=conv.shape[0],
            ssm_state_size=state_size,
            num_heads=num_heads,
            head_dim=head_dim,
            state_size=state_size,
            conv_kernel=conv.shape[1] + 1,
        )
        dtype = Mamba2StateDType(conv=conv.dtype, temporal=recurrent.dtype)
        return Mamba2CacheParams(shape=shape, dtype=dtype, layers=self.numbers["state"])


def unified(model: Model, arena_bytes: int, page_size: int, max_requests: int, max_tokens: int) -> tuple[Any, Any]:
    """The allocator and the rows of `--enable-unified-memory`: one arena, compacted when an allocation is short."""
    common = model.heads("full") | ON
    common |= {"kv_cache_dtype": KV_DTYPE, "page_size": page_size, "lazy_compaction": True, "need_sort": False}
    common |= {"start_layer": 0, "end_layer": sum(map(len, model.numbers.values()))}
    common |= {"full_attention_layer_ids": model.numbers["full"]}
    if model.has_states:
        bundle = init_unified_mamba_pools(
            unified_total_bytes=arena_bytes,
            max_mamba_cache_size=0,  # no more bytes for states than those
            max_total_num_tokens=arena_bytes // model.entry_bytes("full"),
            max_num_reqs=max_requests,
            model_context_len=max_tokens,
            extra_max_context_len=0,
            mamba_layer_ids=model.numbers["state"],
            mamba2_cache_params=model.states(),
            is_draft_worker=False,
            use_mla_backend=False,
            enable_mamba_extra_buffer=False,
            enable_mamba_extra_buffer_lazy=False,
            speculative_num_draft_tokens=None,
            disable_overlap_schedule=False,
            **common,
        )
        return bundle.token_to_kv_pool_allocator, bundle.req_to_token_pool
    windows = init_unified_swa_pools(
        total_bytes=arena_bytes,
        model_context_len=max_tokens,
        sliding_window_size=model.window_tokens,
        swa_attention_layer_ids=model.numbers["window"],
        **model.heads("window", "swa_"),
        **common,
    )
    return windows.token_to_kv_pool_allocator, ReqToTokenPool(max_requests, max_tokens, **ON)


def static(
    model: Model, num_entries: Mapping[str, int], page_size: int, max_requests: int, max_tokens: int
) -> tuple[Any, Any]:
    """The same of pools that have each so many entries from the beginning."""
    assert page_size == 1
    full = {"full_attention_layer_ids": model.numbers["full"], "page_size": page_size, "dtype": KV_DTYPE} | ON
    keys = model.memories["full"].rows[0]
    full |= {"size": num_entries["full"], "head_num": keys.shape[0], "head_dim": keys.shape[1]}
    if model.has_states:
        rows = HybridReqToTokenPool(
            size=max_requests,
            mamba_size=num_entries["state"],
            mamba_spec_state_size=max_requests,
            max_context_len=max_tokens,
            cache_params=model.states(),
            mamba_layer_ids=model.numbers["state"],
            enable_mamba_extra_buffer=False,
            **ON,
        )
        pool = HybridLinearKVPool(mamba_pool=rows.mamba_pool, **full)
        return TokenToKVPoolAllocator(num_entries["full"], KV_DTYPE, "cpu", pool, need_sort=False), rows
    pool = SWAKVPool(size_swa=num_entries["window"], swa_attention_layer_ids=model.numbers["window"], **full)
    sizes = (num_entries["full"], num_entries["window"], page_size)
    allocator = SWATokenToKVPoolAllocator(*sizes, KV_DTYPE, "cpu", pool, need_sort=False)
    return allocator, ReqToTokenPool(max_requests, max_tokens, **ON)


class SGLangPools:
    """Requests in the unified pool, or in static ones that have `shares` of the bytes, by kind.

    `eviction_tokens`: so many leave a window before SGLang gives them back; its own setting by default.
    """

    def __init__(
        self,
        layers: Layers,
        arena_bytes: int,
        *,
        page_size: int,
        max_requests: int,
        max_tokens: int,
        shares: Mapping[str, float] | None = None,
        eviction_tokens: int | None = None,
    ) -> None:
        logging.getLogger("sglang").setLevel(logging.ERROR)
        get_parallel().override_permanently(attn_dcp_size=1, attn_dcp_rank=0)  # one device
        self.model = model = Model(layers)
        self.page_size = page_size
        self.eviction_tokens = eviction_tokens or envs.SGLANG_SWA_EVICTION_INTERVAL.get()
        limits = (page_size, max_requests, max_tokens)
        if shares is None:
            self.allocator, self.rows = unified(model, arena_bytes, *limits)
        else:
            num_entries = {  # one is for padding
                kind: int(share * arena_bytes // model.entry_bytes(kind)) - 1 for kind, share in shares.items()
            }
            self.allocator, self.rows = static(model, num_entries, *limits)
        self._is_unified = shares is None
        self._tree = SimpleNamespace(
            page_size=page_size, token_to_kv_pool_allocator=self.allocator, supports_prefix_sharing=lambda: False
        )

    def add(self) -> Any | None:
        """A request with a row and, where there are states, one; None if there is no room."""
        request = SimpleNamespace(kv=ReqKvInfo())
        if self.model.has_states and self.rows.mamba_allocator.schedulable_available_size() < 1:
            return None
        return None if self.rows.alloc([request]) is None else request

    def extend(self, request: Any, num_tokens: int) -> bool:
        """Take whole pages for so many more tokens, as if one came after the other; False if there is no room."""
        kv = request.kv
        assert num_tokens % self.page_size == 0
        taken = self.allocator.alloc(num_tokens)
        if taken is None:
            return False
        end = kv.kv_allocated_len + num_tokens
        self.rows.write((kv.req_pool_idx, slice(kv.kv_allocated_len, end)), taken.to(torch.int32))
        kv.kv_allocated_len = kv.kv_committed_len = end
        self._leave_window(request, end - 1)
        return True

    def batch(self, requests: Sequence[Any]) -> Any:
        rows = torch.tensor([request.kv.req_pool_idx for request in requests])
        lengths = torch.tensor([request.kv.kv_allocated_len for request in requests])
        return SimpleNamespace(
            reqs=list(requests),
            req_pool_indices=rows,
            req_pool_indices_cpu=rows,
            seq_lens=lengths,
            seq_lens_cpu=lengths.clone(),
            device="cpu",
            tree_cache=self._tree,
            req_to_token_pool=self.rows,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            maybe_evict_swa=partial(self._leave_windows, requests),
        )

    def decode(self, batch: Any) -> list[Tensor]:
        """Take a token for every request; where each attention pool is to write them."""
        taken = alloc_for_decode(batch, 1)
        batch.seq_lens += 1
        batch.seq_lens_cpu += 1
        places = [self.allocator.translate_write_loc(taken) if self._is_unified else taken]
        if not self.model.has_states:
            places.append(self.allocator.translate_loc_from_full_to_swa(taken))
        return places

    def finish(self, request: Any) -> None:
        kv = request.kv
        if kv.kv_allocated_len:
            tokens = self.rows.req_to_token[kv.req_pool_idx, : kv.kv_allocated_len]
            evicted_tokens = kv.get_evicted_seqlen(ComponentType.SWA)
            free_kv_row_segments(self.allocator, [(tokens, 0)], swa_evicted_seqlen=evicted_tokens)
        if kv.holds_mamba:
            self.rows.mamba_allocator.free(kv.mamba_pool_idx.unsqueeze(-1))
        self.rows.free(request)

    def compact(self) -> int:
        """Pack both ends of the unified pool, as a short allocation does; the bytes moved."""
        return sum(int(member.flush_for_allocation() * member.entry_bytes_per_page) for member in self._members())

    def copiers(self) -> list[tuple[Any, str]]:
        """What copies pages, as an owner and the name of its method."""
        return [(member.get_kvcache(), "move_physical_pages") for member in self._members()]

    def check(self) -> None:
        """What SGLang itself has to say about the unified pool's books."""
        if self._is_unified:
            faults = self.allocator.verify_byte_accounting()
            assert not faults, faults

    def _members(self) -> tuple[Any, Any]:
        ends = self.allocator
        return ends.full_attn_allocator, ends.mamba_allocator if self.model.has_states else ends.swa_attn_allocator

    def _leave_windows(self, requests: Sequence[Any]) -> None:
        for request in requests:
            self._leave_window(request, request.kv.kv_allocated_len)

    def _leave_window(self, request: Any, past: int) -> None:
        """Give back what the token at place `past` does not see, when that has become enough."""
        kv, window_tokens = request.kv, self.model.window_tokens
        if window_tokens is None:
            return
        if past - window_tokens < kv.get_evicted_seqlen(ComponentType.SWA) + self.eviction_tokens:
            return
        free_swa_out_of_window_slots(
            request,
            past,
            sliding_window_size=window_tokens,
            page_size=self.page_size,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            supports_prefix_sharing=False,
        )
