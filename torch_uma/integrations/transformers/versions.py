"""What differs between the versions of transformers that are supported, 5.17 to 5.24: the only file that asks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
    StoppingCriteriaList,
    cache_utils,
)

try:
    from transformers.cache_utils import DummyLayer as DummyLayer
except ImportError:  # before 5.23

    class DummyLayer:  # type: ignore[no-redef]
        """A layer that stores nothing."""

        is_compileable = is_croppable = True
        is_sliding = False


_CHOOSING = ("indexed_attention", "deepseek_sparse_attention")  # its name before 5.20


def chooses_keys(config: PreTrainedConfig | None) -> bool:
    """Whether layers of this text config choose single keys among those that their mask shows."""
    return any(kind in _CHOOSING for kind in getattr(config, "layer_types", None) or ())


_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")  # the latter two before 5.24


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The name under which a model's forward takes a cache; None if it takes none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in parameters), None)


CACHE = cache_argument(GenerationMixin.prepare_inputs_for_generation) or "past_key_values"
"""What `generate()` calls a cache in what it returns, and its candidate generators in what they give an assistant."""


def layer_kinds(config: PreTrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """For each layer transformers' name for its kind, and the options of its cache layer."""
    kinds, options = cache_utils.get_layer_types_and_kwargs(config)
    if isinstance(options, dict):  # before 5.21 all layers had the same, and those that share were left out
        kinds += ["dummy"] * (config.num_hidden_layers - len(kinds))
        options = [options] * len(kinds)
    return [_CHOOSING[0] if kind in _CHOOSING else kind for kind in kinds], options


def layer_configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The config of each layer."""
    configs = getattr(config, "per_layer_config", None)
    return [config] * config.num_hidden_layers if configs is None else list(configs)


def makes_masks() -> GenerationMixin | None:
    """The model for whose forward masks are going to be made beforehand, if what has called this was asked for that."""
    frame: FrameType = sys._getframe(2)
    if frame.f_code is not inspect.unwrap(GenerationMixin.prepare_inputs_for_generation).__code__:
        return None
    model: GenerationMixin = frame.f_locals["self"]
    return model


def asks_to_compile() -> bool | None:
    """Whether `generate()` is going to compile, if it has called what has called this; None if that was another.

    It asks a cache if it is compileable. Nothing else tells one so before masks for a compiled forward are made.
    """
    frame: FrameType = sys._getframe(2)
    if frame.f_code is not GenerationMixin._valid_auto_compile_criteria.__code__:
        return None
    model, options = frame.f_locals["self"], frame.f_locals["generation_config"]
    is_forced = options.compile_config is not None and options.compile_config._compile_all_devices
    return bool(is_forced or model.device.type in ("cuda", "xpu", "neuron", "tpu"))


def asks_to_sample() -> bool:
    """Whether `generate()` has called what has called this, to decode without a thought of taking tokens back.

    An assisted one records the past of its caches, and does not say when that ends.
    """
    frame: FrameType = sys._getframe(2)
    if frame.f_code is not GenerationMixin._valid_auto_compile_criteria.__code__ or frame.f_back is None:
        return False
    is_assisted = frame.f_back.f_code is GenerationMixin._assisted_decoding.__code__
    return not (is_assisted or frame.f_locals["generation_config"].is_assistant)


def text_of_prefill() -> Tensor | None:
    """What `generate()` begins with, if its prefill has called what has called this; None if that was another.

    Ids [rows, tokens] or embeddings [rows, tokens, width]. None also where a longer mask says that they are new.
    """
    frame: FrameType = sys._getframe(2)
    if frame.f_code is not GenerationMixin._prefill.__code__:
        return None
    options = frame.f_locals["model_kwargs"]
    embeddings = options.get("inputs_embeds") if frame.f_locals["is_first_iteration"] else None
    text: Tensor = frame.f_locals["input_ids"] if embeddings is None else embeddings
    mask = options.get("attention_mask")
    return text if mask is None or mask.shape[1] == text.shape[1] else None


def prepared_generation(
    model: PreTrainedModel,
    ids: Tensor,
    generation_config: GenerationConfig | None,
    overrides: dict[str, Any],
    *,
    logits_processor: Iterable[Any],
    stopping_criteria: Iterable[Any],
    prefix_allowed_tokens_fn: Callable[..., Any] | None,
    check: Callable[[GenerationConfig], None],
) -> tuple[GenerationConfig, LogitsProcessorList, StoppingCriteriaList, str | list[str] | None]:
    """What `generate()` prepares for text [1, tokens] of the host before its first forward.

    The config, as soon as it is complete given to `check`, processors with tensors of the host, and criteria for all
    but stop strings, which come last.
    """

    def is_default(name: str) -> bool:
        given = (overrides.get(name), getattr(generation_config, name, None), getattr(model.generation_config, name))
        return all(value is None for value in given)

    defaults = {f"has_default_{name}": is_default(name) for name in ("max_length", "min_length")}
    maker: Any = model  # what generates is typed as another class
    config, _ = maker._prepare_generation_config(generation_config, **overrides)
    check(config)
    num_tokens = ids.shape[1]
    maker._prepare_special_tokens(config, True, device=ids.device, batch_size=1)
    config = maker._prepare_generated_length(
        generation_config=config,
        **defaults,
        model_input_name="input_ids",
        input_ids_length=num_tokens,
        inputs_tensor=ids,
    )
    maker._validate_generated_length(config, num_tokens, defaults["has_default_max_length"])
    processors = maker._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=num_tokens,
        encoder_input_ids=ids,
        prefix_allowed_tokens_fn=prefix_allowed_tokens_fn,
        logits_processor=LogitsProcessorList(logits_processor),
        device=ids.device,
        model_kwargs={},
    )
    strings, config.stop_strings = config.stop_strings, None
    criteria = maker._get_stopping_criteria(config, StoppingCriteriaList(stopping_criteria))
    return config, processors, criteria, strings
