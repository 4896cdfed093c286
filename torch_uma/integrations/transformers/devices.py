"""Where the layers of a model run, and what those of one device store: the only file that knows accelerate's hooks.

A layer runs where its hook sends what it is given, as its weights may lie elsewhere until then; without a hook, where
its weights are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_uma.errors import PlanError
from torch_uma.integrations.transformers.declare import fillers
from torch_uma.layout import Layer


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What the layers on one device store: every layer of the model, those that run elsewhere without memory."""

    device: torch.device
    layers: tuple[Layer, ...]
    indices: frozenset[int]


def devices_of(model_or_config: Any) -> tuple[torch.device, ...]:
    """The devices on which the layers of a model run that store something, in their order; none for a config."""
    places = _places(model_or_config)
    devices = dict.fromkeys(places.values())
    if len(devices) > 1:
        devices = dict.fromkeys(_place(places, name) for name in fillers(model_or_config) if name is not None)
    return tuple(devices)


def shards_of(model_or_config: Any, layers: Sequence[Layer]) -> tuple[Shard, ...]:
    """What these layers of a model store on each device, in the order of the layers; none for a config."""
    places = _places(model_or_config)
    storing = [index for index, layer in enumerate(layers) if layer.memories]
    indices: dict[torch.device, set[int]] = {}
    if len(set(places.values())) > 1:
        names = fillers(model_or_config)
        for index in storing:
            name = names[index]
            assert name is not None
            indices.setdefault(_place(places, name), set()).add(index)
    else:
        indices = {device: set(storing) for device in places.values()}
    return tuple(
        Shard(
            device=device,
            indices=frozenset(here),
            layers=tuple(
                layer if index in here or layer.shares in here else Layer(name=layer.name)
                for index, layer in enumerate(layers)
            ),
        )
        for device, here in indices.items()
    )


def memory_by_device(memory: Any, devices: Sequence[torch.device | str]) -> list[Any]:
    """What was given as memory, for each of the devices: for all the same, or what a mapping by device says."""
    if not isinstance(memory, Mapping):
        return [memory] * len(devices)
    try:
        given = {_named(device): size for device, size in memory.items()}
    except (RuntimeError, TypeError) as error:
        raise PlanError(f"memory={dict(memory)!r} names what is no device here ({error})") from error
    places = [_named(device) for device in devices]
    if set(given) != set(places):
        raise PlanError(
            f"memory= names {_listed(given)}, but what the model stores lies on {_listed(places)}; give a size for "
            "each of these, or one for all"
        )
    return [given[device] for device in places]


def several(devices: Sequence[torch.device]) -> str:
    """What errors say of a model whose layers run on more than one device."""
    return f"the layers of this model run on several devices, {_listed(devices)}"


def _listed(devices: Any) -> str:
    return ", ".join(str(device) for device in devices)


def _places(model_or_config: Any) -> dict[str, torch.device]:
    """Where the modules of a model's decoder run that say so, by their names there, and what is around them."""
    places: dict[str, torch.device] = {}
    if hasattr(model_or_config, "get_decoder"):
        _visit(model_or_config.get_decoder(), "", None, places)
    return places


def _place(places: dict[str, torch.device], name: str) -> torch.device:
    """Where the module of this name runs, or the one around it."""
    while name not in places:
        name = name.rpartition(".")[0]
    return places[name]


def _visit(
    module: torch.nn.Module, name: str, hooked: torch.device | None, places: dict[str, torch.device]
) -> torch.device | None:
    """Where a module runs, by its hook, or one around it, or its weights, or else those in it; `places` gets it all."""
    hooked = _hook_device(module) or hooked
    parts = [
        _visit(part, f"{name}.{part_name}" if name else part_name, hooked, places)
        for part_name, part in module.named_children()
    ]
    weights = [parameter.device for parameter in module.parameters(recurse=False)]
    here = next((device for device in (hooked, *weights, *parts) if device is not None), None)
    if here is not None:
        places[name] = here
    return here


def _hook_device(module: torch.nn.Module) -> torch.device | None:
    """Where the hooks of accelerate that a module has send what it is given."""
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        device = getattr(each, "execution_device", None)
        if device is not None:
            return _named(device)
    return None


def _named(device: Any) -> torch.device:
    """A device as tensors on it name theirs; of the host also with a number, which they do not have."""
    device = torch.device(device)
    return device if device.type == "cpu" or device.index is not None else torch.empty(0, device=device).device
