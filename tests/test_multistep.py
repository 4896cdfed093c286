"""Multi-steps: what a graph takes by itself is what the host says that it took, and content follows its owner."""

from __future__ import annotations

import importlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import models
import numpy as np
import pytest
import torch
from pools import Content, advance, layer, make_pool, snapshot
from tiny_models import prompts
from torch._dynamo.utils import counters

from torch_uma import UnifiedCache
from torch_uma.errors import OutOfMemory, SequenceError
from torch_uma.layout import Full, Window
from torch_uma.multistep import MultiStep
from torch_uma.pool import CachePool
from torch_uma.sequence import Sequence
from torch_uma.testing import poison, scramble

torch.set_num_threads(1)

NUM_MULTI_STEPS = 340  # of each kind and page size: 5,100 in all
MEMORY = {1: 1 << 12, 3: 1 << 12, 16: 1 << 13}


def handed_out(multi: MultiStep, taken: list[int]) -> dict[int, dict[int, int]]:
    """By sub-pool, the page in each cell that the rows got, one token and one row after another."""
    pool, given = multi.pool, {}
    for subpool, stack in zip(multi.stacks.paged, multi.stacks.pages, strict=True):
        k, pages, cells = subpool.index, iter(stack.tolist()), {}
        for step in range(multi.num_steps):
            for row, past, count in zip(multi.rows.tolist(), multi.past.tolist(), taken, strict=True):
                length = past + step
                has_page = length < int(pool.sequences.capacity[k, row])
                if step < count and length % subpool.page_tokens == 0 and not has_page:
                    cells[int(pool.tables.origin[k, row]) + length // subpool.page_tokens] = next(pages)
        given[k] = cells
    return given


class Loop:
    """A pool, what its sequences hold, and random operations on them."""

    def __init__(self, kinds: str, page_size: int, seed: int) -> None:
        memory = MEMORY[page_size] // (4 if kinds in ("window", "chunk") else 1)
        self.pool = make_pool(kinds, memory=memory, page_size=page_size, max_sequences=6)
        self.content = Content(self.pool)
        self.rnd = random.Random(seed)
        self.seen: Counter[str] = Counter()

    def between(self) -> None:
        """Something else that a loop does."""
        pool, content, rnd = self.pool, self.content, self.rnd
        sequences = list(content.tokens)
        match rnd.choice(["add", "add", "fork", "free", "scramble", "compact", "step", "crop"]):
            case "add" if len(sequences) < 6:
                try:
                    sequence = pool.add(rnd.choice([0, 0, 3, 17]))
                except OutOfMemory:
                    return
                content.add(sequence)
            case "fork" if 0 < len(sequences) < 6:
                source = rnd.choice(sequences)
                content.fork(source, copy := source.fork())
                assert copy.length == source.length
            case "free" if sequences:
                self.free(rnd.choice(sequences))
            case "scramble":
                scramble(pool, rnd.randrange(1 << 30))
            case "compact":
                pool.compact()
            case "step" if sequences:
                self.step(rnd.sample(sequences, rnd.randint(1, len(sequences))), rnd.choice([1, 2, 7]))
            case "crop" if sequences:
                sequence = rnd.choice(sequences)
                sequence.crop(0)
                content.crop(sequence, 0)

    def step(self, sequences: list[Sequence], num_new_tokens: int) -> None:
        try:
            step = self.pool.begin(sequences, num_new_tokens)
        except OutOfMemory:
            return
        values = self.content.write(step)
        step.commit()
        self.content.commit(step, values)

    def free(self, sequence: Sequence) -> None:
        self.content.free(sequence)
        sequence.free()

    def multi_step(self) -> bool:
        """Open one, or have it refused; take it, stopping rows at random; end it. Returns whether it was opened."""
        pool, rnd = self.pool, self.rnd
        sequences = list(self.content.tokens)
        chosen = rnd.sample(sequences, rnd.randint(1, len(sequences)))
        num_steps = rnd.choice([1, 2, 3, 5, 8, 17])
        quote = pool.quote_steps(chosen, num_steps)
        before = snapshot(pool)
        try:
            multi = pool.begin_steps(chosen, num_steps)
        except OutOfMemory as error:
            assert not quote.fits and error.quote == quote and snapshot(pool) == before
            self.seen["refused"] += 1
            pool.check()
            return False
        assert quote.fits
        self.seen[quote.how] += 1
        taken = [rnd.choice([num_steps, num_steps, rnd.randint(0, num_steps)]) for _ in chosen]
        new = self.take(multi, taken)
        if rnd.random() < 0.1:
            multi.abort()
            self.seen["aborted"] += 1
        else:
            self.end(multi, taken)
            for sequence, values in zip(chosen, new, strict=True):
                self.content.tokens[sequence] += values
        self.pool.check()
        self.content.verify()
        return True

    def take(self, multi: MultiStep, taken: list[int]) -> list[list[int]]:
        """The steps; returns the numbers that were written for each row."""
        content, stacks = self.content, multi.stacks
        new: list[list[int]] = [[] for _ in taken]
        stops_at = torch.tensor(taken)
        for step in range(multi.num_steps + self.rnd.choice([0, 0, 2])):
            stacks.stop(stops_at == step)
            stacks.advance()
            goes_on = stops_at > step
            assert torch.equal(stacks.rows >= 0, goes_on)
            assert torch.equal(stacks.positions[:, 0], torch.where(goes_on, torch.from_numpy(multi.past) + step, -1))
            values = content.num_written + 1 + torch.arange(len(taken))
            content.num_written += len(taken)
            for subpool, entries in zip(stacks.paged, stacks.entries, strict=True):
                assert torch.equal(entries[:, 0] >= 0, goes_on), "a token has no place, or one that is not there does"
                within = (stacks.positions[:, 0] % subpool.tokens_per_entry)[goes_on]
                content._numbers(subpool)[entries[goes_on, 0], within] = values[goes_on].float()
            for row in goes_on.nonzero().flatten().tolist():
                new[row].append(int(values[row]))
            if self.rnd.random() < 0.1:
                self.meanwhile(multi)
        return new

    def meanwhile(self, multi: MultiStep) -> None:
        """What the host does while a multi-step is open must not touch it."""
        pages = np.concatenate(multi._supply.stacks)
        places = self.pool.allocator.v2p[pages].tolist()
        scramble(self.pool, self.rnd.randrange(1 << 30))
        assert self.pool.allocator.v2p[pages].tolist() == places, "a page that the device may hand out has moved"
        others = [sequence for sequence in self.content.tokens if sequence not in multi.sequences]
        if others:
            self.step(others, self.rnd.choice([1, 5]))
        self.pool.check()
        self.seen["meanwhile"] += 1

    def end(self, multi: MultiStep, taken: list[int]) -> None:
        pool, stacks, books = self.pool, multi.stacks, self.pool.sequences
        tables = pool.tables
        expected = handed_out(multi, taken)
        multi.commit(taken)
        for subpool, count in zip(stacks.paged, stacks.taken, strict=True):
            k, cells = subpool.index, expected[subpool.index]
            assert int(count) == len(cells)
            of_device = dict(zip(cells, tables.tensor[list(cells)].tolist(), strict=True))
            assert of_device == cells, "the device has not handed out in order"
            for cell, page in cells.items():
                row, column = divmod(cell - int(tables.origin[k, 0]), tables.columns[k])
                assert int(tables.mirror[cell]) == (page if column >= books.first[k, row] else -1)
            self.seen["pages"] += len(cells)
        unused = multi.device_cells[~np.isin(multi.device_cells, [c for of in expected.values() for c in of])]
        assert (tables.tensor[unused] == -1).all() and (tables.mirror[unused] == -1).all()
        assert stacks.lengths.tolist() == books.length[multi.rows].tolist()


@pytest.mark.parametrize("page_size", MEMORY)
@pytest.mark.parametrize("kinds", ["full", "window", "chunk", "hybrid", "every"])
def test_the_host_replays_what_the_device_has_handed_out(kinds: str, page_size: int) -> None:
    loop = Loop(kinds, page_size, seed=page_size)
    num_opened = 0
    while num_opened < NUM_MULTI_STEPS:
        for _ in range(loop.rnd.choice([0, 1, 3])):
            loop.between()
        if not loop.content.tokens:
            continue
        if loop.multi_step():
            num_opened += 1
        else:
            loop.free(loop.rnd.choice(list(loop.content.tokens)))
    for sequence in list(loop.content.tokens):
        loop.free(sequence)
    assert loop.pool.stats().live_bytes == 0
    loop.pool.check()
    assert loop.seen["refused"] and loop.seen["aborted"] and loop.seen["meanwhile"] and loop.seen["pages"]


def opened(kinds: str, lengths: list[int], num_steps: int) -> tuple[Content, MultiStep]:
    pool = make_pool(kinds, page_size=3)
    content = Content(pool)
    sequences = [pool.add() for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        content.add(sequence)
        advance(content, [sequence], length)
    return content, pool.begin_steps(sequences, num_steps)


def test_a_row_that_stops_at_a_boundary_takes_no_page_behind_it() -> None:
    content, multi = opened("full", [2, 3, 4], num_steps=4)
    pool, stacks = content.pool, multi.stacks
    (stack,) = (pages.tolist() for pages in stacks.pages)
    assert len(stack) == 6 and [len(of) for of in multi._supply.stacks] == [1 + 2 + 1]
    for step in range(4):
        stacks.stop(torch.tensor([1, 3, 2]) == step)
        stacks.advance()
    assert stacks.lengths.tolist() == [3, 6, 6] and int(stacks.taken[0]) == 1
    multi.commit([1, 3, 2])
    first, second, third = (sequence.pages[0].tolist() for sequence in multi.sequences)
    assert (len(first), len(second), len(third)) == (1, 2, 2)
    assert second[1] == stack[0]
    assert pool.stats().subpool("full").live_pages == 5
    pool.check()


def test_at_one_step_pages_go_to_rows_in_the_order_of_the_batch() -> None:
    content, multi = opened("full", [3, 5, 6, 2], num_steps=2)
    stack = multi.stacks.pages[0].tolist()
    for _ in range(2):
        multi.stacks.advance()
    multi.commit(np.array([2, 2, 2, 2]))
    # At the first step rows 0 and 2, at the second rows 1 and 3.
    assert [int(sequence.pages[0][-1]) for sequence in multi.sequences] == [stack[i] for i in (0, 2, 1, 3)]
    content.pool.check()


def test_pages_of_a_window_that_die_meanwhile_are_released_at_the_end() -> None:
    pool = make_pool([layer(Full()), layer(Window(4))], page_size=3)
    sequence = pool.add()
    pool.begin([sequence], 3).commit()
    live = pool.stats().subpool("window_4").live_pages
    multi = pool.begin_steps([sequence], 12)
    for _ in range(12):
        multi.stacks.advance()
        pool.check()
    assert pool.stats().subpool("window_4").live_pages == live + 4
    multi.commit([12])
    window = next(s for s in pool.plan.subpools if s.name == "window_4")
    assert sequence.num_pages[window.index] == window.num_pages_for(15) == pool.stats().subpool("window_4").live_pages


def test_room_that_a_row_has_is_used_before_the_stack() -> None:
    pool = make_pool("full", page_size=3)
    roomy, bare = pool.add(20), pool.add()
    held = roomy.pages[0].tolist()
    multi = pool.begin_steps([roomy, bare], 8)
    for _ in range(8):
        multi.stacks.advance()
    assert int(multi.stacks.taken[0]) == 3
    multi.commit([8, 8])
    assert roomy.pages[0].tolist() == held and len(bare.pages[0]) == 3
    pool.check()


def test_forks_write_into_pages_of_their_own_and_get_the_others_back() -> None:
    for ends in (True, False):
        content, multi = opened("hybrid", [5], num_steps=1)
        multi.abort()
        pool, (source,) = content.pool, multi.sequences
        copy = source.fork()
        content.fork(source, copy)
        before = [[pages.tolist() for pages in sequence.pages] for sequence in (source, copy)]
        multi = pool.begin_steps([source, copy], 4)
        pool.check()
        for _ in range(4):
            multi.stacks.advance()
        if ends:
            multi.commit([0, 0])
            assert source.pages[-1][-1] != copy.pages[-1][-1]
        else:
            multi.abort()
            assert [[pages.tolist() for pages in sequence.pages] for sequence in (source, copy)] == before
        pool.check()
        content.verify()


def test_tensors_stay_for_the_next_multi_step_over_the_same_batch() -> None:
    pool = make_pool("every")
    batch = pool.batch([pool.add(), pool.add()])
    stacks = []
    for _ in range(3):
        with pool.begin_steps(batch, 4) as multi:
            stacks.append(multi.stacks)
            multi.stacks.advance()
            multi.commit([1, 1])
        scramble(pool, 5)
    assert stacks[0] is stacks[1] is stacks[2]


def test_few_stacks_are_kept_whatever_numbers_of_steps_there_are() -> None:
    pool = make_pool("full", page_size=1, memory=1 << 14)
    batch = pool.batch([pool.add(), pool.add()])
    for num_steps in range(1, 34):
        with pool.begin_steps(batch, num_steps) as multi:
            for _ in range(num_steps):
                multi.stacks.advance()
            assert multi.stacks.taken[0] == 2 * num_steps
    assert len(batch.rows._stacks) == 7
    room = [len(stacks.pages[0]) for stacks in batch.rows._stacks.values()]
    assert sum(room) < 2 * max(room) == 4 * 64
    pool.check()


def test_what_a_graph_reads_is_made_and_loaded_on_the_stream_of_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else a copy to it could run before it is filled, where another stream is current."""
    pool = make_pool("full")
    inside: list[bool] = []

    @contextmanager
    def on_stream(stream: object) -> Iterator[None]:
        assert stream is own
        inside.append(True)
        yield
        inside.pop()

    def checked(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*arguments: Any, **options: Any) -> torch.Tensor:
            assert inside
            return make(*arguments, **options)

        return made

    own = object()
    monkeypatch.setattr(pool.guard.epochs, "stream", own)
    monkeypatch.setattr(pool.guard.epochs, "record", lambda epoch: None)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch, "zeros", checked(torch.zeros))
    for module in ("batch", "stacks"):
        target = importlib.import_module(f"torch_uma.{module}")
        monkeypatch.setattr(target, "staged", checked(target.staged))
    multi = pool.begin_steps([pool.add(), pool.add()], 3)
    multi.stacks.advance()
    multi.commit([1, 1])
    assert not inside


def test_a_block_that_does_not_commit_aborts() -> None:
    pool = make_pool("every")
    sequence = pool.add()
    with pool.begin_steps([sequence], 4) as multi:
        multi.stacks.advance()
    assert sequence.length == 0 and not multi.is_open
    with pytest.raises(ZeroDivisionError), pool.begin_steps([sequence], 4):
        raise ZeroDivisionError
    pool.check()


def test_a_state_that_went_on_without_its_row_is_torn() -> None:
    pool = make_pool("hybrid")
    stopped, whole = pool.add(), pool.add()
    multi = pool.begin_steps([stopped, whole], 3)
    multi.state_touched = True
    multi.commit([2, 3])
    pool.begin([whole], 1).commit()
    with pytest.raises(SequenceError, match="half written"):
        pool.begin_steps([stopped], 1)
    pool.check()


def test_a_torn_row_without_tokens_starts_over() -> None:
    pool = make_pool("hybrid")
    stopped, whole = pool.add(), pool.add()
    multi = pool.begin_steps([stopped, whole], 3)
    multi.state_touched = True
    multi.commit([0, 3])
    with pytest.raises(SequenceError, match="half written"):
        pool.begin([stopped], 1)
    stopped.crop(0)
    pool.begin([stopped], 1).commit()
    pool.check()


def test_a_refusal_leaves_no_stacks_behind() -> None:
    pool = make_pool("full")
    batch = pool.batch([pool.add()])
    for num_steps in (10**6, 10**12, 2**63, 10**30):
        assert not pool.quote_steps(batch, num_steps)
        with pytest.raises(OutOfMemory):
            pool.begin_steps(batch, num_steps)
    assert not batch.rows._stacks


def test_nothing_is_taken_after_the_end() -> None:
    pool = make_pool("every", page_size=1)
    sequence = pool.add()
    for is_kept in (True, False):
        multi = pool.begin_steps([sequence], 8)
        multi.stacks.advance()
        multi.stacks.advance()
        if is_kept:
            multi.commit([2])
        else:
            multi.abort()
        for _ in range(3):
            multi.stacks.advance()
        pool.check()


def test_what_is_refused() -> None:
    pool = make_pool("every", max_tokens=40)
    sequence, other = pool.add(), pool.add()
    for num_steps in (0, -1, 1.5, 41):
        before = snapshot(pool)
        with pytest.raises(SequenceError):
            pool.begin_steps([sequence], num_steps)  # type: ignore[arg-type]
        with pytest.raises(SequenceError):
            pool.quote_steps([sequence], num_steps)  # type: ignore[arg-type]
        assert snapshot(pool) == before
    with pytest.raises(SequenceError, match="at least one"):
        pool.begin_steps([], 1)
    multi = pool.begin_steps([sequence, other], 3)
    before = snapshot(pool)
    for taken in ([1], [1, 2, 3], [4, 0], [-1, 0], [0.5, 1], [2**70, 0], 1, None):
        with pytest.raises(SequenceError):
            multi.commit(taken)  # type: ignore[arg-type]
    for misuse in (sequence.free, sequence.fork, lambda: sequence.crop(0), lambda: pool.begin([other], 1)):
        with pytest.raises(SequenceError):
            misuse()
    with pytest.raises(SequenceError):
        pool.begin_steps([other], 1)
    with pytest.raises(SequenceError):
        pool.close()
    assert snapshot(pool) == before
    multi.commit(torch.tensor([3, 0]))
    with pytest.raises(SequenceError, match="has ended"):
        multi.commit([3, 0])
    with pytest.raises(SequenceError, match="has ended"):
        multi.abort()
    pool.check()


MODELS = ["llama", "gpt_oss", "gemma2", "deepseek_v3"]
NUM_STEPS = 3
NUM_MULTI = 8
LENGTHS = (5, 20, 11)


class Decoding:
    """Greedy decoding of a tiny model by multi-steps; rows stop at different tokens in the last one."""

    def __init__(self, name: str) -> None:
        self.model = models.build(name, attention="torch_uma")
        self.prompts = [prompts((length,), seed=length)["input_ids"] for length in LENGTHS]

    def expected(self, name: str) -> list[torch.Tensor]:
        model, options = models.build(name), {"max_new_tokens": NUM_STEPS * NUM_MULTI + 1, "do_sample": False}
        return [model.generate(prompt, **options)[0, prompt.shape[1] :] for prompt in self.prompts]

    @torch.no_grad()
    def run(self, take: Callable[[MultiStep, torch.Tensor, UnifiedCache], torch.Tensor]) -> torch.Tensor:
        """Tokens [rows, steps] by `take`, which takes the tokens of one multi-step."""
        with CachePool(self.model, memory="2MiB", max_sequences=4, page_size=4) as pool:
            poison(pool)
            sequences = [pool.add() for _ in LENGTHS]
            last = []
            for sequence, prompt in zip(sequences, self.prompts, strict=True):
                with pool.step({sequence: prompt.shape[1]}) as cache:
                    last.append(self.model(prompt, cache=cache, **cache.inputs()).logits[:, -1].argmax(-1))
            tokens, batch = torch.stack(last), pool.batch(sequences)
            for number in range(NUM_MULTI):
                with pool.begin_steps(batch, NUM_STEPS) as multi:
                    if number == NUM_MULTI - 1:
                        multi.stacks.limits[1] = multi.stacks.lengths[1] + 2
                    tokens = torch.cat([tokens, take(multi, tokens[:, -1:].contiguous(), multi.cache())], dim=1)
                    multi.commit(multi.stacks.lengths.numpy() - multi.past)
                pool.check()
                scramble(pool, number)
            lengths = [length + NUM_MULTI * NUM_STEPS for length in LENGTHS]
            lengths[1] -= NUM_STEPS - 2
            assert [sequence.length for sequence in sequences] == lengths
            for sequence in sequences:
                sequence.free()
        return tokens

    def one(self, multi: MultiStep, tokens: torch.Tensor, cache: UnifiedCache) -> torch.Tensor:
        multi.stacks.advance()
        logits = self.model(tokens, cache=cache, **cache.inputs()).logits
        return logits[:, -1:].argmax(-1)

    def all(self, multi: MultiStep, tokens: torch.Tensor, cache: UnifiedCache) -> torch.Tensor:
        new = [tokens]
        for _ in range(NUM_STEPS):
            new.append(self.one(multi, new[-1], cache))
        return torch.cat(new[1:], dim=1)


def assert_generated(tokens: torch.Tensor, expected: list[torch.Tensor]) -> None:
    for row, (found, wanted) in enumerate(zip(tokens, expected, strict=True)):
        # Row 1 stops early in the last multi-step; what its model says after that is not of the sequence.
        end = len(wanted) - (NUM_STEPS - 2 if row == 1 else 0)
        assert found[:end].tolist() == wanted[:end].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_a_greedy_decode_gives_the_tokens_of_generate(name: str) -> None:
    decoding = Decoding(name)
    assert_generated(decoding.run(decoding.all), decoding.expected(name))


@pytest.mark.parametrize(("name", "backend"), [("llama", "aot_eager"), ("gpt_oss", "inductor")])
def test_all_steps_are_one_graph_for_every_multi_step(name: str, backend: str) -> None:
    torch.compiler.reset()
    counters.clear()
    decoding = Decoding(name)
    compiled = torch.compile(decoding.all, backend=backend, fullgraph=True, dynamic=False)
    assert_generated(decoding.run(compiled), decoding.expected(name))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
