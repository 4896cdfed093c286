"""What older versions of transformers do differently, played on the present one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import build
from transformers import LlamaConfig, PreTrainedConfig, cache_utils

from torch_uma import CachePool
from torch_uma.integrations.transformers import versions
from torch_uma.integrations.transformers.declare import declare


def test_one_set_of_options_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(num_hidden_layers=3)
    old = (["sliding_attention", "full_attention"], {"sliding_window": 7})
    monkeypatch.setattr(cache_utils, "get_layer_types_and_kwargs", lambda config: old)
    kinds, options = versions.layer_kinds(config)
    assert kinds == ["sliding_attention", "full_attention", "dummy"]
    assert options == [{"sliding_window": 7}] * 3


def test_a_cache_by_its_older_names() -> None:
    def mamba(tokens: Any, cache_params: Any = None) -> None: ...
    def other(tokens: Any, past_key_values: Any = None) -> None: ...
    def none(tokens: Any) -> None: ...

    assert versions.cache_argument(mamba) == "cache_params"
    assert versions.cache_argument(other) == "past_key_values"
    assert versions.cache_argument(build("gpt_oss").forward) in ("cache", "past_key_values")
    assert versions.cache_argument(none) is None


def test_one_config_for_all_layers() -> None:
    class OldConfig:
        num_hidden_layers = 2

    config: Any = OldConfig()
    assert versions.layer_configs(config) == [config, config]
    present: PreTrainedConfig = LlamaConfig(num_hidden_layers=2)
    assert len(versions.layer_configs(present)) == 2


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_states_can_be_indexed_as_models_did_before_5_21(name: str) -> None:
    model = build(name, attention="eager")
    pool = CachePool(declare(model), memory="4MiB", device="cpu")
    sequence = pool.add()
    with torch.no_grad(), pool.step({sequence: 5}) as cache:
        model(torch.arange(5)[None], cache=cache, **cache.inputs())
    with torch.no_grad(), pool.step({sequence: 1}) as cache:
        state_layers = [index for index, is_linear in enumerate(cache.is_linear) if is_linear]
        assert state_layers
        for index in state_layers:
            for kind in ("conv", "recurrent"):
                indexed = getattr(cache.layers[index], f"{kind}_states")[0]
                asked = getattr(cache, f"get_{kind}_state")(index)
                assert torch.equal(indexed, asked) and indexed.data_ptr() == asked.data_ptr()
        model(torch.tensor([[5]]), cache=cache, **cache.inputs())
