"""The kernel of `write_rows` and `gather_rows`, interpreted, against the references.

What is stored as it comes, or as int8 or float8, is compared bit by bit. The interpreter cuts float32 off to bfloat16
where a GPU rounds, so other conversions may be a last bit away.
"""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from torch_uma.ops import dtype_name, reference
from torch_uma.ops import triton as kernels
from torch_uma.ops.triton import segments
from torch_uma.ops.triton.formats import from_float32, to_float32
from torch_uma.ops.triton.launch import Machine
from torch_uma.ops.triton.rows import plan_rows, row_offsets
from torch_uma.ops.triton.segments import is_supported, segments_of

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
QUANTISED = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
MACHINE = Machine(num_multiprocessors=132, converts_float8=False)


def nan_arena(num_bytes):
    return torch.full((num_bytes,), 0xFF, dtype=torch.uint8)


def write_both(rows, entries, origin_bytes, entry_bytes, offsets_bytes, dtypes, scales=None, arena=None):
    """The arena as the reference leaves it, and as the kernel does."""
    expected = nan_arena(origin_bytes + 40 * entry_bytes) if arena is None else arena
    got = expected.clone()
    names = [dtype_name(dtype) for dtype in dtypes]
    for write, written in ((reference.write_rows, expected), (kernels.write_rows, got)):
        write(written, rows, entries, origin_bytes, entry_bytes, offsets_bytes, names, scales or [None] * len(rows))
    return expected, got


def gather_both(arena, entries, origin_bytes, entry_bytes, offsets_bytes, widths, dtypes, out_dtype=None, scales=None):
    names = [dtype_name(dtype) for dtype in dtypes]
    rest = (offsets_bytes, widths, names, out_dtype, scales or [None] * len(widths))
    return [
        gather(arena, entries, origin_bytes, entry_bytes, *rest)
        for gather in (reference.gather_rows, kernels.gather_rows)
    ]


def assert_same_bits(got, expected):
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def assert_close(got, expected):
    """Equal, but for one bit that the interpreter cuts off."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    torch.testing.assert_close(got, expected, rtol=2.0**-7 if got.dtype == torch.bfloat16 else 0, atol=0)


@pytest.mark.parametrize("entries", [[[10, -1, 0], [4, 7, -1]], [[-1, -1], [-1, -1]], [[39]], [], [5, 39, -1, 6], 7])
def test_rows_of_different_dtypes_and_widths_in_one_call(entries):
    entries = torch.tensor(entries, dtype=torch.int64)
    shape = entries.shape
    k = torch.randn(*shape, 3, 8)
    v = torch.randn(*shape[:-1], 5, *shape[-1:]).movedim(-1, -2) if shape else torch.randn(5)
    conv = torch.randint(-9, 9, (*shape, 7), dtype=torch.int8)
    empty, counts = torch.empty(*shape, 0), torch.randint(0, 2**60, (*shape, 2))
    dtypes = [torch.bfloat16, torch.float32, torch.int8, torch.float16, torch.int64]
    exact = [k.bfloat16(), v, conv, empty, counts]
    layout = (32, 176, [0, 64, 96, 144, 160])
    expected, got = write_both(exact, entries, *layout, dtypes)
    assert torch.equal(got, expected)
    for have, want in zip(*gather_both(expected, entries, *layout, [24, 5, 7, 0, 2], dtypes), strict=True):
        assert_same_bits(have, want)


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("head_dim", [1, 24, 64, 130])
def test_keys_as_models_have_them(heads, head_dim):
    batch, tokens = 3, 5
    keys = torch.randn(batch, heads, tokens, head_dim).bfloat16().transpose(1, 2)
    entries = torch.randperm(40)[: batch * tokens].view(batch, tokens)
    entries[1, ::2] = -1
    entry_bytes = -(-2 * heads * head_dim // 16) * 16 + 48
    expected, got = write_both([keys], entries, 16, entry_bytes, [32], [torch.bfloat16])
    assert torch.equal(got, expected)


def test_values_too_irregular_for_segments():
    values = torch.arange(2 * 3 * 4 * 5 * 6).view(4, 2, 6, 3, 5).permute(1, 3, 0, 4, 2)[..., ::2].int()
    expected, got = write_both([values], torch.arange(6).view(2, 3), 0, 256, [0], [torch.int32])
    assert torch.equal(got, expected)


def test_wide_rows_and_many_of_them():
    entries = torch.randperm(40)[:33]
    rows = [torch.randn(33, 4100).half(), torch.randn(33, 3).float()]
    layout = (0, 8224, [0, 8208])
    expected, got = write_both(rows, entries, *layout, [torch.float16, torch.float32])
    assert torch.equal(got, expected)
    for have, want in zip(*gather_both(expected, entries, *layout, [4100, 3], [torch.float16, torch.float32])):
        assert_same_bits(have, want)


@pytest.mark.parametrize("stored", [*FLOATS, *QUANTISED], ids=dtype_name)
@pytest.mark.parametrize("caller", [*FLOATS, torch.int8], ids=dtype_name)
def test_conversions(caller, stored):
    values = (torch.randn(5, 24) * 30).to(caller)
    entries = torch.tensor([3, 0, -1, 39, 7])
    expected, got = write_both([values], entries, 0, 96, [0], [stored])
    if stored in QUANTISED or caller == stored:
        assert torch.equal(got, expected)
    else:
        written = [each.view(stored).view(40, -1)[entries[entries >= 0], :24] for each in (got, expected)]
        assert_close(*written)
        width_bytes = 24 * stored.itemsize
        assert (got.view(40, 96)[:, width_bytes:] == 0xFF).all()
    if caller != torch.int8:
        (want,), (have,) = gather_both(expected, entries, 0, 96, [0], [24], [stored], caller)
        assert_close(have, want)


@pytest.mark.parametrize("stored", QUANTISED, ids=dtype_name)
@pytest.mark.parametrize("caller", FLOATS, ids=dtype_name)
@pytest.mark.parametrize("scale_shape", [(), (6,), (2, 1, 1), (2, 3, 1), (3, 1), (2, 3, 6)])
def test_scales(stored, caller, scale_shape):
    values = torch.randn(2, 3, 6).to(caller)
    scales = [torch.rand(scale_shape) / 16 + 0.02, None]
    entries = torch.tensor([[0, 3, 1], [6, 5, -1]])
    expected, got = write_both([values, values], entries, 0, 16, [0, 8], [stored, stored], scales)
    assert torch.equal(got, expected)
    arguments = (expected, entries, 0, 16, [0, 8], [6, 6], [stored, stored], caller, scales)
    for want, have in zip(*gather_both(*arguments), strict=True):
        assert_close(have, want)


def test_a_scale_for_each_block_of_numbers():
    values = torch.randn(3, 256)
    scales = [(torch.rand(3, 2) + 0.1).repeat_interleave(128, dim=1)]
    expected, got = write_both([values], torch.arange(3), 0, 256, [0], [torch.int8], scales)
    assert torch.equal(got, expected)


def test_a_missing_entry_gives_zeros_even_if_its_scale_is_nan():
    entries = torch.tensor([-1, -1])
    (got,) = kernels.gather_rows(
        nan_arena(64), entries, 0, 32, [0], [3], ["int8"], torch.bfloat16, [torch.tensor(float("nan"))]
    )
    assert got.dtype == torch.bfloat16 and got.tolist() == [[0.0] * 3] * 2


def test_entries_outside_the_arena_fail():
    arena = nan_arena(32 + 5 * 64)
    layout = (32, 64, [48], ["float32"], [None])
    kernels.write_rows(arena, [torch.ones(1, 4)], torch.tensor([4]), *layout)
    with pytest.raises(InterpreterError, match="outside the arena"):
        kernels.write_rows(arena, [torch.ones(2, 4)], torch.tensor([4, 5]), *layout)
    with pytest.raises(InterpreterError, match="outside the arena"):
        kernels.gather_rows(arena, torch.tensor([4, 5]), 32, 64, [48], [4], ["float32"], None, [None])


def test_what_has_no_kernel_goes_the_way_of_the_reference():
    values = torch.randn(2, 4, dtype=torch.float64)
    expected, got = write_both([values], torch.arange(2), 0, 32, [0], [torch.float32])
    assert torch.equal(got, expected)
    (want,), (have,) = gather_both(expected, torch.arange(2), 0, 32, [0], [4], [torch.float32], torch.int8)
    assert_same_bits(have, want)
    scale = torch.ones(2, 1)
    for source, target, given, saturates, supported in [
        (torch.float64, torch.float32, None, True, False),
        (torch.float32, torch.int8, None, False, False),
        (torch.float32, torch.int8, None, True, True),
        (torch.float64, torch.float64, None, False, True),
        (torch.float32, torch.int8, scale, True, True),
        (torch.float32, torch.int8, scale.double(), True, False),
        (torch.float32, torch.int8, scale.to("meta"), True, False),
    ]:
        assert is_supported(source, target, given, torch.device("cpu"), saturates=saturates) == supported


@triton.jit
def convert_kernel(source, target, n, FROM: tl.constexpr, TO: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(source + i, mask=i < n, other=0)
    tl.store(target + i, from_float32(to_float32(numbers, FROM, False), TO, False), mask=i < n)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=dtype_name)
def test_every_byte_is_the_number_that_torch_says(dtype):
    stored = torch.arange(256).to(torch.uint8)
    got = torch.empty(256)
    source = stored.view(torch.int8) if dtype == torch.int8 else stored
    convert_kernel[(1,)](source, got, 256, FROM=dtype_name(dtype), TO="float32", BLOCK=256)
    torch.testing.assert_close(got, stored.view(dtype).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", QUANTISED, ids=dtype_name)
def test_float32_becomes_the_nearest_number(dtype):
    """Every pattern of the upper half of a float32, once as it is, once past a tie and once short of one."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    bits = torch.cat([upper, upper + 1, upper + 0xFFFF, upper + 0x8000])
    values = (bits - (bits >> 31 << 32)).to(torch.int32).view(torch.float32)
    values = values[~values.isnan()]
    stored = torch.empty(len(values), dtype=torch.int8 if dtype == torch.int8 else torch.uint8)
    grid = -(-len(values) // 65536)
    convert_kernel[(grid,)](values, stored, len(values), FROM="float32", TO=dtype_name(dtype), BLOCK=65536)
    assert_same_bits(stored.view(dtype), reference.encode(values, dtype, None))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=dtype_name)
def test_nan_stays_nan(dtype):
    values, stored = torch.tensor([float("nan")] * 2), torch.empty(2, dtype=torch.uint8)
    convert_kernel[(1,)](values, stored, 2, FROM="float32", TO=dtype_name(dtype), BLOCK=2)
    assert stored.view(dtype).float().isnan().all()


@triton.jit
def offsets_kernel(entries, row, at_caller, in_arena, entries_per_batch, VECTORS: tl.constexpr, BLOCK: tl.constexpr):
    callers, arenas, _, _, _, _ = row_offsets(0, 2, entries_per_batch, entries, row, VECTORS, BLOCK)
    flat = tl.arange(0, BLOCK[0])[:, None] * BLOCK[1] + tl.arange(0, BLOCK[1])[None, :]
    tl.store(at_caller + flat, callers)
    tl.store(in_arena + flat, arenas)


def test_offsets_beyond_32_bits():
    """Those that the kernel would use, for an arena of terabytes and values far apart, none of which is touched."""
    values = torch.empty(64, dtype=torch.bfloat16).expand(2, 1, 64)
    entries = torch.tensor([[2**31], [2**20 + 1]])
    segments = segments_of(
        values, entries, None, torch.bfloat16, writes=True, first_bytes=2**33 + 16, entry_bytes=2**16
    )
    row = list(segments.arguments)
    row[5] = (2**40 // segments.vector, 0, 0)
    block = (segments.block_segments, segments.block_numbers)
    at_caller, in_arena = (torch.empty(block, dtype=torch.int64) for _ in range(2))
    vectors = (segments.vector, segments.stored_vector)
    offsets_kernel[(1,)](entries, tuple(row), at_caller, in_arena, 1, VECTORS=vectors, BLOCK=block)
    numbers = torch.arange(64)
    assert torch.equal(at_caller[:2], torch.stack([numbers, 2**40 + numbers]))
    assert torch.equal(in_arena[:2], (entries * 2**16 + 2**33 + 16) // 2 + numbers)


def test_rows_of_more_segments_than_can_be_counted_are_laid_out_anew(monkeypatch):
    values = torch.randn(2, 5, 3, 6).transpose(1, 2)
    entries = torch.tensor([[0, 3, 1], [6, 5, -1]])
    for most, num_heads in ((30, 5), (29, 1)):
        monkeypatch.setattr(segments, "_MOST_SEGMENTS", most)
        made = segments_of(values, entries, None, torch.float32, writes=True, first_bytes=0, entry_bytes=128)
        assert (made.num_heads, made.width) == (num_heads, 30 // num_heads)
        expected, got = write_both([values], entries, 0, 128, [0], [torch.float32])
        assert torch.equal(got, expected)


@pytest.mark.parametrize("shape", [(7, 1), (1, 7)])
def test_strides_of_one_row_or_one_token_have_no_part_in_what_is_compiled(shape):
    """Or else each number of tokens, and each model's way to lay out one, would be compiled for."""
    made = []
    for more in (0, 1, 9):
        values = torch.empty(*(size + more if size > 1 else 1 for size in shape), 512)
        scale = torch.empty(*values.shape[:2], 1)
        entries = torch.zeros(values.shape[:2], dtype=torch.int64)
        rows = segments_of(values, entries, scale, torch.int8, writes=True, first_bytes=0, entry_bytes=512)
        made.append(rows.arguments[2:])
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize(
    ("stored", "offset_bytes", "entry_bytes", "width", "vectors"),
    [
        (torch.bfloat16, 64, 4096, 128, (8, 8)),
        (torch.float8_e4m3fn, 64, 4096, 128, (8, 16)),
        (torch.bfloat16, 4, 4096, 128, (8, 2)),
        (torch.bfloat16, 64, 4104, 128, (8, 4)),
        (torch.float32, 16, 48, 7, (1, 1)),
        (torch.float32, 16, 48, 6, (2, 2)),
    ],
)
def test_what_lies_together_is_known(stored, offset_bytes, entry_bytes, width, vectors):
    values, entries = torch.zeros(4, width, dtype=torch.bfloat16), torch.arange(4)
    segments = segments_of(
        values, entries, None, stored, writes=True, first_bytes=offset_bytes, entry_bytes=entry_bytes
    )
    assert (segments.vector, segments.stored_vector) == vectors
    launch = plan_rows(MACHINE, nan_arena(16), entries, [segments], writes=True)
    assert launch.constants["VECTORS"] == (vectors,)
    assert launch.num_programs == segments.num_tiles(4) == 1
