"""What differs between the versions of transformers that are supported, 5.17 to 5.24: the only file that asks."""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

from transformers import GenerationMixin, PreTrainedConfig, cache_utils

try:
    from transformers.cache_utils import DummyLayer as DummyLayer
except ImportError:  # before 5.23

    class DummyLayer:  # type: ignore[no-redef]
        """A layer that stores nothing."""

        is_compileable = is_croppable = True
        is_sliding = False


def layer_kinds(config: PreTrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """For each layer transformers' name for its kind, and the options of its cache layer."""
    kinds, options = cache_utils.get_layer_types_and_kwargs(config)
    if isinstance(options, dict):  # before 5.21 all layers had the same, and those that share were left out
        kinds += ["dummy"] * (config.num_hidden_layers - len(kinds))
        options = [options] * len(kinds)
    return kinds, options


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
