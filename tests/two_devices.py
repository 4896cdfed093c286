"""Devices that are not there: places on the host that tensors are told apart by, and a model spread over them.

torch takes `cpu:0` and `cpu:1` for names of one device. Within `Devices` a tensor that was made on one of them, or
moved there, says so, and so does all that is computed from it; and a function that is given tensors of both raises, as
it would between two accelerators. Tensors of the host itself, which name neither, go with both.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from accelerate import dispatch_model
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

import torch_uma.arena

FIRST, SECOND = torch.device("cpu", 0), torch.device("cpu", 1)
HOST = torch.device("cpu")

_ALLOCATE = torch_uma.arena._allocate
_FROM_DLPACK = torch.utils.dlpack.from_dlpack
_GET_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]


class Devices(TorchFunctionMode):
    """Lets tensors lie on `FIRST` or `SECOND` while it is entered."""

    def __enter__(self) -> Devices:
        self._patches = ExitStack()
        # What is no function of torch: memory that is shared with numpy, and a second storage over the same memory.
        self._patches.enter_context(patch.object(torch_uma.arena, "_allocate", _allocate))
        self._patches.enter_context(patch.object(torch.utils.dlpack, "from_dlpack", _from_dlpack))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _GET_DEVICE:
            return _label(args[0]) or func(args[0])
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = kwargs.get("device")
        if func is torch.Tensor.to:
            device = next((arg.device for arg in args[1:] if isinstance(arg, torch.Tensor)), device)
            device = next((arg for arg in args[1:] if isinstance(arg, torch.device)), device)
            if device is not None and torch.device(device).type == "cpu":
                return _moved(torch.device(device), args[0], func(*args, **kwargs))
        devices = {_label(tensor) for tensor in tensors} - {None}
        if len(devices) > 1:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {func} was given {devices}")
        result = func(*args, **kwargs)
        label = torch.device(device) if device is not None else next(iter(devices), None)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                _put(leaf, label)
        return result


def spread(model: PreTrainedModel, num_first: int) -> PreTrainedModel:
    """Puts the last layers and the head on `SECOND`, and what is before and around them on `FIRST`, by a device map."""
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    device_map = {name: SECOND for name, _ in model.named_children() if name != prefix}
    for name, child in decoder.named_children():
        if name == "layers":
            device_map |= {f"{prefix}.layers.{i}": FIRST if i < num_first else SECOND for i in range(len(child))}
        else:
            device_map[f"{prefix}.{name}"] = FIRST
    return dispatch_model(model, device_map, main_device=FIRST, skip_keys=model._skip_keys_device_placement)


def _label(tensor: torch.Tensor) -> torch.device | None:
    return getattr(tensor, "_lies_on", None)


def _put(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    if device is not None:
        tensor._lies_on = None if device == HOST else device  # type: ignore[attr-defined]
    return tensor


def _moved(device: torch.device, tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    if device == (_label(tensor) or tensor.device) or isinstance(tensor, torch.nn.Parameter):
        return _put(tensor if result.dtype == tensor.dtype else result, device)
    return _put(result.clone() if result is tensor else result, device)


def _allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    return _put(_ALLOCATE(num_bytes, device), torch.device(device))


def _from_dlpack(tensor: torch.Tensor) -> torch.Tensor:
    return _put(_FROM_DLPACK(tensor), _label(tensor))
