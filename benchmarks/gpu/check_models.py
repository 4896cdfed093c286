"""Tiny models: `generate()`, compiled steps and several steps in one graph, token for token as without this library."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import tiny_models
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, LlamaConfig

import torch_uma
from gpu.device import Device
from gpu.report import Report
from torch_uma import CachePool, UnifiedCache
from torch_uma.integrations.flashinfer import Attention, leave_off

SECTION = "Models"
NUM_STEPS = 6
LENGTHS = (5, 20, 11)
COMPILES_S = 60  # what a check that compiles takes, about


def check_models(report: Report, device: Device) -> None:
    """All of them; those that compile nothing first."""
    names = ("llama", "gpt_oss", "qwen3_next")
    for name in names[:2]:  # the third has states
        report.run(SECTION, f"K steps of {name} in one graph", partial(_multi_steps, device, name))
    for name in names:
        report.run(
            SECTION, f"pool.step of {name}, compiled", partial(_steps, device, name), needs_s=device.size(COMPILES_S, 0)
        )
        report.run(
            SECTION,
            f"generate() of {name}, eager and compiled",
            partial(_generate, device, name),
            needs_s=device.size(COMPILES_S, 0),
        )
    name = "prompts and steps of llama by FlashInfer"
    if device.is_dry or importlib.util.find_spec("flashinfer") is None:
        report.skip(SECTION, name, "it takes a GPU, and flashinfer")
    else:
        report.run(SECTION, name, partial(_by_flashinfer, device), needs_s=2 * COMPILES_S)


def build(device: Device, name: str, attention: str) -> Any:
    """A tiny model, whose experts, if it has any, are computed without a look at the device."""
    if name in tiny_models.BUILDERS:
        model: Any = tiny_models.build(name, attention=attention)
    else:
        config = LlamaConfig(
            vocab_size=tiny_models.VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            pad_token_id=tiny_models.PAD,
            bos_token_id=None,
            eos_token_id=None,
            initializer_range=0.2,
        )
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    return model.eval().requires_grad_(False).to(device.torch)


def _expected(device: Device, name: str, prompt: dict[str, Tensor], num_tokens: int) -> Tensor:
    """By transformers' own cache."""
    options: dict[str, Any] = {"max_new_tokens": num_tokens, "do_sample": False}
    tokens: Tensor = build(device, name, "eager").generate(**prompt, **options)
    return tokens


def _prompt(device: Device, lengths: tuple[int, ...], seed: int = 0) -> dict[str, Tensor]:
    return {key: tensor.to(device.torch) for key, tensor in tiny_models.prompts(lengths, seed=seed).items()}


def _generate(device: Device, name: str) -> None:
    prompt = _prompt(device, LENGTHS)
    num_tokens = device.size(40, 6)
    expected = _expected(device, name, prompt, num_tokens)
    model = build(device, name, "torch_uma")
    for is_compiled in (False, True):
        _start_compiling()
        cache = UnifiedCache(model, memory="8MiB")
        torch_uma.testing.poison(cache.pool)
        options: dict[str, Any] = {"max_new_tokens": num_tokens, "do_sample": False, "cache": cache}
        tokens = model.generate(**prompt, **options, disable_compile=not is_compiled)
        _assert_same(device, name, tokens, expected, prompt)
        _assert_graphs()


def _start_compiling() -> None:
    torch.compiler.reset()
    counters.clear()


def _assert_graphs() -> None:
    assert not counters["inductor"]["cudagraph_skips"], "a compiled forward ran without a CUDA graph"


def _assert_same(device: Device, name: str, tokens: Tensor, expected: Tensor, prompt: dict[str, Tensor]) -> None:
    plain = build(device, name, "eager")
    tiny_models.assert_same_tokens(plain, tokens, expected, prompt["attention_mask"])


def _decode_loop(
    device: Device, name: str, decode: Callable[[Any, CachePool, Any, Tensor, int], Tensor], num_tokens: int
) -> None:
    """Prompts of unequal lengths, then `decode`, whose tokens [rows, num_tokens] must be those of `generate()`."""
    model = build(device, name, "torch_uma")
    prompts = [_prompt(device, (length,), seed=length) for length in LENGTHS]
    with torch.no_grad(), CachePool(model, memory="8MiB", max_sequences=4, max_tokens=512) as pool:
        torch_uma.testing.poison(pool)
        sequences = [pool.add() for _ in LENGTHS]
        last = []
        for sequence, prompt in zip(sequences, prompts, strict=True):
            tokens = prompt["input_ids"]
            with pool.step({sequence: tokens.shape[1]}) as cache:
                last.append(model(tokens, cache=cache, **cache.inputs()).logits[:, -1].argmax(-1))
        first = torch.stack(last)
        new = torch.cat([first, decode(model, pool, pool.batch(sequences), first, num_tokens - 1)], dim=1)
        pool.check()
        for sequence in sequences:
            sequence.free()
    for row, prompt in enumerate(prompts):
        expected = _expected(device, name, prompt, num_tokens)
        _assert_same(device, name, torch.cat([prompt["input_ids"], new[row : row + 1]], dim=1), expected, prompt)


def _steps(device: Device, name: str) -> None:
    """`pool.step` under torch.compile with CUDA graphs."""

    def decode(model: Any, pool: CachePool, batch: Any, tokens: Tensor, num_tokens: int) -> Tensor:
        _start_compiling()
        how: dict[str, Any] = {"backend": "eager"} if device.is_dry else {"mode": "reduce-overhead"}
        forward: Any = torch.compile(model, fullgraph=True, dynamic=False, **how)
        new = [tokens]
        for step in range(num_tokens):
            torch.compiler.cudagraph_mark_step_begin()
            with pool.step(batch, 1) as cache:
                logits = forward(new[-1], cache=cache, **cache.inputs()).logits
            new.append(logits[:, -1:].argmax(-1))
            if step % 5 == 0:
                torch_uma.testing.scramble(pool, step)
        _assert_graphs()
        return torch.cat(new[1:], dim=1)

    _decode_loop(device, name, decode, device.size(40, 6))


def _multi_steps(device: Device, name: str) -> None:
    """A captured graph of `NUM_STEPS` forwards with `advance` before each; no sync from its capture on."""

    def decode(model: Any, pool: CachePool, batch: Any, tokens: Tensor, num_tokens: int) -> Tensor:
        tokens = tokens.clone()  # at a fixed address, as the graph reads it
        taken = tokens.new_empty((len(tokens), NUM_STEPS))
        new = []

        def take() -> None:
            for step in range(NUM_STEPS):
                multi.stacks.advance()
                logits = model(tokens, cache=cache, **cache.inputs()).logits
                tokens.copy_(logits[:, -1:].argmax(-1))
                taken[:, step : step + 1].copy_(tokens)

        first = tokens.clone()
        with pool.begin_steps(batch, NUM_STEPS) as multi:
            cache = multi.cache()
            replay = device.captured(take, take)
        tokens.copy_(first)
        for number in range(num_tokens // NUM_STEPS):
            with device.without_syncs(), pool.begin_steps(batch, NUM_STEPS) as multi:
                cache = multi.cache()
                replay()
                multi.commit([NUM_STEPS] * len(batch))
            new.append(taken.clone())
            torch_uma.testing.scramble(pool, number)
        return torch.cat(new, dim=1)

    _decode_loop(device, name, decode, device.size(5, 2) * NUM_STEPS + 1)


def _by_flashinfer(device: Device) -> None:
    """Logits of a model with heads of 64 numbers, beside those by the op's own attention."""
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
