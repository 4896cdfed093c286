"""The kernel of `relocate`, interpreted, against the reference, bit by bit; how work is cut; which kernel is whose."""

import inspect
import random

import pytest
import torch
from triton.runtime.errors import InterpreterError

from torch_uma.ops import reference, registration
from torch_uma.ops import triton as kernels
from torch_uma.ops.registration import REFERENCES
from torch_uma.ops.triton.copies import plan_relocate
from torch_uma.ops.triton.launch import Machine, block_of, num_programs

MACHINE = Machine(num_multiprocessors=132, converts_float8=True)


def random_arena(num_bytes):
    """Random bytes, NaN among them in every float dtype."""
    arena = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    arena[torch.rand(num_bytes) < 0.3] = 0xFF
    return arena


def check(arena, src, dst, origin_bytes, page_bytes):
    src, dst = torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64)
    expected = arena.clone()
    reference.relocate(expected, src, dst, origin_bytes, page_bytes)
    kernels.relocate(arena, src, dst, origin_bytes, page_bytes)
    assert torch.equal(arena, expected)


@pytest.mark.parametrize("origin_bytes", [0, 48])
@pytest.mark.parametrize("page_bytes", [1, 6, 16, 24, 48, 272, 4112, 20480, 65536, 100016])
def test_pages_of_many_sizes(page_bytes, origin_bytes):
    arena = random_arena(origin_bytes + 23 * page_bytes + 32)
    pages = random.Random(page_bytes).sample(range(23), 14)
    src, dst = pages[:7], pages[7:]
    src[2], dst[5] = -1, -1
    check(arena, src, dst, origin_bytes, page_bytes)


@pytest.mark.parametrize("page_bytes", [2**21 + 16, 5 * 2**20])
def test_one_large_page(page_bytes):
    check(random_arena(3 * page_bytes), [2], [0], 0, page_bytes)


def test_thousands_of_small_pages():
    pages = random.Random(0).sample(range(9000), 6000)
    pages[::7] = [-1] * len(pages[::7])
    check(random_arena(9000 * 32), pages[:3000], pages[3000:], 0, 32)


@pytest.mark.parametrize(("src", "dst"), [([], []), ([-1, -1], [3, -1]), ([2], [-1]), ([-1], [2])])
def test_nothing(src, dst):
    arena = random_arena(16 + 5 * 32)
    before = arena.clone()
    check(arena, src, dst, 16, 32)
    assert torch.equal(arena, before)


def test_an_arena_that_is_a_slice():
    whole = random_arena(1024)
    before = whole.clone()
    kernels.relocate(whole[64:960], torch.tensor([1]), torch.tensor([3]), 16, 48)
    before[64 + 16 + 3 * 48 :][:48] = before[64 + 16 + 48 :][:48]
    assert torch.equal(whole, before)


@pytest.mark.parametrize(("page_bytes", "num_pairs"), [(16, 1), (16, 10**6), (4112, 300), (50 * 2**20, 40), (6, 9)])
def test_every_word_of_a_wave_has_one_place_in_a_tile(page_bytes, num_pairs):
    pages = torch.zeros(num_pairs, dtype=torch.int64)
    launch = plan_relocate(MACHINE, torch.empty(0, dtype=torch.uint8), pages, pages, 0, page_bytes)
    constants = launch.constants
    word_bytes = constants["WORD"].primitive_bitwidth // 8
    assert word_bytes * constants["VECTOR_WORDS"] == (16 if page_bytes % 16 == 0 else 2)
    assert constants["PAIRS"] * constants["WORDS"] == 2048
    num_tiles = -(-num_pairs // constants["PAIRS"]) * -(-page_bytes // (word_bytes * constants["WORDS"]))
    assert launch.num_programs == min(num_tiles, 132 * 8)
    assert launch.arguments[3:] == (num_pairs, 0, 0, page_bytes // (word_bytes * constants["VECTOR_WORDS"]))


def test_blocks_waste_little():
    for size in range(1, 5000, 7):
        block = block_of(size, least=128, most=2048)
        assert block & (block - 1) == 0 and block <= 2048
        assert -(-size // block) * block < size + max(128, size) and (block >= 128 or size <= 128)
    assert [block_of(size, least=128, most=2048) for size in (1, 2, 3, 128, 514, 2048, 4096)] == [
        1, 2, 4, 128, 128, 2048, 2048,
    ]  # fmt: skip


def test_there_is_always_a_program():
    assert [num_programs(MACHINE, num_tiles) for num_tiles in (0, 1, 500, 10**7)] == [1, 1, 500, 1056]


@pytest.mark.parametrize(("src", "dst"), [([5], [2]), ([2], [5]), ([9], [8]), ([0, 1, 5], [2, 3, 4])])
def test_pages_outside_the_arena_fail(src, dst):
    with pytest.raises(InterpreterError, match="outside the arena"):
        kernels.relocate(random_arena(16 + 5 * 32 + 16), torch.tensor(src), torch.tensor(dst), 16, 32)


@pytest.mark.parametrize("name", REFERENCES)
def test_each_op_has_a_kernel_that_takes_what_its_reference_takes(name):
    kernel = getattr(kernels, name)
    assert registration._on_cuda(name) is kernel
    assert list(inspect.signature(kernel).parameters) == list(inspect.signature(REFERENCES[name]).parameters)


def test_without_triton_the_reference_runs(monkeypatch):
    monkeypatch.setattr(registration.importlib.util, "find_spec", lambda name: None)
    assert registration._on_cuda.__wrapped__("relocate") is reference.relocate


def test_what_runs_on_cuda_is_the_kernel():
    arena = random_arena(320)
    expected = arena.clone()
    arguments = (torch.tensor([1]), torch.tensor([7]), 0, 32)
    registration._launch("relocate", arena, *arguments)
    reference.relocate(expected, *arguments)
    assert torch.equal(arena, expected)
