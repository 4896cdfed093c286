"""What some models store, by name: layers for plans without the models.

Shapes are those of the published configs as engines store them: a convolution keeps `kernel - 1` columns. A name that
ends in `-like` is approximate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from torch_uma.layout import Full, Layer, Lifetime, Memory, Row, State, Window

Layers = tuple[Layer, ...]


def attention(lifetime: Lifetime, num_heads: int, k_size: int, v_size: int | None = None) -> Layer:
    """A bf16 attention layer; values are as wide as keys unless `v_size` is given."""
    sizes = {"k": k_size, "v": k_size if v_size is None else v_size}
    rows = tuple(Row(name=name, shape=(num_heads, size), dtype=torch.bfloat16) for name, size in sizes.items())
    return Layer(memories=(Memory(lifetime=lifetime, rows=rows),))


def latent_attention(width: int, rope_width: int) -> Layer:
    """A bf16 MLA layer."""
    widths = {"latent": width, "rope_key": rope_width}
    rows = tuple(Row(name=name, shape=(1, width), dtype=torch.bfloat16) for name, width in widths.items())
    return Layer(memories=(Memory(lifetime=Full(), rows=rows),))


def recurrent(conv: tuple[int, int], shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Layer:
    """A layer with a bf16 convolution state [channels, columns] and a recurrent state, none if its shape is empty."""
    rows = [Row(name="conv", shape=conv, dtype=torch.bfloat16)]
    if shape:
        rows.append(Row(name="recurrent", shape=shape, dtype=dtype))
    return Layer(memories=(Memory(lifetime=State(), rows=tuple(rows)),))


def both(one: Layer, other: Layer) -> Layer:
    """A layer that stores what two layers do."""
    return Layer(memories=one.memories + other.memories)


def gpt_oss_20b() -> Layers:
    return (attention(Window(128), 8, 64), attention(Full(), 8, 64)) * 12


def gpt_oss_20b_eagle() -> Layers:
    """With the one full layer of an EAGLE draft model in the same entries."""
    return (*gpt_oss_20b(), attention(Full(), 8, 64))


def qwen3_5_4b(dtype: torch.dtype = torch.float32) -> Layers:
    """2,146,304 bytes of state a recurrent layer in fp32, 1,097,728 in bf16."""
    return (*[recurrent((8192, 3), (32, 128, 128), dtype)] * 3, attention(Full(), 4, 256)) * 8


def qwen3_5_4b_bf16_state() -> Layers:
    return qwen3_5_4b(torch.bfloat16)


def qwen3_next_80b() -> Layers:
    return (*[recurrent((8192, 3), (32, 128, 128))] * 3, attention(Full(), 2, 256)) * 12


def three_kinds() -> Layers:
    """State, window and full in one model: a gated DeltaNet between sliding and full attention."""
    return (*[recurrent((8192, 3), (32, 128, 128))] * 2, attention(Window(512), 4, 128), attention(Full(), 4, 128)) * 8


def nemotron_h_8b() -> Layers:
    """24 Mamba-2 and 4 attention layers; the rest are feed-forward."""
    return (*[recurrent((10240, 3), (128, 64, 128))] * 6, attention(Full(), 8, 128)) * 4


def zamba2_2_7b() -> Layers:
    """54 Mamba-2 layers with bf16 states, of which 9 have attention over twice the hidden size as well."""
    mamba = recurrent((5248, 3), (80, 64, 64), torch.bfloat16)
    return (*[mamba] * 5, both(mamba, attention(Full(), 32, 160))) * 9


def jamba_mini() -> Layers:
    """28 Mamba-1 and 4 attention layers."""
    mamba = recurrent((8192, 3), (8192, 16))
    return (*[mamba] * 4, attention(Full(), 8, 128), *[mamba] * 3) * 4


def kimi_linear_48b() -> Layers:
    """20 KDA and 7 MLA layers."""
    kda, mla = recurrent((12288, 3), (32, 128, 128)), latent_attention(512, 64)
    return (*(kda, kda, kda, mla) * 6, kda, kda, mla)


def lfm2_like() -> Layers:
    """6 attention layers and 10 short convolutions."""
    return (*[recurrent((2048, 2), ())] * 10, *[attention(Full(), 8, 64)] * 6)


def gemma3_27b() -> Layers:
    """10 full layers, 52 with a window of 1,024."""
    sliding, full = attention(Window(1024), 16, 128), attention(Full(), 16, 128)
    return (*(*[sliding] * 5, full) * 10, sliding, sliding)


def gemma4_31b_like() -> Layers:
    """10 full layers of few wide heads, 50 with a window of 1,024."""
    return (*[attention(Window(1024), 16, 256)] * 5, attention(Full(), 4, 512)) * 10


def full20_window30() -> Layers:
    """Layers in a ratio that suits no fixed grouping."""
    return (*[attention(Window(1024), 8, 128)] * 30, *[attention(Full(), 8, 128)] * 20)


def mimo_like() -> Layers:
    """Keys wider than values: 9 full layers, 39 with a window of 128 and twice the heads."""
    return (*[attention(Window(128), 8, 192, 128)] * 39, *[attention(Full(), 4, 192, 128)] * 9)


GEOMETRIES: dict[str, Callable[[], Layers]] = {
    "gpt-oss-20b": gpt_oss_20b,
    "gpt-oss-20b-eagle": gpt_oss_20b_eagle,
    "qwen3.5-4b": qwen3_5_4b,
    "qwen3.5-4b-bf16-state": qwen3_5_4b_bf16_state,
    "qwen3-next-80b": qwen3_next_80b,
    "three-kinds": three_kinds,
    "nemotron-h-8b": nemotron_h_8b,
    "zamba2-2.7b": zamba2_2_7b,
    "jamba-mini": jamba_mini,
    "kimi-linear-48b": kimi_linear_48b,
    "lfm2-like": lfm2_like,
    "gemma-3-27b": gemma3_27b,
    "gemma-4-31b-like": gemma4_31b_like,
    "20-full-30-window": full20_window30,
    "mimo-like": mimo_like,
}
