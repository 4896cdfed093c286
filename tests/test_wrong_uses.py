"""Wrong uses of a cache or a pool say what was asked and what there is, and leave what there was usable."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from models import build
from test_generate import MEMORY, Inputs, StopAt, assert_all_free, generate, poisoned
from tiny_models import assert_same_tokens, prompts
from transformers import PreTrainedModel, StoppingCriteriaList

import torch_uma

torch.set_num_threads(1)

CASES = [("llama", "sdpa"), ("gpt_oss", "torch_uma"), ("bamba", "sdpa"), ("mamba2", "eager")]
LENGTHS = (9, 30)
NUM_NEW = 12


def assert_serves(model: PreTrainedModel, cache: torch_uma.UnifiedCache, inputs: Inputs | None = None) -> None:
    """The cache gives the tokens that a new one gives."""
    inputs = prompts(LENGTHS) if inputs is None else inputs
    tokens = generate(model, inputs, cache=cache, max_new_tokens=NUM_NEW)
    reference = generate(model, inputs, max_new_tokens=NUM_NEW)
    assert_same_tokens(model, tokens, reference, inputs["attention_mask"])
    cache.pool.check()


def moved(model: PreTrainedModel, to: Any) -> PreTrainedModel:
    return copy.deepcopy(model).to(to)


@pytest.mark.parametrize(("name", "attention"), CASES)
@pytest.mark.parametrize("to", [torch.bfloat16, "meta"])
def test_a_model_that_was_moved_is_told_so_by_both_sides(name: str, attention: str, to: Any) -> None:
    model = build(name, attention=attention)
    used = copy.deepcopy(model)
    inputs = prompts((12, 12))
    cache = poisoned(used)
    first = generate(used, inputs, cache=cache, max_new_tokens=2)
    used.to(to)  # in place, as users do it
    names = ("float32", "bfloat16") if to == torch.bfloat16 else ("cpu", "meta")
    device = used.device
    with pytest.raises(torch_uma.SequenceError, match=f"{names[0]}.*{names[1]}.*move the model"), torch.no_grad():
        used(first[:, -1:].to(device), cache=cache)
    with pytest.raises(torch_uma.SequenceError, match=f"{names[0]}.*{names[1]}.*move the model"), torch.no_grad():
        used(first[:, -1:].expand(-1, 5).to(device), cache=cache)
    for module, original in zip(used.modules(), model.modules(), strict=True):  # back, without a rounding
        module._parameters, module._buffers = dict(original._parameters), dict(original._buffers)
    assert cache.get_seq_length() == 13
    rest = generate(used, {"input_ids": first}, cache=cache, max_new_tokens=5) if name != "mamba2" else None
    if rest is not None:
        assert torch.equal(rest, generate(model, inputs, max_new_tokens=7))
    cache.reset()
    assert_serves(used, cache)


@pytest.mark.parametrize(("name", "attention"), CASES)
@pytest.mark.parametrize("to", [torch.bfloat16, "meta"])
def test_a_pool_of_a_model_that_was_moved_says_so(name: str, attention: str, to: Any) -> None:
    model = build(name, attention=attention)
    pool = torch_uma.CachePool(model, memory=MEMORY)
    torch_uma.testing.poison(pool)
    sequence, tokens = pool.add(), prompts((9,))["input_ids"]
    other = moved(model, to)
    with (
        pytest.raises(torch_uma.SequenceError, match="move the model"),
        torch.no_grad(),
        pool.step({sequence: 9}) as cache,
    ):
        other(tokens.to(other.device), cache=cache)
    assert sequence.length == 0
    with torch.no_grad(), pool.step({sequence: 9}) as cache:
        logits = model(tokens, cache=cache, **cache.inputs()).logits
        assert torch.allclose(logits, model(tokens).logits, atol=1e-4)
    pool.check()


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_a_pool_of_another_dtype_is_refused_and_named(name: str, attention: str) -> None:
    model = build(name, attention=attention)
    pool = torch_uma.CachePool(model, memory=MEMORY)
    with pytest.raises(torch_uma.PlanError, match=r"torch\.float32.*torch\.bfloat16.*make a CachePool of this model"):
        torch_uma.UnifiedCache(moved(model, torch.bfloat16), pool=pool)
    assert_serves(model, torch_uma.UnifiedCache(model, pool=pool))
    gc.collect()
    assert_all_free(pool)


@pytest.mark.parametrize("attention", ["eager", "torch_uma"])
@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_a_cache_of_another_window_names_both(name: str, attention: str) -> None:
    model = build(name, attention=attention)
    config = copy.deepcopy(model.config)
    config.sliding_window = 8
    other = type(model)._from_config(config, attn_implementation=attention).eval().requires_grad_(False)
    other.load_state_dict(model.state_dict())
    cache = poisoned(model)
    for _ in range(2):
        with pytest.raises(torch_uma.PlanError, match=r"sliding_attention.*\b24\b.*\b8\b.*of this model"):
            generate(other, prompts(LENGTHS), cache=cache)
        assert_serves(model, cache)
        cache.reset()
    assert_serves(other, torch_uma.UnifiedCache(config, memory=MEMORY))
    with pytest.raises(torch_uma.PlanError, match="another model"):
        torch_uma.UnifiedCache(other, pool=cache.pool)
    with (
        pytest.raises(torch_uma.PlanError, match="sliding_attention"),
        torch.no_grad(),
        torch_uma.CachePool(model, memory=MEMORY) as pool,
        pool.step({pool.add(): 9}) as given,
    ):
        other(prompts((9,))["input_ids"], cache=given)


def test_autocast_is_no_other_dtype() -> None:
    model = build("llama", attention="sdpa")
    inputs = prompts((9, 30))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tokens = generate(model, inputs, cache=poisoned(model), max_new_tokens=4)
        assert torch.equal(tokens, generate(model, inputs, max_new_tokens=4))


def test_keys_of_other_heads_are_named_by_both_sides() -> None:
    model = build("llama", attention="sdpa")
    cache = poisoned(model)
    with pytest.raises(torch_uma.SequenceError, match=r"\(2, 16\).*\(4, 8\).*made for this model"), torch.no_grad():
        cache.update(torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 3, 8), 0)
    assert_serves(model, cache)


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_memory_that_ends_amid_generate_is_named_and_made_free(name: str, attention: str) -> None:
    model = build(name, attention=attention)
    inputs = prompts(LENGTHS)
    pool = torch_uma.CachePool(model, memory=MEMORY, page_size=4, max_sequences=10_000)
    torch_uma.testing.poison(pool)
    cache = torch_uma.UnifiedCache(model, pool=pool)
    hogs: list[torch_uma.Sequence] = []

    def fill() -> None:
        with pytest.raises(torch_uma.OutOfMemory):
            while True:
                hogs.append(pool.add(4))

    stop = StoppingCriteriaList([StopAt(33, fill)])
    if name == "mamba2":  # its states do not grow; another batch is what does not fit
        generate(model, inputs, cache=cache, max_new_tokens=4, stopping_criteria=stop)
        with pytest.raises(torch_uma.OutOfMemory, match="state"):
            cache.batch_repeat_interleave(2)
            generate(model, {"input_ids": inputs["input_ids"].repeat_interleave(2, 0)}, cache=cache)
    else:
        with pytest.raises(torch_uma.OutOfMemory, match=r"full.*rows of this cache hold \[\d+, \d+\] tokens") as caught:
            generate(model, inputs, cache=cache, max_new_tokens=60, stopping_criteria=stop)
        assert caught.value.quote.relief
    pool.check()
    for hog in hogs:
        hog.free()
    cache.reset()
    assert_serves(model, cache)


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_more_sequences_than_there_is_room_for_are_refused(name: str, attention: str) -> None:
    model = build(name, attention=attention)
    cache = poisoned(model, max_sequences=3)
    with pytest.raises(torch_uma.SequenceError, match="max_sequences"):
        generate(model, prompts((5, 6, 7, 8)), cache=cache)
    assert not cache.is_initialized
    assert_serves(model, cache)
    with pytest.raises(torch_uma.SequenceError, match="max_sequences"):
        cache.batch_repeat_interleave(2)
    cache.reset()
    assert_serves(model, cache)


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_rows_that_are_not_there_are_named(name: str, attention: str) -> None:
    model = build(name, attention=attention)
    inputs = prompts((12, 12))
    cache = poisoned(model)
    generate(model, inputs, cache=cache, max_new_tokens=2)
    for choose, wrong, message in (
        (cache.reorder_cache, torch.tensor([0, 2]), "row 2 was asked for of a cache of 2 rows"),
        (cache.batch_select_indices, torch.tensor([-3]), "row -3 was asked for of a cache of 2 rows"),
        (cache.batch_select_indices, torch.tensor([], dtype=torch.int64), "a selection without rows"),
        (cache.batch_select_indices, torch.tensor([False, False]), "a selection without rows"),
        (cache.batch_select_indices, torch.tensor([True]), r"a mask of \(1,\) says nothing of 2 rows"),
        (cache.batch_repeat_interleave, 0, "repeats of a row"),
        (cache.batch_repeat_interleave, -1, "repeats of a row"),
    ):
        with pytest.raises(torch_uma.SequenceError, match=message):
            choose(wrong)  # type: ignore[operator]
        assert (cache.batch_size, cache.get_seq_length()) == (2, 13)
    cache.pool.check()
    cache.reset()
    assert_serves(model, cache)


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_another_batch_over_the_same_rows_names_both(name: str, attention: str) -> None:
    model = build(name, attention=attention)
    cache = poisoned(model)
    generate(model, prompts((5, 6)), cache=cache, max_new_tokens=2)
    with pytest.raises(torch_uma.SequenceError, match="holds 2 rows, but the forward has a batch of 3; reset"):
        generate(model, prompts((9, 9, 9)), cache=cache)
    cache.reset()
    assert_serves(model, cache, prompts((9, 4, 9)))


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_what_was_freed_or_closed_says_so(name: str, attention: str) -> None:
    model = build(name, attention=attention)
    pool = torch_uma.CachePool(model, memory=MEMORY)
    cache = torch_uma.UnifiedCache(model, pool=pool)
    sequence = pool.add(3)
    sequence.free()
    with pytest.raises(torch_uma.SequenceError, match="freed"), pool.step({sequence: 3}):
        pass
    with pytest.raises(torch_uma.SequenceError, match="freed"):
        sequence.fork()
    assert_serves(model, cache)
    pool.close()
    with pytest.raises(torch_uma.ClosedError, match="closed"):
        generate(model, prompts(LENGTHS), cache=cache)
    with pytest.raises(torch_uma.ClosedError, match="closed"):
        pool.add(3)
    cache.reset()
    other = poisoned(model)
    assert_serves(model, other)


@pytest.mark.parametrize("kv_dtype", ["fp8", "float8", torch.int8, torch.float64, 8])
def test_a_dtype_in_which_keys_are_not_kept_is_refused(kv_dtype: Any) -> None:
    model = build("llama", attention="sdpa")
    for make in (torch_uma.UnifiedCache, torch_uma.CachePool, torch_uma.plan):
        with pytest.raises(torch_uma.PlanError, match="kv_dtype=.*torch.float8_e4m3fn, torch.float8_e5m2"):
            make(model, memory=MEMORY, kv_dtype=kv_dtype)
    pool = torch_uma.CachePool(model, memory=MEMORY)
    with pytest.raises(torch_uma.PlanError, match="give either pool= or kv_dtype="):
        torch_uma.UnifiedCache(model, pool=pool, kv_dtype=torch.float8_e4m3fn)
    with pytest.raises(torch_uma.PlanError, match="give either a plan or these"):
        torch_uma.CachePool(pool.plan, kv_dtype=torch.float8_e4m3fn)
    assert_serves(model, torch_uma.UnifiedCache(model, pool=pool))
