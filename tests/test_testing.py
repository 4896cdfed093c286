"""The tools for tests: that they do what they say, and see what they should see."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pools import Content, advance, make_pool

from torch_uma.pool import CachePool
from torch_uma.testing import live_pages, poison, scramble, stamp, verify


def busy_pool(kinds: str = "every") -> CachePool:
    pool = make_pool(kinds)
    sequences = [pool.add() for _ in range(4)]
    pool.begin(sequences, 13).commit()
    sequences.pop(1).free()
    pool.begin(sequences, 4).commit()
    return pool


def test_live_pages_are_those_of_the_sequences() -> None:
    pool = busy_pool()
    rows = np.flatnonzero(pool.sequences.live)
    assert sorted(live_pages(pool).tolist()) == pool.sequences.pages_of(rows).tolist()


def test_scramble_moves_pages_and_their_content() -> None:
    pool = busy_pool()
    stamp(pool)
    places = pool.allocator.v2p[live_pages(pool)]
    version = pool.allocator.layout_version
    assert scramble(pool, 5) > 0
    assert pool.allocator.layout_version > version
    moved = pool.allocator.v2p[live_pages(pool)] != places
    base = np.array(pool.allocator.id_base)
    kinds = np.searchsorted(base, live_pages(pool), side="right") - 1
    assert set(kinds[moved].tolist()) == set(range(6)), "every sub-pool was scrambled"
    pool.check()
    verify(pool)


def test_scramble_is_the_same_for_the_same_seed() -> None:
    places = []
    for seed in (1, 1, 2):
        pool = busy_pool()
        scramble(pool, seed)
        places.append(pool.allocator.v2p[live_pages(pool)].tolist())
    assert places[0] == places[1] != places[2]


def test_scramble_leaves_leased_pages_where_they_are() -> None:
    pool = busy_pool()
    leased = live_pages(pool)[::3]
    lease = pool.lease(leased, "test")
    places = pool.allocator.v2p[leased].tolist()
    scramble(pool, 0)
    assert pool.allocator.v2p[leased].tolist() == places
    lease.close()
    pool.check()


def test_scramble_of_an_empty_pool_moves_nothing() -> None:
    assert scramble(make_pool(), 0) == 0


def test_verify_finds_the_page_that_was_overwritten() -> None:
    pool = busy_pool("hybrid")
    stamp(pool)
    verify(pool)
    victim = live_pages(pool)[-2]
    full = pool.plan.subpools[-1]
    pool.arena.bytes[full.origin_bytes + int(pool.allocator.v2p[victim]) * full.page_bytes + full.page_bytes - 1] += 1
    with pytest.raises(AssertionError, match=f"page {victim} of 'full'"):
        verify(pool)
    verify(pool, live_pages(pool)[:-2])


def test_stamps_differ_and_can_be_those_of_another_page() -> None:
    pool = busy_pool("full")
    first, second = live_pages(pool)[:2]
    stamp(pool)
    with pytest.raises(AssertionError, match=f"stamp of page {second}"):
        verify(pool, np.array([first]), stamped_as=np.array([second]))
    pool.arena.relocate(0, pool.allocator.v2p[[first]], pool.allocator.v2p[[second]])
    verify(pool, np.array([second]), stamped_as=np.array([first]))


def test_poison_is_nan_in_every_dtype() -> None:
    pool = make_pool()
    poison(pool.arena)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        assert pool.arena.bytes.view(dtype).float().isnan().all(), dtype


def test_poison_can_spare_what_is_in_use() -> None:
    pool = make_pool("every")
    content = Content(pool)
    sequences = [pool.add(), pool.add()]
    for sequence in sequences:
        content.add(sequence)
    advance(content, sequences, 9)
    gone = pool.add(5)
    lease = pool.lease(gone, "a reader")
    stamp(pool, np.concatenate(gone.pages))
    leased = [pool.allocator.v2p[ids].copy() for ids in gone.pages]
    held = [
        pool.arena.bytes[s.origin_bytes + int(page) * s.page_bytes :][: s.page_bytes].clone()
        for s, pages in zip(pool.plan.subpools, leased, strict=True)
        for page in pages
    ]
    gone.free()
    poison(pool, only_free=True)
    content.verify()
    after = [
        pool.arena.bytes[s.origin_bytes + int(page) * s.page_bytes :][: s.page_bytes]
        for s, pages in zip(pool.plan.subpools, leased, strict=True)
        for page in pages
    ]
    assert all(torch.equal(a, b) for a, b in zip(held, after, strict=True)), "what is leased is still being read"
    stats = pool.stats()
    assert (pool.arena.bytes == 0xFF).sum() >= stats.gap_bytes + stats.hole_bytes + stats.sink_bytes
    lease.close()
    with pytest.raises(ValueError, match="give the pool"):
        poison(pool.arena, only_free=True)
