"""FlashInfer's wrappers, each given what a `Call` says.

Owns the names and the order of their arguments, and the buffers that a captured graph reads. When a wrapper may be
planned again is `runner`'s business. No backend is left to FlashInfer's choice, since that depends on versions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_uma.arena import staged
from torch_uma.errors import PlanError
from torch_uma.integrations.flashinfer.calls import Call
from torch_uma.integrations.flashinfer.library import Library
from torch_uma.integrations.flashinfer.pages import Pages


@dataclass(frozen=True, kw_only=True)
class GraphSize:
    """How large the buffers of a captured graph are: `num_rows` rows of at most `pages_per_row` pages each."""

    num_rows: int
    pages_per_row: int

    def buffers(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """int32 for what is before the queries [R + 1] and the pages [R + 1], the pages, and a number for each row."""
        sizes = (self.num_rows + 1, self.num_rows + 1, self.num_rows * self.pages_per_row, self.num_rows)
        query_starts, indptr, indices, per_row = (torch.zeros(n, dtype=torch.int32, device=device) for n in sizes)
        return query_starts, indptr, indices, per_row


class Wrapper(Protocol):
    """What all of them do."""

    def plan(self, call: Call) -> None:
        """Take in the pages of a step, and the numbers that all its layers have in common."""

    def run(self, call: Call, query: Tensor, views: tuple[Tensor, Tensor], sinks: Tensor | None) -> Any:
        """Attend; `[T, Hq, Dv]` and log-sum-exps `[T, Hq]` to base 2."""


class _Decode:
    """One query of each row, on CUDA cores or tensor cores."""

    def __init__(self, library: Library, call: Call, workspace: Tensor, graph: GraphSize | None) -> None:
        self._library = library
        self._buffers: tuple[Tensor, ...] | None = None
        self._is_planned = False
        options: dict[str, Any] = {}
        if graph is not None:
            _, *buffers = graph.buffers(workspace.device)
            self._buffers = tuple(buffers)
            options = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": buffers[0],
                "paged_kv_indices_buffer": buffers[1],
                "paged_kv_last_page_len_buffer": buffers[2],
            }
        self._wrapper = library.decode(
            workspace,
            "NHD",
            use_tensor_cores=call.form == "decode_tensor_cores",
            backend="fa2",
            **options,
        )

    def plan(self, call: Call) -> None:
        pages, question = call.pages, call.question
        arguments: dict[str, Any] = {
            "indptr": pages.indptr,
            "indices": pages.indices,
            "last_page_len": pages.last_page_len,
            "num_qo_heads": question.num_heads,
            "num_kv_heads": question.geometry.num_kv_heads,
            "head_dim": question.geometry.dims[0],
            "page_size": question.geometry.page_size,
            "pos_encoding_mode": "NONE",
            "window_left": question.window_left,
            "logits_soft_cap": question.softcap,
            "q_data_type": question.dtype,
            "kv_data_type": question.geometry.dtypes[0],
            "sm_scale": question.scale,
        }
        if self._buffers is None or not self._is_planned:
            self._wrapper.plan(**arguments)
            self._is_planned = True
            return
        # In a graph a whole plan would wait for the device to copy the pages.
        for buffer, numbers in zip(self._buffers, (pages.indptr, pages.indices, pages.last_page_len)):
            buffer[: len(numbers)].copy_(numbers, non_blocking=True)
        self._library.fast_decode_plan(self._wrapper, **arguments, global_override_indptr_cpu=pages.indptr)

    def run(self, call: Call, query: Tensor, views: tuple[Tensor, Tensor], sinks: Tensor | None) -> Any:
        return self._wrapper.run(query, views, **_scales(call), return_lse=True)


class _Prefill:
    """Any number of queries of each row."""

    def __init__(self, library: Library, call: Call, workspace: Tensor, graph: GraphSize | None) -> None:
        options: dict[str, Any] = {}
        if graph is not None:
            buffers = graph.buffers(workspace.device)
            names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
            options = dict(zip(names, buffers), use_cuda_graph=True)
        self._most_tokens = math.inf
        self._is_in_graph = graph is not None
        self._device = workspace.device
        self._wrapper = self._make(library, call, workspace, dict(options, backend=call.form[-3:]))

    def _make(self, library: Library, call: Call, workspace: Tensor, options: dict[str, Any]) -> Any:
        return library.prefill(workspace, "NHD", **options)

    def plan(self, call: Call) -> None:
        pages, question = call.pages, call.question
        num_tokens = pages.num_tokens
        if num_tokens > self._most_tokens:
            raise PlanError(
                f"{num_tokens} new tokens in a graph whose schedule was laid out for {self._most_tokens}; capture "
                "another one, or plan for the most tokens first"
            )
        indices = pages.indices
        if self._is_in_graph:
            # Into the buffer of a graph it copies host memory by a copy that waits.
            indices = staged(indices.numpy(), self._device)
            if self._most_tokens == math.inf:
                self._most_tokens = num_tokens
        self._wrapper.plan(
            qo_indptr=pages.query_starts,
            paged_kv_indptr=pages.indptr,
            paged_kv_indices=indices,
            paged_kv_last_page_len=pages.last_page_len,
            num_qo_heads=question.num_heads,
            num_kv_heads=question.geometry.num_kv_heads,
            head_dim_qk=question.geometry.dims[0],
            head_dim_vo=question.geometry.dims[1],
            page_size=question.geometry.page_size,
            causal=True,
            pos_encoding_mode="NONE",
            window_left=question.window_left,
            logits_soft_cap=question.softcap,
            sm_scale=question.scale,
            q_data_type=question.dtype,
            kv_data_type=question.geometry.dtypes[0],
        )

    def run(self, call: Call, query: Tensor, views: tuple[Tensor, Tensor], sinks: Tensor | None) -> Any:
        return self._wrapper.run(query, views, **_scales(call), return_lse=True)


class _Sink(_Prefill):
    """The same where each head has a sink, which only this wrapper looks at. Its scale goes with the call."""

    def _make(self, library: Library, call: Call, workspace: Tensor, options: dict[str, Any]) -> Any:
        question = call.question
        return library.sink(
            workspace,
            "NHD",
            q_data_type=question.dtype,
            kv_data_type=question.geometry.dtypes[0],
            head_dim_qk=question.geometry.dims[0],
            head_dim_vo=question.geometry.dims[1],
            window_left=question.window_left,
            **options,
        )

    def run(self, call: Call, query: Tensor, views: tuple[Tensor, Tensor], sinks: Tensor | None) -> Any:
        assert sinks is not None
        scale = _unless_one(call.question.v_scale)
        return self._wrapper.run(query, views, sinks.float(), call.scale, v_scale=scale, return_lse=True)


class _Latent:
    """Latents and rotary keys; a query is as wide as both."""

    def __init__(self, library: Library, call: Call, workspace: Tensor, graph: GraphSize | None) -> None:
        options: dict[str, Any] = {}
        if graph is not None:
            names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
            options = dict(zip(names, graph.buffers(workspace.device)), use_cuda_graph=True)
        self._wrapper = library.mla(workspace, backend=call.form[-3:], **options)

    def plan(self, call: Call) -> None:
        pages, question = call.pages, call.question
        self._wrapper.plan(
            qo_indptr=pages.query_starts,
            kv_indptr=pages.indptr,
            kv_indices=pages.indices,
            kv_len_arr=pages.lengths,
            num_heads=question.num_heads,
            head_dim_ckv=question.geometry.dims[0],
            head_dim_kpe=question.geometry.dims[1],
            page_size=question.geometry.page_size,
            causal=True,
            sm_scale=question.scale,
            q_data_type=question.dtype,
            kv_data_type=question.geometry.dtypes[0],
            lse_mode="base2",
        )

    def run(self, call: Call, query: Tensor, views: tuple[Tensor, Tensor], sinks: Tensor | None) -> Any:
        latent, rotary = query.split(call.question.geometry.dims, dim=-1)
        return self._wrapper.run(
            q_nope=latent.contiguous(),
            q_pe=rotary.contiguous(),
            ckv_cache=views[0],
            kpe_cache=views[1],
            return_lse=True,
        )


_KINDS: dict[str, Any] = {"decode": _Decode, "prefill": _Prefill, "sink": _Sink, "mla": _Latent}


def make(library: Library, call: Call, workspace: Tensor, graph: GraphSize | None) -> Wrapper:
    """The wrapper of a call's form, for a graph or for any number of rows."""
    wrapper: Wrapper = _KINDS[call.form.partition("_")[0]](library, call, workspace, graph)
    return wrapper


class Tables:
    """What the forms without a plan read, on the device of `device`; by a copy that does not wait.

    Attributes:
        block_tables: [R, columns] int32.
        lengths: [R] int32.
        query_starts, key_starts: [R + 1] int32, queries and keys before each row, and of all.
        masks: [T, words] uint16, `Pages.draft_masks`; without words where there is one query of each row.
        longest: tokens that a row of `block_tables` has room for.
    """

    def __init__(
        self, pages: Pages, device: torch.device, num_columns: int | None = None, most_new_tokens: int = 0
    ) -> None:
        table = pages.block_tables(num_columns)
        self.block_tables = staged(table.numpy(), device)
        self.lengths = staged(pages.lengths.numpy(), device)
        self.query_starts = staged(pages.query_starts.numpy(), device)
        self.key_starts = staged(_starts_of(pages.lengths).numpy(), device)
        self.masks = staged(pages.draft_masks(most_new_tokens).numpy(), device)
        self.longest = table.shape[1] * pages.page_size

    def update(self, other: Tables) -> None:
        """Take in the numbers of another, where these lie. PlanError for another number of queries."""
        if self.masks.shape != other.masks.shape:
            raise PlanError(
                f"{len(other.masks)} new tokens in a graph that was made for {len(self.masks)}; take as many, or "
                "capture another one"
            )
        for name in ("block_tables", "lengths", "query_starts", "key_starts", "masks"):
            getattr(self, name).copy_(getattr(other, name))


def run_function(
    library: Library,
    call: Call,
    query: Tensor,
    views: tuple[Tensor, Tensor],
    sinks: Tensor | None,
    workspace: Tensor,
    tables: Tables,
) -> tuple[Tensor, Tensor | None]:
    """Attend by a form without a plan: `[T, Hq, Dv]`, and log-sum-exps `[T, Hq]` to base 2 where it gives them.

    Pages are given with heads outside, as TMA takes them.
    """
    question = call.question
    arguments: dict[str, Any] = {
        "query": query,
        "kv_cache": tuple(view.transpose(1, 2) for view in views),
        "workspace_buffer": workspace,
        "block_tables": tables.block_tables,
        "seq_lens": tables.lengths,
        "bmm1_scale": call.scale,
        "bmm2_scale": question.v_scale,
        "window_left": question.window_left,
        "sinks": None if sinks is None else sinks.float(),
        "kv_layout": "HND",
    }
    if call.form.startswith("xqa"):
        if call.form == "xqa_drafts":
            arguments["q_len_per_req"] = question.most_new_tokens
            arguments["q_cu_seq_lens"] = tables.query_starts
            arguments["mask"] = tables.masks
        return library.xqa_decode(**arguments, max_seq_len=tables.longest), None
    arguments["return_lse"] = True
    if call.form == "trtllm_context":
        attended: tuple[Tensor, Tensor] = library.trtllm_context(
            **arguments,
            max_q_len=call.pages.most_new_tokens,
            max_kv_len=tables.longest,
            batch_size=len(tables.lengths),
            cum_seq_lens_q=tables.query_starts,
            cum_seq_lens_kv=tables.key_starts,
        )
        return attended
    attended = library.trtllm_decode(**arguments, max_seq_len=tables.longest, backend="trtllm-gen")
    return attended


def _scales(call: Call) -> dict[str, float | None]:
    """Those of a layer, which may differ between layers of one plan."""
    return {"k_scale": _unless_one(call.question.k_scale), "v_scale": _unless_one(call.question.v_scale)}


def _unless_one(scale: float) -> float | None:
    """None for 1, which would cost a kernel."""
    return None if scale == 1.0 else scale


def _starts_of(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
