"""Windows slide through a run: the same tokens as without a cache, viewed at nearly every step, in two windows each."""

from __future__ import annotations

import copy
import random
from collections import Counter

import models
import numpy as np
import pytest
import torch
from pools import Content, advance, layer, make_pool, snapshot
from tiny_models import prompts
from transformers import PreTrainedModel

import torch_uma
from torch_uma import CachePool, Full, SequenceError, UnifiedCache, Window
from torch_uma.testing import live_pages, poison, scramble

torch.set_num_threads(1)

STOCK = [("gpt_oss", "eager"), ("gemma2", "eager"), ("mistral", "sdpa"), ("mistral", "eager")]
MEMORY = 4 << 20


def build(name: str, attention: str, window: int) -> PreTrainedModel:
    """A model with another window, which its layers look up when they are made and its masks later."""
    model = models.build(name, attention=attention)
    model.config.sliding_window = window
    for module in model.modules():
        if getattr(module, "sliding_window", None) is not None:
            module.sliding_window = window
    return model


class Chat:
    """Rows of a cache that are fed text, whose logits are compared with those of all the text without a cache."""

    def __init__(self, model: PreTrainedModel, cache: UnifiedCache, num_rows: int) -> None:
        self.model, self.cache = model, cache
        self.text = torch.empty(num_rows, 0, dtype=torch.int64)
        self.logits: list[torch.Tensor] = []  # of the last tokens, not compared yet
        self.paths: Counter[str] = Counter()

    @torch.no_grad()
    def feed(self, num_tokens: int, chance: random.Random) -> None:
        new = torch.tensor([[chance.randrange(256) for _ in range(num_tokens)] for _ in self.text])
        self.text = torch.cat([self.text, new], dim=1)
        self.logits.append(self.model(new, cache=self.cache).logits)
        self.paths.update(self.cache.paths())
        self.cache.pool.check()

    @torch.no_grad()
    def verify(self) -> None:
        actual = torch.cat(self.logits, dim=1)
        expected = self.model(self.text, use_cache=False).logits[:, -actual.shape[1] :]
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
        self.logits.clear()


def counted_entries(pool: CachePool) -> list[int]:
    """A number that grows with the entries of windows that are copied, as a list of one."""
    allocator, counts = pool.sequences.allocator, [0]
    mover = allocator.mover
    assert mover is not None

    def count(k: int, sources: np.ndarray, destinations: np.ndarray) -> None:
        if isinstance(pool.plan.subpools[k].lifetime, Window):
            counts[0] += len(sources) * pool.plan.subpools[k].page_tokens
        mover(k, sources, destinations)

    allocator.mover = count
    return counts


@pytest.mark.parametrize(("window", "page_size"), [(5, 1), (8, 1), (8, 7), (5, 16), (24, 16)])
@pytest.mark.parametrize(("name", "attention"), STOCK[:3])
def test_a_window_is_a_view_at_nearly_every_step(name: str, attention: str, window: int, page_size: int) -> None:
    model = build(name, attention, window)
    chance = random.Random(page_size)
    for options in ({"max_tokens": 6 * window + 40}, {"memory": MEMORY}):
        cache = UnifiedCache(model, page_size=page_size, **options)
        chat = Chat(model, cache, 3)
        chat.feed(9, chance)
        poison(cache.pool, only_free=True)
        counts = counted_entries(cache.pool)
        num_steps, before = 5 * window + 20, chat.paths.copy()
        for _ in range(num_steps):
            chat.feed(1, chance)
        chat.verify()
        assert not (chat.paths - before)["gather"], chat.paths
        # A window a row when its room is first taken, then an entry for each new one; pages are copied whole.
        assert counts[0] <= 3 * (num_steps + 2 * window + 4 * page_size)


@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize(("name", "attention"), STOCK)
def test_whatever_comes_in_between(name: str, attention: str, page_size: int) -> None:
    paths: Counter[str] = Counter()
    for seed in range(3):
        chance = random.Random(100 * page_size + seed)
        model = build(name, attention, chance.choice([7, 8, 13]))
        cache = UnifiedCache(model, memory=MEMORY, page_size=page_size)
        poison(cache.pool)
        chat = Chat(model, cache, 3)
        chat.feed(chance.randint(1, 30), chance)
        chat.verify()
        for _ in range(30):
            match chance.choice(["one"] * 6 + ["some", "many", "crop", "reorder", "fork", "scramble", "reset"]):
                case "one":
                    for _ in range(4):
                        chat.feed(1, chance)
                case "some":
                    chat.feed(chance.randint(2, 6), chance)
                case "many":
                    chat.feed(chance.randint(8, 40), chance)
                case "crop":
                    count = chance.randint(1, 3)
                    try:
                        cache.crop(-count)
                        chat.text = chat.text[:, : chat.text.shape[1] - count]
                    except SequenceError:
                        pass
                case "reorder":
                    rows = torch.tensor([chance.randrange(3) for _ in range(3)])
                    cache.reorder_cache(rows)
                    chat.text = chat.text[rows]
                case "fork":
                    other = Chat(model, copy.deepcopy(cache), 3)
                    other.text = chat.text
                    other.feed(1, chance)
                    other.verify()
                    chat.feed(1, chance)
                    chat.verify()
                    if chance.random() < 0.5:
                        chat, cache = other, other.cache
                case "scramble":
                    scramble(cache.pool, chance.randrange(100))
                case "reset":
                    cache.reset()
                    chat.text = torch.empty(3, 0, dtype=torch.int64)
                    chat.feed(chance.randint(1, 20), chance)
            if chat.logits:
                chat.verify()
            cache.pool.check()
        paths += chat.paths
    assert paths["view"] and paths["gather"]


@pytest.mark.parametrize("page_size", [1, 16])
def test_prompts_in_pieces_keep_their_run_in_an_arena_made_for_them(page_size: int) -> None:
    model = build("mistral", "sdpa", 8)
    chance = random.Random(3)
    cache = UnifiedCache(model, max_tokens=200, page_size=page_size)
    chat = Chat(model, cache, 2)
    for count in (30, 11, 8, 40):
        chat.feed(count, chance)
    counts = counted_entries(cache.pool)
    for count in [1] * 30 + [5, 5, 20] + [1] * 50:
        chat.feed(count, chance)
        if count < 8:
            assert set(cache.paths()) == {"view"}
    chat.verify()
    assert 0 < counts[0] <= 2 * (110 + 4 * 8 + 6 * page_size)
    room = 2 * -(-(8 + page_size - 2) // page_size) + 2
    assert cache.pool.stats().subpools[0].peak_pages <= 2 * room


@pytest.mark.parametrize("name", ["gpt_oss", "mistral"])
def test_attention_in_place_takes_no_room(name: str) -> None:
    model = models.build(name, attention="torch_uma")
    stock = models.build(name, attention="eager")
    bytes_of = {}
    for each in (model, stock):
        cache = UnifiedCache(each, max_tokens=500)
        with torch.no_grad():
            for count in [40, *[1] * 60]:
                each(prompts((count, count))["input_ids"], cache=cache)
                windows = [s.index for s in cache.pool.plan.subpools if isinstance(s.lifetime, Window)]
                books = cache.pool.sequences
                if each is model:
                    cache.pool.check()  # brings the step to its end
                    assert all((books.end - books.first)[k, 0] <= books.lifespans.window_pages(k) for k in windows)
        bytes_of[each] = cache.pool.plan.arena_bytes
    assert bytes_of[model] < bytes_of[stock]


def test_a_step_of_a_pool_takes_a_run_of_equally_long_rows() -> None:
    model = build("gpt_oss", "eager", 8)
    pool = CachePool(model, memory=MEMORY, page_size=4)
    poison(pool)
    rows = [pool.add() for _ in range(2)]
    batch = pool.batch(rows)
    tokens = prompts((60, 60))["input_ids"]
    expected = model(tokens, use_cache=False).logits
    paths: Counter[str] = Counter()
    at = 0
    for count in [9, *[1] * 51]:
        pool.extend_runs(batch, 60)
        pool.slide_windows(batch, count, 60)
        with torch.no_grad(), pool.step(batch, count) as cache:
            logits = model(tokens[:, at : at + count], cache=cache, **cache.inputs()).logits
            paths.update(cache.paths())
        torch.testing.assert_close(logits, expected[:, at : at + count], rtol=1e-3, atol=1e-3)
        at += count
        pool.check()
    assert paths["gather"] == 2  # the windows of a prompt that is longer than they are
    with torch.no_grad(), pool.step({rows[0]: 1}) as cache:
        model(tokens[:1, :1], cache=cache, **cache.inputs())
    with torch.no_grad(), pool.step(batch, 1) as cache:  # rows of unequal length are fetched
        model(tokens[:, :1], cache=cache, **cache.inputs())
        assert set(cache.paths()) == {"gather"}


def test_what_others_hold_or_read_is_not_written_over() -> None:
    pool = make_pool([layer(Window(6), width=8)], memory=1 << 14, page_size=2)
    content = Content(pool)
    sequences = [pool.add() for _ in range(2)]
    for sequence in sequences:
        content.add(sequence)
    grid = pool.arena.pages(pool.plan.subpools[0])
    reached, num_slides = 0, 0
    for _ in range(80):
        length = sequences[0].length
        if length and length + 1 > reached:
            lease = fork = None
            if num_slides % 2:
                lease = pool.lease(sequences[1], "a copy")
                places = pool.allocator.v2p[sequences[1].pages[0]][: -(length % 2) or None]  # but for the last token's
                leased = grid[places].clone()
            else:
                fork = sequences[0].fork()
                content.fork(sequences[0], fork)
            reached = pool.slide_windows(sequences, 1, 200)
            num_slides += 1
            assert reached > length
            content.verify()
            pool.check()
            advance(content, sequences, min(5, reached - length))
            if fork is not None:
                advance(content, [fork], 3)
                content.free(fork)
                fork.free()
            if lease is not None:
                assert torch.equal(grid[places], leased)
                lease.close()
        advance(content, sequences, 1)
    assert num_slides > 4
    pool.check()


def test_without_room_nothing_changes_and_room_is_given_back_for_a_step() -> None:
    pool = make_pool([layer(Full()), layer(Window(6), width=8)], memory=1 << 12, page_size=2, max_sequences=99)
    content = Content(pool)
    sequence = pool.add()
    content.add(sequence)
    advance(content, [sequence], 9)
    windows = pool.sequences.lifespans.windows[0]
    held = len(sequence.pages[windows])
    assert pool.slide_windows([sequence], 3, 100) > 12
    assert len(sequence.pages[windows]) > held
    assert pool.give_back_room([sequence]) and not pool.give_back_room([sequence])
    assert len(sequence.pages[windows]) == held
    content.verify()
    pool.check()
    others = []
    with pytest.raises(torch_uma.OutOfMemory):
        while True:
            others.append(pool.add(2))
    before = snapshot(pool)
    assert pool.slide_windows([sequence], 1, 100) > sequence.length
    assert snapshot(pool) == before
    advance(content, [sequence], 1)


def test_the_room_of_windows_never_refuses_a_step() -> None:
    model = build("gpt_oss", "eager", 8)
    lengths = {}
    for attention in ("torch_uma", "eager"):
        model.set_attn_implementation(attention)
        cache = UnifiedCache(model, memory=120_000, page_size=4)
        with torch.no_grad(), pytest.raises(torch_uma.OutOfMemory):
            while True:
                model(torch.tensor([[1], [2]]), cache=cache)
        cache.pool.check()
        lengths[attention] = cache.get_seq_length()
    assert lengths["eager"] == lengths["torch_uma"] > 50


@pytest.mark.parametrize("seed", range(4))
def test_places_are_reserved_where_they_are_asked_for(seed: int) -> None:
    chance = random.Random(seed)
    pool = make_pool("every", memory=1 << 13)
    allocator = pool.allocator
    ids: list[int] = []
    for _ in range(60):
        k = chance.randrange(len(allocator.bands))
        free = allocator.free_places(k)
        if len(free) and chance.random() < 0.6:
            pages = np.array(chance.sample(free.tolist(), chance.randint(1, min(4, len(free)))))
            new = allocator.reserve_at(k, pages)
            assert (allocator.v2p[new] == pages).all()
            ids += new.tolist()
        elif ids and chance.random() < 0.5:
            chance.shuffle(ids)
            gone, ids = ids[: len(ids) // 2], ids[len(ids) // 2 :]
            allocator.release(gone)
        elif allocator.quote(demand := [int(i == k) for i in range(len(allocator.bands))]):
            ids += allocator.reserve(demand).tolist()
        allocator.check()
        assert sorted(ids) == sorted(live_pages(pool).tolist())


def test_a_step_of_more_tokens_than_windows_hold_is_asked_for_once() -> None:
    pool = make_pool([layer(Window(3))], page_size=2)
    content = Content(pool)
    rows = [pool.add() for _ in range(2)]
    for row in rows:
        content.add(row)
    reached = 0
    while rows[0].length < 40:
        if rows[0].length + 12 > reached:
            reached = pool.slide_windows(rows, 12, 200)
            assert reached >= rows[0].length + 12
        advance(content, rows, 12)
