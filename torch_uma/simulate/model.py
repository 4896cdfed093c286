"""The model that a command line names: its config, with some of it changed, and what that stores and costs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_uma.errors import PlanError, TorchUmaError, TraceError
from torch_uma.plan import Plan, plan
from torch_uma.simulate.work import Work


class Model(NamedTuple):
    """What is simulated: the type of its text decoder, its plan, and what its forwards cost."""

    name: str
    plan: Plan
    work: Work


def model_of(options: argparse.Namespace) -> Model:
    """The model of `--config` and `--set`, in bf16, in an arena of `--memory`.

    TraceError for a config that cannot be had or changed so, PlanError for one of which no model can be made, or that
    does not fit.
    """
    from torch_uma.integrations.transformers.counting import work_of

    with _quiet():
        try:
            config = _config(options.config, options.set)
            work = work_of(config, kv_dtype=options.kv_dtype)
        except (TorchUmaError, OSError):
            raise
        except Exception as error:  # a config is checked by whatever the code of its model does with it
            raise PlanError(
                f"of the config {options.config}{' and --set' if options.set else ''} no model can be made "
                f"({type(error).__name__}: {error})"
            ) from error
        planned = plan(
            config, memory=options.memory, page_size=options.page_size, dtype=torch.bfloat16, kv_dtype=options.kv_dtype
        )
    return Model(config.get_text_config(decoder=True).model_type, planned, work)


def _config(name: str, settings: Sequence[str]) -> Any:
    changes = dict(_change(setting) for setting in settings)
    config = _read(name)
    text = config.get_text_config(decoder=True)
    unknown = [name for name in changes if not hasattr(text, name) or callable(getattr(text, name))]
    if unknown:
        raise TraceError(f"the config of {text.model_type} has no {', '.join(unknown)} to be set")
    if not changes:
        return config
    changed = _changed(text, changes)
    config = _with_text(config, text, changed)
    return config if config.get_text_config(decoder=True) is changed else changed


def _change(setting: str) -> tuple[str, Any]:
    name, separator, value = setting.partition("=")
    if not separator or not name:
        raise TraceError(f"--set {setting} is no NAME=VALUE")
    try:
        return name, json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        return name, value


def _read(name: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if name in CONFIG_MAPPING and not Path(name).exists():
        return CONFIG_MAPPING[name]()
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        close = get_close_matches(name, CONFIG_MAPPING, n=1)
        meant = f" (such as {close[0]})" if close else ""
        raise TraceError(
            f"--config {name} is no model type{meant}, and no config could be read from a file, a folder or the hub of "
            f"that name: {str(error).splitlines()[0]}"
        ) from error


def _changed(text: Any, changes: dict[str, Any]) -> Any:
    from huggingface_hub.errors import StrictDataclassError

    kept = text.to_dict()
    if "num_hidden_layers" in changes:
        # What is said layer by layer follows the model's own pattern, for as many.
        count = text.num_hidden_layers
        kept = {name: value for name, value in kept.items() if not (isinstance(value, list) and len(value) == count)}
    try:
        changed = type(text).from_dict({**kept, **changes})
    except StrictDataclassError as error:
        raise TraceError(f"the config of {text.model_type} cannot be set so: {error}") from error
    for name, value in changes.items():
        if isinstance(value, int | float) and getattr(changed, name) != value:
            raise TraceError(f"{name} of {text.model_type} follows from the rest of its config: {value} is not taken")
    return changed


def _with_text(config: Any, text: Any, changed: Any) -> Any:
    """The config with another one of its text, which may be itself or a part of a part."""
    if config is text:
        return changed
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if hasattr(part, "sub_configs"):
            setattr(config, name, _with_text(part, text, changed))
    return config


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers says of kernels that a model would run by: none is run."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
