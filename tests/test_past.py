"""The past that rows keep: every length that they promise to go back to has its tokens, and nothing more is held."""

from __future__ import annotations

import numpy as np
import pytest
from pools import KINDS, Content, advance, layer, make_pool

from torch_uma.errors import SequenceError
from torch_uma.layout import Full, State, Window
from torch_uma.past import exchange_states, keep_past, let_past_go, rewind
from torch_uma.pool import CachePool
from torch_uma.sequence import Sequence
from torch_uma.tables import Int64Array
from torch_uma.testing import scramble

STATELESS = [kinds for kinds in KINDS if kinds not in ("state", "hybrid", "every")]
MANY = [layer(Full()), layer(Window(7), width=8), layer(Window(1), width=12), layer(Full(), tokens_per_entry=4)]


def rows_of(sequences: list[Sequence]) -> Int64Array:
    return np.array([sequence.row for sequence in sequences])


def pages(pool: CachePool) -> list[int]:
    return [subpool.live_pages for subpool in pool.stats().subpools]


@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("kinds", [*STATELESS, "many"])
def test_any_number_of_tokens_can_be_taken_back(kinds: str, page_size: int) -> None:
    for seed in range(12):
        print("seed", seed)
        chance = np.random.default_rng(seed)
        pool = make_pool(MANY if kinds == "many" else kinds, memory=1 << 15, page_size=page_size)
        content = Content(pool)
        sequences = [pool.add(), pool.add()]
        for sequence in sequences:
            content.add(sequence)
        rows, books = rows_of(sequences), pool.sequences
        for _ in range(6):
            start = sequences[0].length
            room_end = books.end.take(rows, axis=1)
            keep_past(books, rows, start)
            for _ in range(int(chance.integers(1, 3))):
                advance(content, sequences, int(chance.integers(1, 20)))
                scramble(pool, seed)
            num_tokens = int(chance.integers(start, sequences[0].length, endpoint=True))
            if num_tokens:
                rewind(books, rows, num_tokens, room_end)
            else:
                let_past_go(books, rows)
                for sequence in sequences:
                    sequence.crop(0)
            for sequence in sequences:
                content.crop(sequence, num_tokens)
            pool.check()
            content.verify()
            if num_tokens:
                demand = np.maximum(pool.plan.demand(num_tokens), room_end.max(axis=1) - books.first[:, rows[0]])
                assert (np.array(pages(pool)) <= 2 * demand).all()


def test_what_is_kept_begins_at_the_length_that_was_said() -> None:
    pool = make_pool([layer(Window(6))], page_size=2)
    content = Content(pool)
    sequence = pool.add()
    content.add(sequence)
    advance(content, [sequence], 9)
    rows, books = rows_of([sequence]), pool.sequences
    keep_past(books, rows, 40)  # a gap opens before the tokens that a length of 40 needs
    advance(content, [sequence], 33)
    assert pages(pool) == [3 + 4]
    with pytest.raises(SequenceError, match="needs tokens from 33 on, but keeps those from 34 on"):
        rewind(books, rows, 38, books.end.take(rows, axis=1))
    assert sequence.length == 42
    fork = sequence.fork()
    content.fork(sequence, fork)
    pool.check()
    content.verify()
    rewind(books, rows, 40, books.end.take(rows, axis=1) * 0)
    content.crop(sequence, 40)
    pool.check()
    content.verify()
    advance(content, [sequence, fork], 3)
    sequence.free()
    content.free(sequence)
    fork.free()
    content.free(fork)
    pool.check()
    assert pages(pool) == [0]


def test_more_of_the_past_is_kept_from_then_on_alone() -> None:
    pool = make_pool([layer(Full()), layer(Window(6))], page_size=2)
    content = Content(pool)
    sequence = pool.add()
    content.add(sequence)
    advance(content, [sequence], 9)
    rows, books = rows_of([sequence]), pool.sequences
    keep_past(books, rows, 40)
    step = pool.begin([sequence], 33)
    content.write(step)
    step.abort()  # so that nothing is missing yet
    keep_past(books, rows, 9)
    advance(content, [sequence], 20)
    keep_past(books, rows, 60)
    advance(content, [sequence], 33)  # and now a gap is
    keep_past(books, rows, 9)
    pool.check()
    advance(content, [sequence], 3)
    with pytest.raises(SequenceError, match="needs tokens from 53 on, but keeps those from 54 on"):
        rewind(books, rows, 58, books.end.take(rows, axis=1))
    rewind(books, rows, 60, books.end.take(rows, axis=1))
    content.crop(sequence, 60)
    pool.check()
    content.verify()


def test_a_row_that_keeps_its_past_can_be_freed_cropped_and_aborted() -> None:
    pool = make_pool([layer(Full()), layer(Window(6))], page_size=2)
    content = Content(pool)
    first, second = pool.add(), pool.add()
    for sequence in (first, second):
        content.add(sequence)
    advance(content, [first, second], 11)
    keep_past(pool.sequences, rows_of([first, second]), 11)
    before = pages(pool)
    step = pool.begin([first, second], 30)
    content.write(step)
    step.abort()
    pool.check()
    assert pages(pool) == before
    advance(content, [first, second], 14)
    first.free()
    content.free(first)
    second.crop(12)
    content.crop(second, 12)
    pool.check()
    content.verify()
    second.crop(0)
    content.crop(second, 0)
    pool.check()
    let_past_go(pool.sequences, rows_of([second]))
    assert pages(pool) == [0, 0]
    advance(content, [second], 3)


def test_a_row_goes_back_into_a_page_that_a_fork_has() -> None:
    pool = make_pool("full", page_size=4)
    content = Content(pool)
    sequence = pool.add()
    content.add(sequence)
    advance(content, [sequence], 2)
    rows, books = rows_of([sequence]), pool.sequences
    keep_past(books, rows, 2)
    advance(content, [sequence], 4)
    fork = sequence.fork()
    content.fork(sequence, fork)
    advance(content, [sequence], 1)
    rewind(books, rows, 2, books.end.take(rows, axis=1))
    content.crop(sequence, 2)
    advance(content, [sequence], 5)
    advance(content, [fork], 3)


def test_without_a_past_nothing_changes() -> None:
    pool = make_pool("hybrid")
    sequence = pool.add()
    pool.begin([sequence], 20).commit()
    before = pages(pool)
    let_past_go(pool.sequences, rows_of([sequence]))
    pool.check()
    assert pages(pool) == before


def test_states_change_owners_where_they_are() -> None:
    pool = make_pool([layer(Full()), layer(State(), width=20)])
    content = Content(pool)
    sequences = [pool.add() for _ in range(4)]
    for sequence in sequences:
        content.add(sequence)
        advance(content, [sequence], 3)
    fork = sequences[0].fork()
    content.fork(sequences[0], fork)
    some, others = sequences[:2], sequences[2:]
    exchange_states(pool.sequences, rows_of(some), rows_of(others))
    for one, other in zip(some, others, strict=True):
        content.states[one], content.states[other] = content.states[other], content.states[one]
    pool.check()
    content.verify()
    advance(content, sequences, 1)  # the state that the fork shares has another owner now, and is copied all the same
    content.verify()
