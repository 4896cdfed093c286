"""Sequences: room, forks and their copies, crops, frees, and what each refuses without changing anything."""

import copy
import pickle

import numpy as np
import pytest
from pools import Content, advance, layer, make_pool, snapshot

from torch_uma.books import Sequences
from torch_uma.errors import OutOfMemory, SequenceError
from torch_uma.layout import Full, State, Window


def test_room_is_what_a_sequence_of_that_length_holds():
    pool = make_pool()
    for num_tokens in (0, 1, 5, 29):
        sequence = pool.add(num_tokens)
        assert sequence.length == 0
        assert sequence.num_pages == pool.plan.demand(num_tokens)
        pool.check()


def test_room_serves_the_tokens_that_it_was_taken_for():
    pool = make_pool("hybrid")
    sequence = pool.add(29)
    content = Content(pool)
    content.add(sequence)
    pages = {page for ids in sequence.pages for page in ids.tolist()}
    advance(content, [sequence], 29)
    assert {page for ids in sequence.pages for page in ids.tolist()} == pages
    assert sequence.num_pages == pool.plan.demand(29)


def test_room_ahead_of_a_window_serves_behind_the_gap():
    pool = make_pool([layer(Full()), layer(Window(4))], page_size=2)
    window = pool.plan.subpools[0].index
    sequence = pool.add(20)
    room = set(sequence.pages[window].tolist())
    step = pool.begin([sequence], 9)  # needs the columns from 3 on
    assert set(sequence.pages[window].tolist()) <= room
    pool.check()
    step.abort()
    assert set(sequence.pages[window].tolist()) == room
    pool.check()
    content = Content(pool)
    content.add(sequence)
    advance(content, [sequence], 9)


@pytest.mark.parametrize("kinds", ["full", "state", "window", "chunk", "hybrid", "every"])
@pytest.mark.parametrize("length", [0, 1, 6, 17])
@pytest.mark.parametrize("parent_first", [True, False])
def test_a_fork_shares_until_one_side_writes(kinds, length, parent_first):
    pool = make_pool(kinds)
    content = Content(pool)
    parent = pool.add()
    content.add(parent)
    if length:
        advance(content, [parent], length)
    live = pool.stats().live_bytes
    child = parent.fork()
    content.fork(parent, child)
    assert pool.stats().live_bytes == live
    assert all((a == b).all() for a, b in zip(parent.pages, child.pages, strict=True))
    pool.check()
    for sequence in (parent, child) if parent_first else (child, parent):
        advance(content, [sequence], 2)
    assert parent.num_pages == child.num_pages == pool.plan.demand(length + 2)
    full_pages = sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(parent.pages, child.pages, strict=True))
    whole = [s for s in pool.plan.subpools if isinstance(s.lifetime, Full)]
    assert full_pages >= sum(length // subpool.page_tokens for subpool in whole)
    parent.free()
    content.free(parent)
    pool.check()
    content.verify()
    child.free()
    assert pool.stats().live_bytes == 0
    pool.check()


def test_a_fork_whose_partner_is_gone_copies_nothing():
    pool = make_pool("hybrid")
    content = Content(pool)
    parent = pool.add()
    content.add(parent)
    advance(content, [parent], 10)
    child = parent.fork()
    content.fork(parent, child)
    pages = child.pages
    parent.free()
    content.free(parent)
    advance(content, [child], 1)
    assert all(set(a.tolist()) >= set(b.tolist()) for a, b in zip(pages, child.pages, strict=True))


def test_forks_in_one_step_leave_one_page_uncopied():
    pool = make_pool("hybrid")
    content = Content(pool)
    parent = pool.add()
    content.add(parent)
    advance(content, [parent], 10)
    family = [parent]
    for _ in range(3):
        family.append(family[-1].fork())
        content.fork(parent, family[-1])
    state = pool.plan.subpools[0]
    step = pool.begin(family, 1)
    assert pool.stats().subpool(state.name).live_pages == 4
    values = content.write(step)
    step.commit()
    content.commit(step, values)
    pool.check()
    content.verify()
    assert len({int(sequence.pages[0][0]) for sequence in family}) == 4


def test_room_ahead_is_not_shared():
    pool = make_pool("full")
    parent = pool.add(30)
    content = Content(pool)
    content.add(parent)
    advance(content, [parent], 4)
    child = parent.fork()
    content.fork(parent, child)
    assert parent.num_pages == (10,) and child.num_pages == (2,)
    advance(content, [child], 5)
    advance(content, [parent], 5)


def test_two_open_steps_over_a_fork_each_copy():
    pool = make_pool("hybrid")
    content = Content(pool)
    parent = pool.add()
    content.add(parent)
    advance(content, [parent], 10)
    child = parent.fork()
    content.fork(parent, child)
    first, second = pool.begin([parent], 1), pool.begin([child], 1)
    pool.check()
    first_values, second_values = content.write(first), content.write(second)
    first.abort()
    second.commit()
    content.commit(second, second_values)
    pool.check()
    content.verify()
    with pytest.raises(SequenceError, match="half written"):
        pool.begin([parent], 1)
    assert first_values


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 6, 7, 12])
def test_crop_gives_back_the_pages_behind(num_tokens):
    pool = make_pool("full")
    content = Content(pool)
    sequence = pool.add(40)
    content.add(sequence)
    advance(content, [sequence], 13)
    sequence.crop(num_tokens)
    content.crop(sequence, num_tokens)
    assert sequence.length == num_tokens
    assert sequence.num_pages == pool.plan.demand(num_tokens)
    pool.check()
    advance(content, [sequence], 8)


def test_crop_to_the_present_length_changes_nothing():
    pool = make_pool()
    sequence = pool.add(20)
    pool.begin([sequence], 13).commit()
    before = snapshot(pool)
    sequence.crop(13)
    assert snapshot(pool) == before


def test_crop_into_a_shared_page_copies_it_before_it_is_written():
    pool = make_pool("full")
    content = Content(pool)
    parent = pool.add()
    content.add(parent)
    advance(content, [parent], 12)
    child = parent.fork()
    content.fork(parent, child)
    advance(content, [child], 1)
    advance(content, [parent], 1)
    child.crop(4)
    content.crop(child, 4)
    advance(content, [child], 7)
    advance(content, [parent], 1)


def test_a_window_can_be_cropped_as_far_as_its_pages_reach():
    pool = make_pool([layer(Window(7))], page_size=4)
    content = Content(pool)
    sequence = pool.add()
    content.add(sequence)
    advance(content, [sequence], 21)  # needs the tokens from 15 on, and so the page from 12 on
    before = snapshot(pool)
    for crop in (sequence.check_crop, sequence.crop):
        with pytest.raises(SequenceError, match=r"needs tokens from 11 on, but keeps those from 12 on"):
            crop(17)
    sequence.check_crop(18)
    assert snapshot(pool) == before
    sequence.crop(18)
    content.crop(sequence, 18)
    pool.check()
    content.verify()
    advance(content, [sequence], 9)
    sequence.crop(0)
    content.crop(sequence, 0)
    pool.check()
    advance(content, [sequence], 3)


def test_a_state_cannot_be_cropped_but_started_afresh():
    pool = make_pool("hybrid")
    content = Content(pool)
    sequence = pool.add()
    content.add(sequence)
    advance(content, [sequence], 9)
    before = snapshot(pool)
    for crop in (sequence.check_crop, sequence.crop):
        with pytest.raises(SequenceError, match="state"):
            crop(8)
    sequence.check_crop(0)
    assert snapshot(pool) == before
    sequence.crop(0)
    content.crop(sequence, 0)
    step = pool.begin([sequence], 2)
    assert step.fresh.tolist() == [True]
    step.abort()
    advance(content, [sequence], 4)


@pytest.mark.parametrize("num_tokens", [-1, 10, 1000])
def test_crop_only_shortens(num_tokens):
    pool = make_pool("full")
    sequence = pool.add()
    pool.begin([sequence], 9).commit()
    with pytest.raises(SequenceError, match="crop only shortens" if num_tokens > 0 else "at least 0, not -1"):
        sequence.crop(num_tokens)
    with pytest.raises(SequenceError, match="whole number, not 4.5"):
        sequence.crop(4.5)
    assert sequence.length == 9


def test_a_sequence_is_forked_not_copied():
    sequence = make_pool().add(3)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"fork\(\) makes a second one"):
            copied(sequence)
        with pytest.raises(TypeError, match="make another one of its plan"):
            copied(sequence.pool)


def test_a_freed_sequence_is_of_no_use():
    pool = make_pool()
    sequence, other = pool.add(), pool.add()
    pool.begin([sequence, other], 4).commit()
    sequence.free()
    before = snapshot(pool)
    uses = (
        sequence.free,
        sequence.fork,
        lambda: sequence.crop(0),
        lambda: sequence.length,
        lambda: sequence.row,
        lambda: sequence.num_pages,
        lambda: pool.begin([other, sequence], 1),
        lambda: pool.batch([sequence]),
        lambda: pool.lease(sequence, "test"),
        lambda: pool.extend_runs([sequence], 4),
    )
    for use in uses:
        with pytest.raises(SequenceError, match="freed"):
            use()
    assert snapshot(pool) == before
    assert "freed" in repr(sequence)


def test_a_sequence_of_another_pool_is_refused():
    pool, stranger = make_pool(), make_pool().add()
    with pytest.raises(SequenceError, match="another pool"):
        pool.begin([pool.add(), stranger], 1)
    with pytest.raises(SequenceError, match="another pool"):
        pool.lease(stranger, "test")


@pytest.mark.parametrize("when", ["_clear", "concatenate"])
def test_what_a_finalizer_frees_while_rows_are_cleared_is_not_lost(when: str, monkeypatch: pytest.MonkeyPatch):
    pool = make_pool("hybrid")
    first, second, third = (pool.add(10) for _ in range(3))
    first.free()
    second.crop(0)
    victims = [third]
    owner = Sequences if when == "_clear" else np
    original = getattr(owner, when)

    def collect(*arguments, **options):
        result = original(*arguments, **options)
        if victims:
            victims.pop().free()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, when, collect)
        pool.sequences.settle()
    assert not victims
    pool.check()
    second.free()
    assert pool.stats().live_bytes == 0
    assert pool.add().num_pages == (1, 0, 0)


def test_rows_are_used_again_and_run_out():
    pool = make_pool("hybrid", max_sequences=3)
    sequences = [pool.add() for _ in range(3)]
    before = snapshot(pool)
    with pytest.raises(SequenceError, match="larger max_sequences"):
        pool.add()
    with pytest.raises(SequenceError, match="larger max_sequences"):
        sequences[0].fork()
    assert snapshot(pool) == before
    sequences[1].free()
    content = Content(pool)
    again = pool.add()
    content.add(again)
    advance(content, [again], 7)


def test_room_that_does_not_fit_is_refused_with_its_quote():
    pool = make_pool("hybrid", memory=4096)
    sequence = pool.add(30)
    before = snapshot(pool)
    most = pool.tables.max_tokens
    with pytest.raises(OutOfMemory) as refusal:
        pool.add(most)
    assert snapshot(pool) == before
    assert not refusal.value.quote.fits and not pool.quote(most).fits
    sequence.free()
    assert pool.quote(30).fits
    pool.add(30)


def test_what_the_quote_grants_can_be_added():
    pool = make_pool("every", memory=8192)
    for num_tokens in (40, 30, 20, 10, 5, 3, 1, 0) * 4:
        if pool.quote(num_tokens).fits and len([row for row in pool.sequences.live if row]) < 12:
            pool.add(num_tokens)
        pool.check()


def test_freeing_forks_together_releases_each_page_once():
    pool = make_pool("every")
    content = Content(pool)
    parent = pool.add()
    content.add(parent)
    advance(content, [parent], 20)
    family = [parent, parent.fork(), parent.fork()]
    for sequence in family:
        sequence.free()
    pool.check()
    assert pool.stats().live_bytes == 0


def test_a_state_alone_holds_one_page_for_ever():
    pool = make_pool([layer(State())])
    sequence = pool.add()
    for num_new_tokens in (1, 1000, 1):
        pool.begin([sequence], num_new_tokens).commit()
        assert sequence.num_pages == (1,)
        pool.check()
    assert sequence.length == 1002
