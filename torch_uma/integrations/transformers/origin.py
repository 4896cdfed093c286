"""The model that a cache or a pool was made of: whether it is still where and what it was, and whether it is the user.

Owns what can be told before a step. Shapes and dtypes are told by what a model gives to store.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from torch_uma.errors import PlanError, SequenceError
from torch_uma.integrations.transformers.versions import layer_kinds

if TYPE_CHECKING:
    from torch_uma.pool import CachePool

_MODULE_CALL = torch.nn.Module._call_impl.__code__


class Origin:
    """A model, held weakly, with the dtype that its parameters had, or a config; None for a plan by hand.

    `is_sharded`: its layers run on several devices, so that its first parameter says nothing of where the others are.
    """

    def __init__(self, source: Any, *, is_sharded: bool = False) -> None:
        self._is_sharded = is_sharded
        self._model = weakref.ref(source) if isinstance(source, PreTrainedModel) else None
        self._parameter: weakref.ref[torch.nn.Parameter] | None = None
        parameter = self._first()
        self._dtype = None if parameter is None else parameter.dtype
        self._config = text_config_of(source)
        self._user = None if self._config is None else weakref.ref(self._config)

    def check(self, pool: CachePool) -> None:
        """SequenceError if the model's parameters have another dtype than before, or lie on another device.

        Keys and values say by themselves what they are, but a state of the past is handed to the model, which may break
        off after it has changed others: so models with states are looked at before a step.
        """
        if self._model is None or not any(subpool.is_state for subpool in pool.plan.subpools):
            return
        parameter = None if self._parameter is None else self._parameter()
        if parameter is None:  # most moves keep the parameters, but not all
            parameter = self._first()
        if parameter is None:
            return
        if parameter.dtype != self._dtype:
            raise SequenceError(
                f"the cache was made of the model in {self._dtype}, which is in {parameter.dtype} now; make a new "
                f"cache or pool of the model as it is now, or move the model back to {self._dtype}"
            )
        device = pool.arena.bytes.device
        has_hooks = getattr(self._model(), "hf_device_map", None) is not None
        if parameter.device != device and not has_hooks and not self._is_sharded:
            raise SequenceError(
                f"the cache is on {device}, but the model on {parameter.device}; make a cache or pool of the model "
                f"where it is now, or move the model to {device}"
            )

    def _first(self) -> torch.nn.Parameter | None:
        """The first parameter that is no whole number; None if the model is gone."""
        model = None if self._model is None else self._model()
        if model is None:
            return None
        parameter = next((each for each in model.parameters() if each.is_floating_point()), None)
        self._parameter = None if parameter is None else weakref.ref(parameter)
        return parameter

    def check_user(self) -> None:
        """PlanError if the model whose forward runs has as many layers of the same kinds, but of other lengths."""
        config = None if self._config is None else _running_config()
        if config is None or self._config is None or self._user is None or config is self._user():
            return
        used, made = layer_kinds(config.get_text_config(decoder=True)), layer_kinds(self._config)
        if used[0] == made[0]:
            for layer, (wanted, kept) in enumerate(zip(used[1], made[1], strict=True)):
                if wanted != kept:
                    raise PlanError(
                        f"the cache was made for a config whose layer {layer} is {made[0][layer]} with {kept}, but the "
                        f"model that uses it has {wanted} there; make a cache or pool of this model"
                    )
        self._user = weakref.ref(config)


def text_config_of(source: Any) -> PreTrainedConfig | None:
    """The config that a model's attention layers look at, from the model or its config; None for None."""
    config = getattr(source, "config", source)
    return None if config is None else config.get_text_config(decoder=True)


def _running_config() -> PreTrainedConfig | None:
    """The config of the innermost model whose forward, or a hook of it, this thread runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _MODULE_CALL:
            module = frame.f_locals["self"]
            if isinstance(module, PreTrainedModel):  # layers may have configs of their own
                config: PreTrainedConfig = module.config
                return config
        frame = frame.f_back
    return None
