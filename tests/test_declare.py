"""What is declared for a model is what transformers' own cache holds after the model ran."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache
from zoo import COMMON, SLIDING_AND_FULL, WINDOW, build, tiny

from torch_uma.errors import PlanError
from torch_uma.integrations.transformers.declare import declare
from torch_uma.layout import Chunk, Full, Layer, State, Window
from torch_uma.plan import plan

BF16, FP32 = torch.bfloat16, torch.float32
NUM_TOKENS = 11
# One of each form of memory; tests/test_models.py looks at every type.
MODELS = (
    "llama",
    "gpt_oss",
    "gemma2",
    "gemma3_text",
    "mistral",
    "mimo_v2_flash",
    "llama4_text",
    "qwen3_next",
    "qwen3_5_text",
    "olmo_hybrid",
    "lara_mini",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "mamba",
    "mamba2",
    "falcon_mamba",
    "jamba",
    "nemotron_h",
    "zamba2",
    "lfm2",
    "deepseek_v3",
    "deepseek_v32",
    "longcat_flash",
    "kimi_linear",
    "gemma3n_text",
    "gemma4_text",
    "inkling_text",
    "glm5_next_text",
    "zaya",
    "lfm3",
    "bailing_hybrid",
    "hy_v4",
)


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
    assert lifetimes(declare(tiny(model_type))) == expected


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
    text = {**COMMON, "sliding_window": WINDOW, "layer_types": SLIDING_AND_FULL}
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
        ("xlm", {}, "give the model instead of its config"),
        ("mllama", {}, "layer 3 .* stores nothing for text alone"),
        ("t5", {}, "has an encoder"),
        ("llama", {"num_hidden_layers": 0}, "no layers"),
    ],
)
def test_refused(model_type: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        declare(AutoConfig.for_model(model_type, **options))


def test_a_model_whose_code_looks_at_numbers_is_run_and_stays_as_it_was() -> None:
    model = build("jetmoe").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seed = torch.get_rng_state()
    assert [stored(layer) for layer in declare(model)] == [{"k": ((2, 20), FP32), "v": ((2, 20), FP32)}] * 4
    assert torch.equal(torch.get_rng_state(), seed) and model.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


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
