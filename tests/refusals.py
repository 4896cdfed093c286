"""What is refused, each as a tiny case that raises it: the sentence in docs/compatibility.md is that of the error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import models
import torch
import zoo
from flashinfer_model import HOPPER, kv, memory
from test_compile import Graphs
from torch._dynamo.backends.debugging import aot_eager
from transformers import PreTrainedModel
from two_devices import Devices, spread

import torch_uma
from torch_uma import Chunk
from torch_uma.integrations.flashinfer import question_of
from torch_uma.integrations.flashinfer.forms import choose

MEMORY = 4 << 20
NUM_TOKENS = 40

Case = Callable[[], object]


@lru_cache
def model_of(name: str, attention: str = "eager") -> PreTrainedModel:
    build = models.build if name in (*models.CONFIGS, "qwen3_next", "gpt_oss") else zoo.build
    model = build(name)
    model.set_attn_implementation(attention)
    return model


def generate(model: Any, num_rows: int = 2, padding: int = 0, **options: Any) -> torch_uma.UnifiedCache:
    """The cache of a model after a few tokens behind prompts, the first of which is padded."""
    ids = torch.randint(1, 90, (num_rows, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    cache = torch_uma.UnifiedCache(model, memory=MEMORY)
    model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=3, do_sample=False, **options)
    return cache


@torch.no_grad()
def step(model: Any, lengths: Iterable[int], num_new_tokens: int | list[int], run: Any = None) -> object:
    """A step over sequences of these lengths, with the forward of the model in it."""
    pool = torch_uma.CachePool(model, memory=MEMORY)
    sequences = [pool.add() for _ in lengths]
    for sequence, length in zip(sequences, lengths):
        if length:
            with pool.step({sequence: length}) as cache:
                model(torch.ones(1, length, dtype=torch.int64), cache=cache, **cache.inputs())
    with pool.step(pool.batch(sequences), num_new_tokens) as cache:
        inputs = cache.inputs()
        shape = inputs["position_ids"].shape if "position_ids" in inputs else (len(sequences), num_new_tokens)
        return (model if run is None else run)(torch.ones(shape, dtype=torch.int64), cache=cache, **inputs)


def packed(name: str, attention: str) -> Case:
    return lambda: step(model_of(name, attention), [0, 0], [1, 3])


def multistep(name: str, attention: str) -> Case:
    def run() -> object:
        pool = torch_uma.CachePool(model_of(name, attention), memory=MEMORY)
        with pool.begin_steps(pool.batch([pool.add()]), 2) as multi:
            return multi.cache()

    return run


def loop(name: str, attention: str, **options: Any) -> Case:
    return lambda: torch_uma.ServingLoop(model_of(name, attention), memory=MEMORY, **options)


def crop(name: str, num_tokens: int) -> Case:
    return lambda: generate(model_of(name)).crop(-num_tokens)


def compiled_index_keys_in_place() -> object:
    model = model_of("deepseek_v32", "torch_uma")
    compiled = torch.compile(model, backend=Graphs(aot_eager).backend, fullgraph=True, dynamic=False)
    return step(model, [0], 1, compiled)


def a_chunk_inside_a_page() -> object:
    plan = torch_uma.plan([memory(Chunk(6), kv())], memory=MEMORY, page_size=4)
    return choose(question_of(plan, 0, num_heads=2, dtype=torch.bfloat16, scale=1.0, capability=HOPPER))


def latents_whose_projection_is_hooked() -> object:
    model = models.build("deepseek_v3", attention="torch_uma")
    model.get_submodule("model.layers.0.self_attn.kv_b_proj").register_forward_pre_hook(lambda *_: None)
    return generate(model)


def a_pool_for_several_devices() -> object:
    with Devices():
        return torch_uma.CachePool(spread(models.build("llama"), 2), memory=MEMORY)


def speculation_of_mamba() -> object:
    return generate(model_of("mamba"), num_rows=1, custom_generate=torch_uma.speculate, prompt_lookup_num_tokens=3)


CASES: dict[str, Case] = {
    "packed_by_stock_attention": packed("llama", "sdpa"),
    "packed_compressed_groups": packed("deepseek_v4", "eager"),
    "packed_index_keys": packed("deepseek_v32", "torch_uma"),
    "packed_states": packed("qwen3_next", "torch_uma"),
    "packed_mamba": packed("mamba", "torch_uma"),
    "multistep_by_stock_attention": multistep("llama", "sdpa"),
    "multistep_over_compressed_groups": multistep("deepseek_v4", "torch_uma"),
    "multistep_over_index_keys": multistep("deepseek_v32", "torch_uma"),
    "multistep_over_states": multistep("qwen3_next", "torch_uma"),
    "multistep_over_mamba": multistep("mamba", "torch_uma"),
    "crop_behind_a_window": crop("mistral", 30),
    "crop_of_compressed_groups": crop("deepseek_v4", 2),
    "crop_of_states": crop("qwen3_next", 2),
    "crop_of_mamba": crop("mamba", 2),
    "chunks_by_stock_attention": lambda: generate(model_of("llama4")),
    "padding_that_shifts_chunks": lambda: generate(model_of("llama4", "torch_uma"), padding=3),
    "a_chunk_inside_a_page": a_chunk_inside_a_page,
    "latents_whose_projection_is_hooked": latents_whose_projection_is_hooked,
    "compressed_rows_of_unequal_length": lambda: step(model_of("deepseek_v4"), [5, 7], 1),
    "compressed_groups_in_place": lambda: generate(model_of("deepseek_v4", "torch_uma")),
    "compiled_index_keys_in_place": compiled_index_keys_in_place,
    "pieces_of_a_prompt_of_mamba": lambda: generate(model_of("mamba"), prefill_chunk_size=5),
    "speculation_of_mamba": speculation_of_mamba,
    "chunks_in_a_loop_by_stock_attention": loop("llama4", "eager"),
    "compiled_loop_by_stock_attention": loop("llama", "sdpa", compile=True),
    "compiled_loop_over_index_keys": loop("deepseek_v32", "torch_uma", compile=True),
    "a_pool_for_several_devices": a_pool_for_several_devices,
}
