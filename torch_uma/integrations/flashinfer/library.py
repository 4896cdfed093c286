"""The parts of FlashInfer that are called, and whether they can be.

The only file that imports it, when it is first used. `TORCH_UMA_FLASHINFER=0` in the environment leaves it off.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

SWITCH = "TORCH_UMA_FLASHINFER"


@dataclass(frozen=True, kw_only=True)
class Library:
    """Classes and functions of FlashInfer, and the event that says when a copy has passed: each can be stood in for."""

    decode: Callable[..., Any]
    prefill: Callable[..., Any]
    sink: Callable[..., Any]
    mla: Callable[..., Any]
    fast_decode_plan: Callable[..., None]
    trtllm_decode: Callable[..., Any]
    trtllm_context: Callable[..., Any]
    xqa_decode: Callable[..., Any]
    event: Callable[[], Any]


def load() -> Library:
    """Import FlashInfer, 0.7.4 or newer; ImportError if it is not there."""
    from flashinfer import decode, mla, prefill
    from flashinfer.attention import BatchAttentionWithAttentionSinkWrapper

    return Library(
        decode=decode.BatchDecodeWithPagedKVCacheWrapper,
        prefill=prefill.BatchPrefillWithPagedKVCacheWrapper,
        sink=BatchAttentionWithAttentionSinkWrapper,
        mla=mla.BatchMLAPagedAttentionWrapper,
        fast_decode_plan=decode.fast_decode_plan,
        trtllm_decode=decode.trtllm_batch_decode_with_kv_cache,
        trtllm_context=prefill.trtllm_batch_context_with_kv_cache,
        xqa_decode=decode.xqa_batch_decode_with_kv_cache,
        event=torch.cuda.Event,
    )


def why_off(device: torch.device) -> str | None:
    """Why FlashInfer is left off on a device; None if it is used."""
    if os.environ.get(SWITCH, "1") == "0":
        return f"{SWITCH} is 0"
    if device.type != "cuda" or torch.version.cuda is None:
        return f"{device} is no NVIDIA device"
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed; pip install torch-uma[flashinfer]"
    return None
