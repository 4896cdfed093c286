"""What one request needs: against a walk over its tokens, and against running it alone to its end."""

from __future__ import annotations

import random

import numpy as np
import pytest
from arenas import BoundarySearch
from pools import layer
from scheduling import Loop, random_layers

from torch_uma.errors import OutOfMemory, PlanError
from torch_uma.layout import Chunk, Full, State, Window
from torch_uma.plan import SubPool, plan
from torch_uma.pool import CachePool
from torch_uma.scheduling import Scheduler
from torch_uma.scheduling.need import need_of

NUM_SITUATIONS = 150


def fullest_pages(subpool: SubPool, last: int) -> int:
    """The most pages of a row that goes up to `last` tokens one by one, counted one by one."""
    if subpool.is_state:
        return 1
    page_tokens, most, held = subpool.page_tokens, 0, set[int]()
    for length in range(1, last + 1):
        needed = subpool.lifetime.first_needed(length) // page_tokens
        held.add((length - 1) // page_tokens)  # a token's own step reads it
        most = max(most, len(held))
        held = {page for page in held if page >= needed}
    return most


@pytest.mark.parametrize("seed", range(4))
def test_a_need_is_the_fullest_moment_of_every_sub_pool(seed: int) -> None:
    print("seed", seed)
    rnd = random.Random(seed)
    for _ in range(NUM_SITUATIONS):
        made = plan(random_layers(rnd, chunks=True), memory=1 << 14, page_size=rnd.choice([1, 2, 3, 4, 7]))
        pool = CachePool(made, device="meta", max_sequences=1, max_tokens=256)
        num_tokens = rnd.choice([1, 2, 3, rnd.randint(2, 30), rnd.randint(2, 130)])
        need = need_of(pool.allocator, pool.sequences.lifespans, num_tokens)
        expected = {subpool.name: fullest_pages(subpool, max(1, num_tokens - 1)) for subpool in made.subpools}
        assert need.pages == expected, (made, num_tokens)
        assert need.bytes == {s.name: s.page_bytes * expected[s.name] for s in made.subpools}
        search = BoundarySearch(pool.allocator.room.grids, made.sink_bytes, made.arena_bytes)
        counts = list(expected.values())
        assert need.fits_empty == search.fits(counts, [None] * len(counts))


@pytest.mark.parametrize("seed", range(6))
def test_a_request_that_is_taken_comes_to_its_end_and_no_longer_one_would(seed: int) -> None:
    """The longest one runs alone, in pieces of every size and again from the start; one of a token more does not.

    A chunk and a window may be at their fullest at different moments, so with chunks a need may be a page too careful.
    """
    print("seed", seed)
    rnd = random.Random(seed)
    num_refused = 0
    for _ in range(NUM_SITUATIONS // 10):
        chunks = rnd.random() < 0.5
        layers = random_layers(rnd, chunks=chunks)
        made = plan(layers, memory=256 * rnd.randint(4, 12), page_size=rnd.choice([1, 2, 3, 4, 7]), num_tokens=0)
        pool = CachePool(made, device="meta", max_sequences=2, max_tokens=120)
        try:
            longest = Scheduler(pool).max_request_tokens
        except PlanError:
            continue
        for step_tokens in (1, rnd.choice([2, 3, 5, 17]), 300):
            scheduler = Scheduler(pool, step_tokens=step_tokens, max_running=1, chunked=rnd.choice([None, True]))
            num_prompt_tokens = rnd.randint(1, longest - 1)
            request = scheduler.submit(num_prompt_tokens, longest - num_prompt_tokens)
            loop = Loop(scheduler, is_checked=False)
            again_at = rnd.randint(1, longest)
            while scheduler:
                if request.num_new_tokens >= again_at and not request.num_retractions:
                    scheduler.abandon(scheduler.schedule())
                loop.round()
            assert request.num_new_tokens == longest - num_prompt_tokens
        if chunks or longest == 121:
            continue
        num_refused += 1
        # Once it was dropped before its last token, all of a text that is one longer is run again, token by token.
        with pytest.raises(OutOfMemory):
            sequence = pool.add(longest)
            for _ in range(longest):
                pool.begin([sequence], 1).commit()
    assert num_refused > 2


def test_a_need_holds_for_texts_of_any_length() -> None:
    made = plan([layer(Full()), layer(Window(100)), layer(Chunk(8192)), layer(State())], memory="4MiB", page_size=16)
    pool = CachePool(made, device="meta", max_tokens=1 << 17)
    needs = [need_of(pool.allocator, pool.sequences.lifespans, 1 << bits) for bits in range(40)]
    pages = np.array([list(need.pages.values()) for need in needs])
    assert (np.diff(pages, axis=0) >= 0).all()
    fits = [need.fits_empty for need in needs]
    assert fits == sorted(fits, reverse=True) and fits[10] and not fits[-1]
