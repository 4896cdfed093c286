"""The arena: what a view shows are the bytes that the plan names, and they stay the arena's own."""

import numpy as np
import pytest
import torch

from torch_uma.arena import Arena
from torch_uma.errors import PlanError
from torch_uma.layout import Full, Layer, Memory, Row, State, Window
from torch_uma.plan import Plan, plan

K = Row(name="k", shape=(3, 8), dtype=torch.bfloat16)
V = Row(name="v", shape=(5,), dtype=torch.float32)
NOTHING = Row(name="rope", shape=(2, 0), dtype=torch.bfloat16)
SCALE = Row(name="scale", shape=(), dtype=torch.float16)
CODES = Row(name="codes", shape=(7,), dtype=torch.float8_e4m3fn)
CONV = Row(name="conv", shape=(4, 3), dtype=torch.bfloat16)
RECURRENT = Row(name="recurrent", shape=(2, 3, 5), dtype=torch.float32)


@pytest.fixture
def small_plan() -> Plan:
    layers = [
        Layer(memories=(Memory(lifetime=Full(), rows=(K, V)),)),
        Layer(memories=(Memory(lifetime=Window(9), rows=(K, NOTHING, CODES, SCALE)),)),
        Layer(memories=(Memory(lifetime=State(), rows=(CONV, RECURRENT)), Memory(lifetime=Full(), rows=(V,)))),
    ]
    return plan(layers, memory=30_000, page_size=3)


def poisoned(small_plan: Plan, **kwargs: object) -> Arena:
    arena = Arena(small_plan, **kwargs)
    arena.bytes.fill_(0xFF)
    return arena


def every_row(small_plan: Plan):
    return [(subpool, placed) for subpool in small_plan.subpools for placed in subpool.layout.rows]


def test_views_write_the_bytes_that_the_plan_names(small_plan):
    arena = poisoned(small_plan)
    assert len(every_row(small_plan)) == 9
    for subpool, placed in every_row(small_plan):
        view = arena.view(subpool, placed.layer, placed.row.name)
        assert view.shape == (subpool.num_pages, subpool.page_size, *placed.row.shape)
        assert view.dtype == placed.row.dtype
        page, entry = subpool.num_pages - 1, subpool.page_size - 1
        value = torch.randn(placed.row.shape).to(placed.row.dtype)
        view[page, entry] = value
        start = subpool.origin_bytes + page * subpool.page_bytes + entry * subpool.entry_bytes + placed.offset_bytes
        end = start + placed.row.num_bytes
        assert arena.bytes[start:end].tolist() == value.reshape(-1).view(torch.uint8).tolist()
        assert (arena.bytes[:start] == 0xFF).all() and (arena.bytes[end:] == 0xFF).all()
        arena.bytes.fill_(0xFF)


def test_rows_of_a_grid_never_overlap(small_plan):
    arena = poisoned(small_plan)
    ones = {1: (torch.uint8, 0x01), 2: (torch.int16, 0x0101), 4: (torch.int32, 0x01010101)}
    for subpool in small_plan.subpools:
        arena.bytes.zero_()
        for placed in subpool.layout.rows:
            dtype, one_in_each_byte = ones[placed.row.dtype.itemsize]
            arena.view(subpool, placed.layer, placed.row.name).view(dtype).add_(one_in_each_byte)
        row_bytes = sum(placed.row.num_bytes for placed in subpool.layout.rows)
        assert arena.bytes.max() == 1
        assert arena.bytes.sum() == subpool.num_pages * subpool.page_size * row_bytes


def test_relocate_moves_whole_pages_of_its_own_grid(small_plan):
    arena = poisoned(small_plan)
    arena.bytes.random_()
    for subpool in small_plan.subpools:
        before = arena.bytes.clone()
        last = subpool.num_pages - 1
        arena.relocate(subpool.index, np.array([last, 1], dtype=np.int32), np.array([2, last - 1], dtype=np.int32))
        expected = before.clone()
        for src, dst in [(last, 2), (1, last - 1)]:
            source, target = (subpool.origin_bytes + page * subpool.page_bytes for page in (src, dst))
            expected[target : target + subpool.page_bytes] = before[source : source + subpool.page_bytes]
        assert torch.equal(arena.bytes, expected)


def test_views_outlive_moves(small_plan):
    arena = poisoned(small_plan)
    subpool, placed = next((s, p) for s, p in every_row(small_plan) if p.row.name == "v")
    view = arena.view(subpool, placed.layer, "v")
    view[4] = 7.0
    arena.relocate(subpool.index, np.array([4]), np.array([6]))
    assert (view[6] == 7.0).all()


def test_the_ops_and_the_views_mean_the_same_places(small_plan):
    arena = poisoned(small_plan)
    subpool, placed = next((s, p) for s, p in every_row(small_plan) if p.row.name == "k")
    rows = torch.randn(2, 1, 3, 8)
    entries = torch.tensor([[2 * subpool.page_size + 1], [5 * subpool.page_size]])
    torch.ops.torch_uma.write_rows(
        arena.bytes,
        [rows],
        entries,
        subpool.origin_bytes,
        subpool.entry_bytes,
        [placed.offset_bytes],
        ["bfloat16"],
        [None],
    )
    view = arena.view(subpool, placed.layer, "k")
    assert torch.equal(torch.stack([view[2, 1], view[5, 0]]), rows[:, 0].bfloat16())


def test_given_memory_is_used_and_may_be_longer(small_plan):
    out = torch.empty(small_plan.arena_bytes + 100, dtype=torch.uint8)
    arena = Arena(small_plan, out=out)
    assert arena.bytes.data_ptr() == out.data_ptr()
    assert len(arena.bytes) == small_plan.arena_bytes


def test_given_memory_that_starts_inside_a_tensor(small_plan):
    out = torch.zeros(small_plan.arena_bytes + 64, dtype=torch.uint8)
    arena = Arena(small_plan, out=out[64:])
    subpool, placed = every_row(small_plan)[0]
    arena.view(subpool, placed.layer, placed.row.name).fill_(1)
    start = 64 + subpool.origin_bytes + placed.offset_bytes
    assert (out[:start] == 0).all()
    assert out[start : start + placed.row.num_bytes].any()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.empty(10, dtype=torch.uint8), "has 10"),
        (torch.empty(8192, dtype=torch.float32), "float32"),
        (torch.empty(300, 300, dtype=torch.uint8), "shape"),
        (torch.empty(80_000, dtype=torch.uint8)[::2], "strides"),
        (torch.empty(40_000, dtype=torch.uint8)[1:], "address"),
        (torch.empty(40_000, dtype=torch.uint8, device="meta"), "on meta"),
    ],
)
def test_memory_that_does_not_suit_is_refused(small_plan, out, message):
    with pytest.raises(PlanError, match=message):
        Arena(small_plan, device="cpu", out=out)


def test_an_unknown_row_is_refused(small_plan):
    arena = Arena(small_plan)
    with pytest.raises(KeyError, match="latent"):
        arena.view(small_plan.subpools[0], 0, "latent")


def test_an_arena_made_in_inference_mode_can_be_written_outside(small_plan):
    with torch.inference_mode():
        arena = Arena(small_plan)
    arena.bytes.fill_(3)
    subpool, placed = every_row(small_plan)[0]
    with torch.inference_mode():
        view = arena.view(subpool, placed.layer, placed.row.name)
    assert not view.is_inference()
    view.fill_(1)
    arena.view(subpool, placed.layer, placed.row.name).fill_(1)
    arena.relocate(0, np.array([1]), np.array([2]))


def test_an_arena_on_the_meta_device_has_views_and_no_memory(small_plan):
    arena = Arena(small_plan, device="meta")
    subpool, placed = every_row(small_plan)[-1]
    view = arena.view(subpool, placed.layer, placed.row.name)
    assert view.is_meta and view.shape[:2] == (subpool.num_pages, subpool.page_size)
    arena.relocate(subpool.index, np.array([1]), np.array([2]))


def test_more_memory_than_there_is_is_refused() -> None:
    row = Row(name="k", shape=(4,), dtype=torch.float32)
    huge = plan([Layer(memories=(Memory(lifetime=Full(), rows=(row,)),))], memory="4096TiB")
    with pytest.raises(PlanError, match="4,503,599,627,370,496 bytes could not be allocated on cpu; give less memory"):
        Arena(huge, device="cpu")


def test_pages_are_the_bytes_of_a_grid(small_plan):
    arena = Arena(small_plan, device="cpu")
    arena.bytes.zero_()
    for subpool in small_plan.subpools:
        pages = arena.pages(subpool)
        assert pages.shape == (subpool.num_pages, subpool.page_bytes)
        pages[-1].fill_(7)
        start = subpool.origin_bytes + (subpool.num_pages - 1) * subpool.page_bytes
        assert arena.bytes.count_nonzero() == (arena.bytes[start : start + subpool.page_bytes] == 7).sum()
        arena.bytes.zero_()
