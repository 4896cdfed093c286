"""What is said of steps beforehand, beside what they then take and release, in random lives of random pools."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import layer, make_pool, snapshot

from torch_uma.demands import pages_ahead, pages_alone, released_by_step, step_pages
from torch_uma.errors import OutOfMemory, SequenceError
from torch_uma.layout import Chunk, Full, Layer, Lifetime, State, Window
from torch_uma.ledger import Lease
from torch_uma.past import keep_past, let_past_go
from torch_uma.sequence import Sequence
from torch_uma.step import Step
from torch_uma.tables import Int64Array

NUM_LIVES, NUM_OPERATIONS = 260, 60


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
            max_tokens=rnd.choice([None, 60, 200]),
        )
        self.sequences: list[Sequence] = []
        self.leases: list[Lease] = []
        self.open: Step | None = None
        self.seen: Counter[str] = Counter()

    def held(self) -> Int64Array:
        """Pages that are live or quarantined, by sub-pool."""
        return np.array([band.num_held for band in self.pool.allocator.bands])

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
                keep_past(pool.sequences, self.rows(some[:1]), some[0].length + rnd.choice([0, 0, 3]))
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
        before = snapshot(pool)
        try:
            quote = pool.quote_step(sequences, tokens)
        except SequenceError as error:
            with pytest.raises(SequenceError, match="larger max_tokens") as other:
                pool.begin(sequences, tokens)
            assert str(other.value) == str(error) and snapshot(pool) == before
            self.seen["too long"] += 1
            return
        num_new = tokens if isinstance(tokens, int) else np.array(tokens)
        wanted, released = step_pages(books, rows, num_new), released_by_step(books, rows, num_new)
        fits = pool.allocator.fits(wanted.sum(axis=1).tolist())
        assert snapshot(pool) == before, "asking has changed something"
        pages, held, is_plain = [sequence.pages for sequence in some], self.held(), self.is_plain()
        if not quote:
            with pytest.raises(OutOfMemory) as refused:
                pool.begin(sequences, tokens)
            assert refused.value.quote == quote and snapshot(pool) == before
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
        self.seen["stepped"] += 1
        self.seen["released"] += int(released.any())

    def walk(self) -> None:
        """Steps of one token, of which all was said before the first."""
        some = self.some()
        if not some:
            return
        pool, books, rows = self.pool, self.pool.sequences, self.rows(some)
        num_steps = self.rnd.choice([1, 2, 2, 5, 12])
        before = snapshot(pool)
        ahead = pages_ahead(books, rows, num_steps)
        assert ahead.shape == (num_steps, len(books.first), len(rows))
        assert snapshot(pool) == before, "asking has changed something"
        held, is_plain, pages = self.held(), self.is_plain(), np.array([sequence.num_pages for sequence in some]).T
        for more in ahead:
            quote = pool.quote_step(some, 1) if max(books.length[rows]) < pool.tables.max_tokens else None
            if not quote:
                return
            step = pool.begin(some, 1)
            assert (self.held() - held == more.sum(axis=1)).all()
            if is_plain:
                assert np.array([sequence.num_pages for sequence in some]).T.tolist() == (pages + more).tolist()
            step.commit()
            self.seen["walked"] += 1
        self.seen["walked far"] += int(num_steps > 2)


@settings(max_examples=NUM_LIVES, derandomize=True, database=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_steps_take_and_release_what_was_said(seed: int) -> None:
    life = Life(seed)
    for _ in range(NUM_OPERATIONS):
        life.live()
    life.pool.check()
    TOTAL.update(life.seen)


TOTAL: Counter[str] = Counter()
