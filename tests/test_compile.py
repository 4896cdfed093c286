"""A decode step compiles as one graph for ever: the same tokens as eager, whatever moves, and no copy of the arena."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import Any

import compiled_decode
import models
import psutil
import pytest
import torch
from test_generate import MEMORY, NUM_NEW, Scramble, generate
from tiny_models import TIE_MARGIN, prompts
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx
from torch._inductor.utils import run_and_get_code
from transformers import CompileConfig, LogitsProcessorList, PreTrainedModel

import torch_uma
from torch_uma import CachePool, UnifiedCache

torch.set_num_threads(1)

COMPILED = ["llama", "gpt_oss", "gemma2", "qwen3_next", "bamba", "mamba2", "lfm2"]
NUM_STEPS = 512
ARENA = 256 << 20
_BUFFER = re.compile(r"= empty_strided\w*\(\(([\d, ]*)\), \([\d, ]*\), torch\.(\w+)")


def largest_buffer_bytes(codes: list[str]) -> int:
    """Bytes of the largest buffer that the generated code makes."""
    sizes = [
        prod(int(size) for size in match[1].split(",") if size.strip()) * getattr(torch, match[2]).itemsize
        for code in codes
        for match in _BUFFER.finditer(code)
    ]
    assert sizes, "no buffer found: inductor's code looks different now"
    return max(sizes)


class Graphs:
    """`backend` counts what it compiles; a function, as transformers copies everything else."""

    def __init__(self, compile_graph: Callable[..., Any]) -> None:
        self.count = 0
        torch.compiler.reset()
        counters.clear()

        def backend(graph: Any, example_inputs: Any) -> Any:
            self.count += 1
            return compile_graph(graph, example_inputs)

        self.backend = backend


def attention_of(name: str) -> str:
    return "eager" if name == "mamba2" else "torch_uma"  # which has no attention


class Decoding:
    """Sequences of a poisoned pool that have their prompts, and decode what they are told to."""

    def __init__(self, model: PreTrainedModel, lengths: tuple[int, ...], memory: int = MEMORY) -> None:
        self.model = model
        self.pool = CachePool(model, memory=memory, max_sequences=8)
        if memory == MEMORY:
            torch_uma.testing.poison(self.pool)
        self.fill(lengths)

    @torch.no_grad()
    def fill(self, lengths: tuple[int, ...]) -> None:
        self.sequences = [self.pool.add() for _ in lengths]
        self.batch = self.pool.batch(self.sequences)
        for sequence, length in zip(self.sequences, lengths, strict=True):
            with self.pool.step({sequence: length}) as cache:
                self.model(prompts((length,), seed=length)["input_ids"], cache=cache, **cache.inputs())

    def step(self, forward: Callable[..., Any], column: torch.Tensor) -> torch.Tensor:
        """The logits [rows, vocabulary] after a column of tokens [rows, 1]."""
        with torch.no_grad(), self.pool.step(self.batch, 1) as cache:
            logits: torch.Tensor = forward(column, cache=cache, **cache.inputs()).logits
        return logits[:, -1]


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Logits that agree, and choose the same tokens but where two tie."""
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    top = expected.topk(2, dim=-1).values
    decided = top[:, 0] - top[:, 1] > TIE_MARGIN
    assert torch.equal(actual.argmax(-1)[decided], expected.argmax(-1)[decided])


@pytest.mark.parametrize("name", COMPILED)
def test_one_graph_a_batch_size_through_windows_moves_new_sequences_and_another_pool(name: str) -> None:
    graphs = Graphs(compile_fx)
    model = models.build(name, attention=attention_of(name))
    compiled = torch.compile(model, backend=graphs.backend, fullgraph=True, dynamic=False)
    chance = torch.Generator().manual_seed(3)
    for num_graphs, (lengths, num_steps) in enumerate([((7, 12), NUM_STEPS), ((30, 2, 9), 20)], 1):
        eager, traced = Decoding(model, lengths), Decoding(model, lengths)
        for step in range(num_steps):
            column = torch.randint(0, 256, (len(lengths), 1), generator=chance)
            assert_same(traced.step(compiled, column), eager.step(model, column))
            if step % 5 == 0:
                torch_uma.testing.scramble(traced.pool, step)
        traced.pool.check()
        for sequence in [*traced.sequences, *eager.sequences]:
            sequence.free()
        for decoding in (eager, traced):
            decoding.fill(lengths)
        other = Decoding(model, lengths)
        column = torch.randint(0, 256, (len(lengths), 1), generator=chance)
        expected = eager.step(model, column)
        assert_same(traced.step(compiled, column), expected)
        assert_same(other.step(compiled, column), expected)
        assert graphs.count == num_graphs
    assert not counters["graph_break"]


@pytest.mark.parametrize("name", COMPILED)
def test_the_arena_is_not_copied(name: str) -> None:
    torch.compiler.reset()
    model = models.build(name, attention=attention_of(name))
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    decoding = Decoding(model, (9, 17), memory=ARENA)
    column = torch.tensor([[3], [5]])
    with torch.no_grad(), decoding.pool.step(decoding.batch, 1) as cache:
        _, codes = run_and_get_code(compiled, column, cache=cache, **cache.inputs())
    assert largest_buffer_bytes(codes) < ARENA // 100
    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(40):
        decoding.step(compiled, column)
    assert process.memory_info().rss - before < ARENA // 100


@pytest.mark.parametrize("name", COMPILED)
def test_generate_compiles_its_decode_steps_by_itself(name: str) -> None:
    # Without inductor the arena is copied and written back, over states that were changed meanwhile.
    graphs = Graphs(compile_fx if name in ("qwen3_next", "bamba", "lfm2") else aot_eager)
    # Looked for by transformers before it compiles on a device that is no accelerator.
    config = CompileConfig(backend=graphs.backend, mode=None, fullgraph=True)
    config._compile_all_devices = True
    model = models.build(name, attention=attention_of(name))
    inputs = prompts((5, 20))
    expected = generate(models.build(name), inputs)
    cache = UnifiedCache(model, memory=MEMORY)
    for each in (cache, cache, UnifiedCache(model, memory=MEMORY)):
        each.reset()
        torch_uma.testing.poison(each.pool)
        hook = Scramble(each.pool)
        options = {"compile_config": config, "logits_processor": LogitsProcessorList([hook])}
        assert torch.equal(generate(model, inputs, cache=each, **options), expected)
        assert each.get_seq_length() == 20 + NUM_NEW - 1
        each.pool.check()
    assert graphs.count == 1 and not counters["graph_break"]


def test_a_traced_forward_says_that_it_changed_states_in_place() -> None:
    graphs = Graphs(lambda graph, _: graph)
    model = models.build("qwen3_next", attention="torch_uma")
    compiled = torch.compile(model, backend=graphs.backend, fullgraph=True)
    decoding = Decoding(model, (7, 12))
    column = torch.tensor([[3], [5]])
    decoding.step(compiled, column)
    with pytest.raises(KeyError), torch.no_grad(), decoding.pool.step(decoding.batch, 1) as cache:
        compiled(column, cache=cache, **cache.inputs())
        raise KeyError
    with pytest.raises(torch_uma.SequenceError, match="half written"):
        decoding.pool.begin(decoding.batch, 1)
    assert [sequence.length for sequence in decoding.sequences] == [8, 13]


def test_stock_attention_compiles_too() -> None:
    torch.compiler.reset()
    model = models.build("bamba", attention="sdpa")
    compiled = torch.compile(model, fullgraph=True)
    eager, traced = Decoding(model, (7, 12)), Decoding(model, (7, 12))
    for step in range(4):
        column = torch.tensor([[step], [step + 9]])
        assert_same(traced.step(compiled, column), eager.step(model, column))
        torch_uma.testing.scramble(traced.pool, step)


def test_a_compiled_forward_that_nobody_announced_runs_in_pieces() -> None:
    torch.compiler.reset()
    model = models.build("llama", attention="torch_uma")
    tokens = prompts((9, 9))["input_ids"]
    expected = model(tokens, use_cache=False).logits
    for parts in ([9], [6, 1, 1, 1]):
        cache = UnifiedCache(model, memory=MEMORY)
        torch_uma.testing.poison(cache.pool)
        compiled = torch.compile(model, backend="eager")
        with torch.no_grad():
            logits = [compiled(part, cache=cache).logits for part in tokens.split(parts, dim=1)]
        torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=1e-4, atol=1e-4)
        assert cache.get_seq_length() == 9
    torch.compiler.reset()
    whole = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"compile the model over pool\.step\(\)"), torch.no_grad():
        whole(tokens, cache=UnifiedCache(model, memory=MEMORY))


def test_the_example_compiles_once(capsys: pytest.CaptureFixture[str]) -> None:
    torch.compiler.reset()
    counters.clear()
    compiled_decode.main()
    assert capsys.readouterr().out.startswith("1 graph for 3 sequences")
