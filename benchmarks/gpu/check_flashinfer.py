"""FlashInfer's forms over pages that have moved, against the op's own attention; skipped with a word where it is not.

Every case is a kind of layer and a form that serves it. What FlashInfer has not compiled before takes it minutes, so
the cases that are met most come first.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_uma
from gpu.device import Device
from gpu.report import Report
from torch_uma import CachePool, Full, Layer, Memory, Row, Window
from torch_uma.integrations.flashinfer import Library, Question, Runner, leave_off, plan_call, question_of
from torch_uma.integrations.flashinfer.forms import why_not
from torch_uma.layout import Lifetime
from torch_uma.ops import dtype_name
from torch_uma.step import Step

SECTION = "FlashInfer"
COMPILES_S = 90  # what a form takes at first, about
LENGTHS = (5, 150, 33)
TOLERANCE = 2e-2
FP8_TOLERANCE = 0.2  # where queries and weights become fp8 too, as in XQA's on a Hopper
PAGE_SIZE = 16
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of layer, and the form that is to serve it; `dtype` is that of the keys."""

    form: str
    num_heads: int = 16
    kv_heads: int = 2
    lifetime: Lifetime = Full()
    dtype: torch.dtype = BF16
    num_new_tokens: tuple[int, ...] = (1, 1, 1)
    has_sinks: bool = False

    @property
    def name(self) -> str:
        """What there is to know of it."""
        said = [self.form, dtype_name(self.dtype)]
        if isinstance(self.lifetime, Window):
            said.append(f"window of {self.lifetime.num_tokens}")
        if max(self.num_new_tokens) > 1:
            said.append(f"new tokens {self.num_new_tokens}")
        return ", ".join(said)

    @property
    def tolerance(self) -> float:
        """How far results may lie apart, absolutely and relatively."""
        return FP8_TOLERANCE if self.form.startswith("xqa") and self.dtype == E4M3 else TOLERANCE

    @property
    def layer(self) -> Layer:
        """Latents for the forms that read these, else keys and values of 128 numbers a head."""
        shapes = (
            {"latent": (512,), "rope_key": (64,)} if "mla" in self.form else dict.fromkeys("kv", (self.kv_heads, 128))
        )
        rows = tuple(Row(name=name, shape=shape, dtype=self.dtype) for name, shape in shapes.items())
        return Layer(memories=(Memory(lifetime=self.lifetime, rows=rows),))


MANY = (3, 20, 7)
CASES = (
    Case(form="decode_tensor_cores"),
    Case(form="prefill_fa3", num_new_tokens=MANY),
    Case(form="decode_cuda_cores", num_heads=4, lifetime=Window(40)),
    Case(form="prefill_fa2", num_new_tokens=MANY, lifetime=Window(40)),
    Case(form="xqa_decode"),
    Case(form="trtllm_decode"),
    Case(form="trtllm_context", num_new_tokens=MANY),
    Case(form="xqa_drafts", num_new_tokens=(1, 4, 2)),
    Case(form="mla_fa3"),
    Case(form="decode_tensor_cores", dtype=E4M3),
    Case(form="sink_fa3", lifetime=Window(40), has_sinks=True),
    Case(form="xqa_decode", dtype=E4M3, lifetime=Window(40), has_sinks=True),
    Case(form="sink_fa2", num_new_tokens=MANY, has_sinks=True),
    Case(form="mla_fa2", num_new_tokens=MANY),
)
GRAPHS = (Case(form="decode_tensor_cores"), Case(form="xqa_decode"))


def check_flashinfer(report: Report, device: Device) -> None:
    """All cases that serve on this device."""
    if importlib.util.find_spec("flashinfer") is None:
        report.skip(SECTION, "all", "flashinfer is not installed")
        return
    if device.is_dry:
        report.skip(SECTION, "all", "it runs on a GPU alone")
        return
    for case in CASES:
        reason = why_not(case.form, question(device, case))
        if reason is not None:
            report.skip(SECTION, case.name, reason)
            continue
        report.run(SECTION, case.name, partial(check_case, device, case), needs_s=COMPILES_S)
        if case in GRAPHS:
            report.run(SECTION, f"{case.form} in a graph", partial(check_graph, device, case))


def question(device: Device, case: Case, plan: torch_uma.Plan | None = None) -> Question:
    """What a case asks; in a dry run, of an H200."""
    made = torch_uma.plan([case.layer], memory="16MiB", page_size=PAGE_SIZE) if plan is None else plan
    return question_of(
        made,
        0,
        num_heads=case.num_heads,
        dtype=BF16,
        scale=0.1,
        most_new_tokens=max(case.num_new_tokens),
        has_sinks=case.has_sinks,
        capability=(9, 0) if device.is_dry else None,
        has_finite_dead_rows=True,  # as every token is written here
    )


def check_case(device: Device, case: Case, library: Library | None = None) -> None:
    """One step, after its pages have moved."""
    with pool_of(device, case) as pool:
        sequences = grown(pool)
        asked = question(device, case, pool.plan)
        step = pool.begin(sequences, case.num_new_tokens)
        write(step, case.num_new_tokens)
        call = plan_call(step, 0, asked, form=case.form)
        query, sinks = random_query(pool, asked, sum(case.num_new_tokens))
        runner = Runner(pool, library=library)
        runner.plan(call)
        found = runner.run(call, query, sinks=sinks)
        assert_same(found, reference(step, asked, query, sinks, case.num_new_tokens), case.tolerance)
        step.abort()
        for sequence in sequences:
            sequence.free()


def check_graph(device: Device, case: Case, library: Library | None = None) -> None:
    """Decode steps by one graph, with a row of padding, planned anew and among moves between replays."""
    num_rows = len(LENGTHS) + 1
    with pool_of(device, case) as pool:
        sequences = grown(pool)
        asked = question(device, case, pool.plan)
        query, _ = random_query(pool, asked, num_rows)
        out = torch.empty_like(query)
        runner = Runner(pool, library=library, num_rows=num_rows)
        replay = None
        for number in range(4):
            torch_uma.testing.scramble(pool, number)
            step = pool.begin(sequences, 1)
            write(step, case.num_new_tokens)
            call = plan_call(step, 0, asked, form=case.form, num_rows=num_rows)
            runner.plan(call)

            def run(call: Any = call) -> None:
                out.copy_(runner.run(call, query)[0])

            if replay is None or device.is_dry:
                replay = device.captured(run, run)
            out.fill_(math.nan)
            replay()
            expected = reference(step, asked, query[:-1], None, case.num_new_tokens)
            assert_same((out[:-1], None), expected, case.tolerance)
            assert not out[-1].any(), "padding reads zeros"
            step.commit()
        for sequence in sequences:
            sequence.free()


def pool_of(device: Device, case: Case) -> CachePool:
    """A pool of NaN whose own attention answers."""
    pool = CachePool([case.layer], memory="16MiB", page_size=PAGE_SIZE, max_tokens=1024, device=device.torch)
    torch_uma.testing.poison(pool)
    leave_off(pool)
    return pool


def grown(pool: CachePool) -> list[Any]:
    """Sequences with random numbers in every token, a window less one at a time, on pages that have moved."""
    sequences = pool.add_many([0] * len(LENGTHS))
    for sequence, length in zip(sequences, LENGTHS, strict=True):
        while sequence.length < length:
            count = min(20, length - sequence.length)
            step = pool.begin([sequence], count)
            write(step, (count,))
            step.commit()
    torch_uma.testing.scramble(pool, 1)
    return sequences


def write(step: Step, counts: Iterable[int]) -> None:
    """Random numbers in every new token of the step."""
    pool = step.pool
    device = pool.device
    (subpool,) = pool.plan.subpools
    new = torch.tensor(list(counts))
    ahead = torch.arange(int(new.max())).expand(len(new), -1)
    positions = torch.where(ahead < new[:, None], torch.from_numpy(step.past)[:, None] + ahead, -1)
    entries = step.entries(subpool, positions.to(device))
    rows = subpool.layout.rows
    torch.ops.torch_uma.write_rows(
        pool.arena.bytes,
        [torch.randn((*entries.shape, *placed.row.shape), device=device) for placed in rows],
        entries,
        subpool.origin_bytes,
        subpool.entry_bytes,
        [placed.offset_bytes for placed in rows],
        [dtype_name(placed.row.dtype) for placed in rows],
        [None] * len(rows),
    )


def random_query(pool: CachePool, asked: Question, num_tokens: int) -> tuple[Tensor, Tensor | None]:
    """Queries `[num_tokens, heads, dim]`, and sinks where the question has them."""
    geometry = asked.geometry
    width = sum(geometry.dims) if geometry.is_latent else geometry.dims[0]
    query = torch.randn(num_tokens, asked.num_heads, width, device=pool.device).to(asked.dtype)
    return query, torch.randn(asked.num_heads, device=pool.device) if asked.has_sinks else None


def reference(
    step: Step, asked: Question, query: Tensor, sinks: Tensor | None, counts: Iterable[int]
) -> tuple[Tensor, Tensor]:
    """The op's own code."""
    pool, geometry = step.pool, asked.geometry
    (subpool,) = pool.plan.subpools
    key, value = subpool.layout.rows
    offsets_bytes, dims = [key.offset_bytes, value.offset_bytes], list(geometry.dims)
    if geometry.is_latent:
        offsets_bytes, dims = [key.offset_bytes] * 2, [sum(dims), dims[0]]
    new = torch.tensor(list(counts))
    lengths, starts = torch.from_numpy(step.past) + new, torch.cat([new.new_zeros(1), new.cumsum(0)])
    found: tuple[Tensor, Tensor] = torch.ops.torch_uma.attend(
        pool.arena.bytes,
        query,
        starts.to(pool.device),
        pool.tables.page_table(subpool.index),
        pool.tables.v2p,
        step.rows_on_device,
        lengths.to(pool.device),
        subpool.origin_bytes,
        subpool.entry_bytes,
        subpool.page_size,
        offsets_bytes,
        dims,
        geometry.num_kv_heads,
        [dtype_name(dtype) for dtype in geometry.dtypes],
        asked.scale,
        window=subpool.lifetime.num_tokens if isinstance(subpool.lifetime, Window) else 0,
        sinks=sinks,
    )
    return found


def assert_same(found: tuple[Tensor, Tensor | None], expected: tuple[Tensor, Tensor], tolerance: float) -> None:
    """Attention, and log-sum-exps where the form gives them."""
    torch.testing.assert_close(found[0].float(), expected[0].float(), atol=tolerance, rtol=tolerance)
    if found[1] is not None:
        torch.testing.assert_close(found[1].float(), expected[1].float(), atol=tolerance, rtol=tolerance)
