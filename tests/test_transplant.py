"""Sequences that move into another pool: the same content, and the old ones as they were."""

import pytest
import torch
from pools import Content, advance, make_pool

import torch_uma
from torch_uma.transplant import transplant


@pytest.mark.parametrize("kinds", ["hybrid", "full", "window", "state", "chunk", "every"])
@pytest.mark.parametrize("length", [0, 1, 9, 40])
def test_content_is_that_of_the_old_ones(kinds, length):
    source, target = make_pool(kinds), make_pool(kinds)
    torch_uma.testing.poison(target)
    content = Content(source)
    sequences = [source.add() for _ in range(3)]
    for sequence in sequences:
        content.add(sequence)
    if length:
        advance(content, sequences, length)
    torch_uma.testing.scramble(source, 3)
    torch_uma.testing.scramble(target, 4)
    made = transplant(sequences, target)
    assert [each.length for each in made] == [length] * 3
    for old, new in zip(sequences, made):
        for k, subpool in enumerate(target.plan.subpools):
            pages = [pool.allocator.v2p[each.pages[k]] for pool, each in ((source, old), (target, new))]
            size = subpool.page_bytes
            held = [
                torch.stack([pool.arena.bytes[subpool_of.origin_bytes + p * size :][:size] for p in map(int, of)])
                for pool, subpool_of, of in (
                    (source, source.plan.subpools[k], pages[0][: len(pages[1])]),
                    (target, subpool, pages[1]),
                )
                if len(of)
            ]
            assert len(held) != 1 and (not held or torch.equal(*held))
    content.verify()
    source.check()
    target.check()


def test_where_they_do_not_fit_nothing_is_made():
    source = make_pool("hybrid")
    sequences = [source.add() for _ in range(2)]
    content = Content(source)
    for sequence in sequences:
        content.add(sequence)
    advance(content, sequences, 30)
    target = make_pool("hybrid", max_sequences=400)
    others = []
    while target.quote(30):
        others.append(target.add(30))
    live = target.stats().live_bytes
    with pytest.raises(torch_uma.OutOfMemory):
        transplant(sequences, target)
    assert target.stats().live_bytes == live
    target.check()
    content.verify()


def test_where_the_copy_fails_nothing_is_made(monkeypatch):
    source, target = make_pool("hybrid"), make_pool("hybrid")
    sequences = source.add_many([0, 0])
    source.begin(sequences, 30).commit()

    def fail(*_):
        raise RuntimeError("no device")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no device"):
        patch.setattr(torch_uma.transplant, "copy_pages", fail)
        transplant(sequences, target)
    assert not target.stats().live_bytes and not target.guard.steps
    target.check()
    made = transplant(sequences, target)
    # The copy was made within a step, which other streams can wait for.
    assert [each.last_epoch for each in made] == [target.epoch] * 2
