"""The kernels of tables, of the stack and of `page_index`, interpreted, against the references."""

import random

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from torch_uma.ops import triton as kernels
from torch_uma.ops.registration import REFERENCES
from torch_uma.ops.triton.addresses import place


def run_both(name, *arguments):
    """What the reference and the kernel give, with the arguments as each leaves them."""

    def copies():
        return [each.clone() if isinstance(each, torch.Tensor) else each for each in arguments]

    expected, got = copies(), copies()
    results = REFERENCES[name](*expected), getattr(kernels, name)(*got)
    for want, have in zip(expected, got, strict=True):
        assert torch.equal(have, want) if isinstance(want, torch.Tensor) else have == want
    return results


def random_table(generator, num_rows, columns, num_ids):
    cells = [[generator.randrange(-1, num_ids) for _ in range(columns)] for _ in range(num_rows)]
    return torch.tensor(cells, dtype=torch.int32)


def random_v2p(generator, num_ids):
    return torch.tensor([generator.choice([-1, *range(1, 90)]) for _ in range(num_ids)], dtype=torch.int32)


@pytest.mark.parametrize("num_cells", [0, 1, 511, 1300])
def test_remap(num_cells):
    generator = random.Random(num_cells)
    index = torch.tensor(generator.sample(range(2000), num_cells), dtype=torch.int64)
    index[::3] = -1
    run_both("remap", torch.arange(2000, dtype=torch.int32), index, torch.arange(num_cells, dtype=torch.int32) - 7)


def test_remap_of_a_table_with_a_stride():
    table = torch.zeros(12, dtype=torch.int32)
    kernels.remap(table[::3], torch.tensor([2, -1, 0]), torch.tensor([5, 6, 7], dtype=torch.int32))
    assert table.tolist() == [7, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("num_positions", [0, 1, 50, 700])
@pytest.mark.parametrize(("page_size", "tokens_per_entry"), [(1, 1), (3, 1), (16, 1), (2, 4), (1, 128)])
def test_locate(page_size, tokens_per_entry, num_positions):
    generator = random.Random(3)
    table, v2p = random_table(generator, 5, 6, 40), random_v2p(generator, 40)
    most = 8 * page_size * tokens_per_entry
    positions = torch.tensor([[generator.randrange(-5, most) for _ in range(num_positions)] for _ in range(4)])
    arguments = (torch.tensor([4, 0, -1, 2]), positions.long().view(4, -1), page_size, tokens_per_entry)
    for given in (table, table.t().contiguous().t()):
        expected, got = run_both("locate", given, v2p, *arguments)
        assert got.dtype == torch.int64 and torch.equal(got, expected)


@pytest.mark.parametrize("num_rows", [0, 1, 5, 1023, 2500])
@pytest.mark.parametrize("padding", ["none", "some", "all"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_allocate_and_release(num_rows, padding, dtype):
    generator = random.Random(num_rows)
    columns, page_tokens = 4, 3
    table = torch.full((num_rows + 3, columns), -1, dtype=torch.int32)
    rows = torch.tensor(generator.sample(range(num_rows + 3), num_rows), dtype=dtype)
    if padding != "none":
        rows[:: 2 if padding == "some" else 1] = -1
    lengths = torch.tensor([generator.randrange(columns * page_tokens) for _ in range(num_rows)], dtype=dtype)
    stack = torch.tensor(generator.sample(range(9000), num_rows + 9), dtype=torch.int32)
    taken = torch.tensor([4], dtype=dtype)
    run_both("allocate", table, taken, stack, rows, lengths, page_tokens)
    before = [each.clone() for each in (table, taken, stack)]
    kernels.allocate(table, taken, stack, rows, lengths, page_tokens)
    shorter = torch.where(torch.arange(num_rows) % 5 == 0, lengths + 1, lengths)  # some rows keep the new page
    run_both("release", table, taken, stack, rows, lengths + 1, shorter, page_tokens)
    kernels.release(table, taken, stack, rows, lengths + 1, lengths, page_tokens)
    assert all(torch.equal(*pair) for pair in zip(before, (table, taken, stack), strict=True))


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "columns", "page_size", "capacity"), [(1, 1, 1, 1), (37, 9, 16, 400), (3, 2100, 1, 9000)]
)
def test_page_index(num_rows, columns, page_size, capacity, windowed):
    generator = random.Random(num_rows)
    table, v2p = random_table(generator, num_rows, columns, 50), random_v2p(generator, 50)
    rows = torch.tensor([generator.choice([row, row, -1]) for row in range(num_rows)])
    lengths = torch.tensor([generator.randrange(columns * page_size + 1) for _ in rows], dtype=torch.int32)
    first_pages = torch.tensor([generator.randrange(3) for _ in rows]) if windowed else None
    for room in (capacity, 5, 0):
        expected, got = run_both("page_index", table, v2p, rows, lengths, page_size, room, first_pages)
        assert all(
            have.dtype == want.dtype and torch.equal(have, want) for have, want in zip(got, expected, strict=True)
        )


def test_page_index_of_more_rows_than_a_block():
    num_rows = 260
    table = torch.arange(num_rows * 2, dtype=torch.int32).view(num_rows, 2)
    lengths = torch.arange(num_rows) % 9
    expected, got = run_both("page_index", table, table.flatten(), torch.arange(num_rows), lengths, 4, 700)
    assert all(torch.equal(have, want) for have, want in zip(got, expected, strict=True))


@pytest.mark.parametrize("rows", [[], [-1, -1]])
def test_page_index_of_padding_alone(rows):
    index = torch.tensor(rows, dtype=torch.int64)
    table = torch.full((2, 3), 5, dtype=torch.int32)
    indptr, indices, last = kernels.page_index(table, torch.arange(6).int(), index, torch.full_like(index, 40), 16, 4)
    assert indptr.tolist() == list(range(len(rows) + 1))
    assert (indices.tolist(), last.tolist()) == ([0] * 4, [1] * len(rows))


def test_what_lies_outside_a_table_fails():
    table = torch.zeros(3, 2, dtype=torch.int32)
    v2p, one, stack = torch.arange(5).int(), torch.tensor([1]), torch.tensor([3, 4], dtype=torch.int32)
    taken = torch.tensor([0])
    for match, name, arguments in [
        ("outside the table", "remap", (v2p, torch.tensor([5]), one.int())),
        ("outside the page table", "locate", (table, v2p, torch.tensor([3]), one[:, None], 4, 1)),
        ("outside v2p", "locate", (table + 5, v2p, one, one[:, None], 4, 1)),
        ("outside v2p", "page_index", (table + 5, v2p, one, one, 4, 9)),
        ("no such cell", "page_index", (table, v2p, one, one + 8, 4, 9)),
        ("no such cell", "page_index", (table, v2p, one + 2, one, 4, 9)),
        ("outside the page table", "allocate", (table, taken, stack, one, torch.tensor([8]), 4)),
        ("outside the page table", "allocate", (table, taken, stack, one + 2, torch.tensor([4]), 4)),
        ("too few", "allocate", (table, taken + 2, stack, one, torch.tensor([4]), 4)),
        ("none was taken", "release", (table, taken, stack, one, torch.tensor([5]), torch.tensor([4]), 4)),
        ("outside the page table", "release", (table, taken + 1, stack, one, torch.tensor([9]), torch.tensor([8]), 4)),
    ]:
        with pytest.raises(InterpreterError, match=match):
            getattr(kernels, name)(*arguments)


@triton.jit
def places_kernel(index, places, first, stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(places + i, place(tl.load(index + i), first, stride))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("first", "stride"), [(0, 1), (2**31 + 5, 2**22), (48, 2**31 - 1), (2**40, 2**31)])
def test_places_beyond_32_bits(first, stride, dtype):
    index = torch.tensor([0, 1, 2**20, 2**31 - 1], dtype=dtype)
    places = torch.empty(4, dtype=torch.int64)
    places_kernel[(1,)](index, places, first, stride, BLOCK=4)
    assert places.tolist() == [first + i * stride for i in index.tolist()]
