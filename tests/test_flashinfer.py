"""What FlashInfer is given, replayed by a plain model of it, against `torch.ops.torch_uma.attend`; what is refused."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import os
import random
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flashinfer_model import (
    BLACKWELL,
    HOPPER,
    TOLERANCE,
    Event,
    Model,
    check_same,
    check_step,
    kv,
    latent,
    make_pool,
    memory,
    queries,
    reference,
    run_steps,
    stand_in,
    write,
)
from torch import Tensor

import torch_uma
from torch_uma import CachePool, Chunk, Full, Layer, Memory, PlanError, Row, SequenceError, Window
from torch_uma.integrations import flashinfer as adapter
from torch_uma.integrations.flashinfer import Library, Question, Runner, plan_call, question_of, serving
from torch_uma.integrations.flashinfer.forms import FORMS, choose, why_not
from torch_uma.integrations.flashinfer.library import load
from torch_uma.ops import substitutes
from torch_uma.testing import scramble

CASES = 40

LIFETIMES = [Full(), Window(5), Window(12), Full()]


@pytest.mark.parametrize("seed", range(CASES))
def test_what_is_given_means_the_same_attention(seed):
    chance = random.Random(seed)
    page_size = chance.choice([1, 2, 3, 5, 7, 16])
    heads, group, dim = chance.choice([1, 2]), chance.choice([1, 3, 4, 8]), chance.choice([64, 128])
    layers = [memory(lifetime, kv(heads, dim)) for lifetime in LIFETIMES]
    pool = make_pool(*layers, page_size=page_size, memory=2 << 20)
    sequences = pool.add_many([0] * chance.randint(1, 4))
    run_steps(pool, sequences, [chance.randint(0, 40) for _ in sequences], chance)
    counts: Any = chance.choice([1, 1, 3, [chance.randint(1, 4) for _ in sequences]])
    step = pool.begin(sequences, counts)
    write(step, torch.Generator().manual_seed(seed))
    runner = Runner(pool, library=stand_in()[0], workspace_bytes=64)
    for layer in range(len(LIFETIMES)):
        question = question_of(
            pool.plan,
            layer,
            num_heads=heads * group,
            dtype=torch.bfloat16,
            scale=dim**-0.5,
            most_new_tokens=max(counts) if isinstance(counts, list) else counts,
            softcap=chance.choice([0.0, 2.0]),
            capability=chance.choice([HOPPER, BLACKWELL]),
            has_finite_dead_rows=chance.random() < 0.5,
        )
        question = replace(question, has_sinks=not question.softcap and chance.random() < 0.4)
        for form in serving(pool.plan, layer, **options_of(question)).forms:
            assert check_step(pool, step, layer, question, chance, form, runner) == form
    step.commit()
    pool.check()


def options_of(question: Question) -> dict[str, Any]:
    names = ("num_heads", "dtype", "scale", "most_new_tokens", "softcap", "has_sinks", "capability")
    return {name: getattr(question, name) for name in (*names, "has_finite_dead_rows")}


@pytest.mark.parametrize("seed", range(8))
def test_latents_are_read_as_keys_and_values(seed):
    chance = random.Random(seed)
    pool = make_pool(latent(), memory(Window(9), kv()), latent(), page_size=chance.choice([1, 3, 16]), memory=2 << 20)
    sequences = pool.add_many([0] * 3)
    run_steps(pool, sequences, [chance.randint(0, 30) for _ in sequences], chance)
    counts = chance.choice([1, 4, [1, 3, 5]])
    step = pool.begin(sequences, counts)
    write(step, torch.Generator().manual_seed(seed))
    options = {"num_heads": 4, "dtype": torch.bfloat16, "scale": 0.05, "most_new_tokens": 5}
    for capability, form in ((HOPPER, "mla_fa3"), (BLACKWELL, "mla_fa2")):
        question = question_of(pool.plan, 2, capability=capability, **options)
        assert check_step(pool, step, 2, question, chance) == form
    step.abort()


FP8_FORMS = ["decode_cuda_cores", "decode_tensor_cores", "prefill_fa2", "xqa_decode", "trtllm_decode"]


@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *((form, torch.float8_e4m3fn) for form in FP8_FORMS),
        *((form, torch.float8_e5m2) for form in FP8_FORMS[:3]),  # which the others refuse
    ],
)
def test_keys_of_fp8_have_the_scales_of_their_layer(form, dtype):
    chance = random.Random(3)
    pool = make_pool(*[memory(Full(), kv(2, 128, dtype))] * 2, page_size=16)
    sequences = pool.add_many([0, 0])
    run_steps(pool, sequences, [20, 5], chance)
    step = pool.begin(sequences, 1)
    write(step, torch.Generator().manual_seed(1))
    library, log = stand_in()
    runner = Runner(pool, library=library, workspace_bytes=64)
    capability = BLACKWELL if form.startswith("trtllm") else HOPPER
    options = {"num_heads": 4, "dtype": torch.bfloat16, "scale": 0.1, "capability": capability}
    question = question_of(pool.plan, 0, k_scale=0.5, v_scale=1.5, **options)
    check_step(pool, step, 0, question, chance, form, runner)
    pages = plan_call(step, 0, question).pages
    for layer, scales in ((0, (2.0, 0.25)), (1, (1.0, 1.0))):
        question = question_of(pool.plan, layer, k_scale=scales[0], v_scale=scales[1], **options)
        call = replace(plan_call(step, layer, question, form=form), pages=pages)
        query = queries(question, 2, chance)
        runner.plan(call)
        check_same(runner.run(call, query), reference(step, layer, question, query))
    assert len([entry for entry in log if entry[0] == "plan"]) <= 2, "layers share a plan whatever their scales"
    step.abort()


@pytest.mark.parametrize("page_size", [1, 3, 6])
def test_a_chunk_begins_its_table_at_its_first_page(page_size):
    chance = random.Random(page_size)
    pool = make_pool(memory(Chunk(6), kv()), memory(Full(), kv()), page_size=page_size)
    sequences = pool.add_many([0] * 4)
    run_steps(pool, sequences, [0, 4, 6, 20], chance)
    question = question_of(
        pool.plan, 0, num_heads=2, dtype=torch.bfloat16, scale=0.1, most_new_tokens=3, capability=HOPPER
    )
    step = pool.begin(sequences, [3, 1, 2, 2])
    write(step, torch.Generator().manual_seed(1))
    check_step(pool, step, 0, question, chance)
    step.commit()
    step = pool.begin(sequences[1:3], [1, 5])
    with pytest.raises(PlanError, match="in two chunks of 6"):
        plan_call(step, 0, replace(question, most_new_tokens=5))
    step.abort()
    step = pool.begin(sequences[1:2], 1)  # the last token of a chunk has a page until the step is over
    write(step, torch.Generator().manual_seed(1))
    check_step(pool, step, 0, question, chance)
    step.abort()
    step = pool.begin(sequences[:1], 3)  # of several, those that no later step needs have none
    if page_size < 6:
        with pytest.raises(PlanError, match="stored nowhere"):
            plan_call(step, 0, question)
    step.abort()


def test_a_chunk_that_begins_inside_a_page_is_refused():
    plan = torch_uma.plan([memory(Chunk(6), kv())], memory=1 << 20, page_size=4)
    with pytest.raises(PlanError, match="page_size that divides the chunk"):
        choose(question_of(plan, 0, num_heads=2, dtype=torch.bfloat16, scale=1.0, capability=HOPPER))


# Graphs, turns and pads


def decode_world(page_size: int = 3, **options: Any) -> tuple[CachePool, list[Any], Question]:
    pool = make_pool(memory(Full(), kv()), memory(Full(), kv()), memory(Window(7), kv()), page_size=page_size)
    sequences = pool.add_many([0, 0, 0])
    run_steps(pool, sequences, [4, 9, 1], random.Random(0))
    question = question_of(pool.plan, 0, num_heads=8, dtype=torch.bfloat16, scale=0.1, capability=HOPPER, **options)
    return pool, sequences, question


def test_layers_of_one_kind_are_planned_once_a_step_by_two_wrappers_in_turn():
    pool, sequences, question = decode_world()
    library, log = stand_in()
    runner = Runner(pool, library=library, workspace_bytes=64)
    wrappers = []
    for _ in range(4):
        step = pool.begin(sequences, 1)
        write(step, torch.Generator().manual_seed(0))
        call = plan_call(step, 0, question)
        other = replace(call, storage=adapter.storage_of(pool.plan, 1))
        start = len(log)
        for each in (call, other):
            runner.plan(each)
        for layer, each in enumerate((call, other)):
            query = queries(question, 3, random.Random(1))
            check_same(runner.run(each, query), reference(step, layer, question, query))
        kinds = [entry[0] for entry in log[start:]]
        assert [kind for kind in kinds if kind != "wait"] == ["plan", "record", "run", "run"]
        wrappers.append(next(entry[1] for entry in log[start:] if entry[0] == "plan"))
        step.commit()
    assert wrappers[0] is wrappers[2] is not wrappers[1] is wrappers[3]
    check_turns(log)


def check_turns(log: list[tuple[Any, ...]]) -> None:
    """A wrapper is planned again only after a wait for the event that followed its last plan."""
    last: dict[Any, Event] = {}
    waited: list[Event] = []
    for entry, following in zip(log, [*log[1:], ("end",)]):
        if entry[0] == "wait":
            waited.append(entry[1])
        elif entry[0] in ("plan", "replan"):
            if entry[1] in last:
                assert last[entry[1]] is waited[-1]
            assert following[0] == "record"
            last[entry[1]] = following[1]


@pytest.mark.parametrize("form", ["decode_tensor_cores", "decode_cuda_cores", "prefill_fa2", "sink_fa2"])
def test_a_graph_has_one_wrapper_whose_buffers_and_padding_are_fixed(form):
    pool, sequences, question = decode_world(has_sinks=form.startswith("sink"))
    library, log = stand_in()
    runner = Runner(pool, library=library, num_rows=5, workspace_bytes=64)
    assert not pool.arena.bytes[: pool.plan.sink_bytes].any(), "padded rows read the sink"
    for _ in range(3):
        step = pool.begin(sequences, 1)
        write(step, torch.Generator().manual_seed(0))
        call = plan_call(step, 0, question, form=form, num_rows=5)
        assert call.pages.lengths[3:].tolist() == [1, 1] and call.pages.indices[-2:].tolist() == [0, 0]
        query = queries(question, 5, random.Random(1))
        sinks = torch.randn(8) if question.has_sinks else None
        runner.plan(call)
        out, lse = runner.run(call, query, sinks=sinks)
        expected = reference(step, 0, question, query[:3], sinks)
        check_same((out[:3], lse[:3]), expected)
        assert not out[3:].any(), "zeros, and no NaN"
        step.commit()
    planned = {id(entry[1]) for entry in log if entry[0] in ("plan", "replan")}
    assert len(planned) == 1
    kinds = [entry[0] for entry in log if entry[0] in ("plan", "replan")]
    assert kinds == (["plan", "replan", "replan"] if form.startswith("decode") else ["plan"] * 3)
    check_turns(log)
    wrapper = next(entry[1] for entry in log if entry[0] == "plan")
    assert wrapper.options["use_cuda_graph"]
    indices = next(value for name, value in wrapper.options.items() if "indices_buf" in name)
    assert len(indices) == 5 * pool.tables.columns[question.geometry.subpool]


def test_tables_of_a_graph_stay_where_they_are():
    pool, sequences, question = decode_world(page_size=16)
    library, log = stand_in()
    runner = Runner(pool, library=library, num_rows=4, workspace_bytes=64)
    for _ in range(3):
        step = pool.begin(sequences, 1)
        write(step, torch.Generator().manual_seed(0))
        call = plan_call(step, 0, question, form="xqa_decode", num_rows=4)
        query = queries(question, 4, random.Random(1))
        runner.plan(call)
        out, lse = runner.run(call, query)
        check_same((out[:3], lse), reference(step, 0, question, query[:3]))
        assert not out[3:].any()
        step.commit()
    assert len({entry[1] for entry in log if entry[0] == "xqa_decode"}) == 1


@pytest.mark.parametrize("most_new_tokens", [2, 5, 40])
def test_drafts_are_seen_by_those_behind_them_alone(most_new_tokens):
    """Unequally many of each row, in steps and in a graph, to which a step of another number of tokens is refused."""
    chance = random.Random(most_new_tokens)
    pool = make_pool(memory(Full(), kv()), page_size=16, memory=4 << 20)
    sequences = pool.add_many([0, 0, 0])
    run_steps(pool, sequences, [4, 90, 1], chance)
    question = question_of(
        pool.plan,
        0,
        num_heads=8,
        dtype=torch.bfloat16,
        scale=0.1,
        capability=HOPPER,
        most_new_tokens=most_new_tokens,
        has_finite_dead_rows=True,
    )
    for num_rows in (None, 3):
        runner = Runner(pool, library=stand_in()[0], num_rows=num_rows, workspace_bytes=64)
        for counts in ([1, most_new_tokens, 1], [most_new_tokens, 1, 1]):
            step = pool.begin(sequences, counts)
            write(step, torch.Generator().manual_seed(0))
            call = plan_call(step, 0, question, form="xqa_drafts", num_rows=num_rows)
            query = queries(question, sum(counts), chance)
            runner.plan(call)
            check_same(runner.run(call, query), reference(step, 0, question, query))
            step.abort()
    step = pool.begin(sequences, 1)
    with pytest.raises(PlanError, match=f"3 new tokens in a graph that was made for {most_new_tokens + 2}"):
        runner.plan(plan_call(step, 0, question, form="xqa_drafts", num_rows=3))
    step.abort()


@pytest.mark.parametrize(
    ("form", "dtype"), [("xqa_decode", torch.float8_e4m3fn), ("trtllm_decode", torch.bfloat16)], ids=str
)
def test_what_lies_behind_the_last_token_is_cleared_where_pages_are_read_whole(form, dtype):
    """Once for a page, and nothing else: it is NaN in a page that is fresh, whose bytes were of another kind."""
    pool = make_pool(memory(Full(), kv(2, 128, dtype)), page_size=16)
    sequences = pool.add_many([0, 0, 0])
    run_steps(pool, sequences, [20, 31, 5], random.Random(0))
    capability = BLACKWELL if form.startswith("trtllm") else HOPPER
    question = question_of(
        pool.plan, 0, num_heads=4, dtype=torch.bfloat16, scale=0.1, capability=capability, k_scale=1.0
    )
    runner = Runner(pool, library=stand_in()[0], workspace_bytes=64)
    (subpool,) = (subpool for subpool in pool.plan.subpools if not subpool.is_state)
    entries = pool.arena.pages(subpool).view(-1, subpool.entry_bytes)
    cleared = []
    for _ in range(3):
        step = pool.begin(sequences, 1)
        write(step, torch.Generator().manual_seed(0))
        before = entries.clone()
        call = plan_call(step, 0, question, form=form)
        query = queries(question, 3, random.Random(1))
        runner.plan(call)
        changed = (before != entries).any(1).nonzero().flatten().tolist()
        assert set(changed) <= set(call.pages.tails(np.arange(3)).tolist())
        cleared.append(len(changed))
        check_same(runner.run(call, query), reference(step, 0, question, query))
        step.commit()
    assert cleared == [11 + 0 + 10, 15, 0], "behind 21, 32 and 6 tokens; then in a third page of row 1"
    pool.check()


def test_what_keeps_counters_has_a_workspace_of_its_own():
    pool, sequences, question = decode_world(page_size=16)
    question = replace(question, capability=BLACKWELL)
    runner = Runner(pool, library=stand_in()[0], workspace_bytes=64)
    step = pool.begin(sequences, 1)
    for form in ("decode_tensor_cores", "xqa_decode", "trtllm_decode"):
        call = plan_call(step, 0, question, form=form)
        runner.plan(call)
        runner.run(call, queries(question, 3, random.Random(0)))
    step.abort()
    assert runner._workspaces.keys() == {"planned", "xqa", "trtllm"}
    assert not any(runner._workspaces[name].any() for name in ("xqa", "trtllm"))


@pytest.mark.parametrize("form", ["decode_tensor_cores", "prefill_fa2", "xqa_decode"])
def test_what_a_graph_reads_can_be_planned_in_and_outside_of_inference_mode(form):
    pool, sequences, question = decode_world(page_size=16)
    runner = Runner(pool, library=stand_in()[0], num_rows=3, workspace_bytes=64)
    for is_inference in (True, False, True):
        step = pool.begin(sequences, 1)
        write(step, torch.Generator().manual_seed(0))
        with torch.inference_mode(is_inference):
            call = plan_call(step, 0, question, form=form, num_rows=3)
            query = queries(question, 3, random.Random(1))
            runner.plan(call)
            check_same(runner.run(call, query), reference(step, 0, question, query))
        step.commit()


def test_a_graph_refuses_what_it_was_not_made_for():
    pool, sequences, question = decode_world()
    question = replace(question, most_new_tokens=4)
    runner = Runner(pool, library=stand_in()[0], num_rows=3, workspace_bytes=64)
    step = pool.begin(sequences[:2], 2)
    with pytest.raises(PlanError, match="made for 3 rows"):
        runner.plan(plan_call(step, 0, question, form="prefill_fa2"))
    runner.plan(plan_call(step, 0, question, form="prefill_fa2", num_rows=3))
    step.abort()
    step = pool.begin(sequences, 4)
    call = plan_call(step, 0, question, form="prefill_fa2", num_rows=3)
    with pytest.raises(PlanError, match="12 new tokens in a graph whose schedule was laid out for 6"):
        runner.plan(call)
    with pytest.raises(PlanError, match="was not planned"):
        runner.run(call, queries(question, 12, random.Random(0)))
    with pytest.raises(PlanError, match="3 rows, but the graph was made for 2"):
        plan_call(step, 0, question, num_rows=2)
    with pytest.raises(PlanError, match="asked for 2"):
        plan_call(step, 0, replace(question, most_new_tokens=2))
    with pytest.raises(PlanError, match="the block table has 1 columns"):
        call.pages.block_tables(1)
    step.abort()


@pytest.mark.parametrize("seed", range(10))
def test_new_tokens_are_appended_where_the_tables_say_and_padding_into_the_sink(seed):
    chance = random.Random(seed)
    pool = make_pool(memory(Window(6), kv()), memory(Full(), kv()), page_size=chance.choice([1, 3, 4]))
    sequences = pool.add_many([0] * 3)
    run_steps(pool, sequences, [chance.randint(0, 20) for _ in sequences], chance)
    counts = [chance.randint(1, 5) for _ in sequences]
    step = pool.begin(sequences, counts)
    for layer in (0, 1):
        storage = adapter.storage_of(pool.plan, layer)
        subpool = pool.plan.subpools[storage.geometry.subpool]
        pages = adapter.pages_of(step, subpool)
        given = pages.append(sum(counts) + 4)
        assert int(given.batch_indices.min()) >= 0, "it reads the page list at -1"
        size = subpool.page_size
        first = given.indptr[given.batch_indices.long()] + given.positions // size
        entries = given.indices[first.long()].long() * size + given.positions % size
        row_of = torch.repeat_interleave(torch.arange(3), torch.tensor(counts))
        past = torch.from_numpy(step.past)
        ahead = torch.cat([torch.arange(count) for count in counts])
        expected = step.entries(subpool, (past[row_of] + ahead)[:, None], step.rows_on_device[row_of])
        assert entries.tolist() == [*expected.flatten().tolist(), 0, 0, 0, 0]
        with pytest.raises(PlanError, match="do not fit into 1 rows"):
            pages.append(1) if sum(counts) > 1 else pages.append(0)
    step.abort()


def test_a_window_step_that_skips_pages_is_refused():
    pool = make_pool(memory(Window(5), kv()), page_size=2)
    (sequence,) = sequences = pool.add_many([0])
    run_steps(pool, sequences, [9], random.Random(0))
    question = question_of(
        pool.plan, 0, num_heads=2, dtype=torch.bfloat16, scale=1.0, most_new_tokens=12, capability=HOPPER
    )
    step = pool.begin([sequence], 12)
    with pytest.raises(PlanError, match="a window less one at a time"):
        plan_call(step, 0, question)
    step.abort()


def test_nan_before_a_window_reaches_the_output_only_where_that_is_vouched_for():
    pool = make_pool(memory(Window(5), kv()), page_size=4)
    (sequence,) = sequences = pool.add_many([0])
    run_steps(pool, sequences, [10], random.Random(0))
    storage = adapter.storage_of(pool.plan, 0)
    step = pool.begin([sequence], 1)
    write(step, torch.Generator().manual_seed(0))
    question = question_of(pool.plan, 0, num_heads=2, dtype=torch.bfloat16, scale=1.0, capability=HOPPER)
    call = plan_call(step, 0, question)
    assert call.form == "decode_tensor_cores" and call.pages.lengths.tolist() == [7]
    for view in storage.tensors(pool.arena.bytes):
        view[int(call.pages.indices[0]), :2] = math.nan  # positions 4 and 5; the window of position 10 begins at 6
    check_step(pool, step, 0, question, random.Random(0))
    assert "NaN" in str(why_not("decode_cuda_cores", question)) and "NaN" in str(why_not("prefill_fa3", question))
    vouched = replace(question, has_finite_dead_rows=True)
    runner = Runner(pool, library=stand_in()[0], workspace_bytes=64)
    call = plan_call(step, 0, vouched, form="decode_cuda_cores")
    runner.plan(call)
    assert runner.run(call, queries(vouched, 1, random.Random(0)))[0].isnan().all(), "the trap is there"
    step.abort()


# Which forms serve, and why not


def question_over(
    rows: Any, *, page_size: int = 16, lifetime: Any = None, memory_bytes: int = 4 << 20, **options: Any
) -> Question:
    plan = torch_uma.plan([memory(lifetime or Full(), rows)], memory=memory_bytes, page_size=page_size)
    options = {"num_heads": 8, "dtype": torch.bfloat16, "scale": 1.0, "capability": HOPPER, **options}
    return question_of(plan, 0, **options)


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
REFUSALS = {
    "dtype of keys": ("prefill_fa2", kv(dtype=torch.float32), {}, "not torch.float32"),
    "uint8": ("prefill_fa2", kv(dtype=torch.uint8), {}, "NVFP4"),
    "dtypes that differ": ("prefill_fa2", (*kv()[:1], *kv(dtype=E4M3)[1:]), {}, "one dtype for both"),
    "cast": ("prefill_fa2", kv(dtype=torch.float16), {}, "cast the queries"),
    "queries": ("prefill_fa2", kv(), {"dtype": torch.float32}, "queries are"),
    "heads": ("prefill_fa2", kv(3), {}, "no multiple of 3"),
    "alignment": ("prefill_fa2", kv(dim=4), {}, "does not look whether they are aligned"),
    "dims": ("prefill_fa2", kv(dim=80), {}, "heads of (80, 80)"),
    "values of other dims": ("decode_tensor_cores", kv(dim=192, value_dim=128), {}, "strides of keys"),
    "group": ("decode_cuda_cores", kv(), {"num_heads": 14}, "7 query heads"),
    "queries of one row": ("decode_cuda_cores", kv(), {"most_new_tokens": 2}, "one query of each row"),
    "ignored sinks": ("prefill_fa2", kv(), {"has_sinks": True}, "never looks at them"),
    "no sinks": ("sink_fa2", kv(), {}, "it is for sinks"),
    "soft cap and sinks": ("sink_fa2", kv(), {"has_sinks": True, "softcap": 3.0}, "no soft cap"),
    "soft cap of trtllm": ("trtllm_decode", kv(), {"softcap": 3.0, "capability": BLACKWELL}, "no soft cap"),
    "soft cap of xqa": ("xqa_decode", kv(), {"softcap": 3.0}, "no soft cap"),
    "fp8 of 64": ("prefill_fa2", kv(dtype=E4M3), {}, "do not work"),
    "fp8 queries": ("prefill_fa2", kv(dim=128, dtype=E4M3), {"dtype": E4M3}, "queries are float16 or bfloat16"),
    "fa3 and fp8": ("prefill_fa3", kv(dim=128, dtype=E4M3), {}, "fp8 keys need fp8 queries"),
    "trtllm context and fp8": (
        "trtllm_context",
        kv(dim=128, dtype=E4M3),
        {"capability": BLACKWELL},
        "fp8 keys need fp8 queries",
    ),
    "trtllm decode and e5m2": (
        "trtllm_decode",
        kv(dim=128, dtype=E5M2),
        {"capability": BLACKWELL},
        "float8_e4m3fn under queries of bfloat16",
    ),
    "trtllm decode, fp8 and halves": (
        "trtllm_decode",
        kv(dim=128, dtype=E4M3),
        {"capability": BLACKWELL, "dtype": torch.float16},
        "float8_e4m3fn under queries of bfloat16",
    ),
    "drafts of one": ("xqa_drafts", kv(), {}, "for one there is xqa_decode"),
    "drafts of wide heads": ("xqa_drafts", kv(dim=512), {"most_new_tokens": 2}, "of at most 256"),
    "many heads of xqa": ("xqa_decode", kv(1, 512), {"num_heads": 17}, "at most 16 query heads"),
    "xqa and e5m2": ("xqa_decode", kv(dim=128, dtype=E5M2), {}, "float8_e4m3fn"),
    "scales of bfloat16": ("prefill_fa2", kv(), {"v_scale": 2.0}, "scales are for keys and values of fp8"),
    "window of xqa": ("xqa_decode", kv(), {"lifetime": Window(9)}, "NaN"),
    "window of trtllm": ("trtllm_context", kv(), {"lifetime": Window(9), "capability": BLACKWELL}, "NaN"),
    "fa3 elsewhere": ("prefill_fa3", kv(), {"capability": (8, 0)}, "this is 8.0"),
    "trtllm elsewhere": ("trtllm_context", kv(), {}, "this is 9.0"),
    "xqa elsewhere": ("xqa_decode", kv(), {"capability": (8, 9)}, "this is 8.9"),
    "dims of trtllm": ("trtllm_context", kv(dim=192, value_dim=128), {"capability": BLACKWELL}, "strides of keys"),
    "pages of trtllm": ("trtllm_context", kv(), {"page_size": 3, "capability": BLACKWELL}, "power of two"),
    "pages of xqa": ("xqa_decode", kv(), {"page_size": 8}, "16, 32, 64 or 128"),
    "latents": ("prefill_fa2", latent().memories[0].rows, {}, "here are latents"),
    "no latents": ("mla_fa2", kv(), {}, "here are keys and values"),
    "window of latents": ("mla_fa2", latent().memories[0].rows, {"lifetime": Window(9)}, "no window"),
    "soft cap of latents": ("mla_fa2", latent().memories[0].rows, {"softcap": 1.0}, "no soft cap"),
    "scales of latents": ("mla_fa3", latent(E4M3).memories[0].rows, {"k_scale": 2.0}, "multiply before"),
    "fp8 latents": ("mla_fa2", latent(E5M2).memories[0].rows, {}, "float8_e4m3fn"),
    "row scales": ("prefill_fa2", (*kv(), Row(name="k_scale", shape=(4,), dtype=torch.float32)), {}, "one scale"),
    "persistent": ("persistent", kv(), {}, "waits for the whole device"),
    "persistent window": ("persistent", kv(), {"lifetime": Window(9)}, "no window"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_form_is_refused_with_its_reason(name):
    form, rows, options, reason = REFUSALS[name]
    question = question_over(rows, **options)
    said = why_not(form, question)
    assert said is not None and reason in said
    with pytest.raises(PlanError, match=f"FlashInfer's {form} does not serve this layer"):
        choose(question, form)


def test_strides_that_xqa_would_round_down_are_refused():
    question = question_over(kv(1, 128))
    assert why_not("xqa_decode", question) is None
    askew = replace(question, geometry=replace(question.geometry, entry_bytes=question.geometry.entry_bytes + 16))
    assert "rounds down" in str(why_not("xqa_decode", askew))
    assert why_not("prefill_fa2", askew) is None


def test_products_of_page_and_stride_beyond_32_bits_are_refused_where_they_are_taken_in_32_bits():
    question = question_over(kv(8, 128))
    large = replace(question, geometry=replace(question.geometry, num_pages=2**32 // question.geometry.page_stride + 1))
    assert "wrap" in str(why_not("persistent", large)) and why_not("prefill_fa2", large) is None
    wide = replace(question, geometry=replace(question.geometry, page_size=2**20, entry_bytes=2**13))
    assert "with 32 bits" in str(why_not("prefill_fa2", wide))
    wide = replace(wide, capability=BLACKWELL, geometry=replace(wide.geometry, page_size=2**19))
    assert "31 bits" in str(why_not("trtllm_decode", wide)) and why_not("prefill_fa2", wide) is None


def test_a_layer_without_a_pair_of_keys_and_values_is_refused():
    index = Row(name="index_key", shape=(128,), dtype=torch.bfloat16)
    flat = (Row(name="k", shape=(128,), dtype=torch.bfloat16), Row(name="v", shape=(128,), dtype=torch.bfloat16))
    grouped = Layer(memories=(Memory(lifetime=Full(), rows=kv(), tokens_per_entry=4),))
    for layer, reason in (
        (memory(Full(), (*kv(), index)), "one key and one value"),
        (memory(Full(), flat), "how many heads"),
        (grouped, "one entry for 4 tokens"),
    ):
        plan = torch_uma.plan([layer], memory=1 << 20, page_size=2)
        with pytest.raises(PlanError, match=reason):
            adapter.storage_of(plan, 0)


def test_the_table_of_a_layer_names_every_form():
    plan = torch_uma.plan([memory(Full(), kv())], memory=1 << 20, page_size=16)
    found = serving(plan, 0, num_heads=8, dtype=torch.bfloat16, capability=HOPPER)
    assert found.reasons.keys() == FORMS.keys()
    assert found.forms[:3] == ("decode_tensor_cores", "decode_cuda_cores", "prefill_fa3")
    assert "decode_tensor_cores  serves" in str(found)
    few = serving(plan, 0, num_heads=2, dtype=torch.bfloat16, capability=HOPPER)
    assert few.forms[0] == "decode_cuda_cores"
    none = question_over(kv(dtype=torch.float32))
    with pytest.raises(PlanError, match="no form of FlashInfer with a plan serves"):
        choose(none)
    with pytest.raises(PlanError, match="there is no form 'other'"):
        why_not("other", none)
    with pytest.raises(PlanError, match="give capability="):
        serving(plan, 0, num_heads=8, dtype=torch.bfloat16)


# The op


def test_the_op_is_answered_by_flashinfer_where_it_serves():
    pool, sequences, question = decode_world()
    library, log = stand_in()
    attention = adapter.use(pool, library=library, capability=HOPPER)
    assert attention is not None
    for number in range(2):
        step = pool.begin(sequences, 1)
        write(step, torch.Generator().manual_seed(number))
        for layer in (0, 1, 2):
            asked = replace(question, geometry=adapter.storage_of(pool.plan, layer).geometry)
            query = queries(asked, 3, random.Random(number))
            start = len(log)
            served = reference(step, layer, asked, query)
            assert [entry[0] for entry in log[start:]][-1] == "run"
            adapter.leave_off(pool)
            check_same(served, reference(step, layer, asked, query))
            assert [entry[0] for entry in log[start:]].count("run") == 1
            pool.substitute = attention
            substitutes.register(pool.arena.bytes, attention)
        step.commit()
    assert [entry[0] for entry in log].count("plan") == 4, "two kinds in each of two steps"
    assert not attention.declined
    pool.close()


def test_the_op_is_left_alone_where_flashinfer_does_not_serve():
    pool, sequences, question = decode_world()
    library, log = stand_in()
    attention = adapter.use(pool, library=library, capability=HOPPER)
    assert attention is not None
    step = pool.begin(sequences, 1)
    write(step, torch.Generator().manual_seed(0))
    query = queries(question, 3, random.Random(0))
    new = torch.zeros(3, 2, 64, dtype=torch.bfloat16)
    mask = torch.ones(1, 1, 40, dtype=torch.bool)

    def reason(**options: Any) -> str:
        attention.declined.clear()
        reference(step, 0, question, query, **options)
        ((_, said),) = attention.declined.items()
        return said

    assert "no mask" in reason(mask=mask)
    assert "no starts" in reason(starts=torch.zeros(3, dtype=torch.int64))
    assert "may not have been written" in reason(new_key=new, new_value=new)
    step.writes_first = True
    attention.declined.clear()
    reference(step, 0, question, query, new_key=new, new_value=new)
    assert not attention.declined and log[-1][0] == "run"
    log.clear()
    reference(step, 0, question, query.double())
    assert "queries are float16" in str(attention.declined)
    step.commit()
    attention.declined.clear()
    reference(step, 0, question, query)
    assert "no open step" in str(attention.declined) and not log
    pool.close()


def test_nothing_is_planned_on_another_stream(monkeypatch):
    """As where torch.compile warms up a graph, in whose memory nothing may stay."""
    pool, sequences, question = decode_world()
    library, log = stand_in()
    attention = adapter.use(pool, library=library, capability=HOPPER, num_rows=3)
    assert attention is not None
    own, other = (SimpleNamespace(device=pool.device, number=number) for number in range(2))
    monkeypatch.setattr(pool.guard.epochs, "stream", own)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(pool.guard.epochs, "record", lambda epoch: None)
    query = queries(question, 3, random.Random(0))
    step = pool.begin(sequences, 1)
    write(step, torch.Generator().manual_seed(0))
    for current, is_served in ((other, False), (own, True), (other, True)):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, current=current: current)
        log.clear()
        attention.declined.clear()
        reference(step, 0, question, query)
        assert bool(log) == is_served and ("not the arena's" in str(attention.declined)) != is_served
    step.commit()


def test_latents_are_answered_with_the_query_that_absorbs_their_projection():
    pool = make_pool(latent(), page_size=4)
    sequences = pool.add_many([0, 0])
    run_steps(pool, sequences, [5, 2], random.Random(0))
    library, log = stand_in()
    adapter.use(pool, library=library, capability=HOPPER)
    step = pool.begin(sequences, 1)
    write(step, torch.Generator().manual_seed(0))
    question = question_of(pool.plan, 0, num_heads=4, dtype=torch.bfloat16, scale=0.05, capability=HOPPER)
    query = queries(question, 2, random.Random(0))
    served = reference(step, 0, question, query)
    assert log[-1][0] == "run"
    adapter.leave_off(pool)
    check_same(served, reference(step, 0, question, query))
    step.abort()


def test_a_step_that_replays_a_graph_is_planned_beforehand():
    pool, sequences, question = decode_world()
    library, log = stand_in()
    attention = adapter.use(pool, library=library, num_rows=3, capability=HOPPER)
    assert attention is not None
    step = pool.begin(sequences, 1)
    write(step, torch.Generator().manual_seed(0))
    with pytest.raises(PlanError, match="no step of this kind has been served yet"):
        attention.plan(step)
    reference(step, 0, question, queries(question, 3, random.Random(0)))
    step.commit()
    step = pool.begin(sequences, 2)
    with pytest.raises(PlanError, match="no step of this kind has been served yet"):
        attention.plan(step)
    step.abort()
    step = pool.begin(sequences, 1)
    log.clear()
    attention.plan(step)
    assert [entry[0] for entry in log] == ["wait", "replan", "record"]
    step.commit()


def test_rows_of_unequally_many_tokens_are_answered_and_what_no_page_holds_is_not():
    pool = make_pool(memory(Window(5), kv()), memory(Full(), kv()), page_size=2)
    sequences = pool.add_many([0, 0])
    run_steps(pool, sequences, [3, 8], random.Random(0))
    library, log = stand_in()
    attention = adapter.use(pool, library=library, capability=HOPPER)
    assert attention is not None
    step = pool.begin(sequences, [9, 1])
    step.writes_first = True
    write(step, torch.Generator().manual_seed(0))
    for layer, is_served in ((0, False), (1, True)):
        question = question_of(pool.plan, layer, num_heads=2, dtype=torch.bfloat16, scale=0.1, capability=HOPPER)
        query = queries(question, 10, random.Random(0))
        new = torch.zeros(10, 2, 64, dtype=torch.bfloat16)
        reference(step, layer, question, query, new_key=new, new_value=new)
        assert bool(log) == is_served
    assert "stored nowhere" in str(attention.declined)
    step.abort()


def test_a_model_attends_by_flashinfer_where_its_cache_is_not_on_the_host(monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        vocab_size=50,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    importlib.import_module("torch_uma.integrations.transformers")
    model.set_attn_implementation("torch_uma")
    places = importlib.import_module("torch_uma.integrations.transformers.places")
    monkeypatch.setattr(places, "on_host", lambda tensor: False)
    given: list[list[Tensor]] = []
    runs = []
    for is_used in (False, True):
        pool = CachePool(model, memory="1MiB", page_size=3)
        library, log = stand_in()
        if is_used:
            adapter.use(pool, library=library, capability=HOPPER)
        first, second = pool.add_many([0, 0])
        given.append([])
        for counts in ({first: 7}, {second: 4}, {first: 1, second: 1}, {first: 1, second: 5}):
            tokens = torch.arange(sum(counts.values())) % 50
            shape = (1, -1) if len(set(counts.values())) > 1 else (len(counts), -1)
            with torch.no_grad(), pool.step(counts) as cache:
                given[-1].append(model(tokens.view(shape), cache=cache, **cache.inputs()).logits)
            scramble(pool, 1)
        runs.append([entry[0] for entry in log].count("run"))
    assert runs == [0, 8], "two layers in each of four steps"
    for alone, served in zip(*given):
        torch.testing.assert_close(served, alone, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_substitute_goes_with_its_pool():
    pool = decode_world()[0]
    arena = pool.arena.bytes
    adapter.use(pool, library=stand_in()[0], capability=HOPPER)
    assert substitutes._BY_ADDRESS[arena.data_ptr()]() is pool.substitute
    pool.close()
    assert substitutes._BY_ADDRESS[arena.data_ptr()]() is None


def test_warming_up_runs_each_kind_once_and_says_how_far_it_is():
    pool, _, question = decode_world()
    library, log = stand_in()
    said: list[tuple[int, int, str]] = []
    prefill = replace(question, most_new_tokens=64)
    asked = [(0, question), (1, question), (0, prefill), (1, prefill)]
    before = pool.stats()
    count = adapter.warm_up(pool, asked, library=library, progress=lambda *a: said.append(a))
    assert count == 2 and said == [(0, 2, "decode_tensor_cores"), (1, 2, "prefill_fa3"), (2, 2, "")]
    assert [entry[0] for entry in log].count("run") == 2
    assert pool.stats().live_bytes == before.live_bytes
    pool.check()


def test_it_can_be_left_off(monkeypatch):
    assert "no NVIDIA device" in str(adapter.why_off(torch.device("cpu")))
    monkeypatch.setenv("TORCH_UMA_FLASHINFER", "0")
    assert adapter.why_off(torch.device("cuda")) == "TORCH_UMA_FLASHINFER is 0"
    assert adapter.use(decode_world()[0]) is None


def test_only_an_open_step_is_planned_for():
    pool, sequences, question = decode_world(page_size=16)
    subpool = pool.plan.subpools[-1]
    with pool.begin_steps(sequences, 2) as multi, pytest.raises(SequenceError, match="open step"):
        adapter.pages_of(multi, subpool)
    step = pool.begin(sequences, 1)
    step.commit()
    with pytest.raises(SequenceError, match="open step"):
        adapter.pages_of(step, subpool)


BAD_QUESTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no heads": ({"num_heads": 0}, "num_heads of a question is at least 1"),
    "half a head": ({"num_heads": 2.5}, "num_heads of a question is a whole number"),
    "no token": ({"most_new_tokens": 0}, "most_new_tokens of a question is at least 1"),
    "name of a dtype": ({"dtype": "bfloat16"}, "such as torch.bfloat16"),
    "no scale": ({"scale": math.nan}, "scale of a question is a number"),
    "text for a scale": ({"scale": "1"}, "scale of a question is a number"),
    "negative cap": ({"softcap": -1.0}, "softcap of a question is a number of at least 0"),
    "endless key scale": ({"k_scale": math.inf}, "k_scale of a question is a number"),
    "no value scale": ({"v_scale": None}, "v_scale of a question is a number"),
    "capability": ({"capability": 90}, r"\(9, 0\) for an H100"),
    "halves of a capability": ({"capability": (9.0, 0)}, r"\(9, 0\) for an H100"),
}


@pytest.mark.parametrize("name", BAD_QUESTIONS)
def test_a_question_of_numbers_that_mean_nothing_is_refused(name):
    changed, said = BAD_QUESTIONS[name]
    plan = torch_uma.plan([memory(Full(), kv())], memory=1 << 20, page_size=16)
    options = {"num_heads": 8, "dtype": torch.bfloat16, "scale": 0.1, "capability": HOPPER, **changed}
    with pytest.raises(PlanError, match=said):
        question_of(plan, 0, **options)


@pytest.mark.parametrize(
    ("layer", "said"), [(9, "no layer 9; the plan has 4"), (-1, "at least 0"), (0.5, "whole number"), ("q", "whole")]
)
def test_a_layer_that_is_not_there_is_refused(layer, said):
    pool, sequences, question = decode_world()
    step = pool.begin(sequences, 1)
    for ask in (
        lambda: plan_call(step, layer, question),
        lambda: adapter.storage_of(pool.plan, layer),
        lambda: serving(pool.plan, layer, num_heads=8, dtype=torch.bfloat16, capability=HOPPER),
    ):
        with pytest.raises(PlanError, match=said):
            ask()
    step.abort()


def test_counts_and_queries_that_do_not_fit_are_refused():
    pool, sequences, question = decode_world()
    step = pool.begin(sequences, 1)
    write(step, torch.Generator().manual_seed(0))
    for wrong, said in ((2.5, "whole number"), (0, "at least 1"), (-3, "at least 1"), ("4", "whole number")):
        for ask in (
            lambda wrong=wrong: plan_call(step, 0, question, num_rows=wrong),
            lambda wrong=wrong: adapter.pages_of(step, pool.plan.subpools[-1], num_rows=wrong),
            lambda wrong=wrong: Runner(pool, library=stand_in()[0], num_rows=wrong),
            lambda wrong=wrong: Runner(pool, library=stand_in()[0], workspace_bytes=wrong),
            lambda wrong=wrong: adapter.Attention(pool, num_rows=wrong),
            lambda wrong=wrong: plan_call(step, 0, question).pages.append(wrong),
            lambda wrong=wrong: plan_call(step, 0, question).pages.block_tables(wrong),
        ):
            with pytest.raises(PlanError, match=said):
                ask()
    states = next(subpool for subpool in pool.plan.subpools if subpool.is_state)
    with pytest.raises(PlanError, match="holds states"):
        adapter.pages_of(step, states)
    with pytest.raises(PlanError, match="which question_of makes"):
        plan_call(step, 0, "decode")
    for nothing in (None, 3, sequences):
        with pytest.raises(SequenceError, match="open step"):
            plan_call(nothing, 0, question)
    runner = Runner(pool, library=stand_in()[0], workspace_bytes=64)
    call = plan_call(step, 0, question)
    runner.plan(call)
    query = queries(question, 3, random.Random(0))
    for other in (query[:2], query[:, :4], query[..., :32], query.float(), torch.cat([query, query])):
        with pytest.raises(PlanError, match=r"torch.bfloat16 of shape \(3, 8, 64\)"):
            runner.run(call, other)
    with pytest.raises(PlanError, match="sinks are given where"):
        runner.run(call, query, sinks=torch.zeros(8))
    sink = plan_call(step, 0, replace(question, has_sinks=True))
    runner.plan(sink)
    with pytest.raises(PlanError, match="for each of 8 heads"):
        runner.run(sink, query, sinks=torch.zeros(4))
    given = runner.run(call, query.transpose(1, 2).contiguous().transpose(1, 2))
    check_same(given, reference(step, 0, question, query))
    step.abort()


# FlashInfer itself


@pytest.fixture
def environment():
    """As it was: FlashInfer, when it is imported, points Triton to another assembler."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("environment")
@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer is not installed")
def test_the_arguments_are_those_that_flashinfer_has():
    library = load()
    pool, sequences, question = decode_world(page_size=16)
    calls: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
    fake, _ = stand_in()

    def noting(name: str, function: Any) -> Any:
        def noted(*arguments: Any, **options: Any) -> Any:
            calls.setdefault(name, []).append((arguments, options))
            made = function(*arguments, **options)
            if isinstance(made, Model):
                for method in ("plan", "run"):
                    setattr(made, method, noting(f"{name}.{method}", getattr(made, method)))
            return made

        return noted

    names = [name for name in Library.__dataclass_fields__ if name != "event"]
    noted = replace(fake, **{name: noting(name, getattr(fake, name)) for name in names})
    latents = make_pool(latent(), page_size=16)
    for of, layer, options, forms in (
        (pool, 0, {}, ["decode_cuda_cores", "prefill_fa2", "xqa_decode"]),
        (pool, 0, {"has_sinks": True}, ["sink_fa2"]),
        (pool, 0, {"most_new_tokens": 2, "has_finite_dead_rows": True}, ["xqa_drafts"]),
        (pool, 0, {"capability": BLACKWELL}, ["trtllm_decode", "trtllm_context"]),
        (latents, 0, {}, ["mla_fa2"]),
    ):
        options = {"num_heads": 8, "dtype": torch.bfloat16, "scale": 0.1, "capability": HOPPER, **options}
        asked = question_of(of.plan, layer, **options)
        rows = sequences if of is pool else of.add_many([0, 0, 0])
        for num_rows in (None, 3):
            runner = Runner(of, library=noted, num_rows=num_rows, workspace_bytes=64)
            for form in forms * 2:
                step = of.begin(rows, 1)
                write(step, torch.Generator().manual_seed(0))
                check_step(of, step, layer, asked, random.Random(0), form, runner)
                step.abort()
    assert calls.keys() >= {*names, "decode.run", "prefill.plan", "sink.run", "mla.plan"}
    for name, made in calls.items():
        part, _, method = name.partition(".")
        real = getattr(library, part)
        target = getattr(real, method) if method else real
        is_bound = method or inspect.isclass(real)
        signature = inspect.signature(target.__init__ if inspect.isclass(target) else target)
        for arguments, options in made:
            signature.bind(*((None,) if is_bound else ()), *arguments, **options)
    known = inspect.signature(library.decode._plan_impl).parameters
    assert all(set(options) <= set(known) for _, options in calls["decode.plan"])
