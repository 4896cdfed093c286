"""What is declared for a model is what transformers' own cache holds after the model ran."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, PreTrainedConfig

from torch_uma.errors import PlanError
from torch_uma.integrations.transformers.declare import declare
from torch_uma.layout import Chunk, Full, Layer, State, Window
from torch_uma.plan import plan

BF16, FP32 = torch.bfloat16, torch.float32
NUM_TOKENS = 11
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}
DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA2: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_n_groups": 1, "mamba_d_state": 8}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "head_dim": 8,
}
INDEX: dict[str, Any] = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 4}
SLIDING_AND_FULL = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
# model type: what its config has beside COMMON
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt_oss": {**EXPERTS, "sliding_window": 6},
    "gemma2": {"sliding_window": 6},
    "gemma3_text": {"sliding_window": 6, "layer_types": SLIDING_AND_FULL},
    "mistral": {"sliding_window": 6},
    "mimo_v2_flash": {**EXPERTS, "sliding_window": 6, "v_head_dim": 12},
    "llama4_text": {**EXPERTS, "intermediate_size_mlp": 40, "attention_chunk_size": 8},
    "qwen3_next": {**EXPERTS, **DELTA_NET},
    "qwen3_5_text": DELTA_NET,
    "olmo_hybrid": DELTA_NET,
    "lara_mini": {**EXPERTS, **DELTA_NET, "layer_types": ["linear_attention", *SLIDING_AND_FULL[1:]]},
    "bamba": {**MAMBA2, "attn_layer_indices": [2]},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 96},
    "granitemoehybrid": {**MAMBA2, **EXPERTS, "layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 24, "n_groups": 1, "state_size": 8, "expand": 2},
    "falcon_mamba": {"state_size": 8},
    "jamba": {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mamba"],
        **EXPERTS,
        "mamba_num_heads": 4,
        "mamba_head_dim": 24,
        "n_groups": 1,
        "ssm_state_size": 8,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "deepseek_v3": {**LATENT, **EXPERTS},
    "deepseek_v32": {**LATENT, **EXPERTS, **INDEX},
    "longcat_flash": {**LATENT, "num_layers": 2, "n_routed_experts": 4, "moe_topk": 2, "expert_ffn_hidden_size": 24},
    "kimi_linear": {**LATENT, **EXPERTS, "layer_types": ["linear_attention", "full_attention"] * 2},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": 6,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 6,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 6,
        "global_head_dim": 28,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
    },
    "inkling_text": {**EXPERTS, "sliding_window": 6},
    "glm5_next_text": {**LATENT, **EXPERTS, **INDEX, "qk_rope_head_dim": 0, "index_kpool": 2},
    "zaya": {**EXPERTS, "num_experts_per_tok": 1},
    "lfm3": {"sliding_window": 6},
    "bailing_hybrid": {**LATENT, **EXPERTS, "layer_types": ["linear_attention", "full_attention"] * 2},
    "hy_v4": {**LATENT, **EXPERTS, **INDEX},
}


def tiny(model_type: str) -> PreTrainedConfig:
    return AutoConfig.for_model(model_type, **{**COMMON, **MODELS[model_type]})


Rows = dict[str, tuple[tuple[int, ...], torch.dtype]]


def stored(layer: Layer) -> Rows:
    """What a declared layer stores, under the names of transformers' cache."""
    rows: Rows = {row.name: (row.shape, row.dtype) for memory in layer.memories for row in memory.rows}
    for mine, theirs in (("latent", "k"), ("rope_key", "v")):
        if mine in rows:
            rows[theirs] = rows.pop(mine)
    return rows


def held(layer: Any) -> Rows:
    """What a layer of transformers' cache holds, without the batch and the tokens."""
    rows: Rows = {}
    for name, tensor in (("k", getattr(layer, "keys", None)), ("v", getattr(layer, "values", None))):
        if tensor is not None:
            rows[name] = ((tensor.shape[1], tensor.shape[3]), tensor.dtype)
    for name in ("conv", "recurrent"):
        for index, state in getattr(layer, f"{name}_states", {}).items():
            if state is not None:
                rows[f"{name}_{index}" if index else name] = (tuple(state.shape[1:]), state.dtype)
    if getattr(layer, "indexer_keys", None) is not None:
        rows["index_key"] = (tuple(layer.indexer_keys.shape[2:]), layer.indexer_keys.dtype)
    return rows


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("model_type", MODELS)
def test_as_in_the_dynamic_cache(model_type: str, dtype: torch.dtype) -> None:
    config = tiny(model_type)
    model = AutoModel.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=torch.randint(1, 90, (2, NUM_TOKENS)), cache=cache, use_cache=True)
    expected = [held(layer) for layer in cache.layers]
    assert any(expected)
    for layers in (declare(tiny(model_type), dtype=dtype), declare(model)):
        assert [stored(layer) for layer in layers] == expected
    assert plan(model, memory="64MiB", num_tokens=NUM_TOKENS).num_sequences(NUM_TOKENS) >= 1


def lifetimes(layers: tuple[Layer, ...]) -> list[list[object]]:
    return [[memory.lifetime for memory in layer.memories] for layer in layers]


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", [[Full()]] * 4),
        ("gpt_oss", [[Window(6)], [Full()]] * 2),
        ("mistral", [[Window(6)]] * 4),
        ("llama4_text", [[Chunk(8)], [Chunk(8)], [Chunk(8)], [Full()]]),
        ("qwen3_next", [[State()], [State()], [Full()], [State()]]),
        ("lara_mini", [[State()], [Window(6)], [Full()], [Window(6)]]),
        ("mamba2", [[State()]] * 4),
        ("nemotron_h", [[State()], [], [Full()], [State()]]),
        ("falcon_h1", [[State(), Full()]] * 4),
        ("zamba2", [[State()], [State(), Full()]] * 2),
        ("gemma3n_text", [[Window(6)], [Full()], [Window(6)], [Full()], [], []]),
    ],
)
def test_lifetimes(model_type: str, expected: list[list[object]]) -> None:
    config = tiny(model_type)
    if model_type == "lara_mini":
        config.sliding_window = 6
    assert lifetimes(declare(config)) == expected


def test_names_of_rows() -> None:
    def names(model_type: str) -> set[str]:
        return {row.name for layer in declare(tiny(model_type)) for memory in layer.memories for row in memory.rows}

    assert names("llama") == {"k", "v"}
    assert names("bamba") == {"k", "v", "conv", "recurrent"}
    assert names("lfm2") == {"k", "v", "conv"}
    assert names("deepseek_v3") == {"latent", "rope_key"}
    assert names("deepseek_v32") == {"latent", "rope_key", "index_key"}
    assert names("inkling_text") == {"k", "v", "conv", "conv_1", "conv_2", "conv_3"}


def test_layers_that_share_name_their_producer() -> None:
    assert [layer.shares for layer in declare(tiny("gemma3n_text"))] == [None] * 4 + [2, 3]
    assert [layer.shares for layer in declare(tiny("nemotron_h"))] == [None] * 4


def test_a_latent_without_rotary_part() -> None:
    latents = [layer for layer in declare(tiny("glm5_next_text")) if "full" in layer.name or "indexed" in layer.name]
    rows = {row.name: row.shape for row in latents[0].memories[0].rows}
    assert rows["latent"] == (1, 24) and rows["rope_key"] == (1, 0) and rows["index_key"] == (33,)


def test_nested_text_config() -> None:
    text = {**COMMON, "sliding_window": 6, "layer_types": SLIDING_AND_FULL}
    config = AutoConfig.for_model("gemma3", text_config=text)
    assert declare(config, dtype=BF16) == declare(tiny("gemma3_text"), dtype=BF16)


def test_a_looped_model_has_more_layers_than_its_config() -> None:
    config = AutoConfig.for_model("dory")
    layers = declare(config)
    assert len(layers) > config.num_hidden_layers
    assert all(layer.memories for layer in layers)


def test_the_parameters_of_a_model_decide_not_its_config() -> None:
    model = AutoModelForCausalLM.from_config(tiny("gpt_oss"), dtype=BF16).float()
    assert model.config.dtype == BF16
    assert {row.dtype for layer in declare(model) for row in layer.memories[0].rows} == {FP32}


def test_dtype_comes_from_the_config_unless_given() -> None:
    config = tiny("llama")
    config.dtype = BF16
    assert {row.dtype for row in declare(config)[0].memories[0].rows} == {BF16}
    assert {row.dtype for row in declare(config, dtype=FP32)[0].memories[0].rows} == {FP32}
    assert config.dtype == BF16


def test_nothing_is_changed() -> None:
    model = AutoModelForCausalLM.from_config(tiny("qwen3_next"), dtype=BF16, attn_implementation="sdpa").train()
    before = (model.config.to_dict(), {name: tensor.clone() for name, tensor in model.state_dict().items()})
    seed = torch.get_rng_state()
    declare(model)
    assert torch.equal(torch.get_rng_state(), seed)
    assert model.config.to_dict() == before[0] and model.config._attn_implementation == "sdpa" and model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[1][name])


@pytest.mark.parametrize(
    ("model_type", "options", "words"),
    [
        (
            "qwen2",
            {"num_hidden_layers": 2, "layer_types": ["full_attention", "window_attention"]},
            "unknown kinds .*window_attention.*known are full_attention",
        ),
        ("openai-gpt", {}, "takes no cache"),
        ("t5", {}, "has an encoder"),
        ("llama", {"num_hidden_layers": 0}, "no layers"),
    ],
)
def test_refused(model_type: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        declare(AutoConfig.for_model(model_type, **options))


@pytest.mark.parametrize("source", [None, "llama", torch.nn.Linear(2, 2), {"num_hidden_layers": 2}])
def test_no_model(source: object) -> None:
    with pytest.raises(PlanError, match="model or config"):
        declare(source)


def test_transformers_is_imported_only_when_a_config_is_read() -> None:
    code = (
        "import sys, torch\n"
        "from torch_uma.layout import Full, Layer, Memory, Row\n"
        "from torch_uma.plan import plan\n"
        "row = Row(name='k', shape=(1,), dtype=torch.float32)\n"
        "plan([Layer(memories=(Memory(lifetime=Full(), rows=(row,)),))], memory='1MiB')\n"
        "assert 'transformers' not in sys.modules"
    )
    path = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})
