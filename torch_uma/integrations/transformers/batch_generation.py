"""generate_batch: a serving loop run to its end over a batch of prompts.

Owns what a batch has beside a loop: prompts in the forms that tokenizers give, several answers to one prompt, streamers
and a progress bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Ordered
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from torch_uma.counts import whole
from torch_uma.errors import SequenceError
from torch_uma.integrations.transformers.generation import Event, Generation
from torch_uma.integrations.transformers.prompts import prompts_of
from torch_uma.integrations.transformers.serving import ServingLoop

if TYPE_CHECKING:
    from torch_uma.pool import CachePool


def generate_batch(
    model: Any,
    inputs: Any,
    generation_config: GenerationConfig | Ordered[GenerationConfig | None] | None = None,
    *,
    memory: int | float | str | None = None,
    pool: CachePool | None = None,
    priorities: Iterable[int] | None = None,
    seeds: Iterable[int | None] | int | None = None,
    streamers: Iterable[Any] | None = None,
    on_event: Callable[[ServingLoop, Event], None] | None = None,
    progress: bool = False,
    logprobs: bool = False,
    max_running: int = 64,
    step_tokens: int = 2048,
    host_memory: int | str = 0,
    overlap: bool = False,
    compile: bool = False,
    tokenizer: Any = None,
    page_size: int | None = None,
    kv_dtype: torch.dtype | str | None = None,
    **overrides: Any,
) -> list[Generation]:
    """Generate from many prompts at once, each joining as memory allows: their generations, in the order of `inputs`.

    `inputs`: lists or tensors of token ids, of any lengths, or the padded batch that a tokenizer returns.
    `generation_config` and `overrides` are those of `model.generate()`, the former also one for each prompt; with
    `num_return_sequences=n` there are n generations of each prompt, one after another. `priorities`, `seeds` and
    `streamers` (of transformers) are one for each prompt; of several answers the i-th has its prompt's seed + i, and
    none is streamed. One number as `seeds` is that of the first generation, and each has one more than the one before.
    `on_event(loop, event)` sees what comes as it comes, and may `loop.cancel(generation)`. `progress` shows a bar.
    Otherwise as ServingLoop; what its generations or its steps raise is raised. Memory is given back in any case.
    """
    prompts = prompts_of(inputs)
    config_of = _each(
        generation_config, len(prompts), "generation_config", shared=isinstance(generation_config, GenerationConfig)
    )
    priority_of = _each(priorities, len(prompts), "priorities")
    streamer_of = _each(streamers, len(prompts), "streamers")
    num_answers = [_num_answers(model, config, overrides) for config in config_of]
    seed_of = _seeds(seeds, num_answers)
    if streamers is not None and max(num_answers, default=1) > 1:
        raise SequenceError("several answers to one prompt are not streamed one after another; leave streamers= out")
    overrides["num_return_sequences"] = 1
    options: dict[str, Any] = {"page_size": page_size, "kv_dtype": kv_dtype, "compile": compile, "overlap": overlap}
    with ServingLoop(
        model,
        memory=memory,
        pool=pool,
        max_running=max_running,
        step_tokens=step_tokens,
        host_memory=host_memory,
        tokenizer=tokenizer,
        **options,
    ) as loop:
        generations = [
            loop.submit(
                prompt, config_of[place], priority=priority_of[place] or 0, seed=seed, logprobs=logprobs, **overrides
            )
            for place, prompt in enumerate(prompts)
            for seed in seed_of[place]
        ]
        streamed = {
            generation: streamer
            for generation, streamer in zip(generations, streamer_of if streamers is not None else ())
            if streamer is not None
        }
        for generation, streamer in streamed.items():
            streamer.put(torch.tensor([generation.prompt]))
        _run(loop, streamed, on_event, logging.tqdm(total=len(generations), disable=not progress, unit="generation"))
    return generations


def _run(
    loop: ServingLoop,
    streamed: Mapping[Generation, Any],
    on_event: Callable[[ServingLoop, Event], None] | None,
    progress_bar: Any,
) -> None:
    """Step until nothing is left, and hand on what comes."""
    with progress_bar:
        while loop:
            for event in loop.step():
                streamer = streamed.get(event.generation)
                if streamer is not None:
                    for token in event.tokens:
                        streamer.put(torch.tensor([token]))
                    if event.finish_reason is not None:
                        streamer.end()
                if on_event is not None:
                    on_event(loop, event)
                if event.finish_reason is not None:
                    progress_bar.update()
                if event.generation.error is not None:
                    raise event.generation.error


def _each(given: Any, num_prompts: int, name: str, *, shared: bool = False) -> list[Any]:
    """One of what was given for each prompt; SequenceError for another number of them."""
    if given is None or shared:
        return [given] * num_prompts
    each = list(given)
    if len(each) != num_prompts:
        raise SequenceError(f"{name}= has {len(each)} for {num_prompts} prompts; give one for each")
    return each


def _num_answers(model: Any, config: GenerationConfig | None, overrides: Mapping[str, Any]) -> int:
    """How often a prompt is generated from."""
    given = (
        overrides.get("num_return_sequences"),
        *(each.num_return_sequences for each in (config, model.generation_config) if each),
    )
    return whole(
        next((value for value in given if value is not None), 1), "num_return_sequences", least=1, error=SequenceError
    )


def _seeds(seeds: Iterable[int | None] | int | None, num_answers: list[int]) -> list[list[int | None]]:
    """The seeds of the answers to each prompt."""
    if isinstance(seeds, int):
        ends = list(accumulate(num_answers))
        return [[seeds + place for place in range(end - count, end)] for end, count in zip(ends, num_answers)]
    given = _each(seeds, len(num_answers), "seeds")
    return [
        [None if seed is None else seed + place for place in range(count)]
        for seed, count in zip(given, num_answers, strict=True)
    ]
