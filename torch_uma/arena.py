"""The one tensor that holds every kind of memory, and typed views of it. It knows places, not who uses them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import torch_uma.ops  # noqa: F401  (registers the ops)
from torch_uma.errors import PlanError
from torch_uma.layout import ALIGNMENT_BYTES
from torch_uma.plan import Plan, SubPool

_PAGE_BYTES = 4096  # of the machine's memory


class Arena:
    """The bytes of a plan, `bytes`: uint8 `[plan.arena_bytes]`, allocated once and at the same address for ever.

    The bytes are not cleared. `out` is memory to use instead of an allocation: uint8, one-dimensional, contiguous, at
    least `plan.arena_bytes` long; PlanError if it is not. Does not synchronise.
    """

    def __init__(self, plan: Plan, *, device: torch.device | str | None = None, out: Tensor | None = None) -> None:
        self.plan = plan
        if out is None:
            # A tensor that is made in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                try:
                    out = _allocate(plan.arena_bytes, device)
                except (RuntimeError, MemoryError) as error:
                    raise PlanError(
                        f"an arena of {plan.arena_bytes:,} bytes could not be allocated on "
                        f"{device or 'the default device'}; give less memory ({error})"
                    ) from error
        self.bytes = keep_address(_checked(out, plan.arena_bytes, device))
        self._typed: dict[torch.dtype, Tensor] = {}

    def view(self, subpool: SubPool, layer: int, name: str) -> Tensor:
        """The row `name` of `layer` in every entry of the grid: `[num_pages, page_size, *shape]` of the row's dtype.

        The view is the arena's memory, never a copy, and stays right when pages move; of the pages before
        `subpool.first_page`, only page 0 of an attention grid, in the sink, may be written. KeyError if `layer` stores
        no such row there.
        """
        placed = subpool.row(layer, name)
        shape, size_bytes = placed.row.shape, placed.row.dtype.itemsize
        dense = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
        typed = self._as(placed.row.dtype)
        return typed.as_strided(
            (subpool.num_pages, subpool.page_size, *shape),
            (subpool.page_bytes // size_bytes, subpool.entry_bytes // size_bytes, *dense),
            typed.storage_offset() + (subpool.origin_bytes + placed.offset_bytes) // size_bytes,
        )

    def pages(self, subpool: SubPool) -> Tensor:
        """The bytes of the whole grid, whatever they hold: uint8 `[num_pages, page_bytes]`, a view of the arena."""
        grid = self.bytes[subpool.origin_bytes :][: subpool.num_pages * subpool.page_bytes]
        return grid.view(subpool.num_pages, subpool.page_bytes)

    def relocate(self, subpool: int, src_pages: NDArray[Any], dst_pages: NDArray[Any]) -> None:
        """Copy physical pages `src_pages[i]` of the sub-pool of this index over `dst_pages[i]`; no page is in both.

        Writes the arena on the current stream, in one launch, and does not wait for it.
        """
        moved = self.plan.subpools[subpool]
        pages = np.stack([src_pages, dst_pages]).astype(np.int64, copy=False)
        src, dst = staged(pages, self.bytes.device)
        torch.ops.torch_uma.relocate(self.bytes, src, dst, moved.origin_bytes, moved.page_bytes)

    def mover(self) -> Callable[[int, NDArray[Any], NDArray[Any]], None] | None:
        """`relocate` on the stream that is current now, for an allocator; None on the meta device, which has no bytes.

        It does not keep the arena alive.
        """
        device = self.bytes.device
        if device.type == "meta":
            return None
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        relocate_of = weakref.WeakMethod(self.relocate)

        def move(subpool: int, src_pages: NDArray[Any], dst_pages: NDArray[Any]) -> None:
            relocate = relocate_of()
            assert relocate is not None
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                relocate(subpool, src_pages, dst_pages)

        return move

    def _as(self, dtype: torch.dtype) -> Tensor:
        """All bytes as `dtype`, with a storage of its own over the same memory.

        Compiled code refuses to read a view of a tensor that an op writes, if their dtypes differ; it cannot tell that
        two storages are one memory, and the bytes of two rows never overlap.
        """
        if dtype not in self._typed:
            with torch.inference_mode(False):  # as for the bytes themselves
                typed = self.bytes.view(dtype)
                self._typed[dtype] = typed if typed.is_meta else torch.utils.dlpack.from_dlpack(typed)
        return self._typed[dtype]


def keep_address(tensor: Tensor) -> Tensor:
    """Tell whoever captures CUDA graphs that this tensor stays where it is; returns it.

    Before a replay it is not copied, and a graph may change it. Nothing is guarded: another address is captured anew.
    """
    if tensor.is_cuda:
        torch._dynamo.mark_static_address(tensor)
    return tensor


def staged(numbers: NDArray[np.integer], device: torch.device) -> Tensor:
    """Numbers of the host on a device; does not wait for it, as a copy from memory that is not pinned would."""
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def host_memory(num_bytes: int) -> Tensor:
    """uint8 `[num_bytes]` on the host, from numpy, which asks Linux for huge pages: attention reads entries far apart.

    Begins where a page of the machine's memory does; not cleared.
    """
    memory = np.empty(num_bytes + _PAGE_BYTES, np.uint8)
    first = -memory.ctypes.data % _PAGE_BYTES
    return torch.from_numpy(memory[first : first + num_bytes])


def _allocate(num_bytes: int, device: torch.device | str | None) -> Tensor:
    """uint8 `[num_bytes]`."""
    wanted = torch.get_default_device() if device is None else torch.device(device)
    return host_memory(num_bytes) if wanted.type == "cpu" else torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _checked(out: Tensor, arena_bytes: int, device: torch.device | str | None) -> Tensor:
    if out.dtype != torch.uint8 or out.dim() != 1 or not out.is_contiguous():
        raise PlanError(
            f"an arena is one contiguous row of uint8, but out is {out.dtype} of shape {tuple(out.shape)} and strides "
            f"{out.stride()}; pass out.view(torch.uint8).flatten()"
        )
    if len(out) < arena_bytes:
        raise PlanError(f"the plan needs {arena_bytes} bytes, but out has {len(out)}; plan for as many as there are")
    if device is not None and torch.empty(0, device=device).device != out.device:
        raise PlanError(f"out is on {out.device}, but device={device!r} was asked for; leave one of them out")
    if not out.is_meta and out.data_ptr() % ALIGNMENT_BYTES:
        raise PlanError(
            f"rows are aligned to {ALIGNMENT_BYTES} bytes, but out starts at address {out.data_ptr():#x}; "
            "allocate it whole instead of slicing it"
        )
    return out[:arena_bytes]
