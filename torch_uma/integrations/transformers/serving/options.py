"""What a request asks for, with the options of `generate()`: how its tokens are chosen, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StopStringCriteria,
)

from torch_uma.errors import PlanError
from torch_uma.integrations.transformers.serving.sampling import Sampling, sampling_of
from torch_uma.integrations.transformers.serving.stopping import Stopping, StopStrings, stop_strings
from torch_uma.integrations.transformers.versions import prepared_generation

_ALONE = "call model.generate() for it"
_NOT_SERVED = {
    "num_beams": _ALONE,
    "constraints": _ALONE,
    "force_words_ids": _ALONE,
    "dola_layers": _ALONE,
    "guidance_scale": f"it takes a second forward; {_ALONE}",
    "watermarking_config": f"its processor keeps states of its own; {_ALONE}",
    "prompt_lookup_num_tokens": "call model.generate(custom_generate=torch_uma.speculate) for it",
    "assistant_early_exit": _ALONE,
    "use_mtp": _ALONE,
    "num_return_sequences": "submit the prompt as often, each with a seed of its own",
    "token_healing": "heal the prompt before it is submitted",
    "output_scores": "logprobs=True keeps the log-probability of each token",
    "output_logits": "logprobs=True keeps the log-probability of each token",
    "output_attentions": _ALONE,
    "output_hidden_states": _ALONE,
}
"""Fields of a GenerationConfig that a loop has no part in, and what to do instead."""

_ONE_BY_DEFAULT = ("num_beams", "num_return_sequences", "guidance_scale")

_NOT_TAKEN = {
    "assistant_model": "call model.generate() for it",
    "custom_generate": "call model.generate() for it",
    "streamer": "step() returns tokens as they come, and generate_batch() takes streamers=, one for each prompt",
    "cache": "the pool of the loop is the cache; leave it out",
    "past_key_values": "the pool of the loop is the cache; leave it out",
    "cache_implementation": "the pool of the loop is the cache; leave it out",
    "attention_mask": "a prompt has no padding; leave it out",
    "negative_prompt_ids": "guidance takes a second forward; call model.generate() for it",
    "inputs_embeds": "a prompt is made of token ids; call model.generate() for it",
}
"""Arguments of `generate()` that a request does not take, and what to do instead."""

_LISTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")


def resolve(
    model: PreTrainedModel,
    prompt: Listed[int],
    generation_config: GenerationConfig | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    device: torch.device | None = None,
    **overrides: Any,
) -> tuple[Sampling, Stopping]:
    """What `model.generate()` would do with a prompt, a config and options, as values for a loop.

    `overrides` are fields of a GenerationConfig, `logits_processor`, `stopping_criteria` and
    `prefix_allowed_tokens_fn`; the rest is as the config has it, or `model.generation_config`. `device` is that of the
    logits, which is the model's if not given. PlanError for what a loop has no part in, by name, and for stop strings
    without a tokenizer; ValueError where transformers has one. Changes nothing, does not synchronise.
    """
    check_config(generation_config)
    _check_names(overrides)
    if len(prompt) == 0:
        raise PlanError("a prompt of no tokens is to be generated from; begin with the model's bos_token_id")
    custom = {name: overrides.pop(name, None) or () for name in _LISTS[:2]}
    prefix = overrides.pop(_LISTS[2], None)
    ids = torch.tensor([list(prompt)])
    config, processors, criteria, strings = prepared_generation(
        model, ids, generation_config, overrides, **custom, prefix_allowed_tokens_fn=prefix, check=_check_served
    )
    sampling = sampling_of(processors, custom["logits_processor"], bool(config.do_sample), device or model.device)
    return sampling, _stopping(prompt, criteria, _strings(strings, criteria, tokenizer))


def check_config(config: Any) -> None:
    """PlanError for what is given as a GenerationConfig and is none."""
    if config is not None and not isinstance(config, GenerationConfig):
        raise PlanError(
            f"generation_config= is a GenerationConfig, not {type(config).__name__}; GenerationConfig(**options) makes "
            "one of options"
        )


def _check_names(overrides: dict[str, Any]) -> None:
    known = vars(GenerationConfig())
    for name, value in overrides.items():
        if name in _NOT_TAKEN and value is not None:
            raise PlanError(f"a request does not take {name!r}: {_NOT_TAKEN[name]}")
        _check_option(name, value)
        if name not in known and name not in _LISTS and name not in _NOT_TAKEN:
            raise PlanError(
                f"a request has no option {name!r}; it takes the fields of a GenerationConfig, and {', '.join(_LISTS)}"
            )


def _check_served(config: GenerationConfig) -> None:
    for name in _NOT_SERVED:
        _check_option(name, getattr(config, name, None))
    mode = config.get_generation_mode()
    if mode not in ("greedy_search", "sample"):
        raise PlanError(f"{mode.value.replace('_', ' ')} is not served in a loop: {_ALONE}")


def _check_option(name: str, value: Any) -> None:
    """Raise PlanError if a loop has no part in the option, and its value is not one that stands for nothing."""
    is_nothing = value is None or value is False or (name in _ONE_BY_DEFAULT and value == 1)
    if name in _NOT_SERVED and not is_nothing:
        raise PlanError(f"{name}={value!r} is not served in a loop: {_NOT_SERVED[name]}")


def _strings(
    strings: str | list[str] | None, criteria: Listed[StoppingCriteria], tokenizer: PreTrainedTokenizerBase | None
) -> StopStrings | None:
    """What ends a text with strings, unless the user has a criterion for that."""
    if not strings or any(type(criterion) is StopStringCriteria for criterion in criteria):
        return None
    if tokenizer is None:
        raise PlanError(f"stop_strings={strings!r} are looked for in text, and there is no tokenizer; give tokenizer=")
    return stop_strings(tokenizer, (strings,) if isinstance(strings, str) else tuple(strings))


def _stopping(prompt: Listed[int], criteria: Listed[StoppingCriteria], strings: StopStrings | None) -> Stopping:
    """The criteria of transformers as numbers, and the others as they are."""
    lengths, deadlines, eos_token_ids, others = [], [], [], []
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length)
        elif type(criterion) is MaxTimeCriteria:
            deadlines.append(criterion.initial_timestamp + criterion.max_time)
        elif type(criterion) is EosTokenCriteria:
            eos_token_ids += criterion.eos_token_id.tolist()
        else:
            others.append(criterion)
    return Stopping(
        prompt=prompt,
        max_new_tokens=max(1, min(lengths) - len(prompt)),
        eos_token_ids=frozenset(eos_token_ids),
        strings=strings,
        deadline_s=min(deadlines, default=None),
        criteria=tuple(others),
    )
