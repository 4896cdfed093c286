"""Sequences out of the arena: what they need to go on, copied to host memory, and made anew from there.

Owns the host memory and its order with the arena's stream. Pages go in parts of `_PART_BYTES`, with one gather and one
copy each: that bounds what is gathered on the device, and what is lost as torch gives out pinned memory in powers of
two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_uma.arena import host_memory
from torch_uma.content import Pages, content_of, copy_pages, made_for_content, read_pages, write_pages
from torch_uma.errors import SequenceError
from torch_uma.sequence import Sequence

if TYPE_CHECKING:
    from torch_uma.pool import CachePool

_PART_BYTES = 64 << 20


class Offloaded:
    """The content of a sequence in host memory: made by `pool.offload()`, used up by `pool.restore()`.

    Its memory goes with it, so who does not want the sequence back just drops it, at any time; pinned memory stays with
    torch, for the next one. It keeps no pool alive.

    Attributes:
        num_tokens: tokens of the sequence.
        demand: pages by sub-pool that restoring it takes, `plan.demand(num_tokens)`.
        num_bytes: bytes of the pages that were copied; on the meta device, that would have been.
    """

    __slots__ = ("_copied", "_form", "_parts", "demand", "num_bytes", "num_tokens")

    def __init__(self, pool: CachePool, num_tokens: int, parts: list[Tensor]) -> None:
        stream = pool.guard.epochs.stream
        self.num_tokens = num_tokens
        self.demand = pool.plan.demand(num_tokens)
        self.num_bytes = pool.plan.bytes_per_sequence(num_tokens) if num_tokens else 0
        self._parts: list[Tensor] | None = parts
        self._copied = None if stream is None else stream.record_event()
        self._form = _form_of(pool)

    def __repr__(self) -> str:
        state = f"{self.num_bytes:,} bytes" if self._parts is not None else "restored"
        return f"Offloaded({self.num_tokens:,} tokens, {state})"


def offload(sequence: Sequence) -> Offloaded:
    """What `pool.offload` does, but that the sequence stays as it is."""
    pool, num_tokens = sequence.pool, sequence.length
    with pool.guard.epochs.on_stream():
        parts = [_to_host(pages) for pages in _parts_of(content_of([sequence], num_tokens))]
        return Offloaded(pool, num_tokens, parts)


def restore(offloaded: Offloaded, pool: CachePool) -> Sequence:
    """What `pool.restore` does."""
    parts = _usable_parts(offloaded, pool)
    with made_for_content(pool, 1, offloaded.num_tokens) as made:
        if offloaded._copied is not None:  # it may be another pool's stream
            torch.cuda.current_stream(pool.device).wait_event(offloaded._copied)
        for pages, part in zip(_parts_of(content_of(made, offloaded.num_tokens)), parts, strict=True):
            _to_device(part, pages)
    offloaded._parts = None
    return made[0]


def _usable_parts(offloaded: Offloaded, pool: CachePool) -> list[Tensor]:
    if not isinstance(offloaded, Offloaded):
        raise SequenceError(f"{offloaded!r} is nothing to restore; offload() of a pool makes it of a sequence")
    if offloaded._parts is None:
        raise SequenceError(f"{offloaded!r} was restored before; offload() the sequence that this gave to do it again")
    if offloaded._form != _form_of(pool):
        raise SequenceError(
            f"{offloaded!r} comes from a pool of other layers, of another page size or on another kind of device than "
            f"{pool!r}; restore it where it was, or in a pool that is alike in these"
        )
    return offloaded._parts


def _form_of(pool: CachePool) -> tuple[object, ...]:
    """Equal for pools that can take each other's pages."""
    pages = [(each.lifetime, each.tokens_per_entry, each.page_size, each.layout) for each in pool.plan.subpools]
    return (pool.device.type, *pages)


def _parts_of(content: Iterable[Pages]) -> Iterator[Pages]:
    for grid, places in content:
        if len(places):
            for part in places.split(max(1, _PART_BYTES // grid.shape[1])):
                yield Pages(grid, part)


def _to_host(pages: Pages) -> Tensor:
    """A copy of pages in host memory, uint8 [n, page_bytes]; enqueued, and there for what follows on the stream."""
    grid, places = pages
    num_pages, page_bytes = len(places), grid.shape[1]
    if grid.device.type == "cpu":
        host = host_memory(num_pages * page_bytes).view(num_pages, page_bytes)
        copy_pages(pages, Pages(host, torch.arange(num_pages)))
    else:
        # torch does not give out pinned memory again before the copies from and to it have passed.
        host = torch.empty(num_pages, page_bytes, dtype=torch.uint8, pin_memory=grid.is_cuda)
        host.view(torch.int64).copy_(read_pages(pages), non_blocking=grid.is_cuda)
    return host


def _to_device(host: Tensor, pages: Pages) -> None:
    """Copy what `_to_host` gave into pages."""
    if pages.grid.device.type == "cpu":
        copy_pages(Pages(host, torch.arange(len(host))), pages)
    else:
        write_pages(host.view(torch.int64).to(pages.grid.device, non_blocking=pages.grid.is_cuda), pages)
