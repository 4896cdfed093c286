"""Steps whose sequences take unequally many new tokens: the logits of each alone, whatever the others do."""

from __future__ import annotations

import copy
import random
from functools import lru_cache
from typing import Any

import pytest
import torch
from models import CONFIGS, build
from pools import snapshot
from test_compile import Graphs
from test_generate import MEMORY
from test_loop import alone, prompt_of
from tiny_models import VOCABULARY, WINDOW, assert_same_tokens
from torch._inductor.compile_fx import compile_fx
from transformers import AutoModelForCausalLM, Gemma3nTextConfig, PreTrainedModel

import torch_uma
from torch_uma import CachePool, OutOfMemory, Sequence, SequenceError

torch.set_num_threads(1)

MODELS = ["llama", "gpt_oss", "gemma2", "mistral", "llama4", "deepseek_v3"]


@lru_cache
def model_of(name: str, attention: str) -> PreTrainedModel:
    return build(name, attention=attention)


class World:
    """Sequences of one poisoned pool, and for each its tokens and the logits [tokens, vocabulary] that they gave."""

    def __init__(self, model: PreTrainedModel, stock: PreTrainedModel, page_size: int, **given: Any) -> None:
        self.model, self.stock = model, stock
        self.pool = CachePool(model, **{"memory": MEMORY, "page_size": page_size, "max_sequences": 16, **given})
        torch_uma.testing.poison(self.pool)
        self.tokens: dict[Sequence, torch.Tensor] = {}
        self.logits: dict[Sequence, torch.Tensor] = {}
        self.chance = torch.Generator().manual_seed(page_size)

    def add(self) -> Sequence:
        sequence = self.pool.add()
        self.tokens[sequence] = torch.empty(0, dtype=torch.int64)
        self.logits[sequence] = torch.empty(0, VOCABULARY)
        return sequence

    def fork(self, sequence: Sequence) -> None:
        fork = sequence.fork()
        self.tokens[fork], self.logits[fork] = self.tokens[sequence], self.logits[sequence]

    def crop(self, sequence: Sequence, num_tokens: int) -> bool:
        try:
            sequence.crop(num_tokens)
        except SequenceError:
            return False
        self.tokens[sequence] = self.tokens[sequence][:num_tokens]
        self.logits[sequence] = self.logits[sequence][:num_tokens]
        return True

    def free(self, sequence: Sequence) -> None:
        self.verify(sequence)
        sequence.free()
        del self.tokens[sequence], self.logits[sequence]

    @torch.no_grad()
    def step(self, counts: dict[Sequence, int], compiled: Any = None, *, fails: bool = False) -> None:
        """One step; a single token is what the sequence's last logits choose, if it has any."""
        forward = self.model if compiled is None else compiled
        new = []
        for sequence, count in counts.items():
            tokens = torch.randint(0, 256, (count,), generator=self.chance)
            if count == 1 and len(self.logits[sequence]):
                tokens = self.logits[sequence][-1:].argmax(-1)
            new.append(tokens)
        is_packed = len(set(counts.values())) > 1
        with self.pool.step(counts) as cache:
            inputs = cache.inputs()
            given = torch.cat(new)[None] if is_packed else torch.stack(new)
            assert set(inputs) == {"position_ids"} and inputs["position_ids"].shape == given.shape
            logits = forward(given, cache=cache, **inputs).logits
            assert logits.shape[:2] == given.shape and cache.batch_size == len(given)
            self.pool.check()
            if fails:
                raise InterruptedError
        for sequence, tokens, each in zip(counts, new, logits.flatten(0, 1).split(list(counts.values())), strict=True):
            self.tokens[sequence] = torch.cat([self.tokens[sequence], tokens])
            self.logits[sequence] = torch.cat([self.logits[sequence], each])
        self.pool.check()
        assert all(sequence.length == len(tokens) for sequence, tokens in self.tokens.items())

    @torch.no_grad()
    def verify(self, sequence: Sequence) -> None:
        if len(self.tokens[sequence]):
            expected = self.stock(self.tokens[sequence][None]).logits[0]
            torch.testing.assert_close(self.logits[sequence], expected, rtol=1e-3, atol=1e-3)


def some_counts(rnd: random.Random, sequences: list[Sequence]) -> dict[Sequence, int]:
    """Decode rows beside pieces of a prompt, up to three windows long."""
    return {s: rnd.choice([1, 1, rnd.randint(2, 6), rnd.randint(WINDOW - 1, 3 * WINDOW)]) for s in sequences}


@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize("name", MODELS)
def test_every_sequence_has_the_logits_that_it_has_alone(name: str, page_size: int) -> None:
    rnd = random.Random(f"{name} {page_size}")
    world = World(model_of(name, "torch_uma"), model_of(name, "eager"), page_size, memory=400 << 10)
    num_packed = num_refused = num_cropped = 0
    for turn in range(24):
        while len(world.tokens) < 3 or (len(world.tokens) < 6 and rnd.random() < 0.2):
            world.add()
        running = list(world.tokens)
        counts = some_counts(rnd, rnd.sample(running, rnd.randint(2, len(running))))
        fails = turn % 6 == 5
        lengths, before = [each.length for each in running], snapshot(world.pool)
        try:
            world.step(counts, fails=fails)
            num_packed += len(set(counts.values())) > 1
        except OutOfMemory:
            num_refused += 1
            assert snapshot(world.pool) == before
            world.free(max(running, key=lambda each: each.length))
        except InterruptedError:
            assert fails and lengths == [each.length for each in running]
            assert snapshot(world.pool)["cells"] == before["cells"]
            world.pool.check()
        torch_uma.testing.scramble(world.pool, turn)
        sequence = rnd.choice(list(world.tokens))
        if turn % 4 == 1:
            world.fork(sequence)
        elif turn % 4 == 2:
            num_cropped += world.crop(sequence, rnd.randint(max(0, sequence.length - 3), sequence.length))
        elif turn % 8 == 7:
            world.free(sequence)
    assert num_packed > 8
    # Windows alone never fill the arena, and can seldom be cropped.
    assert name == "mistral" or (num_refused and num_cropped)
    for sequence in list(world.tokens):
        world.free(sequence)
    assert world.pool.stats().live_bytes == 0


@pytest.mark.parametrize("name", MODELS)
def test_prompts_join_while_others_decode(name: str) -> None:
    """The tokens of one generate() for each, with every prompt in pieces beside whoever decodes."""
    model, pool = model_of(name, "torch_uma"), CachePool(model_of(name, "torch_uma"), memory=MEMORY)
    torch_uma.testing.poison(pool)
    prompts = {pool.add(): prompt_of(length) for length in (50, 3, 80, 33)}
    tokens = dict(prompts)
    for turn in range(WINDOW + 10):
        counts = {each: min(20, tokens[each].shape[1] - each.length) for each in list(prompts)[: 1 + turn // 2]}
        new = [tokens[each][:, each.length : each.length + count] for each, count in counts.items()]
        is_packed = len(set(counts.values())) > 1
        with torch.no_grad(), pool.step(counts) as cache:
            logits = model(torch.cat(new, dim=1 if is_packed else 0), cache=cache, **cache.inputs()).logits
        for each, last in zip(counts, torch.tensor(list(counts.values())).cumsum(0) - 1, strict=True):
            if each.length == tokens[each].shape[1]:
                tokens[each] = torch.cat([tokens[each], logits.flatten(0, 1)[last].argmax().view(1, 1)], dim=1)
        torch_uma.testing.scramble(pool, turn)
    for each, prompt in prompts.items():
        expected = alone(model_of(name, "eager"), prompt, tokens[each].shape[1] - prompt.shape[1])
        assert_same_tokens(model, tokens[each], expected, torch.ones_like(prompt))


def test_as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is gathered by the page table, without a look at a number."""
    for module in ("ops.reference", "integrations.transformers.places"):
        monkeypatch.setattr(f"torch_uma.{module}.on_host", lambda tensor: False)
    for name in MODELS:
        world = World(model_of(name, "torch_uma"), model_of(name, "eager"), 7, max_tokens=112)
        some = [world.add() for _ in range(4)]
        for counts in ((30, 1, 9, 60), (1, 26, 70, 2), (3, 1, 1, 1)):
            world.step(dict(zip(some, counts, strict=True)))
        for sequence in some:
            world.free(sequence)


def test_layers_that_share_keys() -> None:
    given = CONFIGS["llama"]().to_dict() | {"intermediate_size": [96] * 4, "sliding_window": WINDOW}
    config = Gemma3nTextConfig(
        **{key: given[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")},
        **{key: given[key] for key in ("head_dim", "intermediate_size", "sliding_window", "initializer_range")},
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        laurel_rank=8,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCABULARY,
        activation_sparsity_pattern=[0.0] * 4,
        altup_num_inputs=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="torch_uma")
    model.eval().requires_grad_(False)
    stock = copy.deepcopy(model)
    stock.set_attn_implementation("eager")
    world = World(model, stock, 7)
    some = [world.add() for _ in range(3)]
    for counts in ((30, 1, 9), (1, 26, 70), (3, 1, 1), (1, 40, 2)):
        world.step(dict(zip(some, counts, strict=True)))
        torch_uma.testing.scramble(world.pool, 1)
    for sequence in some:
        world.free(sequence)


def test_a_model_that_counts_positions_by_itself() -> None:
    """Llama 4 scales queries by where they are, which it works out from the length of the cache."""
    models = [build("llama4", attention=attention) for attention in ("torch_uma", "eager")]
    for model in models:
        for layer in model.model.layers:
            layer.self_attn.floor_scale, layer.self_attn.attn_scale = 4, 2.0
    world = World(*models, 7)
    some = [world.add() for _ in range(3)]
    for counts in ((30, 1, 9), (1, 26, 70), (3, 1, 1)):
        world.step(dict(zip(some, counts, strict=True)))
    for sequence in some:
        world.free(sequence)


@pytest.mark.parametrize(("name", "num_graphs"), [("gpt_oss", 1), ("llama4", 1), ("deepseek_v3", 2)])
def test_one_graph_for_a_total_and_a_batch(name: str, num_graphs: int) -> None:
    """And one more for latents of which none are there yet, which are not absorbed."""
    graphs = Graphs(compile_fx if name == "gpt_oss" else lambda graph, _: graph.forward)
    model = model_of(name, "torch_uma")
    compiled = torch.compile(model, backend=graphs.backend, fullgraph=True, dynamic=False)
    world = World(model, model_of(name, "eager"), 7)
    some = [world.add() for _ in range(3)]
    for turn, counts in enumerate([(5, 1, 34), (1, 37, 2), (30, 1, 9), (1, 1, 38), (38, 1, 1), (2, 3, 35)]):
        world.step(dict(zip(some, counts, strict=True)), compiled)
        torch_uma.testing.scramble(world.pool, turn)
    for sequence in some:
        world.verify(sequence)
    assert graphs.count == num_graphs


def test_equal_numbers_are_not_packed() -> None:
    model = model_of("llama", "torch_uma")
    pool = CachePool(model, memory=MEMORY)
    first, second = pool.add(), pool.add()
    for sequences, numbers in (({first: 2, second: 2}, 1), (pool.batch([first, second]), [2, 2])):
        with torch.no_grad(), pool.step(sequences, numbers) as cache:
            assert cache.inputs()["position_ids"].shape == (2, 2) and cache.batch_size == 2
            model(torch.zeros(2, 2, dtype=torch.int64), cache=cache, **cache.inputs())
    with torch.no_grad(), pool.step(pool.batch([first, second]), torch.tensor([1, 3])) as cache:
        assert cache.inputs()["position_ids"].tolist() == [[4, 4, 5, 6]]
        model(torch.zeros(1, 4, dtype=torch.int64), cache=cache, **cache.inputs())
    assert (first.length, second.length) == (5, 7)


@pytest.mark.parametrize(
    ("name", "attention", "message"),
    [
        (
            "qwen3_next",
            "torch_uma",
            "layers with a 'state' would carry it from one into the next; open a step for each",
        ),
        ("mamba2", "eager", "layers with a 'state'"),
        ("llama", "sdpa", r"this model has 'sdpa'; call model\.set_attn_implementation\('torch_uma'\), or open a step"),
        ("llama4", "eager", "this model has 'eager'"),
        ("", "", "the pool was made of no model, or it is gone; make the pool of the model, or open a step"),
    ],
)
def test_what_cannot_tell_sequences_apart_is_refused(name: str, attention: str, message: str) -> None:
    source = build(name, attention=attention) if name else torch_uma.plan(model_of("llama", "eager"), memory=MEMORY)
    pool = CachePool(source, memory=MEMORY) if name else CachePool(source)
    first, second = pool.add(5), pool.add(5)
    before = snapshot(pool)
    for sequences, numbers in (({first: 1, second: 2}, 1), (pool.batch([first, second]), [1, 2])):
        refused = pytest.raises(SequenceError, match=rf"unequally many new tokens, \[1, 2\], .*{message}")
        with refused, pool.step(sequences, numbers):
            raise AssertionError
    assert snapshot(pool) == before


def test_a_forward_that_is_not_that_of_the_step_is_refused() -> None:
    model = model_of("llama", "torch_uma")
    pool = CachePool(model, memory=MEMORY)
    first, second = pool.add(), pool.add()
    packed, column = torch.zeros(1, 5, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)
    ones, zeros = torch.ones_like(packed), torch.tensor([[0, 1, 1, 1, 1]])
    square = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    for tokens, given, message in (
        (
            column,
            {"position_ids": column},
            r"new tokens of 2 sequences one after another, as \[1, 5\], but the forward has \[2, 3\]",
        ),
        (packed[:, :4], {"position_ids": packed[:, :4]}, r"but the forward has \[1, 4\]; pack them with torch\.cat"),
        (packed, {"attention_mask": zeros}, "only be attended to causally, without a mask"),
        (packed, {"attention_mask": square}, "only be attended to causally, without a mask"),
        (packed, None, r"hold, or take, unequal numbers of tokens, .*\*\*cache\.inputs\(\)"),
    ):
        with pytest.raises(SequenceError, match=message), torch.no_grad(), pool.step({first: 2, second: 3}) as cache:
            model(tokens, cache=cache, **({} if given is None else cache.inputs() | given))
        assert (first.length, second.length) == (0, 0)
        pool.check()
    with (
        pytest.raises(SequenceError, match="already written"),
        torch.no_grad(),
        pool.step({first: 2, second: 3}) as cache,
    ):
        for _ in range(2):
            model(packed, cache=cache, **cache.inputs())
    with torch.no_grad(), pool.step({first: 2, second: 3}) as cache:
        model(packed, cache=cache, attention_mask=ones, **cache.inputs())
    assert (first.length, second.length) == (2, 3)
