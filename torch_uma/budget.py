"""The plan and the device of a pool, from what its maker was given: a plan, or a source of layers and of memory."""

from __future__ import annotations

import logging
from typing import Any

import torch

from torch_uma.errors import PlanError
from torch_uma.memory import free_bytes, parse_memory
from torch_uma.plan import Plan, plan

_log = logging.getLogger(__name__)

FREE_SHARE = 0.5
"""Share of the free memory that a pool takes when nobody says how much."""

PAGE_SIZE = 16
"""Entries of a page when nobody says how many."""


def device_of(source: Any, device: torch.device | str | None) -> torch.device:
    """Where the arena of a pool lies: as given, or where the layers of `source` run, if it is a model.

    PlanError for a model whose layers run on several devices.
    """
    if isinstance(source, torch.nn.Module):
        from torch_uma.integrations.transformers.devices import devices_of, several

        devices = devices_of(source)
        if len(devices) > 1:
            raise PlanError(
                f"{several(devices)}, and a pool lies on one; UnifiedCache(model) makes a pool on each for generate(), "
                "and a loop over pool.step needs the model on one device"
            )
        if device is None and devices:
            device = devices[0]
    if device is None:
        device = getattr(source, "device", None) or torch.get_default_device()
    return torch.device(device)


def plan_of(
    source: Any,
    memory: int | float | str | None,
    page_size: int | None,
    dtype: torch.dtype | None,
    kv_dtype: torch.dtype | str | None,
    device: torch.device,
) -> Plan:
    """The plan that was given, or one of `source` in `memory`; PlanError for options that the plan has already."""
    if isinstance(source, Plan):
        if memory is not None:
            raise PlanError("a plan has its memory already; give either a plan or memory=")
        if page_size is not None or dtype is not None or kv_dtype is not None:
            raise PlanError("a plan has its page_size and dtypes already; give either a plan or these")
        return source
    page_size = PAGE_SIZE if page_size is None else page_size
    num_bytes = parse_memory(memory, device)
    if num_bytes is None:
        num_bytes = int(FREE_SHARE * free_bytes(device))
        _log.info("taking %d bytes on %s, %g of what is free", num_bytes, device, FREE_SHARE)
    return plan(
        source,
        memory=num_bytes,
        page_size=page_size,
        dtype=dtype,
        pad_entries=device.type == "cpu",
        kv_dtype=kv_dtype,
    )
