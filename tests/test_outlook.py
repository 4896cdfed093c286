"""How many pages requests will hold: against walking the steps through a pool that has room for them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from scheduling import random_layers

from torch_uma.plan import plan
from torch_uma.pool import CachePool
from torch_uma.scheduling.outlook import Outlook
from torch_uma.sequence import Sequence
from torch_uma.tables import Int64Array

STEPS = (1, 2, 3, 4, 11)


def pool_of(rnd: random.Random) -> CachePool:
    made = plan(random_layers(rnd, chunks=True), memory=1 << 16, page_size=rnd.choice([1, 2, 3, 4, 7]))
    return CachePool(made, device="meta", max_sequences=12, max_tokens=256)


def outlook_of(pool: CachePool) -> Outlook:
    return Outlook(pool.plan, pool.sequences.lifespans, STEPS)


def held(pool: CachePool) -> Int64Array:
    return np.array([band.num_held for band in pool.allocator.bands], np.int64)


def walk(pool: CachePool, sequences: list[Sequence], num_new_tokens: int) -> Int64Array:
    """Take a step; what is held at its fullest."""
    step = pool.begin(sequences, num_new_tokens)
    most = held(pool)
    step.commit()
    return most


def grown(pool: CachePool, rnd: random.Random, *, room: int = 0) -> Sequence:
    """A sequence of some length, that came to it in steps of every size."""
    sequence = pool.add(room)
    for _ in range(rnd.randint(0, 4)):
        pool.begin([sequence], rnd.choice([1, 1, 2, 5, 13])).commit()
    if not sequence.length:
        pool.begin([sequence], 1).commit()
    return sequence


def entangle(pool: CachePool, sequences: list[Sequence], rnd: random.Random) -> list[Any]:
    """Forks of some, leases on some: what others do with a request's sequence."""
    others: list[Any] = []
    for sequence in sequences:
        if rnd.random() < 0.3:
            others.append(sequence.fork())
        if rnd.random() < 0.3 and any(sequence.num_pages):
            others.append(pool.lease(sequence, "a test"))
    return others


@pytest.mark.parametrize("entangled", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_who_decodes_holds_what_was_said(seed: int, entangled: bool) -> None:
    print("seed", seed)
    rnd = random.Random(seed)
    for _ in range(60):
        pool = pool_of(rnd)
        sequences = [grown(pool, rnd) for _ in range(rnd.randint(1, 4))]
        others = entangle(pool, sequences, rnd) if entangled else []
        rows = np.array([sequence.row for sequence in sequences])
        shares = outlook_of(pool).decoding(pool.sequences, rows, np.full(len(rows), 1 << 20))
        assert shares.shape == (1 + len(STEPS), len(pool.plan.subpools), len(rows)) and not shares[0].any()
        ending = outlook_of(pool).decoding(pool.sequences, rows, np.full(len(rows), 2))
        assert (ending[:3] == shares[:3]).all() and (ending[3:] == shares[2]).all()
        now = held(pool)
        for step in range(1, STEPS[-1] + 1):
            most = walk(pool, sequences, 1)
            if step in STEPS:
                assert (now + shares[1 + STEPS.index(step)].sum(axis=1)).tolist() == most.tolist(), (pool.plan, step)
        del others


@pytest.mark.parametrize("entangled", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_who_runs_a_prompt_holds_what_was_said(seed: int, entangled: bool) -> None:
    print("seed", seed)
    rnd = random.Random(seed)
    for _ in range(100):
        pool = pool_of(rnd)
        room = rnd.choice([0, 40, 100])
        sequence = grown(pool, rnd, room=room)
        others = entangle(pool, [sequence], rnd) if entangled else []
        count, is_last = rnd.choice([1, 2, 9, 30]), rnd.random() < 0.5
        if is_last and sequence.length < room:
            count = room - sequence.length  # room is for the prompt alone
        share = outlook_of(pool).prompt(pool.sequences, sequence.row, count, is_last, 1 << 20)
        expected = held(pool) + share
        assert expected[0].tolist() == walk(pool, [sequence], count).tolist()
        assert expected[1].tolist() == held(pool).tolist()
        for step in range(2, STEPS[-1] + 1):
            if is_last:
                most = walk(pool, [sequence], 1)
                if step in STEPS:
                    told = expected[1 + STEPS.index(step)]
                    assert (told >= most).all() if others else told.tolist() == most.tolist()
            elif step in STEPS:
                assert expected[1 + STEPS.index(step)].tolist() == held(pool).tolist()
        del others


@pytest.mark.parametrize("seed", range(3))
def test_who_comes_in_holds_what_was_said(seed: int) -> None:
    print("seed", seed)
    rnd = random.Random(seed)
    for _ in range(150):
        pool = pool_of(rnd)
        grown(pool, rnd)
        num_tokens = rnd.randint(1, 60)
        count = num_tokens if rnd.random() < 0.5 else rnd.randint(1, num_tokens)
        before = held(pool)
        share = outlook_of(pool).fresh(num_tokens, count, 1 << 20)
        sequence = pool.add(num_tokens)
        most = walk(pool, [sequence], count)
        assert (before + share[0]).tolist() == most.tolist()
        assert (before + share[1]).tolist() == held(pool).tolist(), (pool.plan, num_tokens, count)
        for step in range(2, STEPS[-1] + 1):
            most = walk(pool, [sequence], 1) if count == num_tokens else held(pool)
            if step in STEPS:
                assert (before + share[1 + STEPS.index(step)]).tolist() == most.tolist(), (pool.plan, num_tokens, step)


@pytest.mark.parametrize("seed", range(3))
def test_who_comes_back_holds_what_was_said(seed: int) -> None:
    print("seed", seed)
    rnd = random.Random(seed)
    for _ in range(100):
        pool = pool_of(rnd)
        offloaded = pool.offload(grown(pool, rnd, room=rnd.choice([0, 30])))
        before = held(pool)
        share = outlook_of(pool).restored(offloaded.num_tokens, 1 << 20)
        ending = outlook_of(pool).restored(offloaded.num_tokens, 1)
        assert (ending[:2] == share[:2]).all() and (ending[1:] == share[1]).all()
        sequence = pool.restore(offloaded)
        assert (before + share[0]).tolist() == held(pool).tolist()
        for step in range(1, STEPS[-1] + 1):
            most = walk(pool, [sequence], 1)
            if step in STEPS:
                assert (before + share[1 + STEPS.index(step)]).tolist() == most.tolist(), pool.plan
