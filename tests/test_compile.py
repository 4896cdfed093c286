"""A decode step compiles as one graph over the arena, gives the tokens of eager, and never copies the arena."""

from __future__ import annotations

import re
from math import prod

import pytest
import torch
from tiny_models import build, prompts
from torch._inductor.utils import run_and_get_code

import torch_uma
from torch_uma import CachePool

torch.set_num_threads(1)

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


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_a_decode_step_compiles_in_one_graph_without_a_copy_of_the_arena(name: str) -> None:
    torch.compiler.reset()
    model = build(name, attention="sdpa")
    compiled = torch.compile(model, fullgraph=True)
    lengths = (7, 12)
    tokens = {}
    for form in ("eager", "compiled"):
        pool = CachePool(model, memory=8 << 20)
        torch_uma.testing.poison(pool)
        sequences = [pool.add() for _ in lengths]
        last = []
        for sequence, length in zip(sequences, lengths, strict=True):
            with torch.no_grad(), pool.step({sequence: length}) as cache:
                prompt = prompts((length,), seed=length)["input_ids"]
                last.append(model(prompt, cache=cache, **cache.inputs()).logits[:, -1:].argmax(-1))
        column = torch.cat(last)
        seen = [column]
        for step in range(4):
            with torch.no_grad(), pool.step(dict.fromkeys(sequences, 1)) as cache:
                if form == "eager":
                    logits = model(column, cache=cache, **cache.inputs()).logits
                elif step == 0:
                    output, codes = run_and_get_code(compiled, column, cache=cache, **cache.inputs())
                    logits = output.logits
                    assert largest_buffer_bytes(codes) < pool.plan.arena_bytes
                else:
                    logits = compiled(column, cache=cache, **cache.inputs()).logits
            column = logits[:, -1:].argmax(-1)
            seen.append(column)
            pool.check()
        tokens[form] = torch.cat(seen, dim=1)
        # A traced forward, too, says that it has changed states in place.
        with pytest.raises(KeyError), torch.no_grad(), pool.step(dict.fromkeys(sequences, 1)) as cache:
            (compiled if form == "compiled" else model)(column, cache=cache, **cache.inputs())
            raise KeyError
        with pytest.raises(torch_uma.SequenceError, match="half written"):
            pool.begin(sequences, 1)
        assert [sequence.length for sequence in sequences] == [length + 4 for length in lengths]
    assert torch.equal(tokens["compiled"], tokens["eager"])
