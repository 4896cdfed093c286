"""For tests, ours and those of users: move pages about, poison the arena, see whether content follows its owner.

Owns nothing. Everything here works on a pool whose pages are in use, and leaves it consistent.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torch_uma.allocator import Allocator
from torch_uma.arena import Arena
from torch_uma.band import PageArray
from torch_uma.plan import SubPool
from torch_uma.pool import CachePool

_WAVES = 3
_NAN_BYTE = 0xFF  # a NaN in fp32, fp16, bf16 and fp8 alike


def scramble(pool: CachePool, seed: int) -> int:
    """Move pages of every sub-pool to random places, within the rules; returns how many. Pinned pages stay."""
    pool.guard.enter()
    random = np.random.default_rng(seed)
    allocator = pool.allocator
    num_moved = 0
    for _ in range(_WAVES):
        for k in random.permutation(len(pool.plan.subpools)).tolist():
            sources = random.permutation(_movable_pages(allocator, k))
            places = random.permutation(allocator.free_places(k))
            most = min(len(sources), len(places))
            count = int(random.integers(most, endpoint=True)) if most else 0
            allocator.move(k, sources[:count], places[:count])
            num_moved += count
    return num_moved


def poison(pool: CachePool | Arena, *, only_free: bool = False) -> None:
    """Fill the arena with NaN in every floating dtype; with `only_free`, only where no page is in use or leased."""
    if isinstance(pool, Arena) or not only_free:
        arena = pool if isinstance(pool, Arena) else pool.arena
        if only_free:
            raise ValueError("an arena does not know which bytes are free; give the pool")
        arena.bytes.fill_(_NAN_BYTE)
        return
    start_bytes = 0
    for used_start_bytes, used_end_bytes in _used_ranges(pool):
        pool.arena.bytes[start_bytes:used_start_bytes].fill_(_NAN_BYTE)
        start_bytes = used_end_bytes
    pool.arena.bytes[start_bytes:].fill_(_NAN_BYTE)


def stamp(pool: CachePool, pages: PageArray | None = None) -> None:
    """Fill pages (all live ones by default) with a pattern of their own, made from their virtual id."""
    ids = live_pages(pool) if pages is None else np.asarray(pages, np.int64)
    for subpool in pool.plan.subpools:
        own = ids[_belongs(pool, subpool, ids)]
        if len(own):
            places = torch.from_numpy(pool.allocator.v2p[own].astype(np.int64)).to(pool.device)
            pool.arena.pages(subpool).index_copy_(0, places, _patterns(own, subpool.page_bytes).to(pool.device))


def verify(pool: CachePool, pages: PageArray | None = None, *, stamped_as: PageArray | None = None) -> None:
    """Check that pages (all live ones by default) still hold what `stamp` gave them, wherever they have moved.

    `stamped_as` names the pages whose stamps they should hold, where one is a copy of another. Raises AssertionError
    with the first page that does not. Waits for the device.
    """
    ids = live_pages(pool) if pages is None else np.asarray(pages, np.int64)
    stamps = ids if stamped_as is None else np.asarray(stamped_as, np.int64)
    for subpool in pool.plan.subpools:
        chosen = _belongs(pool, subpool, ids)
        if not chosen.any():
            continue
        places = pool.allocator.v2p[ids[chosen]]
        found = pool.arena.pages(subpool)[torch.from_numpy(places.astype(np.int64)).to(pool.device)].cpu()
        wrong = (found != _patterns(stamps[chosen], subpool.page_bytes)).any(dim=1).nonzero()
        if len(wrong):
            at = int(wrong[0])
            raise AssertionError(
                f"page {int(ids[chosen][at])} of {subpool.name!r}, at place {int(places[at])}, does not hold the stamp "
                f"of page {int(stamps[chosen][at])}; {len(wrong)} pages of this sub-pool do not"
            )


def live_pages(pool: CachePool) -> PageArray:
    """[n] int64 virtual ids of every page that is live."""
    allocator = pool.allocator
    return np.concatenate([_live_ids(allocator, subpool) for subpool in pool.plan.subpools])


def _live_ids(allocator: Allocator, subpool: SubPool) -> PageArray:
    first = allocator.id_base[subpool.index] + subpool.first_page  # those before it are the sink's
    ids = np.arange(first, allocator.id_base[subpool.index + 1], dtype=np.int64)
    live: PageArray = ids[allocator.v2p[ids] >= 0]
    return live


def _movable_pages(allocator: Allocator, k: int) -> PageArray:
    places = allocator.v2p[_live_ids(allocator, allocator.plan.subpools[k])].astype(np.int64)
    return places[~np.isin(places + allocator.id_base[k], allocator.room.pinned_places(k))]


def _used_ranges(pool: CachePool) -> list[tuple[int, int]]:
    """The byte ranges that live and quarantined pages hold, ascending."""
    ranges = []
    tables = pool.allocator.tables
    for subpool in pool.plan.subpools:
        low, high = pool.allocator.id_base[subpool.index : subpool.index + 2]
        for page in np.flatnonzero(tables.occupied[low:high]).tolist():
            start_bytes = subpool.origin_bytes + page * subpool.page_bytes
            ranges.append((start_bytes, start_bytes + subpool.page_bytes))
    return sorted(ranges)


def _belongs(pool: CachePool, subpool: SubPool, ids: PageArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    low, high = pool.allocator.id_base[subpool.index : subpool.index + 2]
    return (low <= ids) & (ids < high)


def _patterns(ids: PageArray, page_bytes: int) -> Tensor:
    """[n, page_bytes] uint8: for each page its id, made into an unlikely number, again and again."""
    numbers = (ids + 1) * 0x9E3779B1 & 0x7FFFFFFF
    words = torch.from_numpy(numbers.astype(np.int32)).view(torch.uint8).view(-1, 4)
    return words.repeat(1, -(-page_bytes // 4))[:, :page_bytes]
