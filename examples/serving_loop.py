"""A serving loop of one's own: a scheduler decides who is in memory and what is run next, the loop runs it.

Requests come over time, run their prompts in chunks while others decode, are retracted where memory runs short and come
back, and leave when they are done.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from tiny_models import build, prompts

from torch_uma import CachePool, Scheduler

NUM_NEW_TOKENS = 40


@torch.no_grad()
def serve(model: Any, pool: CachePool, requests: list[list[int]], **options: Any) -> list[list[int]]:
    """Prompt and greedy answer of each request, in their order; every 5 rounds another one of them comes."""
    texts = [list(prompt) for prompt in requests]
    scheduler, coming = Scheduler(pool, **options), deque(texts)
    num_rounds = 0
    while scheduler or coming:
        if coming and num_rounds % 5 == 0:
            text = coming.popleft()
            scheduler.submit(len(text), NUM_NEW_TOKENS, tag=text)
        round = scheduler.schedule()
        for what in ("admitted", "resumed", "dropped", "offloaded"):
            for request in getattr(round, what):
                print(f"round {round.number}: {request.num_tokens} tokens {what}")
        for forward in round.forwards:
            ranges = zip(forward.requests, forward.starts, forward.counts)
            ids = torch.tensor([request.tag[start : start + count] for request, start, count in ranges])
            with pool.step(forward.batch, forward.num_new_tokens) as cache:
                logits = model(ids, cache=cache, **cache.inputs()).logits[:, -1]
            for request, samples, token in zip(forward.requests, forward.samples, logits.argmax(-1).tolist()):
                if samples:  # and otherwise its prompt goes on
                    request.tag.append(token)
        scheduler.complete(round)
        num_rounds += 1
    print(scheduler.stats())
    return texts


if __name__ == "__main__":
    torch.set_num_threads(1)  # matrices this small only lose by being split
    model = build("gpt_oss", attention="eager")
    pool = CachePool(model, memory="160KiB", page_size=4, max_sequences=16)
    requests = [prompts((n,), seed=n)["input_ids"][0].tolist() for n in (50, 9, 30, 31, 60, 5, 48, 20)]
    texts = serve(model, pool, requests, step_tokens=32, host_memory="1MiB")
    for request, text in enumerate(texts):
        print(f"request {request}: {len(text)} tokens, the first new ones {text[len(requests[request]) :][:8]}")
    print(pool.stats())
