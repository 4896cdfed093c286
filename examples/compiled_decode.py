"""A decode step as one compiled graph: sequences of unequal length over one arena, attention reading it in place.

Run it with `python examples/compiled_decode.py`; on a CPU, torch needs a C++ compiler to generate code.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from tiny_models import build, prompts
from torch._dynamo.utils import counters

import torch_uma
import torch_uma.integrations.transformers  # registers the attention "torch_uma"

LENGTHS = (5, 40, 17)


@torch.no_grad()
def decode(model: Any, forward: Callable[..., Any], num_steps: int) -> tuple[torch.Tensor, float]:
    """Tokens [rows, num_steps] of `forward`, which is the model or its compiled form, and milliseconds a step."""
    with torch_uma.CachePool(model, memory="4MiB", max_sequences=8) as pool:
        sequences = [pool.add() for _ in LENGTHS]
        last = []
        for sequence, length in zip(sequences, LENGTHS, strict=True):
            with pool.step({sequence: length}) as cache:
                logits = model(prompts((length,), seed=length)["input_ids"], cache=cache, **cache.inputs()).logits
            last.append(logits[:, -1].argmax(-1))
        tokens = [torch.stack(last)]
        batch = pool.batch(sequences)
        for step in range(num_steps):
            if step == 2:  # the first steps compile
                start = time.perf_counter()
            with pool.step(batch, 1) as cache:
                logits = forward(tokens[-1], cache=cache, **cache.inputs()).logits
            tokens.append(logits[:, -1:].argmax(-1))
        milliseconds = (time.perf_counter() - start) / (num_steps - 2) * 1e3
        for sequence in sequences:
            sequence.free()
    return torch.cat(tokens, dim=1), milliseconds


def main() -> None:
    torch.set_num_threads(1)  # matrices this small only lose by being split
    model = build("gpt_oss", attention="torch_uma")
    eager, eager_ms = decode(model, model, 60)
    compiled, compiled_ms = decode(model, torch.compile(model, fullgraph=True, dynamic=False), 60)
    assert torch.equal(eager, compiled)
    print(f"{counters['stats']['unique_graphs']} graph for {len(LENGTHS)} sequences of {LENGTHS} tokens and 60 steps")
    print(f"{eager_ms:.2f} ms a step eager, {compiled_ms:.2f} ms compiled, the same tokens")


if __name__ == "__main__":
    main()
