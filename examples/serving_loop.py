"""A serving loop: requests are admitted while their memory fits, decoded together, and leave when they are done."""

from __future__ import annotations

import sys
from collections import deque
from pathlib import Path

import torch

from torch_uma import CachePool, OutOfMemory, Sequence

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from models import build, prompts

NUM_NEW_TOKENS = 40


@torch.no_grad()
def serve(model: torch.nn.Module, pool: CachePool, requests: list[torch.Tensor]) -> dict[int, list[int]]:
    """Greedy tokens of each request, in the order of `requests`; each is a prompt [1, tokens]."""
    waiting = deque(enumerate(requests))
    running: dict[Sequence, int] = {}
    tokens: dict[int, list[int]] = {}
    while waiting or running:
        while waiting:
            request, prompt = waiting[0]
            try:
                sequence = pool.add(prompt.shape[1] + NUM_NEW_TOKENS)  # room for all of it, so no step can run out
            except OutOfMemory:
                if not running:
                    raise
                break  # until one of those that run has left
            waiting.popleft()
            print(f"request {request}, {prompt.shape[1]} tokens, joins {len(running)} others")
            with pool.step({sequence: prompt.shape[1]}) as cache:
                logits = model(prompt, cache=cache, **cache.inputs()).logits
            running[sequence], tokens[request] = request, [int(logits[0, -1].argmax())]
        last = torch.tensor([[tokens[request][-1]] for request in running.values()])
        with pool.step(dict.fromkeys(running, 1)) as cache:
            logits = model(last, cache=cache, **cache.inputs()).logits
        for sequence, token in zip(list(running), logits[:, -1].argmax(-1).tolist()):
            request = running[sequence]
            tokens[request].append(token)
            if len(tokens[request]) == NUM_NEW_TOKENS:
                sequence.free()
                del running[sequence]
    return dict(sorted(tokens.items()))


if __name__ == "__main__":
    model = build("qwen3_next", attention="sdpa")
    pool = CachePool(model, memory="320KiB")
    requests = [prompts((length,), seed=length)["input_ids"] for length in (150, 9, 70, 31, 210, 5, 48, 100)]
    for request, answer in serve(model, pool, requests).items():
        print(f"request {request}: {len(answer)} tokens, the first {answer[:8]}")
    print(pool.stats())
