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
from torch_uma.layout import Layer


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What the layers on one device store: every layer of the model, those that run elsewhere without memory."""

    device: torch.device
    layers: tuple[Layer, ...]
    indices: frozenset[int]


def devices_of(model_or_config: Any) -> tuple[torch.device, ...]:
    """The devices that the decoder layers of a model run on, in their order; none for a config."""
    return tuple(dict.fromkeys(_devices_by_layer(model_or_config).values()))


def shards_of(model_or_config: Any, layers: Sequence[Layer]) -> tuple[Shard, ...]:
    """What these layers of a model store on each device, in the order in which a forward comes to them.

    None for a config, and for a model whose modules do not say which layer they are; PlanError if only some do.
    """
    known = _devices_by_layer(model_or_config)
    if not known:
        return ()
    only = next(iter(known.values())) if len(set(known.values())) == 1 else None
    indices: dict[torch.device, set[int]] = {}
    for index, layer in enumerate(layers):
        if layer.memories:
            # A looped model comes to its modules again with layers of its cache that are numbered on.
            device = only or known.get(index, known.get(index % (max(known) + 1)))
            if device is None:
                raise PlanError(
                    f"{several(devices_of(model_or_config))}, but no module says that it is layer {index}, so nobody "
                    "knows where that is; load the model on one device"
                )
            indices.setdefault(device, set()).add(index)
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


def memory_by_device(memory: Any, devices: Sequence[torch.device]) -> list[Any]:
    """What was given as memory, for each of the devices: for all the same, or what a mapping by device says."""
    if not isinstance(memory, Mapping):
        return [memory] * len(devices)
    try:
        given = {_named(device): size for device, size in memory.items()}
    except (RuntimeError, TypeError) as error:
        raise PlanError(f"memory={dict(memory)!r} names what is no device here ({error})") from error
    if set(given) != set(devices):
        raise PlanError(
            f"memory= names {_listed(given)}, but the layers of the model run on {_listed(devices)}; give a size for "
            "each of these, or one for all"
        )
    return [given[device] for device in devices]


def several(devices: Sequence[torch.device]) -> str:
    """What errors say of a model whose layers run on more than one device."""
    return f"the layers of this model run on several devices, {_listed(devices)}"


def _listed(devices: Any) -> str:
    return ", ".join(str(device) for device in devices)


def _devices_by_layer(model_or_config: Any) -> dict[int, torch.device]:
    found: dict[int, torch.device] = {}
    if hasattr(model_or_config, "get_decoder"):
        _visit(model_or_config.get_decoder(), None, found)
    return dict(sorted(found.items()))


def _visit(module: torch.nn.Module, inherited: torch.device | None, found: dict[int, torch.device]) -> bool:
    """Notes where the innermost modules run that say which layer they are; returns whether there were any.

    Innermost, as a block may be numbered otherwise than the layers of the cache in it.
    """
    device = _hook_device(module) or inherited
    inner = [_visit(child, device, found) for child in module.children()]
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        return any(inner)
    if not any(inner):
        device = device or _own_device(module)
        if device is not None:
            found.setdefault(index, device)
    return True


def _hook_device(module: torch.nn.Module) -> torch.device | None:
    """Where the hooks of accelerate that a module has send what it is given."""
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        device = getattr(each, "execution_device", None)
        if device is not None:
            return _named(device)
    return None


def _own_device(module: torch.nn.Module) -> torch.device | None:
    """Where the parts of a module run."""
    hooks = (_hook_device(part) for part in module.modules())
    parameters = (parameter.device for parameter in module.parameters())
    return next((device for device in hooks if device is not None), next(parameters, None))


def _named(device: Any) -> torch.device:
    """A device as tensors on it name theirs; of the host also with a number, which they do not have."""
    device = torch.device(device)
    return device if device.type == "cpu" or device.index is not None else torch.empty(0, device=device).device
