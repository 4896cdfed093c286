"""Steps: what they take and give back, where tokens lie, and that content follows its owner through everything."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pools import KINDS, Content, advance, layer, make_pool, snapshot

from torch_uma.batch import Batch
from torch_uma.errors import OutOfMemory, SequenceError
from torch_uma.layout import Full, State, Window
from torch_uma.ledger import Lease
from torch_uma.pool import CachePool
from torch_uma.sequence import Sequence
from torch_uma.step import Step
from torch_uma.testing import scramble


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("page_size", [1, 3, 4])
@pytest.mark.parametrize("pattern", [(1,) * 40, (13, 1, 1, 9, 1), (2, 3, 30, 5), ([1, 2], [30, 1], [1, 17], 1, [2, 9])])
def test_between_steps_a_sequence_holds_what_its_length_needs(
    kinds: str, page_size: int, pattern: tuple[int | list[int], ...]
) -> None:
    pool = make_pool(kinds, page_size=page_size)
    content = Content(pool)
    sequences = [pool.add(), pool.add()]
    for sequence in sequences:
        content.add(sequence)
    advance(content, sequences[:1], 5)
    for num_new_tokens in pattern:
        advance(content, sequences, num_new_tokens)
        for sequence in sequences:
            assert sequence.num_pages == pool.plan.demand(sequence.length)
    for sequence in sequences:
        sequence.free()
    assert pool.stats().live_bytes == 0


def test_a_window_page_is_released_in_the_step_in_which_it_dies() -> None:
    pool = make_pool([layer(Full()), layer(Window(128))], memory=1 << 17, page_size=16)
    window = next(s for s in pool.plan.subpools if s.name == "window_128")
    sequence = pool.add()
    batch = pool.batch([sequence])
    for length in range(1, 400):
        pool.begin(batch, 1).commit()
        held = len(sequence.pages[window.index])
        assert held == pool.stats().subpool("window_128").live_pages == window.num_pages_for(length)
        if length % 16 == 0 and length >= 128:
            assert held == 8
    pool.check()


def test_the_past_that_a_step_reads_is_held_until_it_is_committed() -> None:
    pool = make_pool([layer(Full()), layer(Window(6))], page_size=2)
    sequence = pool.add()
    pool.begin([sequence], 9).commit()
    window = pool.plan.subpools[0]
    step = pool.begin([sequence], 20)
    positions = torch.arange(9, 29)[None]
    stored = step.entries(window, positions) >= 0
    # The tokens from 24 on are needed at length 29; what was held at length 9 is still there, its half-filled page too.
    assert positions[stored].tolist() == [9, 24, 25, 26, 27, 28]
    assert (step.entries(window, torch.arange(4, 9)[None]) >= 0).all()
    pool.check()
    step.commit()
    assert sequence.num_pages == pool.plan.demand(29)


@pytest.mark.parametrize("kinds", ["full", "hybrid", "every"])
@pytest.mark.parametrize("num_new_tokens", [1, 2, 11])
def test_an_abort_changes_nothing(kinds: str, num_new_tokens: int) -> None:
    pool = make_pool(kinds)
    content = Content(pool)
    first, second = pool.add(), pool.add(8)
    content.add(first)
    content.add(second)
    advance(content, [first], 7)
    third = first.fork()
    content.fork(first, third)
    ids = [sequence.pages for sequence in (first, second, third)]
    live = [subpool.live_pages for subpool in pool.stats().subpools]
    pool.begin([first, third, second], num_new_tokens).abort()
    pool.check()
    content.verify()
    assert [subpool.live_pages for subpool in pool.stats().subpools] == live
    for before, sequence in zip(ids, (first, second, third), strict=True):
        assert all((a == b).all() for a, b in zip(before, sequence.pages, strict=True))
    advance(content, [second, third, first], num_new_tokens)


@pytest.mark.parametrize("kinds", ["full", "window", "chunk"])
@pytest.mark.parametrize("is_first", [True, False])
def test_an_aborted_step_over_forks_of_unequal_length_harms_neither(kinds: str, is_first: bool) -> None:
    """One of them writes into the page that they share: not the shorter, over what the longer has there."""
    pool = make_pool(kinds, page_size=4)
    content = Content(pool)
    short = pool.add()
    content.add(short)
    advance(content, [short], 7)
    long = short.fork()
    content.fork(short, long)
    short.crop(6)
    content.crop(short, 6)
    step = pool.begin([short, long] if is_first else [long, short], 1)
    content.write(step)
    step.abort()
    pool.check()
    content.verify()
    advance(content, [long, short], [1, 2])


def test_a_step_that_does_not_fit_changes_nothing() -> None:
    pool = make_pool("hybrid", memory=4096, page_size=2)
    content = Content(pool)
    first, second = pool.add(), pool.add()
    content.add(first)
    content.add(second)
    advance(content, [first, second], 9)
    third = first.fork()
    content.fork(first, third)
    # The state's copy and the window's pages would fit, full attention does not: all or nothing.
    before = snapshot(pool)
    with pytest.raises(OutOfMemory) as refusal:
        pool.begin([first, second, third], 90)
    assert snapshot(pool) == before
    assert not refusal.value.quote.fits
    pool.check()
    content.verify()
    advance(content, [first, second, third], 3)


def test_a_state_half_written_is_said_so() -> None:
    pool = make_pool("hybrid")
    content = Content(pool)
    old, fresh = pool.add(), pool.add()
    content.add(old)
    content.add(fresh)
    advance(content, [old], 5)
    step = pool.begin([old, fresh], 2)
    content.write(step)
    step.abort()
    assert content.abort(step) == [old]
    pool.check()
    before = snapshot(pool)
    for use in (lambda: pool.begin([old], 1), old.fork, lambda: old.crop(3)):
        with pytest.raises(SequenceError, match=r"crop\(0\)"):
            use()
    assert snapshot(pool) == before
    advance(content, [fresh], 3)  # it had no state that could have been harmed
    old.crop(0)
    content.crop(old, 0)
    advance(content, [old, fresh], 3)


def test_a_step_refuses_what_is_not_a_batch() -> None:
    pool = make_pool()
    first, second = pool.add(), pool.add()
    before = snapshot(pool)
    refused = (
        ([first], 0, "at least 1, not 0"),
        ([first], -3, "at least 1, not -3"),
        ([first], 1.5, "whole number, not 1.5"),
        ([first], "two", "whole number, not 'two'"),
        ([first, second], [1, 0], "at least 1, not 0"),
        ([first, second], (1, 1.5), "whole number, not 1.5"),
        ([first, second], [2], "1 numbers of new tokens were given for 2 sequences; give one for each, or one for all"),
        ([first, second], [], "0 numbers of new tokens"),
        ([first, second], [[1], [2]], r"whole number, not \[1\]"),
        ([], 1, "at least one sequence"),
        ([first, second, first], 1, "named twice"),
        ([first, "second"], 1, "'second' is not a sequence"),
        (None, 1, "not of None"),
        (first, 1, "put one alone into a list"),
    )
    for sequences, num_new_tokens, message in refused:
        with pytest.raises(SequenceError, match=message):
            pool.begin(sequences, num_new_tokens)
    assert snapshot(pool) == before


@pytest.mark.parametrize("kinds", ["every", "full", "state", "window"])
def test_a_step_is_refused_by_the_tables_or_by_the_arena(kinds: str) -> None:
    """What the arena cannot hold is OutOfMemory, however long the tables are; what it could hold is not."""
    pool = make_pool(kinds)
    sequence, short = pool.add(), pool.add()
    before = snapshot(pool)
    for num_new_tokens in (pool.tables.max_tokens + 1, 10**6, 10**30):
        with pytest.raises((OutOfMemory, SequenceError)) as other:
            pool.begin([sequence, short], [num_new_tokens, 1])
        with pytest.raises(type(other.value)) as caught:
            pool.begin([sequence], num_new_tokens)
        if kinds in ("every", "full"):
            assert isinstance(caught.value, OutOfMemory) and not caught.value.quote.fits_empty
        else:
            assert "larger max_tokens" in str(caught.value)
    assert snapshot(pool) == before


def test_only_the_row_that_gets_too_long_is_too_long() -> None:
    """Neither the most tokens of a row nor the most new ones, but what the two come to in one row."""
    pool = make_pool("window", max_tokens=20)
    long, short = pool.add(), pool.add()
    pool.begin([long], 15).commit()
    before = snapshot(pool)
    for numbers in ([6, 1], [1, 21]):
        with pytest.raises(SequenceError, match="larger max_tokens"):
            pool.begin([long, short], numbers)
    assert snapshot(pool) == before
    step = pool.begin([long, short], [5, 20])
    assert step.num_new_tokens.tolist() == [5, 20]
    step.commit()
    assert (long.length, short.length) == (20, 20)


def test_pages_are_taken_for_what_each_row_gets() -> None:
    """A row may have more new tokens than the window while another has one, which takes no page."""
    pool = make_pool([layer(Full()), layer(Window(6))], page_size=2)
    first, second, third = pool.add(), pool.add(), pool.add()
    pool.begin([first, second], [5, 8]).commit()
    step = pool.begin([first, third, second], [1, 20, 2])
    window = next(subpool for subpool in pool.plan.subpools if subpool.name == "window_6")
    positions = torch.tensor([[*range(1, 8), -1], [*range(14, 20), -1, -1], [*range(2, 10)]])
    stored = [[p for p, e in zip(*both) if e >= 0] for both in zip(positions.tolist(), step.entries(window, positions))]
    # What the past of each needs is still there, with whole pages of what comes.
    assert stored == [[1, 2, 3, 4, 5], [14, 15, 16, 17, 18, 19], [2, 3, 4, 5, 6, 7, 8, 9]]
    live = [[len(pages) for pages in sequence.pages] for sequence in (first, third, second)]
    assert live == [[3, 3], [3, 10], [4, 5]]
    pool.check()
    step.commit()
    for sequence, length in ((first, 6), (third, 20), (second, 10)):
        assert sequence.length == length and sequence.num_pages == pool.plan.demand(length)


def test_numbers_of_numpy_and_torch_are_whole_numbers() -> None:
    pool = make_pool("hybrid")
    sequence = pool.add(np.int64(5))
    pool.extend_runs([sequence], np.int32(7))
    for number in (np.int64(3), np.uint8(3), torch.tensor(3), np.array([3]), torch.tensor([3]), iter([3])):
        pool.begin([sequence], number).commit()
    assert sequence.length == 18 and pool.quote(np.int16(4)).fits
    assert pool.event(np.int64(1)) is None and 0 <= pool.compact(np.int64(100)) <= 100
    pool.check()


def test_sequences_of_an_open_step_are_left_alone() -> None:
    pool = make_pool()
    first, second = pool.add(), pool.add()
    step = pool.begin([first], 4)
    before = snapshot(pool)
    uses = (
        first.free,
        first.fork,
        lambda: first.crop(0),
        lambda: pool.begin([second, first], 1),
        lambda: pool.extend_runs([first], 9),
    )
    for use in uses:
        with pytest.raises(SequenceError, match="open step"):
            use()
    assert snapshot(pool) == before
    # Others may come, step and go meanwhile.
    third = pool.add(5)
    pool.begin([second, third], 3).commit()
    third.free()
    pool.check()
    step.commit()
    pool.check()
    assert (first.length, second.length) == (4, 3)


def test_a_step_ends_once() -> None:
    pool = make_pool()
    step = pool.begin([pool.add()], 1)
    step.commit()
    for end in (step.commit, step.abort):
        with pytest.raises(SequenceError, match="ended already"):
            end()
    pool.check()


def test_pages_of_an_open_step_do_not_move() -> None:
    pool = make_pool("every")
    content = Content(pool)
    first, second = pool.add(), pool.add()
    content.add(first)
    content.add(second)
    advance(content, [first, second], 11)
    step = pool.begin([first], 2)
    places = [pool.allocator.v2p[ids].tolist() for ids in first.pages]
    assert scramble(pool, 0) > 0
    pool.compact()
    assert [pool.allocator.v2p[ids].tolist() for ids in first.pages] == places
    values = content.write(step)
    step.commit()
    content.commit(step, values)
    pool.check()
    content.verify()


def test_slots_and_fresh() -> None:
    pool = make_pool("hybrid")
    first, second = pool.add(), pool.add()
    pool.begin([first], 3).commit()
    scramble(pool, 3)
    step = pool.begin([second, first], 2)
    assert step.past.tolist() == [0, 3] and step.fresh.tolist() == [True, False]
    assert step.sequences == (second, first)
    ids = np.concatenate([second.pages[0], first.pages[0]])
    assert step.slots().tolist() == pool.allocator.v2p[ids].tolist()
    slots = step.entries(pool.plan.subpools[0], torch.zeros(2, 1, dtype=torch.int64))
    assert slots.flatten().tolist() == step.slots().tolist()


def test_entries_where_there_is_no_page() -> None:
    pool = make_pool("full")
    sequence = pool.add()
    step = pool.begin([sequence], 4)
    full = pool.plan.subpools[0]
    positions = torch.tensor([[-1, 0, 3, 5, 6, 10**9]])
    page = pool.allocator.v2p[sequence.pages[0]].astype(np.int64) * 3
    expected = [-1, page[0], page[1], page[1] + 2, -1, -1]
    assert step.entries(full, positions).tolist() == [expected]


def run_by_hand(pool: CachePool, step: Step, k: int) -> tuple[int, int] | None:
    """`Step.run`, page by page."""
    subpool = pool.plan.subpools[k]
    length = int(step.past.max()) + step.num_new_tokens
    num_pages = -(-length // subpool.page_tokens)
    starts = []
    for sequence in step.sequences:
        places = pool.allocator.v2p[sequence.pages[k]].tolist()[:num_pages]
        if len(places) < num_pages or places != list(range(places[0], places[0] + num_pages)):
            return None
        starts.append(places[0])
    gaps = {after - before for before, after in zip(starts, starts[1:], strict=False)}
    if len(gaps) > 1 or (gaps and min(gaps) < num_pages):
        return None
    return starts[0], gaps.pop() if gaps else num_pages


def test_run_says_when_one_view_covers_all_rows() -> None:
    pool = make_pool([layer(Full()), layer(State())], page_size=2)
    sequences = [pool.add() for _ in range(3)]
    pool.extend_runs(sequences, 20)
    full = pool.plan.subpools[1]
    batch = pool.batch(sequences)
    seen = set()
    for turn in range(30):
        step = pool.begin(batch, 1)
        run = step.run(full)
        assert run == step.run(full) == run_by_hand(pool, step, 1)
        assert turn >= 20 or turn == 12 or run is not None
        seen.add(run is None)
        step.commit()
        if turn == 11:
            assert scramble(pool, 1) > 0
        if turn == 12:
            pool.compact()
            pool.extend_runs(batch, 20)
    assert seen == {True, False}


def test_a_batch_can_change_while_its_step_is_open() -> None:
    pool = make_pool("hybrid")
    sequences = [pool.add() for _ in range(4)]
    batch = pool.batch(sequences[:3])
    step = pool.begin(batch, 2)
    batch.replace([sequences[1]], [sequences[3]])
    batch.remove(sequences[0])
    assert step.sequences == tuple(sequences[:3])
    assert batch.sequences == (sequences[3], sequences[2]) == tuple(batch) and len(batch) == 2
    step.commit()
    assert [sequence.length for sequence in sequences] == [2, 2, 2, 0]
    batch.append(sequences[1])
    pool.begin(batch, 1).commit()
    assert [sequence.length for sequence in sequences] == [2, 3, 3, 1]


def test_a_batch_refuses_what_it_has_not_and_what_is_gone() -> None:
    pool = make_pool("hybrid")
    first, second, third = pool.add(), pool.add(), pool.add()
    batch = pool.batch([first, second])
    refused = (
        (lambda: batch.append(first), "already"),
        (lambda: batch.replace([first], [second]), "already"),
        (lambda: batch.remove(third), "not in it"),
        (lambda: batch.replace([first, first], [third, pool.add()]), "named twice"),
        (lambda: batch.replace([first], []), "cannot be replaced by 0"),
        (lambda: Batch(pool, [first, first]), "named twice"),
        (lambda: make_pool().begin(batch, 1), "another pool"),
    )
    for use, message in refused:
        with pytest.raises(SequenceError, match=message):
            use()
    first.free()
    again = pool.add()  # in the same row
    with pytest.raises(SequenceError, match="sequence 0 of the batch was freed"):
        pool.begin(batch, 1)
    batch.replace([first], [again])
    pool.begin(batch, 1).commit()
    assert (again.length, second.length, third.length) == (1, 1, 0)


class Loop(RuleBasedStateMachine):
    """Everything that a loop may do, in any order, against the plain model of what must be where."""

    def __init__(self) -> None:
        super().__init__()
        self.torn: set[Sequence] = set()
        self.open: list[tuple[Step, list[list[int]]]] = []
        self.leases: list[Lease] = []

    @initialize(kinds=st.sampled_from(sorted(KINDS)), page_size=st.integers(1, 4), memory=st.sampled_from([2048, 4096]))
    def make(self, kinds: str, page_size: int, memory: int) -> None:
        self.pool = make_pool(kinds, memory=memory, page_size=page_size, max_sequences=6)
        self.content = Content(self.pool)

    def idle(self) -> list[Sequence]:
        busy = {sequence for step, _ in self.open for sequence in step.sequences}
        return [sequence for sequence in self.content.tokens if sequence not in busy]

    def pick(self, data: st.DataObject) -> Sequence | None:
        idle = self.idle()
        return data.draw(st.sampled_from(idle)) if idle else None

    @rule(room=st.integers(0, 30))
    def add(self, room: int) -> None:
        before = snapshot(self.pool)
        try:
            sequence = self.pool.add(min(room, self.pool.tables.max_tokens))
        except (OutOfMemory, SequenceError) as error:
            assert isinstance(error, OutOfMemory) or len(self.content.tokens) == 6
            assert snapshot(self.pool) == before
            return
        self.content.add(sequence)

    @rule(data=st.data(), most=st.sampled_from([1, 2, 20]), is_even=st.booleans())
    def begin(self, data: st.DataObject, most: int, is_even: bool) -> None:
        idle = self.idle()
        if not idle:
            return
        sequences = data.draw(st.permutations(idle))[: data.draw(st.integers(1, len(idle)))]
        some = st.integers(1, most)
        counts = [data.draw(some)] * len(sequences) if is_even else [data.draw(some) for _ in sequences]
        before = snapshot(self.pool)
        try:
            step = self.pool.begin(sequences, counts[0] if is_even else counts)
        except (OutOfMemory, SequenceError) as error:
            lengths = [len(self.content.tokens[each]) + new for each, new in zip(sequences, counts, strict=True)]
            too_long = max(lengths) > self.pool.tables.max_tokens
            assert isinstance(error, OutOfMemory) or too_long or self.torn & set(sequences)
            assert snapshot(self.pool) == before
            return
        assert not self.torn & set(sequences)
        self.open.append((step, self.content.write(step)))

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 5))
    def commit(self, which: int) -> None:
        step, values = self.open.pop(which % len(self.open))
        step.commit()
        self.content.commit(step, values)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 5))
    def abort(self, which: int) -> None:
        step, _ = self.open.pop(which % len(self.open))
        step.abort()
        had_state = self.content.abort(step)
        if self.pool.sequences.lifespans.states:
            self.torn.update(had_state)

    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source = self.pick(data)
        if source is None or len(self.content.tokens) == 6:
            return
        if source in self.torn:
            with pytest.raises(SequenceError, match="half written"):
                source.fork()
            return
        self.content.fork(source, source.fork())

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        if sequence is not None:
            sequence.free()
            self.content.free(sequence)
            self.torn.discard(sequence)

    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        if sequence is None:
            return
        length = len(self.content.tokens[sequence])
        num_tokens = data.draw(st.integers(0, length))
        before = snapshot(self.pool)
        try:
            sequence.crop(num_tokens)
        except SequenceError:
            assert 0 < num_tokens < length
            kept = [s for s in self.pool.plan.subpools if not s.is_state and not isinstance(s.lifetime, Full)]
            has_state = any(isinstance(s.lifetime, State) for s in self.pool.plan.subpools)
            assert has_state or any(s.lifetime.first_needed(num_tokens) < s.lifetime.first_needed(length) for s in kept)
            assert snapshot(self.pool) == before
            return
        self.content.crop(sequence, num_tokens)
        if num_tokens == 0:
            self.torn.discard(sequence)

    @rule(data=st.data(), num_tokens=st.integers(1, 40))
    def extend_runs(self, data: st.DataObject, num_tokens: int) -> None:
        sequences = data.draw(st.permutations(self.idle()))[:3]
        before = snapshot(self.pool)
        try:
            self.pool.extend_runs(sequences, num_tokens)
        except OutOfMemory:
            assert snapshot(self.pool) == before

    @rule(data=st.data(), num_new_tokens=st.integers(1, 9), num_tokens=st.integers(1, 40))
    def slide_windows(self, data: st.DataObject, num_new_tokens: int, num_tokens: int) -> None:
        sequences = data.draw(st.permutations(self.idle()))[:3]
        self.pool.slide_windows(sequences, num_new_tokens, num_tokens)

    @rule(data=st.data())
    def give_back_room(self, data: st.DataObject) -> None:
        sequences = data.draw(st.permutations(self.idle()))[:3]
        self.pool.give_back_room(sequences)
        assert not self.pool.give_back_room(sequences)

    @rule(seed=st.integers(0, 1000))
    def scramble(self, seed: int) -> None:
        scramble(self.pool, seed)

    @rule(budget_bytes=st.sampled_from([None, 0, 200]))
    def compact(self, budget_bytes: int | None) -> None:
        self.pool.compact(budget_bytes)

    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        if sequence is not None and sum(sequence.num_pages):
            self.leases.append(self.pool.lease(sequence, "test"))

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 5))
    def unlease(self, which: int) -> None:
        self.leases.pop(which % len(self.leases)).close()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            self.content.verify()


def test_content_follows_its_owner_through_everything() -> None:
    checks = settings(
        max_examples=100,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    run_state_machine_as_test(Loop, settings=checks)
