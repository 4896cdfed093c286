"""Copies of many byte ranges within tensors on the host, as fast as its memory allows.

Owns the choice between the loop in C, which runs on torch's number of threads, and the one in Python, which needs no
compiler when the package is installed and has one thread, as it holds Python's lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torch_uma.ops.native import native

Bytes = NDArray[np.int64]

# Fewer bytes than this are copied before another thread has started.
_BYTES_FOR_A_THREAD = 2**20

# What a thread takes of the ranges at a time.
_BYTES_AT_ONCE = 2**18


def copy_pages(memory: Tensor, sources: Bytes, destinations: Bytes, page_bytes: int, *, source: Tensor) -> None:
    """`copy_ranges` of `page_bytes` each, where those that follow one another on both sides go as one.

    `source` is `memory`, or a tensor that does not overlap it.
    """
    bounds = np.ones(len(sources) + 1, np.bool_)  # of what goes as one; the end is the last of them
    np.not_equal(sources[1:] - sources[:-1], page_bytes, out=bounds[1:-1])
    bounds[1:-1] |= destinations[1:] - destinations[:-1] != page_bytes
    edges = np.flatnonzero(bounds)
    starts = edges[:-1]
    copy_ranges(memory, sources[starts], destinations[starts], (edges[1:] - starts) * page_bytes, source=source)


def copy_ranges(
    memory: Tensor, sources: Bytes, destinations: Bytes, sizes: Bytes, *, source: Tensor | None = None
) -> None:
    """Copy `sizes[i]` bytes from byte `sources[i]` of `source`, by default `memory`, to byte `destinations[i]` there.

    Both are uint8, contiguous and on the host; all ranges lie inside them and no two overlap.
    """
    source = memory if source is None else source
    num_bytes = int(sizes.sum())
    library = native()
    if library is None or num_bytes == 0:
        _copy_in_python(memory, source, sources, destinations, sizes)
        return
    sources = sources + (source.data_ptr() - memory.data_ptr())
    num_threads = min(torch.get_num_threads(), 1 + num_bytes // _BYTES_FOR_A_THREAD)
    num_at_once = 1 + len(sizes) * _BYTES_AT_ONCE // num_bytes
    next_range = ctypes.c_int64(0)
    numbers = [np.ascontiguousarray(each, dtype=np.int64) for each in (sources, destinations, sizes)]
    pointers = [ctypes.c_void_p(each.ctypes.data) for each in numbers]
    share = (
        *(ctypes.c_void_p(memory.data_ptr()), *pointers),
        *(ctypes.c_int64(len(sizes)), ctypes.c_int64(num_at_once), ctypes.byref(next_range)),
    )
    others: list[Future[None]] = []
    try:
        with contextlib.suppress(RuntimeError):  # no more threads to be had: this one copies what they would
            for _ in range(num_threads - 1):
                others.append(_helpers(os.getpid(), num_threads - 1).submit(library.torch_uma_copy_ranges, *share))
        library.torch_uma_copy_ranges(*share)
    finally:
        wait(others)


@functools.cache
def _helpers(process: int, num_threads: int) -> ThreadPoolExecutor:
    """Threads that copy beside the caller's; a forked process has none of its parent's, so it makes its own."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="torch_uma_copy")


def _copy_in_python(memory: Tensor, source: Tensor, sources: Bytes, destinations: Bytes, sizes: Bytes) -> None:
    """A memoryview has a tenth of the cost per copy that a tensor has."""
    data, source_data = memory.numpy().data, source.numpy().data
    for start, destination, size in zip(sources.tolist(), destinations.tolist(), sizes.tolist(), strict=True):
        data[destination : destination + size] = source_data[start : start + size]
