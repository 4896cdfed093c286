"""States as kernels of other libraries take them: the right memory, the right padding, and a reason where it cannot be.

The kernels' part is played by indexing with the slots they are given.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import torch_uma
from torch_uma import CachePool, Full, Layer, Memory, PlanError, Row, SequenceError, State
from torch_uma.integrations.recurrent import (
    KERNELS,
    clear_fresh,
    hold_slot_zero,
    num_slots,
    serving,
    states_of,
    view_of,
    why_not,
)
from torch_uma.integrations.view import View
from torch_uma.testing import poison, scramble

BFLOAT = "flashinfer.gated_delta_rule_decode_pretranspose, bfloat16"
FLOAT = "flashinfer.gated_delta_rule_decode_pretranspose"
MAMBA = "flashinfer.selective_state_update"


def layers(shape: tuple[int, ...] = (2, 4, 8), dtype: torch.dtype = torch.float32, conv_width: int = 3) -> list[Layer]:
    rows = (
        Row(name="conv", shape=(12, conv_width), dtype=torch.bfloat16),
        Row(name="recurrent", shape=shape, dtype=dtype),
    )
    state = Layer(memories=(Memory(lifetime=State(), rows=rows),))
    full = Layer(memories=(Memory(lifetime=Full(), rows=(Row(name="k", shape=(4,), dtype=torch.float32),)),))
    return [state, full, state]


def make_pool(*, memory: int = 1 << 16, **options: object) -> CachePool:
    pool = CachePool(torch_uma.plan(layers(**options), memory=memory, page_size=2), device="cpu", max_sequences=8)
    poison(pool)
    return pool


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kernel", [FLOAT, MAMBA, "fla.fused_recurrent_kda_fwd", "mamba_ssm.selective_state_update"])
def test_a_state_is_where_the_slots_say_after_every_move(kernel, seed):
    chance = random.Random(seed)
    pool = make_pool(conv_width=chance.choice([1, 3, 4]))
    sequences = pool.add_many([0] * chance.randint(1, 6))
    expected = torch.zeros(len(sequences), 2, 4, 8)
    for number in range(4):
        step = pool.begin(sequences, 1)
        if number == 0:
            clear_fresh(step)
        states = states_of(step, 2, "recurrent", kernel)
        assert states.slots.dtype == torch.int32 and states.slots.is_contiguous()
        assert states.pool.stride()[1:] == (32, 8, 1) and states.pool.data_ptr() % 16 == 0
        torch.testing.assert_close(states.pool[states.slots.long()], expected, rtol=0, atol=0)
        new = torch.randn(expected.shape)
        states.pool[states.slots.long()] += new
        expected += new
        assert step.state_touched
        step.commit()
        scramble(pool, seed + number)
        pool.check()


def test_padding_is_what_a_kernel_skips():
    pool = make_pool()
    held = hold_slot_zero(pool)
    sequences = pool.add_many([0, 0, 0])
    step = pool.begin(sequences, 1)
    own = step.slots().tolist()
    assert 0 not in own
    assert states_of(step, 0, "recurrent", FLOAT, num_rows=5).slots.tolist() == [*own, -1, -1]
    zero = "vllm.fused_recurrent_gated_delta_rule"
    assert states_of(step, 0, "recurrent", zero, num_rows=5).slots.tolist() == [*own, 0, 0]
    with pytest.raises(PlanError, match="no padding; give it 3 rows"):
        states_of(step, 0, "recurrent", "mamba_ssm.selective_state_update", num_rows=5)
    with pytest.raises(PlanError, match="3 rows, more than 2"):
        states_of(step, 0, "recurrent", FLOAT, num_rows=2)
    step.abort()
    held.close()
    pool.check()
    pool.close()


def test_slot_zero_is_held_whatever_moves_and_goes_back():
    pool = make_pool()
    before = pool.stats()
    held = hold_slot_zero(pool)
    pool.check()
    for seed in range(8):
        sequences = pool.add_many([0] * 5)
        scramble(pool, seed)
        step = pool.begin(sequences, 1)
        assert 0 not in step.slots()
        step.commit()
        pool.check()
        for sequence in sequences:
            sequence.free()
    held.close()
    pool.check()
    assert pool.stats().live_bytes == before.live_bytes
    pool.close()


def test_slot_zero_is_asked_for_where_a_kernel_would_take_a_state_for_padding():
    pool = make_pool(shape=(1, 128, 128), dtype=torch.bfloat16, memory=1 << 20, conv_width=4)
    (sequence,) = pool.add_many([0])
    step = pool.begin([sequence], 1)
    with pytest.raises(PlanError, match="hold_slot_zero"):  # it skips slot 0, which is this row's
        states_of(step, 0, "recurrent", "flashinfer.fused_kda_decode")
    assert states_of(step, 0, "recurrent", BFLOAT).slots.tolist() == [0]  # it writes there only for padding
    with pytest.raises(PlanError, match="hold_slot_zero"):
        states_of(step, 0, "recurrent", BFLOAT, num_rows=2)
    step.abort()
    with pytest.raises(PlanError, match="slot 0 is in use"):
        hold_slot_zero(pool)
    pool.check()


@pytest.mark.parametrize("kernel", [name for name, takes in KERNELS.items() if takes.copies])
def test_a_kernel_that_copies_the_pool_is_refused(kernel):
    pool = make_pool()
    step = pool.begin([pool.add()], 1)
    with pytest.raises(PlanError, match="contiguous"):
        states_of(step, 0, "recurrent", kernel)
    assert not step.state_touched
    step.abort()


@pytest.mark.parametrize(
    ("kernel", "bits"), [("causal_conv1d.causal_conv1d_update", 32), ("mamba_ssm.selective_state_update", 31)]
)
def test_a_slot_whose_offset_wraps_is_refused(kernel, bits):
    stride, width = 3 << 20, 1 << 10
    view = View(shape=(1 << 13, width), strides=(stride, 1), offset_bytes=0, dtype=torch.bfloat16)
    most = num_slots(kernel, view)
    last = (most - 1) * stride + width - 1
    assert last < 2**bits <= last + stride
    assert num_slots("vllm.causal_conv1d_update", view) == 1 << 13
    assert why_not(kernel, view) is None


def test_a_step_with_a_slot_out_of_reach_is_refused(monkeypatch):
    pool = make_pool()
    sequences = pool.add_many([0, 0, 0])
    kernel = "mamba_ssm.selective_state_update"
    view = view_of(pool.plan, 0, "recurrent")
    few = replace(KERNELS[kernel], most_elements=2 * view.strides[0])
    monkeypatch.setitem(KERNELS, kernel, few)
    step = pool.begin(sequences[:1], 1)
    states_of(step, 0, "recurrent", kernel)
    step.abort()
    step = pool.begin(sequences, 1)
    with pytest.raises(PlanError, match="reaches 2 slots, but a row has slot 2"):
        states_of(step, 0, "recurrent", kernel)
    step.abort()


def test_reasons_name_dtype_dims_and_alignment():
    plan = torch_uma.plan(layers(), memory=1 << 16, page_size=2)
    view = view_of(plan, 0, "recurrent")
    assert "torch.bfloat16, not torch.float32" in str(why_not(BFLOAT, view))
    small = View(shape=(4, 1, 64, 64), strides=(4096 + 8, 4096, 64, 1), offset_bytes=0, dtype=torch.bfloat16)
    assert "(128, 128)" in str(why_not(BFLOAT, small))
    askew = View(shape=(4, 1, 128, 128), strides=(2**14 + 8, 2**14, 128, 1), offset_bytes=16, dtype=torch.bfloat16)
    assert "32 bytes at a time" in str(why_not(BFLOAT, askew))
    assert why_not("flashinfer.packed_kda_decode", askew) is None  # 16 are enough for it
    with pytest.raises(PlanError, match="not known"):
        why_not("some.kernel", view)
    with pytest.raises(PlanError, match="stores no state 'k'"):
        view_of(plan, 0, "k")


def test_the_table_has_a_word_on_every_kernel():
    said = serving(torch_uma.plan(layers(), memory=1 << 16, page_size=2), 0, "recurrent")
    assert said.keys() == KERNELS.keys()
    assert said[FLOAT] == "serves" and "contiguous" in said["flashinfer.gated_delta_rule_decode"]


def test_the_view_is_the_arenas_own():
    pool = make_pool()
    subpool = next(s for s in pool.plan.subpools if s.is_state)
    for name in ("conv", "recurrent"):
        view = view_of(pool.plan, 2, name).over(pool.arena.bytes)
        own = pool.arena.view(subpool, 2, name).squeeze(1)
        assert (view.data_ptr(), view.shape, view.stride()) == (own.data_ptr(), own.shape, own.stride())


def test_slots_of_a_step_that_has_ended_are_refused():
    pool = make_pool()
    step = pool.begin(pool.add_many([0, 0]), 1)
    step.commit()
    with pytest.raises(SequenceError, match="has ended"):
        states_of(step, 2, "recurrent", FLOAT)


def test_what_means_nothing_is_refused():
    pool = make_pool()
    step = pool.begin(pool.add_many([0, 0]), 1)
    for layer, said in ((9, "no layer 9; the plan has 3"), (-1, "at least 0"), ("a", "whole number")):
        with pytest.raises(PlanError, match=said):
            states_of(step, layer, "recurrent", FLOAT)
        with pytest.raises(PlanError, match=said):
            serving(pool.plan, layer, "recurrent")
    for num_rows, said in ((2.5, "whole number"), (0, "at least 1"), ("3", "whole number")):
        with pytest.raises(PlanError, match=said):
            states_of(step, 2, "recurrent", FLOAT, num_rows=num_rows)
    with pytest.raises(PlanError, match="'other' is not known here"):
        num_slots("other", view_of(pool.plan, 2, "recurrent"))
    assert not step.state_touched
    step.commit()
    for nothing in (None, pool):
        with pytest.raises(SequenceError, match="open step"):
            states_of(nothing, 2, "recurrent", FLOAT)
        with pytest.raises(SequenceError, match="open step"):
            clear_fresh(nothing)
    with pytest.raises(SequenceError, match="has ended"):
        clear_fresh(step)
    stateless = CachePool(torch_uma.plan(layers()[1:2], memory=1 << 16), device="cpu")
    with pytest.raises(PlanError, match="no states"):
        clear_fresh(stateless.begin([stateless.add()], 1))
