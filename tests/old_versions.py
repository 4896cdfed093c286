"""Tests say `cache` as transformers does from 5.24 on; this makes older versions understand it.

The only place among the tests that asks how old they are. `make oldest` runs tests with the oldest that is supported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from transformers import GenerationMixin, LlamaForCausalLM, PreTrainedModel
from transformers.utils import ModelOutput

from torch_uma.integrations.transformers.versions import cache_argument


def _said_anew(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, with `cache=` handed on under the name that the model has for it."""

    @functools.wraps(call)
    def said(model: Any, *arguments: Any, **options: Any) -> Any:
        if "cache" in options:
            options[cache_argument(model.forward) or "cache"] = options.pop("cache")
        return call(model, *arguments, **options)

    return said


IS_OLD = cache_argument(LlamaForCausalLM.forward) != "cache"
"""Before 5.24: attention in place reads no latents, and `generate()` knows no cache of states by the name of others, so
that it takes new text alone."""

if IS_OLD:
    GenerationMixin.generate = _said_anew(GenerationMixin.generate)  # type: ignore[method-assign]
    PreTrainedModel.__call__ = _said_anew(PreTrainedModel.__call__)  # type: ignore[method-assign]
    ModelOutput.cache = property(lambda output: output.get("past_key_values", output.get("cache_params")))
