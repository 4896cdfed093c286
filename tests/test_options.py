"""What a request may ask for: the options of `generate()`, read as it reads them; what is not served is named."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from choosing import ENDS
from models import build
from transformers import GenerationConfig, TextStreamer, WatermarkingConfig

from torch_uma.errors import PlanError
from torch_uma.integrations.transformers.serving.options import resolve

MODEL = build("llama")


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("num_beams", 2, r"call model\.generate\(\)"),
        ("num_return_sequences", 3, "submit the prompt as often"),
        ("force_words_ids", [[3]], "call"),
        ("dola_layers", "low", "call"),
        ("guidance_scale", 1.5, "second forward"),
        ("watermarking_config", WatermarkingConfig(bias=2.0), "states of its own"),
        ("prompt_lookup_num_tokens", 4, "torch_uma.speculate"),
        ("assistant_early_exit", 1, "call"),
        ("token_healing", True, "before it is submitted"),
        ("output_scores", True, "logprobs=True"),
        ("output_logits", True, "logprobs=True"),
        ("output_attentions", True, "call"),
        ("output_hidden_states", True, "call"),
        ("assistant_model", MODEL, "call"),
        ("custom_generate", print, "call"),
        ("streamer", TextStreamer, "streamers=, one for each"),
        ("cache", object(), "pool"),
        ("past_key_values", object(), "pool"),
        ("cache_implementation", "static", "pool"),
        ("attention_mask", torch.ones(1, 3), "no padding"),
        ("negative_prompt_ids", torch.ones(1, 3), "second forward"),
        ("inputs_embeds", torch.ones(1, 3, 64), "token ids"),
        ("pixel_values", torch.ones(1), "it takes the fields of a GenerationConfig"),
        ("max_tokens", 3, "it takes the fields of a GenerationConfig"),
    ],
)
def test_what_a_loop_has_no_part_in_is_refused_by_name(option: str, value: Any, remedy: str) -> None:
    with pytest.raises(PlanError, match=f"{option}.*{remedy}"):
        resolve(MODEL, [1, 2, 3], **{option: value})


def test_what_a_config_asks_for_is_refused_as_well() -> None:
    for config in (GenerationConfig(num_beams=4), GenerationConfig(num_beams=2, do_sample=True)):
        with pytest.raises(PlanError, match="num_beams"):
            resolve(MODEL, [1], config)
    with pytest.raises(PlanError, match=r"not dict; GenerationConfig\(\*\*options\) makes"):
        resolve(MODEL, [1], {"max_new_tokens": 3})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="contrastive search is not served"):
        resolve(MODEL, [1], GenerationConfig(penalty_alpha=0.6, top_k=4))
    with pytest.raises(PlanError, match="'bad'.* there is no tokenizer; give tokenizer="):
        resolve(MODEL, [1], stop_strings="bad")


def test_an_option_that_changes_nothing_is_no_reason_to_refuse() -> None:
    unset = {"num_beams": 1, "num_return_sequences": 1, "guidance_scale": 1.0, "output_scores": False, "streamer": None}
    sampling, _ = resolve(MODEL, [1, 2], max_new_tokens=4, **unset, use_cache=False, return_dict_in_generate=True)
    assert sampling is resolve(MODEL, [1, 2], max_new_tokens=4)[0]


def test_what_transformers_refuses_is_refused_with_its_words() -> None:
    with pytest.raises(ValueError, match="temperature"):
        resolve(MODEL, [1, 2], do_sample=True, temperature=-1.0)
    with pytest.raises(ValueError, match="`max_length` is set to 3"):
        resolve(MODEL, [1, 2, 3], max_length=3)
    with pytest.raises(ValueError, match="max_new_tokens"):
        resolve(MODEL, [1, 2, 3], max_new_tokens=0)
    with pytest.raises(PlanError, match="a prompt of no tokens"):
        resolve(MODEL, [])


def test_overrides_go_before_the_config_and_that_before_the_defaults_of_the_model() -> None:
    model = build("llama")
    model.generation_config.update(do_sample=True, temperature=0.4, eos_token_id=ENDS, max_new_tokens=7)
    before = copy.deepcopy(model.generation_config)
    config = GenerationConfig(temperature=0.5, max_new_tokens=8)
    told: list[tuple[GenerationConfig | None, dict[str, Any], float, int]] = [
        (None, {}, 0.4, 7),
        (config, {}, 0.5, 8),
        (config, {"temperature": 0.6, "max_new_tokens": 9}, 0.6, 9),
    ]
    for given, overrides, temperature, max_new_tokens in told:
        sampling, stopping = resolve(model, [1, 2], given, **overrides)
        assert sampling.do_sample and sampling.processors[0].temperature == temperature
        assert stopping.max_new_tokens == max_new_tokens and stopping.eos_token_ids == frozenset(ENDS)
    assert model.generation_config == before and config == GenerationConfig(temperature=0.5, max_new_tokens=8)


def test_a_length_by_default_ends_where_the_positions_of_the_model_do() -> None:
    model = build("llama")
    model.config.max_position_embeddings = 30
    assert resolve(model, [1] * 5)[1].max_new_tokens == 20
    assert resolve(model, [1] * 18)[1].max_new_tokens == 12
    assert resolve(model, [1] * 18, max_new_tokens=40)[1].max_new_tokens == 40


def test_no_prompt_is_too_long_to_be_read() -> None:
    sampling, stopping = resolve(MODEL, list(range(200)) * 50, max_length=10_003)
    assert stopping.max_new_tokens == 3 and not sampling.processors
    assert resolve(MODEL, [1], max_new_tokens=sys.maxsize - 1)[1].max_new_tokens == sys.maxsize - 1
