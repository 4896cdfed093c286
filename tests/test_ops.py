"""The ops against a byte-by-byte model, by both ways that the reference has: the host's, and that of accelerators."""

import random

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.library import opcheck

import torch_uma.ops
from torch_uma.ops import dtype_name, reference
from torch_uma.ops.registration import REFERENCES, SCHEMAS

ops = torch.ops.torch_uma

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
QUANTISED = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


@pytest.fixture(params=["host", "accelerator"], autouse=True)
def way(request, monkeypatch):
    """Runs each test on host memory twice, the second time as on an accelerator, where nothing may be read back."""
    monkeypatch.setattr(reference, "on_host", lambda tensor: request.param == "host")
    return request.param


def nan_arena(num_bytes: int) -> torch.Tensor:
    """Bytes that are NaN in every float dtype."""
    return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)


def random_arena(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)


# relocate


@pytest.mark.parametrize(("origin_bytes", "page_bytes"), [(0, 16), (48, 272), (16, 4112), (0, 65536)])
def test_relocate_copies_pages_and_nothing_else(origin_bytes, page_bytes):
    arena = random_arena(origin_bytes + 23 * page_bytes + 32)
    pages = random.Random(1).sample(range(23), 14)
    src, dst = pages[:7], pages[7:]
    src[2], dst[5] = -1, -1
    expected = bytearray(arena.numpy().tobytes())
    for s, d in zip(src, dst, strict=True):
        if s >= 0 and d >= 0:
            source, target = origin_bytes + s * page_bytes, origin_bytes + d * page_bytes
            expected[target : target + page_bytes] = expected[source : source + page_bytes]
    ops.relocate(arena, torch.tensor(src), torch.tensor(dst), origin_bytes, page_bytes)
    assert arena.numpy().tobytes() == expected


def test_relocate_of_runs():
    arena = random_arena(40 * 48)
    before = arena.view(40, 48).clone()
    src, dst = torch.tensor([5, 6, 7, 30, 31, 9]), torch.tensor([10, 11, 12, 13, 14, 15])
    ops.relocate(arena, src, dst, 0, 48)
    after = arena.view(40, 48)
    assert torch.equal(after[10:16], before[src])
    kept = [page for page in range(40) if not 10 <= page < 16]
    assert torch.equal(after[kept], before[kept])


@pytest.mark.parametrize(("src", "dst"), [([], []), ([-1, -1], [3, -1]), ([2], [-1]), ([-1], [2])])
def test_relocate_of_nothing_changes_nothing(src, dst):
    arena = random_arena(16 + 5 * 32)
    before = arena.clone()
    ops.relocate(arena, torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64), 16, 32)
    assert torch.equal(arena, before)


@pytest.mark.parametrize(("src", "dst"), [([5], [2]), ([2], [5]), ([9], [8])])
def test_relocate_refuses_pages_outside_the_arena(src, dst):
    arena = random_arena(16 + 5 * 32 + 16)
    before = arena.clone()
    with pytest.raises(IndexError):
        ops.relocate(arena, torch.tensor(src), torch.tensor(dst), 16, 32)
    assert torch.equal(arena, before)


# remap


@pytest.mark.parametrize("index", [[3, 0, 6], [-1, 5, 2], [5, 2, -1], [-1, -1, -1], []])
def test_remap(index):
    table = torch.arange(100, 107, dtype=torch.int32)
    values = torch.tensor([-1, 41, 42][: len(index)], dtype=torch.int32)
    expected = table.tolist()
    for place, value in zip(index, values.tolist(), strict=True):
        if place >= 0:
            expected[place] = value
    ops.remap(table, torch.tensor(index, dtype=torch.int64), values)
    assert table.tolist() == expected


# write_rows and gather_rows


def test_rows_of_different_dtypes_and_widths_in_one_call():
    origin_bytes, entry_bytes, num_entries = 32, 160, 11
    arena = nan_arena(origin_bytes + num_entries * entry_bytes)
    entries = torch.tensor([[10, -1, 0], [4, 7, -1]])
    k = torch.randn(2, 3, 3, 8)  # 24 numbers of bfloat16
    v = torch.randn(2, 5, 3).transpose(1, 2)  # 5 of float32, neither contiguous nor a multiple of 16 bytes
    conv = torch.randint(-9, 9, (2, 3, 7), dtype=torch.int8)
    empty = torch.empty(2, 3, 0)
    dtypes = ["bfloat16", "float32", "int8", "float16"]
    offsets_bytes = [0, 64, 96, 144]
    rows = [k, v, conv, empty]
    ops.write_rows(arena, rows, entries, origin_bytes, entry_bytes, offsets_bytes, dtypes, [None] * 4)

    written = np.zeros(arena.numel(), dtype=bool)
    stored = [k.bfloat16().view(torch.uint8), v.contiguous().view(torch.uint8), conv.view(torch.uint8)]
    for values, offset_bytes in zip(stored, offsets_bytes, strict=False):
        flat = values.reshape(6, -1)
        for i, entry in enumerate(entries.flatten().tolist()):
            if entry >= 0:
                start = origin_bytes + entry * entry_bytes + offset_bytes
                assert torch.equal(arena[start : start + flat.shape[1]], flat[i])
                written[start : start + flat.shape[1]] = True
    assert (arena.numpy()[~written] == 0xFF).all()

    widths = [24, 5, 7, 0]
    got = ops.gather_rows(arena, entries, origin_bytes, entry_bytes, offsets_bytes, widths, dtypes, None, [None] * 4)
    present = (entries >= 0).unsqueeze(-1)
    for result, values, width, name in zip(got, rows, widths, dtypes, strict=True):
        assert result.dtype == getattr(torch, name)
        assert torch.equal(result, torch.where(present, values.reshape(2, 3, width), 0).to(result.dtype))


@pytest.mark.parametrize("stored", [*FLOATS, *QUANTISED], ids=dtype_name)
@pytest.mark.parametrize("caller", FLOATS, ids=dtype_name)
def test_conversions(stored, caller):
    values = (torch.randn(5, 6) * 30).to(caller)
    arena = nan_arena(7 * 32)
    ops.write_rows(arena, [values], torch.arange(5), 0, 32, [0], [dtype_name(stored)], [None])
    (got,) = ops.gather_rows(arena, torch.arange(5), 0, 32, [0], [6], [dtype_name(stored)], caller, [None])
    rounded = values.float().round() if stored == torch.int8 else values.float()
    assert got.dtype == caller
    assert torch.equal(got, rounded.to(stored).to(caller))


@pytest.mark.parametrize("stored", QUANTISED, ids=dtype_name)
def test_conversions_saturate(stored):
    values = torch.tensor([[1e6, -1e6, 3.4e38, -1.0]])
    arena = nan_arena(32)
    ops.write_rows(arena, [values], torch.tensor([1]), 0, 16, [0], [dtype_name(stored)], [None])
    (got,) = ops.gather_rows(arena, torch.tensor([1]), 0, 16, [0], [4], [dtype_name(stored)], torch.float32, [None])
    limits = torch.iinfo(stored) if stored == torch.int8 else torch.finfo(stored)
    assert got.tolist() == [[limits.max, limits.min, limits.max, -1.0]]


@pytest.mark.parametrize("stored", QUANTISED, ids=dtype_name)
@pytest.mark.parametrize("scale_shape", [(), (6,), (2, 3, 1), (2, 3, 6)])
def test_scales(stored, scale_shape):
    values = torch.randn(2, 3, 6)
    scale = torch.rand(scale_shape) / 16 + 0.02
    entries = torch.tensor([[0, 3, 1], [6, 5, -1]])
    arena = nan_arena(7 * 16)
    name = dtype_name(stored)
    ops.write_rows(arena, [values, values], entries, 0, 16, [0, 8], [name, name], [scale, None])
    scaled, plain = ops.gather_rows(arena, entries, 0, 16, [0, 8], [6, 6], [name, name], torch.float32, [scale, None])
    quantised = values / scale if stored != torch.int8 else (values / scale).round().clamp(-128, 127)
    expected = quantised.to(stored).float() * scale
    expected[1, 2] = 0
    assert torch.equal(scaled, expected)
    assert torch.equal(plain[1, 2], torch.zeros(6))


def test_a_missing_entry_gives_zeros_even_if_its_scale_is_nan():
    arena = nan_arena(64)
    (got,) = ops.gather_rows(
        arena, torch.tensor([-1, -1]), 0, 32, [0], [3], ["int8"], torch.bfloat16, [torch.tensor(float("nan"))]
    )
    assert got.dtype == torch.bfloat16 and got.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("entries", [[-1, -1], []])
def test_writing_to_no_entry_changes_nothing(entries):
    arena = random_arena(96)
    before = arena.clone()
    index = torch.tensor(entries, dtype=torch.int64)
    ops.write_rows(arena, [torch.randn(len(index), 4)], index, 0, 32, [16], ["float32"], [None])
    assert torch.equal(arena, before)
    (got,) = ops.gather_rows(arena, index, 0, 32, [16], [4], ["float32"], None, [None])
    assert torch.equal(got, torch.zeros(len(index), 4))


def test_gathered_rows_share_no_memory_with_the_arena():
    arena = nan_arena(64)
    ops.write_rows(arena, [torch.ones(2, 4)], torch.arange(2), 0, 32, [0], ["float32"], [None])
    (got,) = ops.gather_rows(arena, torch.arange(2), 0, 32, [0], [4], ["float32"], None, [None])
    arena.zero_()
    assert torch.equal(got, torch.ones(2, 4))


def test_an_arena_that_is_a_slice_of_a_larger_tensor():
    whole = nan_arena(512)
    arena = whole[64:448]
    ops.write_rows(arena, [torch.ones(1, 4)], torch.tensor([2]), 16, 32, [16], ["float32"], [None])
    assert torch.equal(whole[64 + 16 + 2 * 32 + 16 :][:16].view(torch.float32), torch.ones(4))
    ops.relocate(arena, torch.tensor([2]), torch.tensor([9]), 16, 32)
    assert torch.equal(whole[64 + 16 + 9 * 32 + 16 :][:16].view(torch.float32), torch.ones(4))
    assert (whole == 0xFF).sum() == 512 - 32


def test_offsets_beyond_32_bits():
    num_bytes = (1 << 32) + 4096  # uint8: more elements than an unsigned 32-bit number counts
    arena = torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8))  # pages that are never touched take no memory
    last = num_bytes // 4096 - 1
    ops.write_rows(arena, [torch.ones(1, 4)], torch.tensor([last]), 0, 4096, [4080], ["float32"], [None])
    assert torch.equal(arena[-16:].view(torch.float32), torch.ones(4))
    (got,) = ops.gather_rows(arena, torch.tensor([last]), 0, 4096, [4080], [4], ["float32"], None, [None])
    assert torch.equal(got, torch.ones(1, 4))
    ops.relocate(arena, torch.tensor([last]), torch.tensor([last - 1]), 0, 4096)
    assert torch.equal(arena[-4096 - 16 : -4096].view(torch.float32), torch.ones(4))
    assert arena[: 1 << 20].count_nonzero() == 0


# locate


@pytest.mark.parametrize("num_positions", [0, 50, 400])
@pytest.mark.parametrize(("page_size", "tokens_per_entry"), [(1, 1), (3, 1), (16, 1), (2, 4), (1, 128)])
def test_locate(page_size, tokens_per_entry, num_positions):
    generator = random.Random(3)
    num_ids, columns = 40, 6
    v2p = [generator.choice([-1, *range(1, 90)]) for _ in range(num_ids)]
    table = [[generator.randrange(-1, num_ids) for _ in range(columns)] for _ in range(5)]
    rows = [4, 0, -1, 2]
    page_tokens = page_size * tokens_per_entry
    positions = [[generator.randrange(-5, (columns + 2) * page_tokens) for _ in range(num_positions)] for _ in rows]

    def entry(row: int, position: int) -> int:
        column, inside = divmod(position, page_tokens)
        if row < 0 or not 0 <= column < columns or table[row][column] < 0 or v2p[table[row][column]] < 0:
            return -1
        return v2p[table[row][column]] * page_size + inside // tokens_per_entry

    got = ops.locate(
        torch.tensor(table, dtype=torch.int32),
        torch.tensor(v2p, dtype=torch.int32),
        torch.tensor(rows),
        torch.tensor(positions, dtype=torch.int64),
        page_size,
        tokens_per_entry,
    )
    assert got.dtype == torch.int64
    assert got.tolist() == [[entry(row, p) for p in line] for row, line in zip(rows, positions, strict=True)]


# allocate and release


def device_stack(lengths: list[int], rows: list[int]) -> dict[str, torch.Tensor]:
    return {
        "page_table": torch.full((6, 5), -1, dtype=torch.int32),
        "taken": torch.tensor([2], dtype=torch.int32),
        "stack": torch.tensor([70, 71, 50, 33, 48, 12, 99], dtype=torch.int32),
        "rows": torch.tensor(rows),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
    }


def test_allocate_takes_pages_in_the_order_of_the_batch():
    state = device_stack(lengths=[4, 3, 0, 8, 5], rows=[5, 1, 0, -1, 2])
    ops.allocate(*state.values(), 4)
    table = state["page_table"].tolist()
    assert (table[5][1], table[0][0]) == (50, 33)
    assert sum(cell != -1 for line in table for cell in line) == 2
    assert state["taken"].tolist() == [4]
    assert state["stack"].tolist() == [70, 71, 50, 33, 48, 12, 99]


@pytest.mark.parametrize("rows", [[3, 0, 5, 1], [-1, 2, -1, 4], [-1, -1, -1, -1], []])
def test_release_undoes_allocate(rows):
    lengths = [8, 0, 3, 16][: len(rows)]
    state = device_stack(lengths, rows)
    before = {name: tensor.clone() for name, tensor in state.items()}
    ops.allocate(*state.values(), 4)
    longer = state["lengths"] + 1
    ops.release(state["page_table"], state["taken"], state["stack"], state["rows"], longer, state["lengths"], 4)
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_many_steps_on_the_device_give_every_row_its_pages():
    state = device_stack(lengths=[0, 2, 7], rows=[1, 4, 2])
    state["taken"].zero_()
    state["page_table"][4, 0], state["page_table"][2, :2] = 80, torch.tensor([81, 82], dtype=torch.int32)
    for _ in range(6):
        ops.allocate(*state.values(), 4)
        state["lengths"] += 1
    table = state["page_table"]
    assert table[1].tolist() == [70, 33, -1, -1, -1]  # at lengths 0 and 4
    assert table[4].tolist() == [80, 50, -1, -1, -1]  # at length 4
    assert table[2].tolist() == [81, 82, 71, 48, -1]  # at lengths 8 and 12
    assert state["taken"].tolist() == [5]


def test_a_page_behind_the_last_column_is_an_error():
    state = device_stack(lengths=[20], rows=[3])
    with pytest.raises((IndexError, RuntimeError)):
        ops.allocate(*state.values(), 4)


# page_index


def index_model(table, v2p, rows, lengths, page_size, capacity, first_pages):
    """What `page_index` gives, page by page."""
    indptr, indices, last_page_len = [0], [], []
    for row, length, first in zip(rows, lengths, first_pages, strict=True):
        ids = table[row][first : -(-length // page_size)] if row >= 0 else []
        indices += [max(0, v2p[page_id]) if page_id >= 0 else 0 for page_id in ids] or [0]
        last_page_len.append((length - 1) % page_size + 1 if ids else 1)
        indptr.append(len(indices))
    return indptr, (indices + [0] * capacity)[:capacity], last_page_len


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(("page_size", "capacity"), [(1, 300), (3, 80), (16, 7), (16, 0)])
def test_page_index(page_size, capacity, windowed):
    generator = random.Random(5)
    columns, num_ids = 9, 50
    v2p = [generator.choice([-1, *range(1, 90)]) for _ in range(num_ids)]
    table = [[generator.randrange(-1, num_ids) for _ in range(columns)] for _ in range(8)]
    rows = [4, -1, 7, 0, 2, -1, 1, 3]
    lengths = [generator.randrange(columns * page_size + 1) for _ in rows]
    lengths[2:4] = 0, columns * page_size
    first_pages = [generator.randrange(3) if windowed else 0 for _ in rows]
    got = ops.page_index(
        torch.tensor(table, dtype=torch.int32),
        torch.tensor(v2p, dtype=torch.int32),
        torch.tensor(rows),
        torch.tensor(lengths, dtype=torch.int32),
        page_size,
        capacity,
        torch.tensor(first_pages) if windowed else None,
    )
    assert all(each.dtype == torch.int32 for each in got)
    expected = index_model(table, v2p, rows, lengths, page_size, capacity, first_pages)
    assert tuple(each.tolist() for each in got) == expected


@pytest.mark.parametrize("rows", [[], [-1, -1]])
def test_page_index_of_padding_alone(rows):
    index = torch.tensor(rows, dtype=torch.int64)
    table = torch.full((2, 3), 5, dtype=torch.int32)
    indptr, indices, last = ops.page_index(table, torch.arange(6).int(), index, torch.full_like(index, 40), 16, 4)
    assert indptr.tolist() == list(range(len(rows) + 1))
    assert (indices.tolist(), last.tolist()) == ([0] * 4, [1] * len(rows))


# registration


def samples() -> dict[str, tuple[object, ...]]:
    arena = torch.zeros(1024, dtype=torch.uint8)
    entries = torch.tensor([[3, -1], [0, 7]])
    rows = [torch.randn(2, 2, 3, 4), torch.randn(2, 2, 5)]
    layout = (16, 96, [0, 48])
    dtypes = ["bfloat16", "int8"]
    scales = [None, torch.tensor(0.5)]
    state = device_stack(lengths=[4, 3, 0], rows=[5, -1, 0])
    page_table, taken, stack, batch_rows, lengths = state.values()
    positions = torch.tensor([[0, 5, -1]] * 3)
    return {
        "relocate": (arena, torch.tensor([1, -1, 4]), torch.tensor([2, 5, 3]), 16, 96),
        "remap": (torch.zeros(9, dtype=torch.int32), torch.tensor([4, -1]), torch.ones(2, dtype=torch.int32)),
        "write_rows": (arena, rows, entries, *layout, dtypes, scales),
        "gather_rows": (arena, entries, *layout, [12, 5], dtypes, torch.float32, scales),
        "locate": (page_table.clone(), stack.clone(), batch_rows.clone(), positions, 2, 2),
        "allocate": (page_table, taken, stack, batch_rows, lengths, 4),
        "release": (page_table + 9, taken, stack, batch_rows, lengths + 1, lengths, 4),
        "page_index": (page_table.clone(), stack.clone(), batch_rows.clone(), lengths.clone(), 2, 9, lengths // 4),
    }


@pytest.mark.parametrize("name", sorted(samples()))
def test_opcheck(name, way):
    op = getattr(ops, name).default
    assert torch.Tag.pt2_compliant_tag in op.tags
    opcheck(op, samples()[name])


def test_the_samples_cover_every_op():
    assert sorted(samples()) == sorted(schema.partition("(")[0] for schema in SCHEMAS)


@pytest.mark.parametrize("name", sorted(samples()))
def test_on_an_accelerator_no_number_is_read(name, way):
    with FakeTensorMode() as mode:  # its tensors have no numbers: reading one, or a shape that depends on one, raises

        def without_numbers(value: object) -> object:
            if isinstance(value, list):
                return [without_numbers(item) for item in value]
            return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

        arguments = [without_numbers(value) for value in samples()[name]]
        if way == "accelerator":
            REFERENCES[name](*arguments)
        elif name in ("relocate", "remap", "write_rows", "gather_rows"):
            with pytest.raises(DataDependentOutputException):
                REFERENCES[name](*arguments)


@pytest.mark.parametrize("name", sorted(samples()))
def test_on_the_meta_device_only_shapes_count(name):
    def on_meta(value: object) -> object:
        if isinstance(value, list):
            return [on_meta(item) for item in value]
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    result = getattr(ops, name)(*(on_meta(value) for value in samples()[name]))
    expected = getattr(ops, name)(*samples()[name])
    if isinstance(expected, torch.Tensor):
        result, expected = [result], [expected]
    for got, want in zip(result or [], expected or [], strict=True):
        assert (got.device.type, got.shape, got.dtype) == ("meta", want.shape, want.dtype)


def test_gather_without_out_dtype_keeps_what_is_stored_under_compile():
    def fetch(arena: torch.Tensor, entries: torch.Tensor) -> list[torch.Tensor]:
        return ops.gather_rows(arena, entries, 0, 32, [0, 16], [4, 8], ["float32", "bfloat16"], None, [None, None])

    arena, entries = random_arena(320), torch.tensor([1, -1, 9])
    for got, want in zip(torch.compile(fetch, fullgraph=True, backend="eager")(arena, entries), fetch(arena, entries)):
        assert got.dtype == want.dtype and torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_the_folder_cannot_be_imported_under_another_name():
    import importlib.util
    from pathlib import Path

    path = Path(torch_uma.ops.__file__)
    spec = importlib.util.spec_from_file_location("ops", path)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=r"torch_uma\.ops"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("name", sorted(samples()))
def test_cuda_has_kernels_of_its_own(name):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"torch_uma::{name}", "CUDA")
