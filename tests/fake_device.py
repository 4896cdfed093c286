"""Forwards and ops on an accelerator that is not there: tensors without numbers, on a device that is not the CPU.

A process of its own, as torch takes one such device for good. Fails where an op waits for the device, or mixes its
tensors with those of the host, as a copy between them does: neither can be captured in a CUDA graph.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from models import build
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from torch_uma import CachePool
from torch_uma.integrations.transformers.serving.options import resolve
from torch_uma.integrations.transformers.serving.sampling import Sampling, choose
from torch_uma.ops.attend_gathered import attend_gathered

DEVICE = "npu"


class OnDevice(TorchDispatchMode):
    """No op sees a tensor of the host."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        seen = {each.device.type for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor)}
        assert seen <= {DEVICE}, f"{op} sees tensors on {seen}"
        return out


def on_device(model: torch.nn.Module) -> torch.nn.Module:
    """The model with all its tensors there."""
    for module in model.modules():
        for owned in (module._parameters, module._buffers, vars(module)):
            for name, tensor in list(owned.items()):
                if isinstance(tensor, Tensor):
                    there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    owned[name] = torch.nn.Parameter(there, requires_grad=False) if is_parameter else there
    return model


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


@torch.no_grad()
def run_model(model: Any) -> None:
    """Tokens of a multi-step as a graph takes them, and steps of one token and of unequally many."""
    pool = CachePool(model, memory="2MiB", max_sequences=4, max_tokens=64, device=DEVICE)
    first, second = sequences = pool.add_many([0, 0])
    pool.begin(sequences, 7).commit()
    with pool.begin_steps(sequences, 4) as multi:
        cache, tokens = multi.cache(), zeros(2, 1)
        with OnDevice():
            for _ in range(2):
                multi.stacks.advance()
                logits = model(tokens, cache=cache, **cache.inputs()).logits
                tokens.copy_(logits[:, -1:].argmax(-1))
            multi.stacks.stop(zeros(2).bool())
    for counts, shape in (({first: 1, second: 1}, (2, 1)), ({first: 4, second: 2}, (1, 6))):
        with pool.step(counts) as cache:
            inputs = cache.inputs()
            with OnDevice():
                model(zeros(*shape), cache=cache, **inputs)


def run_attention() -> None:
    """The op's own code for accelerators, with each of its options."""
    halves = torch.bfloat16
    arena, query = zeros(1 << 16, dtype=torch.uint8), zeros(7, 8, 64, dtype=halves)
    tables = (zeros(4), zeros(5, 9, dtype=torch.int32), zeros(99, dtype=torch.int32), zeros(3), zeros(3))
    layout = (0, 1024, 16, [0, 256], [64, 64], 2, ["bfloat16"] * 2, 0.1)
    options: Sequence[dict[str, Any]] = (
        {"window": 5},
        {"chunk": 16, "softcap": 2.0, "sinks": zeros(8, dtype=halves)},
        {"starts": zeros(3)},
        {"mask": zeros(3, 1, 4).bool(), "bias": zeros(1, 8, 1, 4, dtype=halves), "first_column": 2},
        {"indices": zeros(7, 4)},
        {"new_key": zeros(7, 2, 64, dtype=halves), "new_value": zeros(7, 2, 64, dtype=halves)},
    )
    for given in options:
        with OnDevice():
            attend_gathered(arena, query, *tables, *layout, **given)


def samplings(model: Any) -> list[Sampling]:
    """One for each kind of row, whose processors have been called once."""
    options: Sequence[dict[str, Any]] = (
        {},
        {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.1, "typical_p": 0.9},
        {"do_sample": True, "epsilon_cutoff": 0.1, "suppress_tokens": [3], "renormalize_logits": True},
        {"remove_invalid_values": True, "sequence_bias": {(3,): 1.0, (4,): 2.0}, "bad_words_ids": [[5], [6]]},
        {"bad_words_ids": [[5], [6], [6, 7], [8, 9]], "begin_suppress_tokens": [1], "forced_eos_token_id": 3},
        {"repetition_penalty": 1.1, "no_repeat_ngram_size": 2, "min_new_tokens": 9, "eos_token_id": [1, 2]},
    )
    asked = [resolve(model, [1, 2, 3], max_new_tokens=5, **each)[0] for each in options]
    choose(asked, torch.zeros(len(asked), 260), [[1, 2, 3]] * len(asked))
    return asked


def run_choosing(asked: list[Sampling]) -> None:
    """Tokens for rows of unequal options, of whose texts the host has not seen the last token."""
    for processor in (processor for sampling in asked for processor in sampling.processors):
        for name, value in vars(processor).items():
            there = tree_map_only(Tensor, lambda tensor: zeros(*tensor.shape, dtype=tensor.dtype), value)
            setattr(processor, name, there)
    for rows in (asked * 2, asked[:1], asked[1:2] * 2, asked[-1:]):  # an index of one number is taken for a constant
        logits, texts = zeros(len(rows), 260, dtype=torch.bfloat16), [[zeros(3), zeros(1)]] * len(rows)
        choose(rows, logits, texts)  # puts there which rows go together
        with OnDevice():
            tokens, logprobs = choose(rows, logits, texts, logprobs=True)
        assert tokens.shape == (len(rows),) and logprobs is not None and logprobs.shape == (len(rows),)


def main() -> None:
    built = [build(name, attention="torch_uma") for name in sys.argv[1:]]  # before: a seed is for every device
    asked = samplings(built[0])
    for model in built:
        if model._can_set_experts_implementation():
            model.set_experts_implementation("batched_mm")  # others look how many tokens an expert has
    _setup_privateuseone_for_python_backend(DEVICE)
    Tensor.data_ptr = lambda self: id(self)  # type: ignore[method-assign]
    torch.utils.dlpack.from_dlpack = lambda tensor: tensor
    with FakeTensorMode(allow_non_fake_inputs=True):
        run_attention()
        run_choosing(asked)
        for model in built:
            run_model(on_device(model))


if __name__ == "__main__":
    main()
