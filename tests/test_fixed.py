"""A decode step with stock attention compiles once, as its keys have a fixed size: the tokens of eager, and no copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import models
import psutil
import pytest
import torch
from test_compile import ARENA, Graphs, assert_same, largest_buffer_bytes
from test_generate import MEMORY, NUM_NEW, Scramble, generate
from tiny_models import assert_same_tokens, prompts
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import run_and_get_code
from transformers import CompileConfig, LogitsProcessorList, PreTrainedModel

import torch_uma
from torch_uma import CachePool, UnifiedCache
from torch_uma.integrations.transformers.steps import OwnSteps

torch.set_num_threads(1)

STOCK = [("llama", "sdpa"), ("mistral", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager"), ("qwen3_next", "sdpa")]
MAX_TOKENS = 110


class Loop:
    """Equally long sequences of a poisoned pool, in runs."""

    def __init__(self, model: PreTrainedModel, num_rows: int, length: int, memory: int = MEMORY) -> None:
        self.model = model
        self.pool = CachePool(model, memory=memory, max_sequences=8)
        if memory == MEMORY:
            torch_uma.testing.poison(self.pool)
        self.fill(num_rows, length)

    def fill(self, num_rows: int, length: int) -> None:
        self.batch = self.pool.batch([self.pool.add() for _ in range(num_rows)])
        self.pool.extend_runs(self.batch, MAX_TOKENS)
        self.step(self.model, prompts((length,) * num_rows, seed=length)["input_ids"])

    @torch.no_grad()
    def step(self, forward: Callable[..., Any], tokens: torch.Tensor) -> torch.Tensor:
        """The logits [rows, vocabulary] after the last of `tokens` [rows, new]."""
        self.pool.slide_windows(self.batch, tokens.shape[1], MAX_TOKENS)
        with self.pool.step(self.batch, tokens.shape[1]) as cache:
            logits: torch.Tensor = forward(tokens, cache=cache, **cache.inputs()).logits
        return logits[:, -1]

    def empty(self) -> None:
        self.pool.check()
        for sequence in self.batch.sequences:
            sequence.free()


@pytest.mark.parametrize(("name", "attention"), STOCK)
def test_one_graph_a_batch_size_through_windows_and_in_another_pool(name: str, attention: str) -> None:
    graphs = Graphs(compile_fx)
    model = models.build(name, attention=attention)
    compiled = torch.compile(model, backend=graphs.backend, fullgraph=True, dynamic=False)
    chance = torch.Generator().manual_seed(3)
    for num_graphs, (num_rows, length, num_steps) in enumerate([(2, 5, 96), (1, 31, 8)], 1):
        eager, traced = Loop(model, num_rows, length), Loop(model, num_rows, length)
        for again in (num_steps, 4):
            for _ in range(again):
                column = torch.randint(0, 256, (num_rows, 1), generator=chance)
                assert_same(traced.step(compiled, column), eager.step(model, column))
            for loop in (eager, traced):
                loop.empty()
                loop.fill(num_rows, length + 9)
            traced = Loop(model, num_rows, length + 9)
        assert graphs.count == num_graphs
    assert not counters["graph_break"]


@pytest.mark.parametrize(("name", "attention"), STOCK)
def test_neither_the_arena_nor_the_keys_are_copied(name: str, attention: str) -> None:
    torch.compiler.reset()
    model = models.build(name, attention=attention)
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    loop = Loop(model, 2, 9, memory=ARENA)
    column = torch.tensor([[3], [5]])
    loop.pool.slide_windows(loop.batch, 1, MAX_TOKENS)
    with torch.no_grad(), loop.pool.step(loop.batch, 1) as cache:
        _, codes = run_and_get_code(compiled, column, cache=cache, **cache.inputs())
    assert largest_buffer_bytes(codes) < ARENA // 100
    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(40):
        loop.step(compiled, column)
    assert process.memory_info().rss - before < ARENA // 100


def compile_config(graphs: Graphs) -> CompileConfig:
    config = CompileConfig(backend=graphs.backend, mode=None, fullgraph=True)
    config._compile_all_devices = True
    return config


@pytest.mark.parametrize(("name", "attention"), [*STOCK, ("deepseek_v3", "sdpa"), ("bamba", "sdpa")])
def test_generate_compiles_its_decode_steps_by_itself(name: str, attention: str) -> None:
    graphs = Graphs(compile_fx)
    model = models.build(name, attention=attention)
    inputs = prompts((5, 20))
    expected = generate(models.build(name), inputs)
    cache = UnifiedCache(model, max_tokens=MAX_TOKENS)
    for each in (cache, cache, UnifiedCache(model, max_tokens=MAX_TOKENS)):
        each.reset()
        tokens = generate(model, inputs, cache=each, compile_config=compile_config(graphs))
        assert_same_tokens(model, tokens, expected, inputs["attention_mask"])
        assert each.get_seq_length() == 20 + NUM_NEW - 1
        each.pool.check()
    assert graphs.count == 1 and not counters["graph_break"]


def test_without_max_tokens_there_is_a_graph_for_each_power_of_two() -> None:
    graphs = Graphs(aot_eager)
    model = models.build("gemma2", attention="eager")
    cache = UnifiedCache(model, memory=MEMORY)
    for lengths in ((5, 20), (3, 9), (17, 19)):
        inputs = prompts(lengths)
        cache.reset()
        torch_uma.testing.poison(cache.pool)
        tokens = generate(model, inputs, cache=cache, compile_config=compile_config(graphs))
        assert_same_tokens(model, tokens, generate(model, inputs), inputs["attention_mask"])
    assert graphs.count <= 4  # 16, 32, 64 and 128


def test_rows_that_leave_their_run_are_fetched_again() -> None:
    graphs = Graphs(aot_eager)
    model = models.build("mistral", attention="sdpa")
    inputs = prompts((5, 20))
    cache = UnifiedCache(model, memory=MEMORY)
    torch_uma.testing.poison(cache.pool)
    hook = LogitsProcessorList([Scramble(cache.pool)])
    options = {"compile_config": compile_config(graphs), "logits_processor": hook}
    tokens = generate(model, inputs, cache=cache, **options)
    assert_same_tokens(model, tokens, generate(model, inputs), inputs["attention_mask"])


def test_the_room_is_cleared_for_keys_of_a_fixed_size_alone() -> None:
    model = models.build("llama", attention="sdpa")
    inputs = prompts((9, 9))
    cache = UnifiedCache(model, memory=MEMORY)
    torch_uma.testing.poison(cache.pool)
    books = cache.pool.sequences
    plain = generate(model, inputs, cache=cache, max_new_tokens=20)
    assert not books.is_clear.any()
    assert cache.paths() == ["view"] * 4
    cache.reset()
    graphs = Graphs(aot_eager)
    tokens = generate(model, inputs, cache=cache, max_new_tokens=20, compile_config=compile_config(graphs))
    assert torch.equal(tokens, plain)
    held = books.is_clear.sum()
    assert 0 < held <= 2 * 3
    cache.reset()
    torch_uma.testing.poison(cache.pool)  # what is taken again is cleared again
    tokens = generate(model, inputs, cache=cache, max_new_tokens=20, compile_config=compile_config(graphs))
    assert torch.equal(tokens, plain) and books.is_clear.sum() == held


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_keys_are_converted_if_they_are_stored_otherwise(kv_dtype: torch.dtype) -> None:
    model = models.build("llama", attention="sdpa")
    inputs = prompts((9, 9))
    graphs = Graphs(aot_eager)
    results = []
    for options in ({}, {"compile_config": compile_config(graphs)}):
        cache = UnifiedCache(model, memory=MEMORY, kv_dtype=kv_dtype)
        torch_uma.testing.poison(cache.pool)
        results.append(generate(model, inputs, cache=cache, max_new_tokens=20, **options))
    assert torch.equal(*results)
    assert graphs.count


def test_a_cache_says_whether_its_keys_can_have_a_fixed_size() -> None:
    model = models.build("mistral", attention="sdpa")
    inputs = prompts((9, 9))
    cache = UnifiedCache(model, max_tokens=MAX_TOKENS)
    steps = cache._steps
    assert isinstance(steps, OwnSteps) and not steps.reads_fixed
    config = compile_config(Graphs(aot_eager))
    generate(model, inputs, cache=cache, max_new_tokens=5, compile_config=config)
    assert steps.reads_fixed and cache.is_compileable
    cache.reorder_cache(torch.tensor([0, 0]))
    assert not steps.reads_fixed
    cache.reset()
    generate(model, inputs, cache=cache, max_new_tokens=5)  # is not going to compile
    assert not steps.reads_fixed


def test_generate_compiles_what_can_have_a_fixed_size() -> None:
    for name, attention, compiles in (
        ("mistral", "sdpa", True),
        ("llama4", "sdpa", False),
        ("llama4", "torch_uma", True),
    ):
        model = models.build(name, attention=attention)
        cache = UnifiedCache(model, max_tokens=MAX_TOKENS)
        config = copy.deepcopy(model.generation_config)
        config.compile_config = compile_config(Graphs(aot_eager))
        assert model._valid_auto_compile_criteria({"cache": cache}, config) == compiles
