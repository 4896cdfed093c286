"""What models allow of a forward over several sequences is found by a few forwards, in a pool apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from served import assert_all_free, model_of, tight_pool

import torch_uma
from torch_uma.errors import PlanError, SequenceError
from torch_uma.integrations.transformers.serving import trial
from torch_uma.integrations.transformers.serving.traits import traits_of

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("name", "attention", "packed", "even"),
    [
        ("llama", "torch_uma", True, False),
        ("llama", "sdpa", False, False),
        ("gpt2", "torch_uma", True, False),
        ("roberta", "torch_uma", True, False),  # which counts from 2 where nobody tells it positions
        ("opt", "torch_uma", False, False),  # which makes a mask of as many columns as there are tokens
        ("gpt_oss", "eager", False, False),
        ("qwen3_next", "torch_uma", False, False),
        ("mamba", "eager", False, False),
        ("deepseek_v32", "torch_uma", False, False),
        ("deepseek_v4", "eager", False, True),
        ("minimax_m3_vl_text", "eager", False, True),
        ("inkling_text", "torch_uma", False, True),  # whose bias is made of columns
        ("git", "eager", False, True),  # which takes positions and counts columns
        ("roformer", "eager", False, True),
    ],
)
def test_what_sequences_in_one_forward_may_be(name: str, attention: str, packed: bool, even: bool) -> None:
    model = model_of(name, attention)
    pool = tight_pool(model, "2MiB")
    traits = traits_of(model, pool)
    assert (traits.packed, traits.even) == (packed, even)
    assert_all_free(pool)


@pytest.mark.parametrize(
    ("name", "attention", "error", "message"),
    [
        ("kosmos_2_5_text_model", "eager", PlanError, "counts positions"),
        ("moshi", "torch_uma", PlanError, "makes masks"),
        ("bloom", "torch_uma", PlanError, "another implementation"),
        ("cpmant", "eager", SequenceError, "has 33"),
        ("jetmoe", "torch_uma", SequenceError, "changes keys"),
        ("blip_text_model", "eager", PlanError, "takes no cache"),
    ],
)
def test_who_cannot_be_served_is_told_why(name: str, attention: str, error: type[Exception], message: str) -> None:
    model = model_of(name, attention)
    with pytest.raises(error, match=message):
        traits_of(model, tight_pool(model, "2MiB"))


def test_a_model_is_tried_once_with_each_attention() -> None:
    model = torch_uma_model()
    num_forwards = 0

    def count(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1

    model.register_forward_hook(count, with_kwargs=True)
    numbers = []
    for attention in ("torch_uma", "torch_uma", "eager", "torch_uma"):
        model.set_attn_implementation(attention)
        traits_of(model, tight_pool(model, "2MiB"))
        numbers.append(num_forwards)
    assert 0 < numbers[0] == numbers[1] < numbers[2] == numbers[3]


def test_dropout_is_no_reason_to_refuse_a_model() -> None:
    model = torch_uma_model()
    model.config.attention_dropout = 0.5
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    model.set_attn_implementation("eager")
    model.train()
    assert not traits_of(model, tight_pool(model, "2MiB")).even
    assert model.training


def torch_uma_model() -> Any:
    """A model that nobody has tried yet."""
    model = model_of.__wrapped__("llama", "torch_uma")
    assert model not in trial._TRIED
    return model


@pytest.mark.parametrize(
    ("name", "attention", "even"),
    [("gpt_oss", "torch_uma", False), ("git", "eager", True), ("roformer", "eager", True)],
)
def test_logits_in_fewer_bits_may_round(name: str, attention: str, even: bool) -> None:
    model = model_of.__wrapped__(name, attention).to(torch.bfloat16)
    traits = traits_of(model, torch_uma.CachePool(model, memory="2MiB"))
    assert traits.packed is (attention == "torch_uma") and traits.even is even
    with pytest.raises(PlanError, match="counts positions"):
        other = model_of.__wrapped__("kosmos_2_5_text_model", "eager").to(torch.bfloat16)
        traits_of(other, torch_uma.CachePool(other, memory="2MiB"))


def test_who_counts_columns_is_known_by_what_it_does_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_COUNTS_COLUMNS", frozenset())
    for name in ("git", "roformer", "trocr"):
        model = model_of.__wrapped__(name, "eager")
        assert traits_of(model, tight_pool(model, "2MiB")).even
    monkeypatch.setattr(trial, "_COUNTS_BY_ITSELF", frozenset())
    model = model_of.__wrapped__("kosmos_2_5_text_model", "eager")
    with pytest.raises(PlanError, match="counts positions"):
        traits_of(model, tight_pool(model, "2MiB"))
