"""Runs of states: a step finds them side by side in batch order where that can be had; nothing else is disturbed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import Content, advance, layer, make_pool, snapshot

import torch_uma.batch
from torch_uma.books import Sequences
from torch_uma.errors import OutOfMemory, SequenceError
from torch_uma.layout import Full, State
from torch_uma.ledger import Lease
from torch_uma.pool import Batch, CachePool, Step
from torch_uma.runs import align_states, alignment_price_bytes, plan_alignment
from torch_uma.testing import live_pages, scramble, stamp, verify


@pytest.fixture
def free_of_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_uma.batch, "alignment_price_bytes", lambda num_rows, num_pages, device: 0)


def is_aligned(slots: np.ndarray) -> bool:
    return bool((np.diff(slots) == 1).all())


def can_be_aligned(slots: list[int], is_pinned: list[bool], free: list[int]) -> bool:
    """Search through every arrangement that single moves of own pages to free places lead to."""
    places = frozenset(slots) | frozenset(free)
    seen, reached = {tuple(slots)}, [tuple(slots)]
    while reached:
        now = reached.pop()
        if all(after == before + 1 for before, after in zip(now, now[1:], strict=False)):
            return True
        for row in range(len(now)):
            for target in () if is_pinned[row] else places - set(now):
                moved = (*now[:row], target, *now[row + 1 :])
                if moved not in seen:
                    seen.add(moved)
                    reached.append(moved)
    return False


def fewest_rows_to_move(slots: list[int], is_pinned: list[bool], free: list[int]) -> int:
    places = set(slots) | set(free)
    counts = []
    for start in places:
        goals = range(start, start + len(slots))
        moving = [slot != goal for slot, goal in zip(slots, goals, strict=True)]
        if places.issuperset(goals) and not any(m and p for m, p in zip(moving, is_pinned, strict=True)):
            counts.append(sum(moving))
    return min(counts)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_a_plan_moves_as_few_as_a_search_allows_and_is_there_whenever_one_can_be_had(data: st.DataObject) -> None:
    grid = data.draw(st.permutations(range(7)))
    num_rows = data.draw(st.integers(2, 4))
    slots, rest = grid[:num_rows], grid[num_rows:]
    free = sorted(rest[: data.draw(st.integers(0, len(rest)))])
    is_pinned = data.draw(
        st.one_of(st.just([False] * num_rows), st.lists(st.booleans(), min_size=num_rows, max_size=num_rows))
    )
    waves = plan_alignment(3, np.array(slots), np.array(is_pinned), np.array(free, np.int64))
    assert (waves is not None) == can_be_aligned(slots, is_pinned, free)
    if waves is None:
        return
    at = {slot: row for row, slot in enumerate(slots)}
    moved = set()
    num_moves = 0
    for wave in waves:
        sources, destinations = wave.sources.tolist(), wave.destinations.tolist()
        assert wave.subpool == 3 and sources == sorted(sources) and len(set(destinations)) == len(sources) > 0
        assert set(sources) <= set(at) and not set(destinations) & set(at)
        assert set(destinations) <= set(slots) | set(free)
        rows = [at.pop(source) for source in sources]
        assert not any(is_pinned[row] for row in rows)
        at.update(zip(destinations, rows, strict=True))
        moved.update(rows)
        num_moves += len(rows)
    places = sorted(at)
    assert is_aligned(np.array(places)) and [at[place] for place in places] == list(range(num_rows))
    assert len(moved) == fewest_rows_to_move(slots, is_pinned, free)
    assert num_moves < 2 * num_rows or not moved


@pytest.mark.parametrize("num_rows", [2, 3, 8, 33, 256])
def test_three_waves_do_with_enough_spare_places_and_one_place_does_with_more(num_rows: int) -> None:
    random = np.random.default_rng(num_rows)
    unpinned = np.zeros(num_rows, bool)
    shifted = np.delete(np.arange(num_rows + 1), num_rows // 2)  # one of a batch has left
    for slots in (np.arange(num_rows)[::-1], np.roll(np.arange(num_rows), 1), random.permutation(num_rows), shifted):
        free = np.setdiff1d(np.arange(2 * num_rows + 1), slots)
        waves = plan_alignment(0, slots, unpinned, free)
        assert waves is not None and len(waves) <= 3
        assert sum(len(wave.sources) for wave in waves) <= 5 * num_rows / 3
        narrow = plan_alignment(0, slots, unpinned, free[:1])
        assert narrow is not None and len(narrow) <= num_rows + num_rows // 2
    assert plan_alignment(0, np.arange(num_rows)[::-1], unpinned, np.empty(0, np.int64)) is None


class Seen:
    """What `align_states` was asked in a pool; whenever it is, that it did what the search allows and no more."""

    def __init__(self, pool: CachePool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[bool] = []
        self.pool = pool
        monkeypatch.setattr(torch_uma.batch, "align_states", self.align_states)

    def align_states(self, books: Sequences, k: int, slots: np.ndarray) -> bool:
        allocator = books.allocator
        base = allocator.id_base[k]
        ids = allocator.tables.owner[slots + base]
        pinned = allocator.room.pinned_places(k)
        is_pinned = np.isin(slots + base, pinned)
        pinned_owners = allocator.tables.owner[pinned]
        free = allocator.free_places(k)
        nearest = free[np.argsort(abs(free - slots.mean()), kind="stable")][:4]  # more would make the search long
        expected = can_be_aligned(slots.tolist(), is_pinned.tolist(), nearest.tolist())
        places, contents, bands = allocator.v2p.copy(), self.contents(), self.bands()
        answer = align_states(books, k, slots)
        assert answer or not expected
        assert answer == is_aligned(allocator.v2p[ids])
        assert (np.delete(allocator.v2p, ids) == np.delete(places, ids)).all()
        assert (allocator.tables.owner[pinned] == pinned_owners).all()
        assert self.contents() == contents
        assert answer or self.bands() == bands
        self.answers.append(answer)
        return answer

    def contents(self) -> dict[int, bytes]:
        """The bytes of every live page by id."""
        allocator, arena = self.pool.sequences.allocator, self.pool.arena.bytes.numpy()
        found = {}
        for subpool in self.pool.plan.subpools:
            base, end = allocator.id_base[subpool.index : subpool.index + 2]
            for page in np.flatnonzero(allocator.tables.owner[base:end] >= 0).tolist():
                start = subpool.origin_bytes + page * subpool.page_bytes
                found[int(allocator.tables.owner[base + page])] = arena[start : start + subpool.page_bytes].tobytes()
        return found

    def bands(self) -> tuple[object, ...]:
        allocator = self.pool.sequences.allocator
        return tuple(
            (b.span, b.num_holes, b.num_live, b.moved_pages) for b in allocator.bands
        ), allocator.layout_version


@pytest.mark.parametrize("kinds", ["state", "hybrid", "every"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("free_of_charge")
def test_states_lie_side_by_side_in_any_traffic(kinds: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(seed)
    memory = {"state": 400, "hybrid": 2048, "every": 4096}[kinds]
    pool = make_pool(kinds, memory=memory, max_sequences=9)
    content, seen = Content(pool), Seen(pool, monkeypatch)
    leases: list[Lease] = []
    opened: list[tuple[Step, list[list[int]]]] = []
    for _ in range(150):
        busy = {sequence for step, _ in opened for sequence in step.sequences}
        idle = [sequence for sequence in content.tokens if sequence not in busy]
        deed = int(random.integers(10))
        try:
            if deed < 2 or len(idle) < 2:
                content.add(pool.add())
            elif deed == 2:
                source = idle[random.integers(len(idle))]
                content.fork(source, source.fork())
            elif deed == 3:
                gone = idle[random.integers(len(idle))]
                gone.free()
                content.free(gone)
            elif deed == 4:
                scramble(pool, int(random.integers(1000)))
            elif deed == 5:
                leases.append(pool.lease(idle[random.integers(len(idle))], "test"))
            else:
                chosen = [idle[at] for at in random.permutation(len(idle))[: random.integers(2, 5)]]
                step = pool.begin(chosen, int(random.integers(1, 4)))
                assert len(set(step.slots().tolist())) == len(chosen)
                opened.append((step, content.write(step)))
        except (OutOfMemory, SequenceError):
            pass
        if leases and random.integers(4) == 0:
            leases.pop().close()
        if opened and (len(opened) > 1 or random.integers(2)):
            step, values = opened.pop(int(random.integers(len(opened))))
            step.commit()
            content.commit(step, values)
        pool.check()
        content.verify()
    assert set(seen.answers) == {True, False}, seen.answers


def out_of_order(pool: CachePool) -> tuple[Batch, Content]:
    """Three sequences with states, in a batch in the opposite order."""
    content = Content(pool)
    sequences = [pool.add() for _ in range(3)]
    for sequence in sequences:
        content.add(sequence)
    step = pool.begin(pool.batch(sequences), 2)
    assert step.slots().tolist() == [0, 1, 2]
    values = content.write(step)
    step.commit()
    content.commit(step, values)
    return pool.batch(sequences[::-1]), content


def state_slots(pool: CachePool, batch: Batch) -> list[int]:
    return [int(pool.allocator.v2p[sequence.pages[0][0]]) for sequence in batch]


@pytest.mark.usefixtures("free_of_charge")
def test_moves_are_made_once_counted_and_seen_by_the_device() -> None:
    pool = make_pool("hybrid")
    batch, content = out_of_order(pool)
    advance(content, list(batch), 1)
    subpool = pool.plan.subpools[0]
    moved_bytes = pool.stats().subpools[0].moved_bytes
    assert state_slots(pool, batch) == [0, 1, 2] and moved_bytes == 3 * subpool.page_bytes
    version = pool.allocator.layout_version
    for _ in range(3):
        step = pool.begin(batch, 1)
        located = step.entries(subpool, torch.zeros(3, 1, dtype=torch.int64))
        assert located.flatten().tolist() == step.slots().tolist() == [0, 1, 2]
        step.commit()
    assert pool.allocator.layout_version == version and pool.stats().subpools[0].moved_bytes == moved_bytes


@pytest.mark.usefixtures("free_of_charge")
def test_what_cannot_be_had_is_not_tried_again_until_states_come_or_go(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool("hybrid")
    batch, content = out_of_order(pool)
    seen = Seen(pool, monkeypatch)
    lease = pool.lease(batch.sequences[0], "test")
    other = pool.lease(batch.sequences[1], "test")
    for turn in range(7):
        if turn == 4:
            other.close()
        if turn == 5:
            lease.close()
        step = pool.begin(batch, 1)
        values = content.write(step)
        assert is_aligned(step.slots()) == (turn >= 4), turn
        step.commit()
        content.commit(step, values)
        pool.check()
        content.verify()
    assert seen.answers == [False, True]
    assert state_slots(pool, batch) == [2, 3, 4]  # beside the one that could not move


@pytest.mark.usefixtures("free_of_charge")
def test_without_a_spare_place_states_stay_and_the_step_goes_on() -> None:
    pool = make_pool([layer(State(), width=20)], memory=256)
    batch, content = out_of_order(pool)
    version = pool.allocator.layout_version
    advance(content, list(batch), 1)
    assert state_slots(pool, batch) == [2, 1, 0] and pool.allocator.layout_version == version


@pytest.mark.usefixtures("free_of_charge")
def test_other_sequences_and_open_steps_are_left_where_they_are() -> None:
    pool = make_pool("hybrid")
    sequences = [pool.add() for _ in range(6)]
    first = pool.begin(sequences[1::2], 1)
    places = first.slots().tolist()
    stamped = live_pages(pool)
    stamp(pool, stamped)
    second = pool.begin(sequences[::2], 1)
    assert is_aligned(second.slots()) and first.slots().tolist() == places
    verify(pool, stamped)
    pool.check()
    second.abort()
    first.commit()
    pool.check()
    verify(pool, stamped)


@pytest.mark.usefixtures("free_of_charge")
def test_forks_have_a_state_each_before_states_move() -> None:
    pool = make_pool("hybrid")
    batch, content = out_of_order(pool)
    parents = batch.sequences
    forks = [parent.fork() for parent in parents]
    for parent, fork in zip(parents, forks, strict=True):
        content.fork(parent, fork)
    mixed = [forks[1], parents[1], forks[0], parents[2]]
    step = pool.begin(mixed, 2)
    assert is_aligned(step.slots())
    values = content.write(step)
    pool.check()
    step.commit()
    content.commit(step, values)
    content.verify()
    step = pool.begin([parents[0], forks[2]], 1)  # each shared by one that is in no step
    assert is_aligned(step.slots())
    step.abort()
    pool.check()
    content.verify()


def test_states_that_are_cheap_to_copy_are_moved_when_steps_have_copied_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool("hybrid")
    batch, _ = out_of_order(pool)
    page_bytes = pool.plan.subpools[0].page_bytes
    prices = []

    def price(num_rows: int, num_pages: int, device: torch.device) -> float:
        prices.append(alignment_price_bytes(num_rows, num_pages, device))
        return 3 * 2 * 3 * page_bytes

    monkeypatch.setattr(torch_uma.batch, "alignment_price_bytes", price)
    aligned = []
    for _ in range(5):
        step = pool.begin(batch, 1)
        aligned.append(is_aligned(step.slots()))
        step.commit()
    assert aligned == [False, False, True, True, True]
    assert min(prices) > 1e6
    assert alignment_price_bytes(2, 1 << 20, pool.device) > 10 * alignment_price_bytes(2, 100, pool.device)


@pytest.mark.usefixtures("free_of_charge")
def test_a_move_that_fails_gives_the_reservation_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool("hybrid")
    batch, content = out_of_order(pool)
    before = snapshot(pool)
    allocator = pool.allocator

    def fail(*arguments: object) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(allocator, "mover", fail)
        with pytest.raises(RuntimeError, match="gone"):
            pool.begin(batch, 9)
    after = snapshot(pool)
    assert after["cells"] == before["cells"] and after["sequences"] | {"last_epoch": 0} == before["sequences"] | {
        "last_epoch": 0
    }
    pool.check()
    content.verify()
    advance(content, list(batch), 9)
    assert state_slots(pool, batch) == [0, 1, 2]


@pytest.mark.usefixtures("free_of_charge")
def test_an_arena_without_bytes_moves_as_one_with_them_does() -> None:
    """So that a replay counts what a loop would move."""
    real = make_pool("hybrid")
    places, moved_bytes = [], []
    for pool in (real, CachePool(real.plan, device="meta", max_sequences=2)):
        step = pool.begin([pool.add() for _ in range(2)][::-1], 1)
        places.append(step.slots().tolist())
        step.commit()
        moved_bytes.append(pool.stats().moved_bytes)
    assert places[0] == places[1] and moved_bytes[0] == moved_bytes[1] > 0


@pytest.mark.usefixtures("free_of_charge")
def test_nothing_is_asked_without_states_and_without_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_uma.batch, "align_states", None)
    without_states = make_pool([layer(Full())])
    sequences = [without_states.add() for _ in range(2)]
    without_states.begin(sequences[::-1], 1).commit()
    pool = make_pool("hybrid")
    sequences = [pool.add() for _ in range(2)]
    pool.begin(sequences[1:], 1).commit()


@pytest.mark.usefixtures("free_of_charge")
def test_frozen_frontiers_stay() -> None:
    pool = make_pool("hybrid", split={"state": 0.02})
    (num_pages,) = {pool.allocator.bands[0].grid.num_pages}
    sequences = [pool.add() for _ in range(num_pages)]
    with pytest.raises(OutOfMemory):
        pool.add()
    step = pool.begin(sequences[::-1], 1)
    assert not is_aligned(step.slots())
    step.commit()
    sequences[0].free()
    step = pool.begin(sequences[:0:-1], 1)
    assert is_aligned(step.slots()) and step.slots().max() < num_pages
    step.commit()
    pool.check()
