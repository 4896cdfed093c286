"""The copies of byte ranges: the loop in C, on any number of threads, does as the loop in Python."""

import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from torch_uma.ops import host_copy


@pytest.fixture(params=["native", "python"])
def loop(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(host_copy, "native", lambda: None)
    elif host_copy.native() is None:
        assert shutil.which("cc") is None, "there is a C compiler: `pip install -e .` should have built the loop"
        pytest.skip("the package was installed without a C compiler")
    return request.param


@pytest.fixture
def torch_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def scattered(num_ranges: int, largest: int, seed: int) -> tuple[torch.Tensor, np.ndarray, np.ndarray, np.ndarray]:
    """A memory of random bytes and ranges of it, none of which overlap, in random order."""
    chance = random.Random(seed)
    sizes = np.array([chance.randrange(largest + 1) for _ in range(num_ranges)], dtype=np.int64)
    spots = [(size, i, side) for i, size in enumerate(sizes) for side in (0, 1)]
    chance.shuffle(spots)
    starts = np.zeros((2, num_ranges), dtype=np.int64)
    end = 0
    for size, i, side in spots:
        starts[side, i] = end
        end += int(size) + chance.randrange(3)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (end + 1,), dtype=torch.uint8, generator=generator), starts[0], starts[1], sizes


@pytest.mark.parametrize("torch_threads", [1, 3], indirect=True)
@pytest.mark.parametrize(("num_ranges", "largest"), [(1, 0), (1, 5), (700, 7), (90, 100_000), (2, 3_000_000)])
def test_every_range_is_copied_and_nothing_else(loop, torch_threads, num_ranges, largest):
    memory, sources, destinations, sizes = scattered(num_ranges, largest, seed=num_ranges + largest)
    expected = memory.numpy().copy()
    for source, destination, size in zip(sources, destinations, sizes):
        expected[destination : destination + size] = expected[source : source + size]
    host_copy.copy_ranges(memory, sources, destinations, sizes)
    assert np.array_equal(memory.numpy(), expected)


@pytest.mark.parametrize("torch_threads", [4], indirect=True)
def test_where_no_thread_can_be_started_one_copies_all(loop, torch_threads, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    memory, sources, destinations, sizes = scattered(40, 400_000, seed=3)
    expected = memory.numpy().copy()
    for source, destination, size in zip(sources, destinations, sizes):
        expected[destination : destination + size] = expected[source : source + size]
    monkeypatch.setattr(host_copy, "_helpers", lambda *_: ThreadPoolExecutor(3))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    host_copy.copy_ranges(memory, sources, destinations, sizes)
    assert np.array_equal(memory.numpy(), expected)


def test_numbers_that_are_not_contiguous(loop):
    memory, sources, destinations, sizes = scattered(50, 300, seed=4)
    expected = memory.clone()
    host_copy.copy_ranges(expected, sources, destinations, sizes)
    spread = np.stack([sources, destinations, sizes], axis=1)
    host_copy.copy_ranges(memory, spread[:, 0], spread[:, 1], spread[:, 2])
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("torch_threads", [1, 3], indirect=True)
@pytest.mark.parametrize(("num_pages", "page_bytes"), [(1, 5), (60, 48), (40, 100_000)])
def test_pages_of_one_memory_go_into_another(loop, torch_threads, num_pages, page_bytes):
    generator = torch.Generator().manual_seed(num_pages)
    source = torch.randint(0, 256, (2 * num_pages, page_bytes), dtype=torch.uint8, generator=generator)
    chance = np.random.default_rng(num_pages)
    pages = chance.permutation(2 * num_pages)[:num_pages]
    for sources in (pages, np.sort(pages), np.arange(num_pages)):
        for destinations in (np.arange(num_pages) + num_pages // 2, np.sort(pages), chance.permutation(num_pages)):
            target = torch.zeros_like(source)
            expected = target.clone()
            expected[torch.from_numpy(destinations)] = source[torch.from_numpy(sources)]
            starts = (sources * page_bytes, destinations * page_bytes)
            host_copy.copy_pages(target.view(-1), *starts, page_bytes, source=source.view(-1))
            assert torch.equal(target, expected)
