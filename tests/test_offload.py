"""Sequences that leave the arena and come back: the same bytes elsewhere, the same tokens, nothing lost."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import build
from pools import KINDS, Content, advance, layer, make_pool, snapshot
from test_compressed import model_of as deepseek_v4
from tiny_models import prompts
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

import torch_uma
import torch_uma.offload
from torch_uma import CachePool, OutOfMemory, SequenceError
from torch_uma.content import Pages
from torch_uma.layout import Chunk, Full, Layer, Lifetime, State, Window
from torch_uma.lifespans import NEVER
from torch_uma.offload import Offloaded
from torch_uma.past import keep_past
from torch_uma.sequence import Sequence
from torch_uma.testing import poison, scramble

torch.set_num_threads(1)


def needed_pages(sequence: Sequence) -> list[torch.Tensor]:
    """The bytes of the pages that a sequence needs at its length: [n, page_bytes] uint8 for each sub-pool."""
    pool, books, row, length = sequence.pool, sequence.pool.sequences, sequence.row, sequence.length
    found = []
    for subpool in pool.plan.subpools:
        first, end = subpool.lifetime.first_needed(length) // subpool.page_tokens, -(-length // subpool.page_tokens)
        if subpool.is_state:
            first, end = 0, int(length > 0)
        cells = books.tables.origin[subpool.index, row] + np.arange(first, end)
        places = pool.allocator.v2p[books.tables.mirror[cells]]
        found.append(torch.stack([pool.arena.pages(subpool)[p] for p in places.tolist()]) if len(places) else None)
    return [pages.clone() for pages in found if pages is not None]


def fill_at_random(pool: CachePool) -> None:
    """Bytes of every kind, so that a copy that looks at numbers instead of bits is seen."""
    torch.manual_seed(3)
    pool.arena.bytes.copy_(torch.randint(0, 256, pool.arena.bytes.shape, dtype=torch.uint8))


def live_pages(pool: CachePool) -> list[int]:
    return [subpool.live_pages for subpool in pool.stats().subpools]


def sequence_of(pool: CachePool, num_tokens: int, step_tokens: int = 1000) -> Sequence:
    sequence = pool.add()
    for start in range(0, num_tokens, step_tokens):
        pool.begin([sequence], min(step_tokens, num_tokens - start)).commit()
    return sequence


class Moved(Content):
    """Content that follows sequences out of the pool and back."""

    def offload(self, sequence: Sequence) -> tuple[Offloaded, list[int], int | None]:
        offloaded = self.pool.offload(sequence)
        kept = (offloaded, self.tokens[sequence], self.states[sequence])
        self.free(sequence)
        return kept

    def restore(self, offloaded: Offloaded, tokens: list[int], state: int | None) -> Sequence:
        sequence = self.pool.restore(offloaded)
        self.tokens[sequence], self.states[sequence] = tokens, state
        return sequence


# Content


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("length", [0, 1, 5, 6, 9, 40])
def test_what_comes_back_is_what_went_and_goes_on(kinds: str, length: int) -> None:
    pool = make_pool(kinds)
    content = Moved(pool)
    first, other = pool.add(), pool.add()
    for sequence in (first, other):
        content.add(sequence)
        if length:
            advance(content, [sequence], length)
    advance(content, [other], 3)
    kept = content.offload(first)
    assert live_pages(pool) == list(other.num_pages)
    poison(pool, only_free=True)
    advance(content, [other], 2)
    scramble(pool, length)
    between = pool.add(4)  # so that pages come in another order
    back = content.restore(*kept)
    assert back.length == length
    assert back.num_pages == pool.plan.demand(length) == kept[0].demand
    assert back.num_pages == pool.add(length).num_pages
    between.free()
    pool.check()
    content.verify()
    scramble(pool, 7)
    for _ in range(8):
        advance(content, [other, back], 1)


@pytest.mark.parametrize("part_bytes", [1, 200, 1 << 30])
@pytest.mark.parametrize("inference", [False, True])
def test_every_bit_comes_back_in_parts_of_any_size(monkeypatch: Any, part_bytes: int, inference: bool) -> None:
    monkeypatch.setattr(torch_uma.offload, "_PART_BYTES", part_bytes)
    pool = make_pool()
    sequence = sequence_of(pool, 29)
    fill_at_random(pool)
    expected = needed_pages(sequence)
    with torch.inference_mode(inference):
        offloaded = pool.offload(sequence)
    pool.arena.bytes.fill_(0)
    pool.add(5)
    back = pool.restore(offloaded)
    assert len(expected) == len(pool.plan.subpools)
    for before, after in zip(expected, needed_pages(back), strict=True):
        assert torch.equal(before, after)


def test_only_what_is_needed_at_the_length_is_copied() -> None:
    pool = make_pool()
    page_bytes = [subpool.page_bytes for subpool in pool.plan.subpools]
    for num_tokens, step_tokens in ((0, 1), (1, 1), (17, 17), (17, 1), (30, 7)):
        sequence = sequence_of(pool, num_tokens, step_tokens)
        pool.extend_runs([sequence], num_tokens + 20)
        offloaded = pool.offload(sequence)
        demand = pool.plan.demand(num_tokens)
        assert offloaded.num_tokens == num_tokens and offloaded.demand == demand
        copied = [part.numel() * part.itemsize for part in offloaded._parts or []]
        assert copied == [n * size for n, size in zip(demand, page_bytes) if n and num_tokens]
        assert offloaded.num_bytes == sum(copied)
        assert not any(live_pages(pool))
        assert repr(offloaded) == f"Offloaded({num_tokens} tokens, {sum(copied):,} bytes)"


def test_a_past_stays_behind() -> None:
    pool = make_pool([layer(Full()), layer(Window(4))], page_size=2)
    content = Moved(pool)
    sequence = pool.add()
    content.add(sequence)
    advance(content, [sequence], 9)
    keep_past(pool.sequences, np.array([sequence.row]), 9)
    advance(content, [sequence], 15)
    assert sequence.num_pages != pool.plan.demand(24)
    back = content.restore(*content.offload(sequence))
    assert back.num_pages == pool.plan.demand(24)
    assert pool.sequences.kept[back.row] == NEVER
    advance(content, [back], 1)


@pytest.mark.parametrize("kinds", KINDS)
def test_what_a_fork_shares_is_copied_and_stays_with_the_other(kinds: str) -> None:
    pool = make_pool(kinds)
    content = Moved(pool)
    parent = pool.add()
    content.add(parent)
    advance(content, [parent], 11)
    child = parent.fork()
    content.fork(parent, child)
    live = live_pages(pool)
    kept = content.offload(parent)
    assert live_pages(pool) == live
    pool.check()
    scramble(pool, 1)
    advance(content, [child], 2)
    back = content.restore(*kept)
    assert not {p for ids in back.pages for p in ids.tolist()} & {p for ids in child.pages for p in ids.tolist()}
    pool.check()
    advance(content, [back, child], 4)


def test_leased_pages_are_copied_and_stay_until_the_lease_ends() -> None:
    pool = make_pool("hybrid")
    content = Moved(pool)
    sequence = pool.add()
    content.add(sequence)
    advance(content, [sequence], 10)
    held = list(sequence.num_pages)
    lease = pool.lease(sequence, "a transfer")
    kept = content.offload(sequence)
    assert not any(live_pages(pool))
    assert [subpool.quarantined_pages for subpool in pool.stats().subpools] == held
    back = content.restore(*kept)
    pool.check()
    content.verify()
    lease.close()
    assert live_pages(pool) == list(back.num_pages)
    pool.check()


# What is refused, and leaves everything as it was


def test_a_sequence_that_cannot_go() -> None:
    pool, other = make_pool("hybrid"), make_pool("hybrid")
    sequence = sequence_of(pool, 8)
    torn = sequence_of(pool, 4)
    step = pool.begin([torn], 1)
    step.state_touched = True
    step.abort()
    freed = pool.add()
    freed.free()
    step = pool.begin([sequence], 1)
    before = snapshot(pool)
    for asked, word in (
        (torn, "half written"),
        (sequence, "open step"),
        (freed, "freed"),
        (other.add(), "of another pool"),
        (3, "not a sequence"),
    ):
        with pytest.raises(SequenceError, match=word):
            pool.offload(asked)  # type: ignore[arg-type]
        assert snapshot(pool) == before
    step.commit()
    assert pool.restore(pool.offload(sequence)).length == 9


def test_what_does_not_fit_can_come_later() -> None:
    pool = make_pool("hybrid", max_sequences=30)
    content = Moved(pool)
    sequence = pool.add()
    content.add(sequence)
    advance(content, [sequence], 30)
    kept = content.offload(sequence)
    others = []
    while pool.quote(30):
        others.append(pool.add(30))
    before = snapshot(pool)
    with pytest.raises(OutOfMemory) as refused:
        pool.restore(kept[0])
    assert refused.value.quote.demand == kept[0].demand
    assert snapshot(pool) == before
    others.pop().free()
    while len(others) < 30:
        try:
            others.append(pool.add())
        except OutOfMemory:
            break
    else:
        with pytest.raises(SequenceError, match="rows"):
            pool.restore(kept[0])
    for other in others:
        other.free()
    advance(content, [content.restore(*kept)], 1)


def test_without_a_row_it_stays_outside() -> None:
    pool = make_pool("full", max_sequences=2)
    offloaded = pool.offload(sequence_of(pool, 4))
    others = pool.add_many([1, 1])
    before = snapshot(pool)
    with pytest.raises(SequenceError, match="max_sequences"):
        pool.restore(offloaded)
    assert snapshot(pool) == before
    others[0].free()
    assert pool.restore(offloaded).length == 4


def test_it_comes_back_once() -> None:
    pool = make_pool("hybrid")
    offloaded = pool.offload(sequence_of(pool, 5))
    back = pool.restore(offloaded)
    assert repr(offloaded) == "Offloaded(5 tokens, restored)"
    before = snapshot(pool)
    with pytest.raises(SequenceError, match="restored before"):
        pool.restore(offloaded)
    with pytest.raises(SequenceError, match="nothing to restore"):
        pool.restore(back)  # type: ignore[arg-type]
    assert snapshot(pool) == before


def test_it_comes_back_to_any_pool_of_these_layers() -> None:
    pool = make_pool("hybrid")
    sequence = sequence_of(pool, 20)
    fill_at_random(pool)
    expected = needed_pages(sequence)
    offloaded = pool.offload(sequence)
    meta = CachePool(pool.plan, device="meta")
    for other in (make_pool("full"), make_pool("every"), make_pool("hybrid", page_size=4), meta):
        before = live_pages(other)
        with pytest.raises(SequenceError, match="layers"):
            other.restore(offloaded)
        assert live_pages(other) == before
    with pytest.raises(SequenceError, match="max_tokens"):
        make_pool("hybrid", max_tokens=15).restore(offloaded)
    larger = make_pool("hybrid", memory=1 << 16)
    larger.add(50)
    pool.close()
    back = larger.restore(offloaded)
    for before, after in zip(expected, needed_pages(back), strict=True):
        assert torch.equal(before, after)
    larger.check()


def test_one_thread_and_an_open_pool() -> None:
    pool = make_pool("hybrid")
    sequence, offloaded = sequence_of(pool, 3), pool.offload(sequence_of(pool, 5))
    errors: list[Exception] = []

    def use() -> None:
        for act in (lambda: pool.offload(sequence), lambda: pool.restore(offloaded)):
            try:
                act()
            except torch_uma.ThreadError as error:
                errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert len(errors) == 2
    pool.close()
    for act in (lambda: pool.offload(sequence), lambda: pool.restore(offloaded)):
        with pytest.raises(torch_uma.ClosedError):
            act()


def test_a_copy_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool("hybrid")
    content = Moved(pool)
    sequence = pool.add()
    content.add(sequence)
    advance(content, [sequence], 20)

    def fail(*_: object) -> Any:
        raise MemoryError("no host memory")

    before = snapshot(pool)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(torch_uma.offload, "host_memory", fail)
        pool.offload(sequence)
    assert snapshot(pool) == before
    content.verify()
    kept = content.offload(sequence)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(torch_uma.offload, "_to_device", fail)
        pool.restore(kept[0])
    pool.check()
    assert not any(live_pages(pool)) and not pool.guard.steps
    advance(content, [content.restore(*kept)], 1)


def test_what_is_dropped_goes_and_keeps_no_pool() -> None:
    pool = make_pool("hybrid")
    offloaded = pool.offload(sequence_of(pool, 5))
    parts = [weakref.ref(part) for part in offloaded._parts or []]
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None and len(parts) == 3
    del offloaded
    assert [part() for part in parts] == [None] * 3


# Devices


def test_without_bytes_the_books_do_the_same() -> None:
    pools = [make_pool("every"), CachePool(make_pool("every").plan, device="meta", max_sequences=12)]
    outcomes = []
    for pool in pools:
        sequences = [sequence_of(pool, length) for length in (5, 17, 30)]
        offloaded = [pool.offload(sequence) for sequence in sequences[:2]]
        pool.add(7)
        back = pool.restore(offloaded[1])
        pool.begin([back, sequences[2]], 1).commit()
        pool.check()
        outcomes.append((snapshot(pool), [(each.num_tokens, each.num_bytes, each.demand) for each in offloaded]))
    assert outcomes[0] == outcomes[1]


def test_everything_is_enqueued_on_the_arenas_stream_and_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool("hybrid")
    sequence = sequence_of(pool, 20)
    inside: list[object] = []
    seen: list[str] = []

    @contextmanager
    def on_stream(stream: object) -> Iterator[None]:
        inside.append(stream)
        yield
        inside.pop()

    class Stream:
        def record_event(self) -> str:
            seen.append("record")
            return "copied"

        def wait_event(self, event: str) -> None:
            assert event == "copied"
            seen.append("wait")

    own = Stream()
    for name in ("_to_host", "_to_device"):
        copy = getattr(torch_uma.offload, name)

        def checked(*arguments: Any, name: str = name, copy: Any = copy) -> Any:
            assert inside == [own]
            seen.append(name)
            return copy(*arguments)

        monkeypatch.setattr(torch_uma.offload, name, checked)
    monkeypatch.setattr(pool.guard.epochs, "stream", own)
    monkeypatch.setattr(pool.guard.epochs, "record", lambda epoch: seen.append(f"step {epoch}"))
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: inside[-1])
    offloaded = pool.offload(sequence)
    assert seen == ["_to_host"] * 3 + ["record"]
    seen.clear()
    back = pool.restore(offloaded)
    assert seen == ["wait", *["_to_device"] * 3, f"step {back.last_epoch}"]


class Copies(TorchDispatchMode):
    """Notes what each part costs, where all that crosses between the devices has to do so without a wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, torch.Tensor)]
        if len({tensor.device.type for tensor in tensors}) > 1:
            is_enqueued = args[2] if op == torch.ops.aten.copy_.default else (kwargs or {})["non_blocking"]
            assert is_enqueued, op
        if op == torch.ops.aten.empty.memory_format:
            assert kwargs["device"].type == "cuda" or kwargs["pin_memory"]
        self.seen.append(op.overloadpacket.__name__)
        return out


def test_on_cuda_nothing_waits() -> None:
    """Tensors without numbers, on a device that is not there."""
    with FakeTensorMode(), Copies() as copies:
        grid = torch.empty(100, 64, dtype=torch.uint8, device="cuda")
        pages = Pages(grid, torch.zeros(5, dtype=torch.int64, device="cuda"))
        copies.seen.clear()
        host = torch_uma.offload._to_host(pages)
        assert host.device.type == "cpu" and host.shape == (5, 64)
        torch_uma.offload._to_device(host, pages)
    work = [name for name in copies.seen if name not in ("device", "view", "detach")]
    assert work == ["empty", "index_select", "copy_", "_to_copy", "index_copy_"]


# Any plan, any order


LIFETIMES: list[Lifetime] = [Full(), Window(1), Window(4), Window(11), Chunk(5), Chunk(8)]


@st.composite
def plans(draw: st.DrawFn) -> list[Layer]:
    chosen = draw(st.lists(st.sampled_from(LIFETIMES), min_size=0, max_size=4, unique_by=repr))
    layers = [
        layer(lifetime, draw(st.sampled_from([1, 1, 4])) if isinstance(lifetime, Full) else 1, draw(st.integers(1, 9)))
        for lifetime in chosen
    ]
    if draw(st.booleans()) or not layers:
        layers.append(layer(State(), width=draw(st.integers(1, 40))))
    return layers


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(plans(), st.integers(1, 5), st.integers(0, 1 << 20))
def test_any_life_of_any_pool(layers: list[Layer], page_size: int, seed: int) -> None:
    chance = random.Random(seed)
    pool = make_pool(layers, memory=8192, page_size=page_size, max_sequences=6)
    content = Moved(pool)
    outside: list[tuple[Offloaded, list[int], int | None]] = []
    for _ in range(25):
        sequences = list(content.tokens)
        act = chance.choice(["add", "advance", "advance", "offload", "restore", "restore", "fork", "free"])
        try:
            if act == "add":
                content.add(pool.add(chance.choice([0, 9])))
            elif act == "advance" and sequences:
                advance(content, chance.sample(sequences, chance.randint(1, len(sequences))), chance.choice([1, 1, 13]))
            elif act == "offload" and sequences:
                outside.append(content.offload(chance.choice(sequences)))
                poison(pool, only_free=True)
            elif act == "restore" and outside:
                at = chance.randrange(len(outside))
                fits, before = bool(pool.quote(outside[at][0].num_tokens)), snapshot(pool)
                try:
                    back = content.restore(*outside[at])
                except (OutOfMemory, SequenceError) as error:
                    assert snapshot(pool) == before and fits == isinstance(error, SequenceError)
                    raise
                assert fits and back.num_pages == outside[at][0].demand
                del outside[at]
            elif act == "fork" and sequences:
                source = chance.choice(sequences)
                content.fork(source, source.fork())
            elif act == "free" and sequences:
                gone = chance.choice(sequences)
                content.free(gone)
                gone.free()
        except (OutOfMemory, SequenceError):
            pass
        scramble(pool, chance.randrange(1 << 20))
        pool.check()
        content.verify()
    for sequence in list(content.tokens):
        content.free(sequence)
        sequence.free()
    for kept in outside:
        back = content.restore(*kept)
        content.verify()
        content.free(back)
        back.free()
    pool.check()
    assert not any(live_pages(pool))


# Models


@lru_cache
def model_of(name: str, attention: str) -> PreTrainedModel:
    return deepseek_v4() if name == "deepseek_v4" else build(name, attention=attention)


@torch.no_grad()
def logits_of(model: PreTrainedModel, pool: CachePool, sequence: Sequence, tokens: torch.Tensor) -> torch.Tensor:
    with pool.step({sequence: tokens.shape[1]}) as cache:
        logits = model(tokens, cache=cache, **cache.inputs()).logits
    assert isinstance(logits, torch.Tensor)
    return logits[:, -1]


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("gpt_oss", "eager"),
        ("gpt_oss", "torch_uma"),
        ("qwen3_next", "eager"),
        ("bamba", "eager"),
        ("mamba2", "eager"),
        ("lfm2", "eager"),
        ("deepseek_v3", "eager"),
        ("llama4", "torch_uma"),
        ("deepseek_v4", "eager"),
    ],
)
@pytest.mark.parametrize(("num_tokens", "page_size"), [(13, 4), (41, 16)])
def test_a_model_goes_on_as_if_nothing_had_been(name: str, attention: str, num_tokens: int, page_size: int) -> None:
    model = model_of(name, attention)
    prompt = prompts((num_tokens,), seed=num_tokens)["input_ids"] % model.config.vocab_size
    runs = []
    for leaves in (False, True):
        pool = CachePool(model, memory=4 << 20, page_size=page_size, max_sequences=4)
        poison(pool)
        sequence, other = pool.add(), pool.add()
        logits = [logits_of(model, pool, sequence, prompt)]
        logits_of(model, pool, other, prompt[:, :9])
        for step in range(30):
            token = logits[-1].argmax(-1, keepdim=True)
            if leaves and step in (0, 7, 8, 21):
                offloaded = pool.offload(sequence)
                assert offloaded.num_tokens == num_tokens + step and offloaded.num_bytes
                poison(pool, only_free=True)
                logits_of(model, pool, other, token)
                scramble(pool, step)
                sequence = pool.restore(offloaded)
                pool.check()
            logits.append(logits_of(model, pool, sequence, token))
        runs.append(torch.cat(logits))
    assert torch.isfinite(runs[0]).all()
    assert torch.equal(runs[0].argmax(-1), runs[1].argmax(-1))
    if attention == "eager":
        assert torch.equal(*runs)
    else:  # where pages lie apart, attention in place adds up in another order
        torch.testing.assert_close(*runs, rtol=0, atol=1e-5)
