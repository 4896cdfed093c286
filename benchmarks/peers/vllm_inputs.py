"""What vLLM's planner and scheduler are handed: layers as its own specs, and a config whose model is a few fields.

Owns what is not vLLM's own, and the version that it is written for. Attention has blocks of 16 tokens, as with
FlashAttention; states are saved at the end of a forward, as with every prefill but FlashInfer's; scheduling is
synchronous.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from geometries import Layers
from workloads import STEP_TOKENS

from peers.installed import version_of
from torch_uma.layout import Memory, State, Window

ATTENTION_TOKENS = 16  # of a block, at least
MAX_TOKENS = 32768  # of a request
VERSION = "0.33"


def why_not() -> str | None:
    """A sentence if vLLM is not installed, or not the one that this is written for."""
    found = version_of("vllm")
    if found.startswith(f"{VERSION}."):
        return None
    return (
        f"vLLM's scheduler is driven where vLLM {VERSION} is installed, and here is {found}: "
        f"`pip install vllm=={VERSION}.0`; no GPU is needed"
    )


def num_bytes(memory: Memory) -> int:
    """Of an entry without padding."""
    return sum(row.num_bytes for row in memory.rows)


def block_of(layers: Layers) -> tuple[int, int]:
    """Tokens and bytes a layer of a block of attention, no smaller than a state: as vLLM's platforms round it up."""
    memories = [memory for layer in layers for memory in layer.memories]
    state_bytes = max((num_bytes(memory) for memory in memories if memory.lifetime == State()), default=0)
    token_bytes = max(num_bytes(memory) for memory in memories if memory.lifetime != State())
    num_tokens = ATTENTION_TOKENS * max(1, -(-state_bytes // (ATTENTION_TOKENS * token_bytes)))
    return num_tokens, num_tokens * token_bytes


def spec_of(memory: Memory, block: tuple[int, int], prefix_caching: bool) -> Any:
    """The memory of a layer as vLLM's, a state padded to the block; what is no state has keys and values."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    block_tokens, block_bytes = block
    if memory.lifetime == State():
        return MambaSpec(
            block_size=block_tokens if prefix_caching else MAX_TOKENS,
            shapes=tuple(row.shape for row in memory.rows),
            dtypes=tuple(row.dtype for row in memory.rows),
            page_size_padded=block_bytes,
            mamba_cache_mode="align" if prefix_caching else "none",
        )
    keys, values = memory.rows
    num_heads, key_size = keys.shape
    attention = {
        "block_size": block_tokens,
        "num_kv_heads": num_heads,
        "head_size": key_size,
        "head_size_v": values.shape[1],
        "dtype": keys.dtype,
    }
    if isinstance(memory.lifetime, Window):
        return SlidingWindowSpec(sliding_window=memory.lifetime.num_tokens, **attention)
    return FullAttentionSpec(**attention)


def specs_of(layers: Layers, prefix_caching: bool) -> dict[str, Any]:
    """By names, in the order of the layers, each of which has one memory."""
    block, specs = block_of(layers), {}
    for number, layer in enumerate(layers):
        (memory,) = layer.memories
        specs[f"layers.{number}"] = spec_of(memory, block, prefix_caching)
    return specs


def config_of(layers: Layers, max_running: int, prefix_caching: bool) -> Any:
    """vLLM's defaults, but for what is said here."""
    from vllm.config import CacheConfig, DeviceConfig, SchedulerConfig, VllmConfig

    block_tokens, _ = block_of(layers)
    cache = CacheConfig(block_size=block_tokens, enable_prefix_caching=prefix_caching)
    cache.kv_cache_layout = "LBNHC"
    if prefix_caching and any(memory.lifetime == State() for layer in layers for memory in layer.memories):
        cache.mamba_cache_mode, cache.mamba_block_size = "align", block_tokens
    scheduling = SchedulerConfig(
        max_model_len=MAX_TOKENS,
        is_encoder_decoder=False,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=max_running,
        async_scheduling=False,
    )
    config = VllmConfig(device_config=DeviceConfig(device="cpu"), cache_config=cache, scheduler_config=scheduling)
    config.scheduler_config.disable_hybrid_kv_cache_manager = False  # as on a GPU
    config.model_config = SimpleNamespace(
        max_model_len=MAX_TOKENS,
        original_max_model_len=MAX_TOKENS,
        runner_type="generate",
        uses_mrope=False,
        is_encoder_decoder=False,
        is_diffusion=False,
        multimodal_config=None,
        supports_multimodal_inputs=False,
        supports_kv_cache_grouping=False,
        return_sampling_mask=False,
        skip_tokenizer_init=True,
    )
    return config
