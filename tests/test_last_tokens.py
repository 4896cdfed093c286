"""The last tokens of sequences, fed from where they were sampled, or from the host where they are not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from pools import layer, make_pool

from torch_uma import CachePool, Full, Sequence
from torch_uma.integrations.transformers.serving.generation import Generation
from torch_uma.integrations.transformers.serving.last_tokens import LastTokens
from torch_uma.scheduling import Forward


def generation_of(*tokens: int) -> Generation:
    parts: Any = SimpleNamespace(reason=lambda tokens: None)
    made = Generation([100, 101, 102], parts, parts, generator=None, with_logprobs=False, tag=None)
    for token in tokens:
        made.add(token, 0.0)
    return made


def forward_over(pool: CachePool, running: dict[Generation, Sequence], counts: Any = 1, samples: Any = True) -> Forward:
    generations = list(running)
    ends = np.array([each.num_tokens for each in generations])
    return Forward(
        requests=tuple([SimpleNamespace(tag=each) for each in generations]),  # type: ignore[arg-type]
        batch=pool.batch(list(running.values())),
        num_new_tokens=counts,
        starts=ends - np.array(counts),
        samples=np.broadcast_to(samples, len(generations)),
        is_decode=counts == 1,
    )


def fed(tokens: LastTokens, forward: Forward) -> list[int]:
    return tokens.feed(forward, forward.batch)[:, 0].tolist()


def sampled(tokens: LastTokens, forward: Forward, new: list[int]) -> None:
    places = forward.samples.nonzero()[0]
    generations = [forward.requests[place].tag for place in places]
    tokens.keep(forward.batch.rows, places, generations, torch.tensor(new))


def test_tokens_that_nobody_has_read_are_fed() -> None:
    pool = make_pool([layer(Full())], max_sequences=4)
    tokens = LastTokens(pool)
    a, b, c = generation_of(), generation_of(7), generation_of()
    running = {a: pool.add(), b: pool.add(), c: pool.add()}
    assert fed(tokens, forward_over(pool, running)) == [102, 7, 102]
    forward = forward_over(pool, running)
    for step in range(3):
        sampled(tokens, forward, [step, 10 + step, 20 + step])
        assert fed(tokens, forward) == [step, 10 + step, 20 + step]
    assert fed(tokens, forward_over(pool, {c: running[c], a: running[a]})) == [22, 2]
    assert tokens.text(b, running[b].row, 5).tolist() == [100, 101, 102, 7, 12]
    assert tokens.text(b, running[b].row, 4).tolist() == [100, 101, 102, 7]


def test_prompts_with_a_token_in_flight_between_them() -> None:
    pool = make_pool([layer(Full())], max_sequences=4)
    tokens = LastTokens(pool)
    a, b = generation_of(), generation_of()
    running = {a: pool.add(), b: pool.add()}
    forward = forward_over(pool, running, [3, 2], [True, False])
    assert tokens.prompt(forward).tolist() == [100, 101, 102, 101, 102]
    sampled(tokens, forward, [55])
    again = Forward(
        requests=forward.requests,
        batch=forward.batch,
        num_new_tokens=[1, 2],
        starts=np.array([3, 1]),
        samples=np.array([True, True]),
        is_decode=False,
    )
    assert tokens.prompt(again).tolist() == [55, 101, 102]


def test_a_generation_that_comes_back_to_an_older_row_has_its_newest_token() -> None:
    pool = make_pool([layer(Full())], max_sequences=2)
    tokens = LastTokens(pool)
    a = generation_of()
    first, second = pool.add(), pool.add()
    for sequence, new in ((first, 31), (second, 32)):
        forward = forward_over(pool, {a: sequence})
        fed(tokens, forward)
        sampled(tokens, forward, [new])
        a.add(new, 0.0)
    assert fed(tokens, forward_over(pool, {a: first})) == [32]
