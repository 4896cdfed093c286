"""A hand-written loop over pool.step: the tokens of one generate() for each sequence, whatever the others do."""

from __future__ import annotations

from functools import lru_cache

import pytest
import serving_loop
import torch
from tiny_models import VOCABULARY, WINDOW, assert_same_tokens, build, prompts
from transformers import PreTrainedModel

import torch_uma
from torch_uma import CachePool, Sequence

torch.set_num_threads(1)

MODELS = ["gpt_oss", "qwen3_next", "bamba"]
NUM_NEW = WINDOW + 41


@lru_cache
def model_of(name: str, attention: str = "eager") -> PreTrainedModel:
    return build(name, attention=attention)


def alone(model: PreTrainedModel, prompt: torch.Tensor, num_new: int) -> torch.Tensor:
    """The tokens [1, prompt + num_new] that generate() gives this sequence with the default cache."""
    mask = torch.ones_like(prompt)
    tokens = model.generate(input_ids=prompt, attention_mask=mask, do_sample=False, max_new_tokens=num_new)
    assert isinstance(tokens, torch.Tensor)
    return tokens


class Loop:
    """Greedy decoding of sequences of unequal length, any subset of them in a step."""

    def __init__(self, model: PreTrainedModel, pool: CachePool) -> None:
        self.model, self.pool = model, pool
        self.tokens: dict[Sequence, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, prompt: torch.Tensor, chunk: int = 1000) -> Sequence:
        sequence = self.pool.add(prompt.shape[1])
        for part in prompt.split(chunk, dim=1):
            with self.pool.step({sequence: part.shape[1]}) as cache:
                logits = self.model(part, cache=cache, **cache.inputs()).logits
        self.tokens[sequence] = torch.cat([prompt, logits[:, -1:].argmax(-1)], dim=1)
        return sequence

    def fork(self, sequence: Sequence) -> Sequence:
        fork = sequence.fork()
        self.tokens[fork] = self.tokens[sequence].clone()
        return fork

    @torch.no_grad()
    def decode(self, sequences: list[Sequence]) -> None:
        with self.pool.step(dict.fromkeys(sequences, 1)) as cache:
            logits = self.forward(sequences, cache)
        self.keep(sequences, logits)

    def forward(self, sequences: list[Sequence], cache: torch_uma.UnifiedCache) -> torch.Tensor:
        last = torch.cat([self.tokens[sequence][:, -1:] for sequence in sequences])
        logits = self.model(last, cache=cache, **cache.inputs()).logits
        assert isinstance(logits, torch.Tensor)
        return logits

    def keep(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        for sequence, token in zip(sequences, logits[:, -1:].argmax(-1), strict=True):
            self.tokens[sequence] = torch.cat([self.tokens[sequence], token[None]], dim=1)

    def check(self, sequence: Sequence, prompt: torch.Tensor) -> None:
        tokens = self.tokens[sequence]
        expected = alone(self.model, prompt, tokens.shape[1] - prompt.shape[1])
        assert_same_tokens(self.model, tokens, expected, torch.ones_like(prompt))
        assert sequence.length == tokens.shape[1] - 1


def prompt_of(length: int) -> torch.Tensor:
    return prompts((length,), seed=length)["input_ids"]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", MODELS)
def test_sequences_come_fork_and_go_while_pages_move(name: str, page_size: int) -> None:
    model = model_of(name)
    pool = CachePool(model, memory=4 << 20, page_size=page_size, max_sequences=16)
    torch_uma.testing.poison(pool)
    loop = Loop(model, pool)
    lengths = {loop.add(prompt_of(length), chunk=13): length for length in (5, 33, 18)}
    running = list(lengths)
    for step in range(NUM_NEW):
        if step == 7:
            fork = loop.fork(running[1])
            lengths[fork] = lengths[running[1]]
            running.append(fork)
        if step == 11:
            gone = running.pop(0)
            loop.check(gone, prompt_of(lengths[gone]))
            gone.free()
        if step == 13:
            late = loop.add(prompt_of(9))
            lengths[late] = 9
            running.insert(1, late)
        if step % 5 == 4:
            running.reverse()
        loop.decode(running)
        torch_uma.testing.scramble(pool, step)
        if step % 4 == 0:
            pool.compact()
        pool.check()
    for sequence in running:
        loop.check(sequence, prompt_of(lengths[sequence]))
        sequence.free()
    pool.check()
    assert [subpool.live_pages for subpool in pool.stats().subpools] == [0] * len(pool.plan.subpools)


@pytest.mark.parametrize("name", MODELS)
def test_the_next_step_is_planned_while_one_is_in_flight(name: str) -> None:
    model = model_of(name)
    pool = CachePool(model, memory=4 << 20, page_size=4)
    torch_uma.testing.poison(pool)
    loop = Loop(model, pool)
    lengths = {loop.add(prompt_of(length)): length for length in (4, 26, 15, 31)}
    one, two = list(lengths)[:2], list(lengths)[2:]
    for step in range(NUM_NEW):
        with torch.no_grad(), pool.step(dict.fromkeys(one, 1)) as first:
            logits = loop.forward(one, first)
            with pool.step(dict.fromkeys(two, 1)) as second:
                logits_two = loop.forward(two, second)
        loop.keep(one, logits)
        loop.keep(two, logits_two)
        torch_uma.testing.scramble(pool, step)
        pool.check()
    for sequence, length in lengths.items():
        loop.check(sequence, prompt_of(length))


@pytest.mark.parametrize("name", MODELS)
def test_a_step_whose_body_raises_changes_nothing(name: str) -> None:
    model = model_of(name)
    pool = CachePool(model, memory=4 << 20)
    torch_uma.testing.poison(pool)
    loop = Loop(model, pool)
    sequence = loop.add(prompt_of(30))
    live = [subpool.live_pages for subpool in pool.stats().subpools]
    with pytest.raises(RuntimeError, match="no"), pool.step({sequence: 40}):
        raise RuntimeError("no")
    assert sequence.length == 30
    assert [subpool.live_pages for subpool in pool.stats().subpools] == live
    pool.check()
    for _ in range(NUM_NEW):
        loop.decode([sequence])
    loop.check(sequence, prompt_of(30))


@pytest.mark.parametrize(
    ("name", "page_size", "memory"),
    [("gpt_oss", 7, "88KiB"), ("gpt_oss", 5, "110KiB"), ("qwen3_next", 4, "80KiB"), ("bamba", 4, "50KiB")],
)
@pytest.mark.parametrize("way", ["dropped", "offloaded"])
def test_the_example_serves_all_requests(
    name: str, page_size: int, memory: str, way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of(name)
    pool = CachePool(model, memory=memory, page_size=page_size, max_sequences=16)
    torch_uma.testing.poison(pool)
    lengths = [20, 9, 20, 19, 5]
    options = {"step_tokens": 32, "host_memory": 0 if way == "dropped" else "1MiB"}
    texts = serving_loop.serve(model, pool, [prompt_of(length)[0].tolist() for length in lengths], **options)
    for length, text in zip(lengths, texts, strict=True):
        expected = alone(model, prompt_of(length), serving_loop.NUM_NEW_TOKENS)
        assert_same_tokens(model, torch.tensor([text]), expected, torch.ones(1, length))
    out = capsys.readouterr().out
    num_retracted = out.count(f"tokens {way}")
    assert num_retracted > 0
    assert out.count("tokens admitted") == len(lengths) + (num_retracted if way == "dropped" else 0)
    pool.check()
    assert pool.stats().live_bytes == 0


def test_the_example_says_when_a_request_can_never_be_served() -> None:
    model = model_of("gpt_oss")
    pool = CachePool(model, memory="88KiB", page_size=7, max_sequences=16)
    with pytest.raises(torch_uma.OutOfMemory):
        serving_loop.serve(model, pool, [prompt_of(9)[0].tolist(), prompt_of(400)[0].tolist()])


def test_a_forward_of_another_shape_is_refused() -> None:
    model = model_of("gpt_oss")
    pool = CachePool(model, memory=4 << 20)
    sequence = pool.add()
    for shape, message in (((1, 2), "3 new tokens"), ((2, 3), "1 rows")):
        with pytest.raises(torch_uma.SequenceError, match=message), torch.no_grad(), pool.step({sequence: 3}) as cache:
            model(torch.zeros(shape, dtype=torch.int64), cache=cache)
    assert sequence.length == 0


def test_rows_of_unequal_past_are_aligned_at_their_ends() -> None:
    model = model_of("gpt_oss")
    pool = CachePool(model, memory=4 << 20)
    loop = Loop(model, pool)
    short, long = loop.add(prompt_of(3)), loop.add(prompt_of(5))
    with pool.step({short: 2, long: 2}) as cache:
        inputs = cache.inputs()
        assert cache.batch_size == 2 and cache.get_seq_length() == 5
        with pytest.raises(torch_uma.SequenceError):
            cache.reset()
        with torch.no_grad():
            logits = model(torch.zeros(2, 2, dtype=torch.int64), cache=cache, **inputs).logits
    assert inputs["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]
    assert inputs["position_ids"].tolist() == [[3, 4], [5, 6]]
    assert logits.shape == (2, 2, VOCABULARY)
    assert cache.paths() == ["gather"] * 4


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_unequal_past_without_their_inputs_are_refused(name: str) -> None:
    model = model_of(name)
    pool = CachePool(model, memory=4 << 20)
    loop = Loop(model, pool)
    short, long = loop.add(prompt_of(3)), loop.add(prompt_of(5))
    column = torch.zeros(2, 1, dtype=torch.int64)
    for mask in ({}, {"attention_mask": torch.ones(2, 6, dtype=torch.int64)}):
        with (
            pytest.raises(torch_uma.SequenceError, match=r"\*\*cache.inputs\(\)"),
            torch.no_grad(),
            pool.step({short: 1, long: 1}) as cache,
        ):
            model(column, cache=cache, **mask)
    for _ in range(3):  # nothing was stored
        loop.decode([short, long])
    loop.check(short, prompt_of(3))
    loop.check(long, prompt_of(5))


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next"])  # transformers' Bamba counts its positions from 0
def test_rows_of_equal_past_need_no_inputs(name: str) -> None:
    model = model_of(name)
    pool = CachePool(model, memory=4 << 20)
    loop = Loop(model, pool)
    sequence = loop.add(prompt_of(5))
    both = [sequence, loop.fork(sequence)]
    column = torch.cat([loop.tokens[each][:, -1:] for each in both])
    with torch.no_grad(), pool.step(dict.fromkeys(both, 1)) as cache:
        loop.keep(both, model(column, cache=cache).logits)
    for each in both:
        loop.check(each, prompt_of(5))


@pytest.mark.parametrize("num_new", [1, 3])
@pytest.mark.parametrize("past", [0, 6])
@pytest.mark.parametrize("name", MODELS)
def test_a_second_forward_in_one_step_is_refused(name: str, past: int, num_new: int) -> None:
    model = model_of(name)
    pool = CachePool(model, memory=4 << 20)
    sequence = Loop(model, pool).add(prompt_of(past)) if past else pool.add()
    new = torch.zeros(1, num_new, dtype=torch.int64)
    with (
        torch.no_grad(),
        pytest.raises(torch_uma.SequenceError, match="layer 0 was already written in this step; open another step"),
        pool.step({sequence: num_new}) as cache,
    ):
        model(new, cache=cache, **cache.inputs())
        if name != "gpt_oss":
            for _ in range(2):  # to look is no forward
                assert cache.get_conv_state(0) is None or past
        model(new, cache=cache, **cache.inputs())
    assert sequence.length == past
    pool.check()
