"""FlashInfer against the reference attention, in steps of a pool; skipped with a word where it is not there."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import tiny_models
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import torch_uma.integrations.transformers  # noqa: F401 (registers its attention)
from gpu.device import Device
from gpu.report import Report
from torch_uma import CachePool
from torch_uma.integrations.flashinfer import Attention, leave_off

SECTION = "FlashInfer"


def check_flashinfer(report: Report, device: Device) -> None:
    """Prompts and steps of a model with heads of 64 numbers."""
    name = "prompts and steps, against the reference"
    if importlib.util.find_spec("flashinfer") is None:
        report.skip(SECTION, name, "flashinfer is not installed")
    elif device.is_dry:
        report.skip(SECTION, name, "it runs on a GPU alone")
    else:
        report.run(SECTION, name, partial(_steps, device))


def _steps(device: Device) -> None:
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=tiny_models.VOCABULARY,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        dtype="bfloat16",
    )
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="torch_uma", dtype=torch.bfloat16)
    model = model.eval().requires_grad_(False).to(device.torch)
    by_flashinfer, by_reference = (_logits(device, model, is_left_off=each) for each in (False, True))
    torch.testing.assert_close(by_flashinfer, by_reference, rtol=5e-2, atol=5e-2)


@torch.no_grad()
def _logits(device: Device, model: Any, *, is_left_off: bool) -> Tensor:
    """[forwards, vocabulary] after prompts of unequal lengths and some steps of the same tokens."""
    lengths = (5, 40, 17)
    results = []
    with CachePool(model, memory="64MiB", max_sequences=4, max_tokens=512) as pool:
        if is_left_off:
            leave_off(pool)
        sequences = [pool.add() for _ in lengths]
        for sequence, length in zip(sequences, lengths, strict=True):
            tokens = tiny_models.prompts((length,), seed=length)["input_ids"].to(device.torch)
            with pool.step({sequence: length}) as cache:
                results.append(model(tokens, cache=cache, **cache.inputs()).logits[:, -1])
        batch = pool.batch(sequences)
        for step in range(8):
            torch_uma.testing.scramble(pool, step)
            column = torch.full((len(lengths), 1), step, device=device.torch)
            with pool.step(batch, 1) as cache:
                results.append(model(column, cache=cache, **cache.inputs()).logits[:, -1])
        if not is_left_off:  # or else the reference would be compared with itself
            assert isinstance(pool.substitute, Attention), "FlashInfer was not asked"
            assert not pool.substitute.declined, f"FlashInfer did not serve {pool.substitute.declined}"
        for sequence in sequences:
            sequence.free()
    return torch.cat(results).float()
