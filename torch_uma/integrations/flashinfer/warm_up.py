"""Compiles FlashInfer's kernels for a plan before the first request has to wait for them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

from torch_uma.integrations.flashinfer.calls import call_over
from torch_uma.integrations.flashinfer.forms import Question
from torch_uma.integrations.flashinfer.library import Library
from torch_uma.integrations.flashinfer.pages import pages_of
from torch_uma.integrations.flashinfer.runner import Runner
from torch_uma.integrations.flashinfer.storage import storage_of
from torch_uma.pool import CachePool

_log = logging.getLogger(__name__)


def warm_up(
    pool: CachePool,
    questions: Iterable[tuple[int, Question]],
    *,
    library: Library | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> int:
    """Run each kind of call once, over a sequence that is freed again; returns how many there were.

    `questions` are pairs of a layer and what it asks (`question_of`); those that share a plan are run once. It takes
    minutes where FlashInfer has no compiled kernels. `progress(done, total, form)` is called before each and at the
    end; by default it is logged at INFO. Waits for the device. Raises OutOfMemory if there is no room for the sequence,
    PlanError for a question that no form answers.
    """
    kinds = {(question.shared, question.most_new_tokens > 1): (layer, question) for layer, question in questions}
    say = _logged if progress is None else progress
    runner = Runner(pool, library=library)
    for done, (layer, question) in enumerate(kinds.values()):
        storage = storage_of(pool.plan, layer)
        num_tokens = min(question.most_new_tokens, 2)
        sequence = pool.add()
        step = pool.begin([sequence], num_tokens)
        try:
            pages = pages_of(step, pool.plan.subpools[storage.geometry.subpool])
            call = call_over(storage, question, pages)
            say(done, len(kinds), call.form)
            for view in storage.tensors(pool.arena.bytes):
                # Written byte by byte: not every dtype can be filled.
                view.view(torch.uint8)[pages.indices.long().to(pool.device)] = 0
            width = question.geometry.dims[0] + (question.geometry.dims[1] if question.geometry.is_latent else 0)
            query = torch.zeros((num_tokens, question.num_heads, width), dtype=question.dtype, device=pool.device)
            sinks = torch.zeros(question.num_heads, device=pool.device) if question.has_sinks else None
            runner.plan(call)
            runner.run(call, query, sinks=sinks)
            if pool.device.type == "cuda":
                torch.cuda.synchronize(pool.device)
        finally:
            step.abort()
            sequence.free()
    say(len(kinds), len(kinds), "")
    return len(kinds)


def _logged(done: int, total: int, form: str) -> None:
    _log.info("FlashInfer: %d of %d kinds of calls are compiled%s", done, total, f", next {form}" if form else "")
