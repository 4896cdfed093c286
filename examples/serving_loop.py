"""A serving loop: requests are admitted while their memory fits, decoded together, and leave when they are done."""

from collections import deque

import torch
from tiny_models import build, prompts

from torch_uma import CachePool, OutOfMemory, Sequence

NUM_NEW_TOKENS = 40


@torch.no_grad()
def serve(model: torch.nn.Module, pool: CachePool, requests: list[list[int]]) -> list[list[int]]:
    """Prompt and greedy answer of each request, in the order of `requests`, which are prompts."""
    texts, waiting = [list(prompt) for prompt in requests], deque(range(len(requests)))
    running: dict[int, Sequence] = {}  # by request, the youngest last
    may_admit = True
    while waiting or running:
        while waiting and may_admit:
            try:
                sequence = pool.add(len(requests[waiting[0]]) + NUM_NEW_TOKENS)
                print(f"request {waiting[0]}, {len(texts[waiting[0]])} tokens, joins {len(running)} others")
                running[waiting.popleft()] = sequence
            except OutOfMemory:
                if not running:
                    raise
                may_admit = False  # until one of those that run has left
        fresh = [request for request, sequence in running.items() if not sequence.length]
        batch = fresh[:1] or list(running)  # a prompt alone: any model can serve equal numbers of tokens
        num_new_tokens = len(texts[batch[0]]) - running[batch[0]].length
        try:
            with pool.step({running[request]: num_new_tokens for request in batch}) as cache:
                new = torch.tensor([texts[request][-num_new_tokens:] for request in batch])
                logits = model(new, cache=cache, **cache.inputs()).logits
        except OutOfMemory:  # add() made room for what a request holds between steps; in one, a window may need more
            if len(running) == 1:
                raise
            request, sequence = running.popitem()  # retract the youngest
            sequence.free()
            waiting.appendleft(request)
            may_admit = False
        else:
            for request, token in zip(batch, logits[:, -1].argmax(-1).tolist()):
                texts[request].append(token)
                if len(texts[request]) == len(requests[request]) + NUM_NEW_TOKENS:
                    running.pop(request).free()
                    may_admit = True
    return texts


if __name__ == "__main__":
    torch.set_num_threads(1)  # matrices this small only lose by being split
    model = build("gpt_oss", attention="eager")
    pool = CachePool(model, memory="160KiB", page_size=4)
    requests = [prompts((n,), seed=n)["input_ids"][0].tolist() for n in (50, 9, 30, 31, 60, 5, 48, 20)]
    for request, text in enumerate(serve(model, pool, requests)):
        print(f"request {request}: {len(text)} tokens, the first new ones {text[len(requests[request]) :][:8]}")
    print(pool.stats())
