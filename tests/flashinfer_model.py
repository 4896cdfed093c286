"""FlashInfer's place taken by a plain model, and pools that are written at random.

Wrappers of the model keep what they were planned with, and attend in float64 over the views and page lists alone, as
FlashInfer documents it: it knows no pages but those that it is given.
"""

from __future__ import annotations

import math
import random
from typing import Any

import torch
from torch import Tensor

import torch_uma
from torch_uma import CachePool, Chunk, Full, Layer, Memory, Row, State, Window
from torch_uma.integrations.flashinfer import Library, Question, Runner, plan_call
from torch_uma.ops import dtype_name
from torch_uma.step import Step
from torch_uma.testing import poison, scramble

HOPPER, BLACKWELL = (9, 0), (10, 0)
TOLERANCE = 2e-2  # one rounding of a result of about 1 to bfloat16, on each side


# A plain model of FlashInfer


class Event:
    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log = log

    def record(self) -> None:
        self.log.append(("record", self))

    def synchronize(self) -> None:
        self.log.append(("wait", self))


class Model:
    """A wrapper of some kind: it keeps its plan, and attends by it."""

    def __init__(self, kind: str, log: list[tuple[Any, ...]], workspace: Tensor, layout: str = "NHD", **options: Any):
        assert layout == "NHD" and workspace.dtype == torch.uint8
        assert options["backend"] in ("fa2", "fa3"), "left to FlashInfer's choice"
        self.kind, self.log, self.options = kind, log, options
        self.planned: dict[str, Any] = {}

    def plan(self, **arguments: Any) -> None:
        self.log.append(("plan", self, arguments))
        for name, tensor in arguments.items():
            if isinstance(tensor, Tensor):
                assert tensor.dtype == torch.int32 and tensor.device.type == "cpu" and tensor.is_contiguous(), name
        self.planned = {name.removeprefix("paged_").removeprefix("kv_"): value for name, value in arguments.items()}

    def run(self, query: Tensor, views: tuple[Tensor, Tensor], *sink: Any, **options: Any) -> tuple[Tensor, Tensor]:
        self.log.append(("run", self, options))
        p = self.planned
        sinks, scale = sink if self.kind == "sink" else (None, p["sm_scale"])
        window_left = self.options["window_left"] if self.kind == "sink" else p["window_left"]
        assert window_left == p["window_left"]
        assert type(views) is tuple, "a list is refused"
        assert views[0].stride()[:2] == views[1].stride()[:2]
        starts = p.get("qo_indptr", torch.arange(len(p["indptr"])))
        pages = p["indptr"].diff()
        lengths = (pages - 1) * p["page_size"] + p["last_page_len"]
        return attended(
            query,
            views,
            starts,
            p["indptr"],
            p["indices"],
            lengths,
            causal=p.get("causal", False),
            window_left=window_left,
            softcap=p["logits_soft_cap"],
            scale=scale * (options.get("k_scale") or 1.0),
            v_scale=options.get("v_scale") or 1.0,
            sinks=sinks,
            reads_all=self.kind == "decode" and not self.options["use_tensor_cores"],
        )


class Latents(Model):
    def __init__(self, log: list[tuple[Any, ...]], workspace: Tensor, **options: Any) -> None:
        super().__init__("mla", log, workspace, **options)

    def run(self, *, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, **options: Any) -> Any:  # type: ignore[override]
        self.log.append(("run", self, options))
        p = self.planned
        assert (q_nope.shape[-1], q_pe.shape[-1]) == (p["head_dim_ckv"], p["head_dim_kpe"]) == (512, 64)
        key = torch.cat([ckv_cache, kpe_cache], -1).unsqueeze(2)
        return attended(
            torch.cat([q_nope, q_pe], -1),
            (key, ckv_cache.unsqueeze(2)),
            p["qo_indptr"],
            p["indptr"],
            p["indices"],
            p["len_arr"],
            causal=p["causal"],
            window_left=-1,
            softcap=0.0,
            scale=p["sm_scale"],
        )


def attended(
    query: Tensor,
    views: tuple[Tensor, Tensor],
    starts: Tensor,
    indptr: Tensor,
    indices: Tensor,
    lengths: Tensor,
    *,
    causal: bool,
    window_left: int,
    softcap: float,
    scale: float,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
    reads_all: bool = False,
    reads_tails: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention by page list, [pages, page_size, heads, dim] views.

    `reads_all` multiplies hidden values by 0, `reads_tails` those behind the last token in its page.
    """
    assert int(indices.min()) >= 0 and int(indices.max()) < views[0].shape[0]
    out = query.new_zeros((*query.shape[:2], views[1].shape[-1]), dtype=torch.float64)
    lse = torch.full(query.shape[:2], -math.inf, dtype=torch.float64)
    group = query.shape[1] // views[0].shape[2]
    for row, length in enumerate(lengths.tolist()):
        pages = indices[int(indptr[row]) : int(indptr[row + 1])].long()
        assert 0 < length <= len(pages) * views[0].shape[1]
        key, value = (view[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for view in views)
        first, end = int(starts[row]), int(starts[row + 1])
        at = torch.arange(length)
        for token in range(first, end):
            own = length - end + token
            seen = (at <= own) if causal else at >= 0
            if window_left >= 0:
                seen &= at >= own - window_left
            scores = torch.einsum("hd,nhd->hn", query[token].double(), key) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            scores = scores.masked_fill(~seen, -math.inf)
            sums = scores.logsumexp(-1)
            if sinks is not None:
                sums = torch.logaddexp(sums, sinks.double())
            weights = (scores - sums[:, None]).exp()
            if not reads_all:
                value = value.masked_fill(~seen[:, None, None], 0.0)
            out[token] = torch.einsum("hn,nhd->hd", weights, value) * v_scale
            if reads_tails:
                tail = view_of(views[1], pages, len(pages) * views[1].shape[1], group)[length:]
                out[token] += 0.0 * tail.sum(0)
            lse[token] = sums / math.log(2)
            value = view_of(views[1], pages, length, group)
    return out.to(query.dtype), lse.float()


def view_of(view: Tensor, pages: Tensor, length: int, group: int) -> Tensor:
    return view[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1)


def by_tables(log: list[tuple[Any, ...]], name: str) -> Any:
    """A function form: block tables and lengths instead of a plan."""

    def function(
        query: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        workspace_buffer: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        bmm1_scale: float,
        bmm2_scale: float,
        window_left: int,
        sinks: Tensor | None,
        kv_layout: str,
        cum_seq_lens_q: Tensor | None = None,
        q_cu_seq_lens: Tensor | None = None,
        q_len_per_req: int = 1,
        mask: Tensor | None = None,
        return_lse: bool = False,
        **others: Any,
    ) -> Any:
        log.append((name, block_tables.data_ptr()))
        assert return_lse == name.startswith("trtllm"), "XQA has none"
        assert kv_layout == "HND" and not workspace_buffer.any()
        page_size = kv_cache[0].shape[2]
        counts = -(-seq_lens // page_size)
        starts = torch.arange(len(seq_lens) + 1) if cum_seq_lens_q is None else cum_seq_lens_q
        assert (q_cu_seq_lens is None) == (mask is None) == (q_len_per_req == 1)
        if q_cu_seq_lens is not None and mask is not None:
            starts = q_cu_seq_lens
            assert starts.dtype == torch.int32 and int(starts.diff().max()) <= q_len_per_req
            assert mask.dtype == torch.uint16 and mask.shape == (len(query), 2 * -(-q_len_per_req // 32))
            bits = (mask.int()[:, :, None] >> torch.arange(16) & 1).flatten(1)
            ahead = torch.cat([torch.arange(int(count)) for count in starts.diff()])
            assert torch.equal(bits, (torch.arange(bits.shape[1]) <= ahead[:, None]).int()), "not causal"
        out, lse = attended(
            query,
            (kv_cache[0].transpose(1, 2), kv_cache[1].transpose(1, 2)),
            starts,
            torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
            torch.cat([table[:count] for table, count in zip(block_tables, counts.tolist())]),
            seq_lens,
            causal=True,
            window_left=window_left,
            softcap=0.0,
            scale=bmm1_scale,
            v_scale=bmm2_scale,
            sinks=None if sinks is None else sinks.flatten(),
            reads_tails=name.startswith("trtllm") or kv_cache[0].dtype.itemsize == 1,
        )
        return (out, lse) if return_lse else out

    return function


def stand_in() -> tuple[Library, list[tuple[Any, ...]]]:
    """FlashInfer's place taken by the model, and the log of what it is asked."""
    log: list[tuple[Any, ...]] = []

    def replan(wrapper: Model, *, global_override_indptr_cpu: Tensor, **arguments: Any) -> None:
        assert global_override_indptr_cpu is arguments["indptr"]
        options = wrapper.options
        for name in ("indptr", "indices", "last_page_len"):
            buffer = options[f"paged_kv_{name}_buffer"]
            assert torch.equal(buffer[: len(arguments[name])], arguments[name]), "the caller writes the buffers"
        log.append(("replan", wrapper))
        wrapper.planned.update(arguments)

    return Library(
        decode=lambda *a, **o: Model("decode", log, *a, **o),
        prefill=lambda *a, **o: Model("prefill", log, *a, **o),
        sink=lambda *a, **o: Model("sink", log, *a, **o),
        mla=lambda *a, **o: Latents(log, *a, **o),
        fast_decode_plan=replan,
        trtllm_decode=by_tables(log, "trtllm_decode"),
        trtllm_context=by_tables(log, "trtllm_context"),
        xqa_decode=by_tables(log, "xqa_decode"),
        event=lambda: Event(log),
    ), log


# Pools, written at random


def kv(heads: int = 2, dim: int = 64, dtype: torch.dtype = torch.bfloat16, value_dim: int | None = None) -> Any:
    return (Row(name="k", shape=(heads, dim), dtype=dtype), Row(name="v", shape=(heads, value_dim or dim), dtype=dtype))


def memory(lifetime: Any, rows: Any) -> Layer:
    return Layer(memories=(Memory(lifetime=lifetime, rows=rows),))


def latent(dtype: torch.dtype = torch.bfloat16) -> Layer:
    return memory(
        Full(), (Row(name="latent", shape=(512,), dtype=dtype), Row(name="rope_key", shape=(64,), dtype=dtype))
    )


STATE = memory(State(), (Row(name="conv", shape=(24,), dtype=torch.float32),))


def make_pool(*layers: Layer, page_size: int, memory: int = 1 << 20) -> CachePool:
    made = torch_uma.plan([*layers, STATE], memory=memory, page_size=page_size)
    pool = CachePool(made, device="cpu", max_sequences=8)
    poison(pool)
    return pool


def write(step: Step, generator: torch.Generator) -> None:
    """Write random keys and values of every new token of the step."""
    pool = step.pool
    counts = torch.from_numpy(step.past + step.num_new_tokens - step.past)
    ahead = torch.arange(int(counts.max())).expand(len(counts), -1)
    positions = torch.where(ahead < counts[:, None], torch.from_numpy(step.past)[:, None] + ahead, -1)
    for subpool in pool.plan.subpools:
        if subpool.is_state:
            continue
        entries = step.entries(subpool, positions)
        for placed in subpool.layout.rows:
            width = math.prod(placed.row.shape)
            new = torch.randn((*entries.shape, width), generator=generator)
            torch.ops.torch_uma.write_rows(
                pool.arena.bytes,
                [new],
                entries,
                subpool.origin_bytes,
                subpool.entry_bytes,
                [placed.offset_bytes],
                [dtype_name(placed.row.dtype)],
                [None],
            )


def run_steps(pool: CachePool, sequences: list[Any], counts: list[int], chance: random.Random) -> None:
    """Grow each sequence to so many tokens, in steps of its own, among moves."""
    generator = torch.Generator().manual_seed(chance.randrange(2**40))
    for sequence, count in zip(sequences, counts):
        while sequence.length < count:
            step = pool.begin([sequence], min(count - sequence.length, chance.randint(1, 9)))
            write(step, generator)
            step.commit()
        scramble(pool, chance.randrange(2**30))


def queries(question: Question, num_tokens: int, chance: random.Random) -> Tensor:
    width = question.geometry.dims[0] + (question.geometry.dims[1] if question.geometry.is_latent else 0)
    generator = torch.Generator().manual_seed(chance.randrange(2**40))
    return torch.randn((num_tokens, question.num_heads, width), generator=generator).to(question.dtype)


def reference(
    step: Step, layer: int, question: Question, query: Tensor, sinks: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The op over the same layer, whose new tokens are in the arena."""
    pool = step.pool
    (subpool, key), (_, value) = (pair for pair in pool.plan.where(layer) if not pair[0].is_state)
    lifetime, geometry = subpool.lifetime, question.geometry
    offsets, dims = [key.offset_bytes, value.offset_bytes], list(geometry.dims)
    if geometry.is_latent:
        offsets, dims = [key.offset_bytes] * 2, [sum(dims), dims[0]]
    counts = torch.from_numpy(step.past + step.num_new_tokens - step.past)
    out, lse = torch.ops.torch_uma.attend(
        pool.arena.bytes,
        query,
        torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]),
        pool.tables.page_table(subpool.index),
        pool.tables.v2p,
        step.rows_on_device,
        torch.from_numpy(step.past) + counts,
        subpool.origin_bytes,
        subpool.entry_bytes,
        subpool.page_size,
        offsets,
        dims,
        geometry.num_kv_heads,
        [dtype_name(dtype) for dtype in geometry.dtypes],
        question.scale * question.k_scale,
        window=lifetime.num_tokens if isinstance(lifetime, Window) else 0,
        chunk=lifetime.num_tokens if isinstance(lifetime, Chunk) else 0,
        softcap=question.softcap,
        sinks=sinks,
        **options,
    )
    return out * question.v_scale, lse


def check_same(given: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(given[0].float(), expected[0].float(), atol=TOLERANCE, rtol=TOLERANCE)
    if given[1] is not None:
        torch.testing.assert_close(given[1], expected[1], atol=TOLERANCE, rtol=TOLERANCE)


def check_step(
    pool: CachePool,
    step: Step,
    layer: int,
    question: Question,
    chance: random.Random,
    form: str | None = None,
    runner: Runner | None = None,
) -> str:
    """Plan and run one layer of an open step by the model, and compare; returns the form."""
    if runner is None:
        runner = Runner(pool, library=stand_in()[0], workspace_bytes=64)
    call = plan_call(step, layer, question, form=form)
    query = queries(question, call.pages.num_tokens, chance)
    sinks = torch.randn(question.num_heads) if question.has_sinks else None
    runner.plan(call)
    check_same(runner.run(call, query, sinks=sinks), reference(step, layer, question, query, sinks))
    return call.form
