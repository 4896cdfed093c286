"""generate_batch: a serving loop run to its end over a batch of prompts.

Owns what a batch has beside a loop: prompts in the forms that tokenizers give, several answers to one prompt, streamers
and a progress bar.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Ordered
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from torch_uma.counts import whole
from torch_uma.errors import SequenceError, TorchUmaError
from torch_uma.integrations.transformers.serving.generation import Event, Generation
from torch_uma.integrations.transformers.serving.loop import ServingLoop
from torch_uma.integrations.transformers.serving.options import check_config
from torch_uma.integrations.transformers.serving.prompts import prompts_of

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
    headroom_steps: int = 16,
    host_memory: int | str = 0,
    overlap: bool = False,
    compile: bool = False,
    tokenizer: Any = None,
    page_size: int | None = None,
    kv_dtype: torch.dtype | str | None = None,
    **overrides: Any,
) -> list[Generation]:
    """Generate from many prompts at once, each joining as memory allows: their generations, in the order of `inputs`.

    Args:
        model: of transformers, that can generate. It is run as it is: call `model.eval()` first.
        inputs: a list of prompts, each of token ids and of any length, or all that a tokenizer returns for a list of
            texts, padded or not.
        generation_config: as of `model.generate()`, for all prompts, or a list with one (or None) for each.
        overrides: as of `model.generate()`, for all prompts: `max_new_tokens`, `do_sample`, ... Where neither says how
            many, 20 new tokens. With `num_return_sequences=n` there are n generations of each prompt, side by side.
        priorities: a number for each prompt; higher ones are served first. All 0 by default.
        seeds: a number, or None, for each prompt; of several answers the i-th has its prompt's seed + i. Or one number,
            that of the first generation, and each has one more than the one before. By default nothing is repeatable.
        streamers: of transformers, one (or None) for each prompt, as prompts are answered side by side. Not for several
            answers.
        on_event: called as `on_event(loop, event)` with what comes as it comes: `event.generation`, the new
            `event.tokens`, and `event.finish_reason`, None while it goes on. It may `loop.cancel(event.generation)`.
        progress: show a bar of generations.
        logprobs: keep the log-probability of each token, see Generation.
        memory, pool, max_running, step_tokens, headroom_steps, host_memory, overlap, compile, tokenizer, page_size,
            kv_dtype: as of ServingLoop.

    Returns Generations: `tokens` are the new ones, `text(tokenizer)` is what they say, `finish_reason` why it ended.

    Raises what ServingLoop and its `submit` raise, with the prompt's place in `inputs`, before anything is run, and
    what a generation or a step raises. Memory is given back in any case.
    """
    for name, of_each in {"seed": "seeds", "priority": "priorities"}.items():
        if name in overrides:
            raise SequenceError(f"a batch has no {name}=; give {of_each}=, one for each prompt")
    prompts = prompts_of(inputs, getattr(getattr(model, "generation_config", None), "pad_token_id", None))
    config_of = _each(
        generation_config, len(prompts), "generation_config", shared=isinstance(generation_config, GenerationConfig)
    )
    priority_of = _each(priorities, len(prompts), "priorities")
    streamer_of = _each(streamers, len(prompts), "streamers")
    num_answers = [_num_answers(model, config, overrides) for config in config_of]
    seed_of = _seeds(seeds, num_answers)
    if streamers is not None and max(num_answers, default=1) > 1:
        raise SequenceError("several answers to one prompt are not streamed one after another; leave streamers= out")
    options: dict[str, Any] = {"page_size": page_size, "kv_dtype": kv_dtype, "compile": compile, "overlap": overlap}
    with ServingLoop(
        model,
        memory=memory,
        pool=pool,
        max_running=max_running,
        step_tokens=step_tokens,
        headroom_steps=headroom_steps,
        host_memory=host_memory,
        tokenizer=tokenizer,
        **options,
    ) as loop:
        generations: list[Generation] = []
        for place, prompt in enumerate(prompts):
            config, others = _of_one_answer(config_of[place], overrides)
            asked: dict[str, Any] = {"priority": priority_of[place] or 0, "logprobs": logprobs, **others}
            try:
                generations += [loop.submit(prompt, config, seed=seed, **asked) for seed in seed_of[place]]
            except TorchUmaError as error:
                error.args = (f"inputs[{place}]: {error}",)
                raise
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
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise SequenceError(f"{name}= is a list with one for each prompt, not {type(given).__name__}")
    each = list(given)
    if len(each) != num_prompts:
        raise SequenceError(f"{name}= has {len(each)} for {num_prompts} prompts; give one for each")
    return each


def _num_answers(model: Any, config: GenerationConfig | None, overrides: Mapping[str, Any]) -> int:
    """How often a prompt is generated from."""
    check_config(config)
    given = (
        overrides.get("num_return_sequences"),
        *(each.num_return_sequences for each in (config, getattr(model, "generation_config", None)) if each),
    )
    return whole(
        next((value for value in given if value is not None), 1), "num_return_sequences", least=1, error=SequenceError
    )


def _of_one_answer(
    config: GenerationConfig | None, overrides: Mapping[str, Any]
) -> tuple[GenerationConfig | None, dict[str, Any]]:
    """The config and the options of one answer. transformers warns of options beside a config: none is added to it."""
    others = dict(overrides)
    others.pop("num_return_sequences", None)
    if config is None:
        return None, {**others, "num_return_sequences": 1}
    config = copy.copy(config)
    config.num_return_sequences = 1
    return config, others


def _seeds(seeds: Iterable[int | None] | int | None, num_answers: list[int]) -> list[list[int | None]]:
    """The seeds of the answers to each prompt."""
    if seeds is not None and not isinstance(seeds, Iterable):
        seeds = whole(seeds, "seeds of a batch", least=-(1 << 63), error=SequenceError)
        ends = list(accumulate(num_answers))
        return [[seeds + place for place in range(end - count, end)] for end, count in zip(ends, num_answers)]
    given = _each(seeds, len(num_answers), "seeds")
    return [
        [None if seed is None else seed + place for place in range(count)]
        for seed, count in zip(given, num_answers, strict=True)
    ]
