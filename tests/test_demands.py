"""What is said of steps beforehand, beside what they then take and release, in random lives of random pools."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import layer, make_pool, snapshot

from torch_uma.books import Sequences
from torch_uma.demands import pages_ahead, pages_alone, released_by_step, step_pages
from torch_uma.errors import OutOfMemory, SequenceError
from torch_uma.layout import Chunk, Full, Layer, Lifetime, State, Window
from torch_uma.ledger import Lease
from torch_uma.past import keep_past, let_past_go
from torch_uma.plan import plan
from torch_uma.pool import CachePool
from torch_uma.sequence import Sequence
from torch_uma.step import Step
from torch_uma.tables import Int64Array

NUM_LIVES, NUM_OPERATIONS = 340, 60


def random_layers(rnd: random.Random) -> list[Layer]:
    """Layers of one to five sub-pools."""
    lifetimes: list[tuple[Lifetime, int]] = [
        (Full(), 1),
        (Full(), rnd.choice([2, 4])),
        (Window(rnd.randint(1, 9)), rnd.choice([1, 1, 2])),
        (Window(rnd.randint(10, 20)), 1),
        (Chunk(rnd.randint(1, 12)), 1),
        (State(), 1),
    ]
    chosen = rnd.sample(lifetimes, rnd.randint(1, 5))
    return [layer(lifetime, per_entry, width=4 * rnd.randint(1, 4)) for lifetime, per_entry in chosen]


class Life:
    """A pool, its sequences, leases and at most one step that others leave open; every operation checks what was said.

    Attributes:
        seen: how often what came out.
    """

    def __init__(self, seed: int) -> None:
        self.rnd = rnd = random.Random(seed)
        self.pool = make_pool(
            random_layers(rnd),
            memory=rnd.choice([3072, 4096, 8192]),
            page_size=rnd.randint(1, 4),
            max_sequences=8,
            max_tokens=rnd.choice([60, 200, 500]),
        )
        self.sequences: list[Sequence] = []
        self.leases: list[Lease] = []
        self.open: Step | None = None
        self.seen: Counter[str] = Counter()

    def held(self) -> Int64Array:
        """Pages that are live or quarantined, by sub-pool."""
        return np.array([band.num_held for band in self.pool.allocator.bands])

    def snapshot(self) -> dict[str, Any]:
        """Everything that the pool knows; now and then, as it takes longer than all else here."""
        return snapshot(self.pool) if self.rnd.random() < 0.3 else {}

    def check_unchanged(self, before: dict[str, Any]) -> None:
        assert not before or snapshot(self.pool) == before, "something has changed"

    def is_plain(self) -> bool:
        """Whether a page leaves whenever a row lets go of it."""
        return not self.pool.sequences.num_shared and not self.leases

    def idle(self) -> list[Sequence]:
        busy = self.open.sequences if self.open is not None else ()
        return [sequence for sequence in self.sequences if sequence not in busy]

    def some(self) -> list[Sequence]:
        idle = self.idle()
        return self.rnd.sample(idle, self.rnd.randint(1, len(idle))) if idle else []

    def rows(self, sequences: list[Sequence]) -> Int64Array:
        return np.array([sequence.row for sequence in sequences])

    def live(self) -> None:
        operations: list[Callable[[], object]] = [self.add, self.step, self.walk, self.fork, self.free, self.change]
        (operate,) = self.rnd.choices(operations, [3, 8, 3, 3, 1.5, 4])
        operate()

    # Operations

    def add(self) -> None:
        with suppress(OutOfMemory, SequenceError):
            self.sequences.append(self.pool.add(self.rnd.choice([0, 0, self.rnd.randint(1, 25)])))

    def fork(self) -> None:
        for sequence in self.some()[:2]:
            with suppress(SequenceError):
                self.sequences.append(sequence.fork())

    def free(self) -> None:
        for sequence in self.some()[:1]:
            (alone,) = pages_alone(self.pool.sequences, self.rows([sequence])).T
            before = self.held()
            sequence.free()
            self.sequences.remove(sequence)
            assert (before - self.held() == alone).all()
            self.seen["freed"] += 1

    def change(self) -> None:
        """Whatever else makes books differ."""
        rnd, pool, some = self.rnd, self.pool, self.some()
        what = rnd.choice(["crop", "room", "slide", "give", "keep", "let go", "lease", "close", "open", "end", "poll"])
        with suppress(OutOfMemory, SequenceError):
            if what == "crop":
                for sequence in some[:1]:
                    sequence.crop(rnd.choice([0, rnd.randint(0, sequence.length)]))
            elif what == "room":
                pool.extend_runs(some, rnd.randint(1, 30))
            elif what == "slide":
                pool.slide_windows(some, 1, 30)
            elif what == "give":
                pool.give_back_room(some)
            elif what == "keep" and some:
                keep_past(pool.sequences, self.rows(some[:1]), some[0].length + rnd.choice([0, 0, 3, 30]))
            elif what == "let go" and some:
                let_past_go(pool.sequences, self.rows(some))
            elif what == "lease" and some and any(some[0].num_pages):
                pages = np.concatenate(some[0].pages)
                self.leases.append(pool.lease(rnd.sample(pages.tolist(), rnd.randint(1, len(pages))), "a copy"))
            elif what == "close" and self.leases:
                self.leases.pop(rnd.randrange(len(self.leases))).close()
            elif what == "open" and self.open is None and len(some) < len(self.idle()):
                self.open = pool.begin(some, rnd.randint(1, 5))
            elif what == "end" and self.open is not None:
                rnd.choice([self.open.commit, self.open.abort])()
                self.open = None

    def step(self) -> None:
        """One step of any number of tokens for any of the sequences."""
        some, rnd = self.some(), self.rnd
        if not some:
            return
        one = rnd.choice([1, 1, 2, rnd.randint(1, 30)])
        tokens: int | list[int] = one if rnd.random() < 0.6 else [rnd.choice([1, rnd.randint(1, 20)]) for _ in some]
        pool, books, rows = self.pool, self.pool.sequences, self.rows(some)
        sequences = rnd.choice([some, pool.batch(some)])
        num_new = tokens if isinstance(tokens, int) else np.array(tokens)
        wanted, released = step_pages(books, rows, num_new), released_by_step(books, rows, num_new)
        before = self.snapshot()
        try:
            quote = pool.quote_step(sequences, tokens)
        except SequenceError as error:
            with pytest.raises(SequenceError, match="larger max_tokens") as other:
                pool.begin(sequences, tokens)
            assert str(other.value) == str(error)
            self.check_unchanged(before)
            self.seen["too long"] += 1
            return
        assert (released_by_step(books, rows, num_new) == released).all()
        fits = pool.allocator.fits(wanted.sum(axis=1).tolist())
        self.check_unchanged(before)
        pages, held, is_plain = [sequence.pages for sequence in some], self.held(), self.is_plain()
        if not quote:
            with pytest.raises(OutOfMemory) as refused:
                pool.begin(sequences, tokens)
            assert refused.value.quote == quote
            self.check_unchanged(before)
            assert not fits or not quote.fits_empty  # without columns in the tables it is refused before it is counted
            self.seen["refused"] += 1
            return
        assert fits and quote.demand == tuple(wanted.sum(axis=1))
        step = pool.begin(sequences, tokens)
        for place, (sequence, old) in enumerate(zip(some, pages, strict=True)):
            new = [len(np.setdiff1d(*both)) for both in zip(sequence.pages, old, strict=True)]
            assert new == wanted[:, place].tolist()
        assert (self.held() - held == wanted.sum(axis=1)).all()
        if rnd.random() < 0.2:
            step.abort()
            assert (self.held() == held).all()
            return
        open_held = self.held()
        step.commit()
        assert (open_held - self.held() == released.sum(axis=1)).all()
        assert (released >= 0).all() and (wanted >= 0).all()
        if is_plain:
            left = [sequence.num_pages for sequence in some]
            kept = np.array([[len(of) for of in old] for old in pages]).T + wanted - released
            assert np.array(left).T.tolist() == kept.tolist()
        self.seen["granted"] += 1
        self.seen["released"] += int(released.any())

    def walk(self) -> None:
        """Steps of one token, of which all was said before the first."""
        some = self.some()
        if not some:
            return
        pool, books, rows = self.pool, self.pool.sequences, self.rows(some)
        num_steps = self.rnd.choice([1, 2, 2, 5, 12])
        ahead, before = pages_ahead(books, rows, num_steps), self.snapshot()
        assert (pages_ahead(books, rows, num_steps) == ahead).all()
        self.check_unchanged(before)
        held, is_plain, pages = self.held(), self.is_plain(), np.array([sequence.num_pages for sequence in some]).T
        for more in ahead:
            if max(books.length[rows]) == pool.tables.max_tokens:
                return
            if not pool.quote_step(some, 1):
                with pytest.raises(OutOfMemory):
                    pool.begin(some, 1)
                self.seen["refused"] += 1
                return
            step = pool.begin(some, 1)
            assert (self.held() - held == more.sum(axis=1)).all()
            if is_plain:
                assert np.array([sequence.num_pages for sequence in some]).T.tolist() == (pages + more).tolist()
            step.commit()
            self.seen["granted"] += 1
        self.seen["walked"] += 1


def test_steps_take_and_release_what_was_said() -> None:
    """In more than 10,000 situations what is granted begins, and takes what was said; what is refused does not."""
    seen: Counter[str] = Counter()

    @settings(max_examples=NUM_LIVES, derandomize=True, database=None)
    @given(seed=st.integers(0, 2**32 - 1))
    def live(seed: int) -> None:
        life = Life(seed)
        for _ in range(NUM_OPERATIONS):
            life.live()
        life.pool.check()
        seen.update(life.seen)

    live()
    print(seen)
    assert seen["granted"] + seen["refused"] > 10_000
    assert all(seen[what] > 50 for what in ("granted", "refused", "too long", "released", "walked", "freed"))


def asked(pool: CachePool, sequences: list[Sequence]) -> tuple[Sequences, Int64Array]:
    return pool.sequences, np.array([sequence.row for sequence in sequences])


def test_room_behind_a_gap_is_used_again() -> None:
    pool = make_pool([layer(Full()), layer(Window(6))], page_size=2)
    sequence = pool.add(9)
    books, rows = asked(pool, [sequence])
    assert sequence.num_pages == (3, 5)
    # 20 tokens need 10 pages of full attention; of the window those of the tokens 15 to 19, and there are three
    assert step_pages(books, rows, 20).T.tolist() == [[0, 5]] and released_by_step(books, rows, 20).T.tolist() == [
        [0, 0]
    ]
    # Of 7 tokens the first two are dead at once, so that the page for them can hold the seventh.
    assert step_pages(books, rows, 7).T.tolist() == [[0, 0]] and released_by_step(books, rows, 7).T.tolist() == [[0, 0]]
    pool.begin([sequence], 20).commit()
    assert sequence.num_pages == (3, 10)


def test_pages_that_rows_share_leave_with_the_last_of_them() -> None:
    pool = make_pool([layer(Window(5))], page_size=4)
    first = pool.add()
    pool.begin([first], 7).commit()
    second = first.fork()
    books, rows = asked(pool, [first, second])
    assert pages_alone(books, rows).tolist() == [[0, 0]]
    assert step_pages(books, rows, 1).tolist() == [[0, 1]] and step_pages(books, rows[:1], 1).tolist() == [[1]]
    # Page 0 is dead at length 8, and page 1 at length 12, of which the second row has a copy then.
    assert released_by_step(books, rows, 1).tolist() == [[0, 1]] and released_by_step(books, rows[1:], 1).tolist() == [
        [0]
    ]
    assert pages_ahead(books, rows, 7)[:, 0].tolist() == [[0, 1], *[[1, 1]] * 6]
    assert pages_ahead(books, rows[1:], 3)[:, 0, 0].tolist() == [1, 2, 2]


def test_pages_with_a_lease_do_not_leave() -> None:
    pool = make_pool([layer(Window(5)), layer(State(), width=20)], page_size=4)
    sequence = pool.add()
    pool.begin([sequence], 7).commit()
    books, rows = asked(pool, [sequence])
    state, window = sequence.pages
    lease = pool.lease(window[:1], "a copy")
    assert released_by_step(books, rows, 1).T.tolist() == [[0, 0]] and pages_alone(books, rows).T.tolist() == [[1, 1]]
    assert pages_ahead(books, rows, 2)[:, 1, 0].tolist() == [0, 1]
    lease.close()
    assert released_by_step(books, rows, 1).T.tolist() == [[0, 1]] and pages_alone(books, rows).T.tolist() == [[1, 2]]
    assert pages_ahead(books, rows, 2)[:, 1, 0].tolist() == [0, 0]


@pytest.mark.parametrize("forked", [False, True])
def test_a_single_token_has_a_place_in_its_step_even_if_it_is_dead_then(forked: bool) -> None:
    """However a batch is made up: with a fork among the rows, a step looks at shared pages too."""
    pool = make_pool([layer(Full()), layer(Window(1)), layer(Chunk(3))], page_size=1)
    sequences = [pool.add(), pool.add()]
    if forked:
        pool.begin(sequences[:1], 2).commit()
        sequences.append(sequences[0].fork())
    books, rows = asked(pool, sequences[1:2])
    assert pages_ahead(books, rows, 7)[:, :, 0].T.tolist() == [[1, 2, 3, 1, 2, 3, 1], [1] * 7, [1, 2, 3, 4, 5, 6, 7]]
    for length in range(1, 8):
        assert step_pages(books, rows, 1).T.tolist() == [[1, 1, 1]]
        assert released_by_step(books, rows, 1).T.tolist() == [[3 * (length % 3 == 0), 1, 0]]
        step = pool.begin(sequences, 1)
        assert sequences[1].num_pages == ((length - 1) % 3 + 1, 1, length)
        step.commit()
        assert sequences[1].num_pages == (length % 3, 0, length)
        pool.check()
    # Of several tokens, those that no later step needs have none.
    assert step_pages(books, rows, 2).T.tolist() == [[0, 0, 2]] and released_by_step(books, rows, 2).T.tolist() == [
        [1, 0, 0]
    ]


def test_plans_are_asked_without_any_memory() -> None:
    """What a simulator does: the books of a pool on the meta device say, take and release the same."""
    layers = [layer(Full()), layer(Window(7), width=8), layer(Chunk(5)), layer(State(), width=20)]
    made = plan(layers, memory=1 << 14, page_size=3)
    lives = [CachePool(made, device=device, max_sequences=12) for device in ("cpu", "meta")]
    told: list[list[object]] = [[], []]
    for pool, said in zip(lives, told, strict=True):
        sequences = [pool.add(), pool.add(9), *pool.add_many([0, 20])]
        batch = pool.batch(sequences)
        books, rows = pool.sequences, batch.rows.numbers
        for tokens in (5, [1, 2, 3, 4], 1, 1, 1, 17, 1, 1):
            said += [pool.quote_step(batch, tokens), pages_ahead(books, rows, 3).tolist(), pool.quote(30)]
            step = pool.begin(batch, tokens)
            said += [pool.stats(), sequences[0].num_pages, sequences[0].capacity]
            step.commit()
            said.append(pool.allocator.fits((-pages_alone(books, rows).sum(axis=1)).tolist()))
        sequences[1].crop(0)
        fork = sequences[1].fork()
        batch.replace([sequences[0]], [fork])
        sequences[0].free()
        lease = pool.lease(sequences[2], "a copy")
        pool.begin(batch, 2).commit()
        pool.compact()
        lease.close()
        said += [pool.stats(), pool.quote_steps(batch, 4)]
        with pytest.raises(OutOfMemory) as refused:
            pool.begin(batch, 10**4)
        said.append(refused.value.quote)
        for sequence in batch.sequences:
            sequence.free()
        assert pool.stats().live_bytes == 0
        pool.check()
        pool.close()
    assert told[0] == told[1]
