"""The pool: who may call when, what is brought to rest first, runs, leases, and where the memory goes."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pools import KINDS, Content, advance, layer, make_pool, snapshot

from torch_uma.errors import (
    ClosedError,
    InvariantError,
    LeaseError,
    OutOfMemory,
    PageError,
    PlanError,
    SequenceError,
    ThreadError,
)
from torch_uma.integrations.transformers.cache import UnifiedCache
from torch_uma.layout import Full, State, Window
from torch_uma.plan import plan
from torch_uma.pool import CachePool
from torch_uma.testing import scramble


class Event:
    """One that passes when a test says so."""

    passed = False

    def query(self) -> bool:
        return self.passed


class PlainCache:
    """What a step gives here: a cache for no model."""

    def __init__(self) -> None:
        self.finished = False

    def _finish(self) -> None:
        self.finished = True


@pytest.fixture
def plain_cache(monkeypatch: pytest.MonkeyPatch) -> PlainCache:
    cache = PlainCache()
    monkeypatch.setattr(UnifiedCache, "_of_step", lambda step: cache)
    return cache


# Making a pool


def test_a_pool_is_made_of_a_plan_or_of_layers() -> None:
    made = plan(KINDS["hybrid"], memory=8192, page_size=4)
    assert CachePool(made, device="cpu").plan is made
    assert CachePool(KINDS["hybrid"], memory="8KiB", page_size=4, device="cpu").plan.arena_bytes == 8192


def test_a_pool_refuses_what_it_cannot_be_made_of() -> None:
    made = plan(KINDS["full"], memory=8192)
    with pytest.raises(PlanError, match="either a plan or memory="):
        CachePool(made, memory=8192)
    for wrong in ({"max_sequences": 0}, {"max_tokens": 0}):
        with pytest.raises(PlanError, match="at least 1, not 0"):
            CachePool(made, device="cpu", **wrong)
    for wrong in ({"max_sequences": 1.5}, {"max_tokens": "9"}):
        with pytest.raises(PlanError, match="of a pool is a whole number"):
            CachePool(made, device="cpu", **wrong)
    for memory in (0, -1, 2.0, "much"):
        with pytest.raises(PlanError):
            CachePool(KINDS["full"], memory=memory, device="cpu")


def test_without_memory_a_share_of_what_is_free_is_taken_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch_uma.budget.free_bytes", lambda device: 1 << 15)
    with caplog.at_level(logging.INFO, logger="torch_uma"):
        pool = CachePool(KINDS["full"], device="cpu")
    assert pool.plan.arena_bytes == 1 << 14
    assert "16384 bytes" in caplog.text


def test_a_pool_on_the_meta_device_keeps_books_of_memory_that_is_not_there() -> None:
    made = plan([*KINDS["every"][:-1], layer(State(), width=1 << 20)], memory="64GiB", page_size=1 << 20)
    pool = CachePool(made, device="meta", max_sequences=8)
    first, second = pool.add(), pool.add(50)
    pool.begin([first, second], 40).commit()
    third = first.fork()
    pool.begin([first, third], 3).commit()
    assert scramble(pool, 1) > 0
    pool.extend_runs([third, first], 60)
    pool.compact()
    pool.check()
    for sequence in (first, second, third):
        sequence.free()
    pool.check()
    assert pool.stats().live_bytes == 0


def test_split_freezes_the_frontiers() -> None:
    made = plan([layer(Full()), layer(State())], memory=1 << 14, page_size=2)
    pool = CachePool(made, device="cpu", split={"state": 0.5, "full": 0.5})
    with pytest.raises(OutOfMemory):
        pool.add(700)
    assert CachePool(made, device="cpu").add(700).num_pages == (1, 350)


# Who may call, and when


def every_call(pool: CachePool, content: Content) -> Iterator[Callable[[], object]]:
    sequence = next(iter(content.tokens))
    batch = pool.batch([sequence])
    yield from (pool.add, pool.poll, pool.compact, pool.stats, pool.check, pool.close)
    yield lambda: pool.quote(1)
    yield lambda: pool.batch([sequence])
    yield lambda: pool.begin(batch, 1)
    yield lambda: pool.begin([sequence], 1)
    yield lambda: pool.step({sequence: 1}).__enter__()
    yield lambda: pool.extend_runs([sequence], 1)
    yield lambda: pool.quote_runs([sequence], 1)
    yield lambda: pool.quote_step(batch, 1)
    yield lambda: pool.quote_step([sequence], 1)
    yield lambda: pool.lease(sequence, "test")
    yield lambda: pool.event(0)
    yield lambda: batch.append(sequence)
    yield lambda: scramble(pool, 0)
    yield from (sequence.fork, sequence.free, lambda: sequence.crop(0))
    yield from (lambda: sequence.length, lambda: sequence.row, lambda: sequence.pages, lambda: sequence.capacity)


def started(kinds: str = "hybrid") -> tuple[CachePool, Content]:
    pool = make_pool(kinds)
    content = Content(pool)
    content.add(pool.add())
    advance(content, list(content.tokens), 7)
    return pool, content


def test_a_second_thread_is_refused_and_changes_nothing() -> None:
    pool, content = started()
    calls = list(every_call(pool, content))
    step = pool.begin([pool.add()], 1)
    calls += [step.commit, step.abort]
    before = snapshot(pool)
    outcomes: list[Exception | None] = []

    def other_thread() -> None:
        for call in calls:
            try:
                call()
                outcomes.append(None)
            except Exception as error:
                outcomes.append(error)

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert len(outcomes) == len(calls) and all(isinstance(outcome, ThreadError) for outcome in outcomes), outcomes
    assert snapshot(pool) == before
    step.commit()
    pool.check()


def test_a_closed_pool_refuses_every_call() -> None:
    pool, content = started()
    calls = [call for call in every_call(pool, content) if call != pool.close]
    pool.close()
    for call in calls:
        with pytest.raises(ClosedError, match="closed"):
            call()
    for part in ("arena", "allocator", "tables", "sequences"):
        with pytest.raises(ClosedError):
            getattr(pool, part)
    assert pool.closed and "freed" in repr(next(iter(content.tokens)))


def test_close_waits_for_open_steps_and_leases() -> None:
    pool, content = started()
    (sequence,) = content.tokens
    step = pool.begin([sequence], 1)
    with pytest.raises(SequenceError, match="steps are open"):
        pool.close()
    step.commit()
    lease = pool.lease(sequence, "the copier")
    with pytest.raises(LeaseError, match="the copier"):
        pool.close()
    lease.close()
    pool.close()


@pytest.mark.parametrize("by", ["close", "last reference"])
def test_the_memory_goes_without_the_collector(by: str) -> None:
    pool, content = started("every")
    (sequence,) = content.tokens
    fork = sequence.fork()
    batch = pool.batch([sequence, fork])
    step = pool.begin(batch, 1)
    step.commit()
    scramble(pool, 0)
    arena = weakref.ref(pool.arena)
    memory = weakref.ref(pool.arena.bytes)
    gc.collect()
    gc.disable()
    try:
        if by == "close":
            pool.close()
        else:
            del pool, content, sequence, fork, batch, step
        assert arena() is None and memory() is None
    finally:
        gc.enable()


# Steps as blocks, and implicit steps


def test_a_block_that_raises_leaves_things_as_before(plain_cache: PlainCache) -> None:
    pool, content = started("full")
    (sequence,) = content.tokens
    live = pool.stats().live_bytes
    for error in (RuntimeError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)), pool.step({sequence: 20}):
            assert pool.stats().live_bytes > live
            raise error
        assert (sequence.length, pool.stats().live_bytes) == (7, live)
        assert not plain_cache.finished
        pool.check()
        content.verify()
    with pool.step({sequence: 2}) as cache:
        assert cache is plain_cache
    assert plain_cache.finished and sequence.length == 9


def test_a_block_whose_cache_cannot_be_made_leaves_things_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, content = started("full")
    (sequence,) = content.tokens

    def fail(step: object) -> UnifiedCache:
        raise RuntimeError("no cache")

    monkeypatch.setattr(UnifiedCache, "_of_step", fail)
    with pytest.raises(RuntimeError, match="no cache"), pool.step({sequence: 20}):
        pass
    assert sequence.length == 7
    sequence.crop(0)
    pool.check()


def test_without_a_model_all_sequences_of_a_step_take_equally_many_tokens(plain_cache: PlainCache) -> None:
    pool = make_pool("full")
    first, second = pool.add(), pool.add()
    before = snapshot(pool)
    with (
        pytest.raises(SequenceError, match=r"unequally many new tokens, \[1, 2\], .* made of no model"),
        pool.step({first: 1, second: 2}),
    ):
        pass
    with pytest.raises(SequenceError, match="at least one sequence"), pool.step({}):
        pass
    assert snapshot(pool) == before
    with pool.step(pool.batch([second, first]), 3):
        pass
    assert (first.length, second.length) == (3, 3)


def test_an_implicit_step_is_brought_to_rest_before_anything_else(plain_cache: PlainCache) -> None:
    pool, content = started()
    (sequence,) = content.tokens
    for call in every_call(pool, content):
        if sequence._row < 0:
            sequence = pool.add()
        if pool.closed:
            continue
        step = pool.begin([sequence], 1)
        settled = []

        def settle(step=step, settled=settled) -> None:  # type: ignore[no-untyped-def]
            assert pool.stats() is not None  # what it calls itself does not settle again
            settled.append(step)
            step.commit()

        step.on_settle = settle
        if call == pool.close:
            continue
        with contextlib.suppress(SequenceError, ClosedError):
            call()
        assert settled == [step] and not step.is_open
        for open_step in list(pool.guard.steps.values()):
            open_step.abort()
    pool.check()


# Runs


def test_extend_runs_gives_every_row_its_place_in_one_run() -> None:
    pool = make_pool("every", memory=1 << 15)
    content = Content(pool)
    sequences = [pool.add() for _ in range(3)]
    for sequence in sequences:
        content.add(sequence)
    advance(content, sequences[1:], 5)
    scramble(pool, 2)
    pool.compact()
    pool.extend_runs(sequences, 25)
    pool.check()
    content.verify()
    step = pool.begin(sequences, 1)
    for subpool in pool.plan.subpools:
        if isinstance(subpool.lifetime, Full):
            run = step.run(subpool)
            assert run is not None and run[1] == -(-25 // subpool.page_tokens)
    step.abort()
    pages = [sequence.pages for sequence in sequences]
    pool.extend_runs(sequences, 25)
    pool.extend_runs(sequences, 20)
    assert all(
        (a == b).all() for old, s in zip(pages, sequences, strict=True) for a, b in zip(old, s.pages, strict=True)
    )
    advance(content, sequences[:2], 7)
    advance(content, sequences, 9)


def test_extend_runs_does_not_disturb_what_forks_share() -> None:
    pool = make_pool("hybrid", memory=1 << 15)
    content = Content(pool)
    parent = pool.add()
    content.add(parent)
    advance(content, [parent], 11)
    child, other = parent.fork(), parent.fork()
    content.fork(parent, child)
    content.fork(parent, other)
    pages = other.pages
    pool.extend_runs([child, parent], 30)
    pool.check()
    content.verify()
    assert all((a == b).all() for a, b in zip(pages, other.pages, strict=True))
    advance(content, [parent, other, child], 4)


def test_extend_runs_fits_wherever_paging_fits() -> None:
    pool = make_pool("full", memory=4096)
    hog, sequence = pool.add(), pool.add()
    content = Content(pool)
    content.add(sequence)
    content.add(hog)
    full = pool.plan.subpools[0]
    most = full.num_pages - full.first_page
    advance(content, [hog], (most // 2) * 3)
    advance(content, [sequence], 12)
    free = most - sum(hog.num_pages) - sum(sequence.num_pages)
    assert free < (4 + free), "a new run beside what it holds does not fit"
    assert pool.quote_runs([sequence], (4 + free) * 3).demand == (free,)
    pool.extend_runs([sequence], (4 + free) * 3)
    assert sequence.num_pages == (4 + free,)
    assert pool.quote_runs([sequence], (4 + free) * 3).demand == (0,)
    pool.check()
    content.verify()
    before = snapshot(pool)
    assert not pool.quote_runs([sequence], (5 + free) * 3)
    with pytest.raises(OutOfMemory):
        pool.extend_runs([sequence], (5 + free) * 3)
    assert snapshot(pool) == before


def test_extend_runs_takes_room_for_no_more_than_max_tokens() -> None:
    pool = make_pool("full", max_tokens=20)
    sequence = pool.add()
    pool.extend_runs([sequence], 1000)
    assert sequence.num_pages == (7,) and sequence.capacity == 20
    pool.extend_runs([], 10)
    with pytest.raises(SequenceError, match="larger max_tokens"):
        pool.add(21)
    with pytest.raises(SequenceError, match="larger max_tokens"):
        pool.quote(21)


@pytest.mark.parametrize("wrong", [-1, 1.5, "a", None])
def test_what_is_no_count_is_refused_and_changes_nothing(wrong: Any) -> None:
    pool, content = started("every")
    (sequence,) = content.tokens
    before = snapshot(pool)
    calls: list[Callable[[], object]] = [
        lambda: pool.add(wrong),
        lambda: pool.add_many([3, wrong]),
        lambda: pool.quote(wrong),
        lambda: pool.extend_runs([sequence], wrong),
        lambda: pool.event(wrong),
        lambda: pool.step({sequence: wrong}).__enter__(),
        lambda: sequence.crop(wrong),
    ]
    for call in calls:
        with pytest.raises(SequenceError, match="at least ., not -1" if wrong == -1 else f"not {wrong!r}"):
            call()
    if wrong is not None:
        with pytest.raises(PageError, match="budget_bytes"):
            pool.compact(wrong)
    for pages in ([wrong], np.array([0.0, 1.0])):
        with pytest.raises(PageError):
            pool.lease(pages, "test")
    for stranger in ("a", None):
        with pytest.raises(SequenceError, match="is not a sequence"):
            pool.step({stranger: 1}).__enter__()
    assert snapshot(pool) == before


@pytest.mark.parametrize("num_tokens", [10**6, 10**9, 10**30])
@pytest.mark.parametrize("kinds", KINDS)
def test_more_than_the_arena_holds_is_out_of_memory(kinds: str, num_tokens: int) -> None:
    pool = make_pool(kinds)
    before = snapshot(pool)
    if kinds in ("full", "hybrid", "every"):
        quote = pool.quote(num_tokens)
        assert not quote.fits and not quote.fits_empty
        for call in (lambda: pool.add(num_tokens), lambda: pool.add_many([1, num_tokens])):
            with pytest.raises(OutOfMemory, match="not fit an empty arena") as caught:
                call()
            assert caught.value.quote == quote
    else:  # the memory would do, but nobody said that sequences get so long
        for call in (lambda: pool.add(num_tokens), lambda: pool.quote(num_tokens)):
            with pytest.raises(SequenceError, match="larger max_tokens"):
                call()
    for fitting in range(0, pool.tables.max_tokens, 1 + pool.tables.max_tokens // 7):
        pool.quote(fitting)
    assert snapshot(pool) == before


# Leases, epochs, the books


def test_a_lease_outlives_its_sequence() -> None:
    pool, content = started("every")
    (sequence,) = content.tokens
    num_pages = sum(sequence.num_pages)
    lease = pool.lease(sequence, "a copy to the host")
    assert len(lease.pages) == num_pages and lease.epoch == pool.epoch == 1
    sequence.free()
    stats = pool.stats()
    assert (stats.live_bytes, sum(s.quarantined_pages for s in stats.subpools)) == (0, num_pages)
    pool.check()
    lease.close(Passed())
    assert pool.stats().quarantined_bytes > 0
    assert pool.poll() == 1
    assert pool.stats().quarantined_bytes == 0
    pool.check()


class Passed:
    """An event that has passed."""

    def query(self) -> bool:
        return True


def test_pages_can_be_leased_one_by_one() -> None:
    pool, content = started("full")
    (sequence,) = content.tokens
    lease = pool.lease(sequence.pages[0][:1], "one page")
    place = pool.allocator.v2p[lease.pages].tolist()
    scramble(pool, 0)
    assert pool.allocator.v2p[lease.pages].tolist() == place
    lease.close()
    with pytest.raises(LeaseError, match="no pages"):
        pool.lease(pool.add(), "nothing")


def test_epochs_number_the_steps() -> None:
    pool = make_pool("hybrid")
    first, second = pool.add(), pool.add()
    assert pool.epoch == first.last_epoch == 0
    one = pool.begin([first], 1)
    two = pool.begin([second], 1)
    assert (one.epoch, two.epoch, pool.epoch) == (1, 2, 2)
    two.commit()
    with pytest.raises(SequenceError, match="step 1 has not ended"):
        pool.event(1)
    one.abort()
    assert (first.last_epoch, second.last_epoch) == (1, 2)
    assert pool.event(1) is pool.event(2) is None  # a device without streams
    with pytest.raises(SequenceError, match="there is no step 3; the last that began is 2"):
        pool.event(3)
    assert first.fork().last_epoch == 1


def test_stats_say_where_the_bytes_are() -> None:
    pool, content = started("every")
    stats = pool.stats()
    parts = (stats.live_bytes, stats.hole_bytes, stats.quarantined_bytes, stats.gap_bytes, stats.slack_bytes)
    assert sum(parts) + stats.sink_bytes == stats.capacity_bytes == pool.plan.arena_bytes
    (sequence,) = content.tokens
    assert tuple(subpool.live_pages for subpool in stats.subpools) == sequence.num_pages
    assert all(subpool.name in str(stats) for subpool in stats.subpools)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda pool: pool.sequences.length.__setitem__(0, 9), "tokens"),
        (lambda pool: pool.sequences.end.__setitem__((2, 0), 9), "holds|capacity"),
        (lambda pool: pool.sequences.first.__setitem__((2, 0), 1), "need those from 0 on"),
        (lambda pool: pool.sequences.references.__setitem__(int(pool.tables.mirror[0]), 2), "its count is 2"),
        (lambda pool: setattr(pool.sequences, "num_shared", 1), "references are shared"),
        (lambda pool: pool.tables.mirror.__setitem__(0, -1), "should hold"),
        (lambda pool: pool.sequences.live.__setitem__(0, False), "not in use"),
        (lambda pool: pool.sequences.allocator.reserve_one(2), "0 rows refer to it"),
        (lambda pool: pool.tables.mirror.__setitem__(-1, 5), "lengths in the tables"),
    ],
)
def test_check_sees_books_that_do_not_balance(harm: Callable[[CachePool], object], message: str) -> None:
    pool, _ = started()
    pool.check()
    harm(pool)
    with pytest.raises(InvariantError, match=message):
        pool.check()


def test_windows_hold_the_same_however_the_tokens_come() -> None:
    pool = make_pool([layer(Full()), layer(Window(16))], page_size=4, memory=1 << 15)
    for parts in ((50,), (20, 30), (1,) * 50, (49, 1)):
        sequence = pool.add()
        for part in parts:
            pool.begin([sequence], part).commit()
        assert sequence.num_pages == pool.plan.demand(50)
    pool.check()
    assert torch.equal(pool.tables.lengths[:4], torch.full((4,), 50, dtype=torch.int32))


# Several at once


@pytest.mark.parametrize("kinds", KINDS)
def test_adding_many_is_adding_one_by_one_with_one_reservation(kinds: str) -> None:
    together, singly = make_pool(kinds), make_pool(kinds)
    for lengths in ([], [4], [0, 9, 3, 9]):
        many = together.add_many(lengths)
        ones = [singly.add(length) for length in lengths]
        assert [sequence.num_pages for sequence in many] == [sequence.num_pages for sequence in ones]
        assert [sequence.capacity for sequence in many] == [sequence.capacity for sequence in ones]
        assert together.stats().live_bytes == singly.stats().live_bytes
        together.check()
    rows = [sequence.row for sequence in many]
    assert len(set(rows)) == len(rows)


def test_adding_many_is_all_or_none() -> None:
    pool = make_pool("hybrid", memory=2048)
    pool.add_many([5, 8])
    before = snapshot(pool)
    with pytest.raises(OutOfMemory):
        pool.add_many([9] * 10)
    with pytest.raises(SequenceError, match="11 more sequences were asked for, and 10 of 12 rows of the pool are free"):
        pool.add_many([0] * 11)
    with pytest.raises(SequenceError, match="not -1"):
        pool.add_many([3, -1])
    assert snapshot(pool) == before


def test_a_step_ends_the_leases_whose_event_has_passed() -> None:
    pool, event = make_pool("full"), Event()
    leased, other = pool.add(4), pool.add()
    lease = pool.lease(leased, "a transfer")
    leased.free()
    lease.close(event)
    pool.begin([other], 1).commit()
    assert pool.stats().subpools[0].quarantined_pages == 2
    event.passed = True
    assert pool.stats().subpools[0].quarantined_pages == 2  # looking does not poll
    pool.begin([other], 1).commit()
    assert pool.stats().subpools[0].quarantined_pages == 0
    pool.check()


def test_a_pool_is_closed_at_the_end_of_its_block_and_only_once() -> None:
    with make_pool("hybrid") as pool:
        assert repr(pool) == "CachePool(state, window_7, full; 16,384 bytes on cpu)"
        sequence = pool.add(3)
    assert pool.closed and repr(pool) == "CachePool(state, window_7, full; closed)"
    pool.close()
    with pytest.raises(ClosedError):
        sequence.free()
    with pytest.raises(KeyError), make_pool() as open_pool:
        step = open_pool.begin([open_pool.add()], 1)
        raise KeyError
    step.abort()
    assert not open_pool.closed


def test_a_plan_has_its_page_size_already() -> None:
    made = plan(KINDS["full"], memory=8192, page_size=4)
    for option in ({"page_size": 8}, {"dtype": torch.float16}):
        with pytest.raises(PlanError, match="either a plan or these"):
            CachePool(made, device="cpu", **option)
    assert CachePool(KINDS["full"], memory=8192, device="cpu").plan.subpools[0].page_size == 16


def test_a_quote_is_true_if_it_fits() -> None:
    pool = make_pool("hybrid")
    assert pool.quote(5) and not pool.quote(10**6)


def test_a_step_is_quoted_as_it_would_begin() -> None:
    pool, content = started("every")
    (first,) = content.tokens
    second, freed, busy = pool.add(), pool.add(), pool.add()
    freed.free()
    step = pool.begin([busy], 1)
    other = make_pool()
    stale = pool.batch([second])
    before = snapshot(pool)
    wrong: list[tuple[Any, Any]] = [
        *(([first], number) for number in (0, -3, 1.5, "two", None, [1.5], [1, 1], [])),
        *(([first, second], numbers) for numbers in ([1, 0], [2], [[1], [2]])),
        *((sequences, 1) for sequences in ([], None, first, "abc", [first, first], [freed], [busy, first])),
        ([other.add()], 1),
        (other.batch([other.add()]), 1),
        ([first], pool.tables.max_tokens),
    ]
    for sequences, numbers in wrong:
        with pytest.raises((SequenceError, OutOfMemory)) as begun:
            pool.begin(sequences, numbers)
        if isinstance(begun.value, OutOfMemory):
            assert pool.quote_step(sequences, numbers) == begun.value.quote
            continue
        with pytest.raises(SequenceError) as quoted:
            pool.quote_step(sequences, numbers)
        assert str(quoted.value) == str(begun.value)
    for numbers in (10**6, 10**30, [1, 10**30]):
        quote = pool.quote_step([first, second], numbers)
        assert not quote and not quote.fits_empty
        with pytest.raises(OutOfMemory) as refused:
            pool.begin([first, second], numbers)
        assert refused.value.quote == quote
    for good in (2, np.int64(2), [2, 2], iter([2, 2]), torch.tensor([2, 2]), np.array([2, 2])):
        assert pool.quote_step({first: 1, second: 1}, good).fits
    assert snapshot(pool) == before
    step.commit()
    second.free()
    with pytest.raises(SequenceError, match="was freed"):
        pool.quote_step(stale, 1)


def test_a_quote_of_a_step_ends_the_leases_whose_event_has_passed() -> None:
    pool, event = make_pool("full", memory=512, page_size=1), Event()
    first, second = pool.add(), pool.add()
    pool.begin([first], 20).commit()
    lease = pool.lease(first, "a copy")
    first.free()
    lease.close(event)
    assert not pool.quote_step([second], 20)
    event.passed = True
    assert pool.quote_step([second], 20)
