"""UnifiedCache when things go another way: hooks, interruptions, refusals, copies, states looked at from outside."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from test_generate import LENGTHS, MEMORY, MODELS, NUM_NEW, assert_all_free, expected, generate, model_of, poisoned
from tiny_models import assert_same_tokens, prompts
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

import torch_uma

torch.set_num_threads(1)


@pytest.mark.parametrize("place", ["self_attn", "linear_attn.in_proj_ba", "mamba.in_proj", "mamba.out_proj", "mlp"])
def test_a_hook_may_use_the_pool_in_the_middle_of_a_forward(place: str) -> None:
    for name in MODELS:
        model = model_of(name)
        pool = torch_uma.CachePool(model, memory=MEMORY, page_size=4)
        torch_uma.testing.poison(pool)
        others = [pool.add() for _ in range(4)]
        for other in others[::2]:  # states at no stride are worked on in copies
            other.free()
        cache = torch_uma.UnifiedCache(model, pool=pool)

        def look(*_: Any, pool: torch_uma.CachePool = pool, cache: torch_uma.UnifiedCache = cache) -> None:
            torch_uma.testing.scramble(pool, 1)
            pool.compact()
            pool.add(3).free()
            pool.check()
            cache.get_seq_length()

        modules = [module for path, module in model.named_modules() if path.endswith(place)]
        hooks = [module.register_forward_pre_hook(look) for module in modules]
        try:
            tokens = generate(model, prompts(LENGTHS), cache=cache, max_new_tokens=12)
        finally:
            for hook in hooks:
                hook.remove()
        assert torch.equal(tokens, expected(name, "eager", False)[:, : tokens.shape[1]])


@pytest.mark.parametrize("name", MODELS)
def test_a_forward_whose_step_was_ended_meanwhile_says_so(name: str) -> None:
    model = model_of(name)
    inputs = prompts(LENGTHS)
    cache = poisoned(model)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: copy.deepcopy(cache) and None)
    with pytest.raises(torch_uma.SequenceError, match="from its beginning"):
        generate(model, inputs, cache=cache)
    hook.remove()
    assert cache.get_seq_length() == 0
    tokens = generate(model, inputs, cache=cache)
    assert_same_tokens(model, tokens, expected(name, "eager", False), inputs["attention_mask"])


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_states_can_be_looked_at_between_forwards(name: str) -> None:
    model = model_of(name)
    inputs = prompts(LENGTHS)
    reference = DynamicCache(config=model.config)
    cache = poisoned(model)
    assert cache.get_conv_state(0) is None
    for form in (reference, cache):
        first = generate(model, inputs, cache=form, max_new_tokens=10)
    for layer, kind in enumerate(model.config.layer_types):
        if kind == "linear_attention":
            for state, other in (
                (cache.get_conv_state(layer), reference.layers[layer].conv_states[0]),
                (cache.get_recurrent_state(layer), reference.layers[layer].recurrent_states[0]),
            ):
                assert state is not None and other is not None and torch.allclose(state, other, atol=1e-4)
                state.fill_(float("nan"))  # a copy
    assert cache.get_seq_length() == first.shape[1] - 1
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 10), value=1)
    tokens = generate(model, {"input_ids": first, "attention_mask": mask}, cache=cache, max_new_tokens=NUM_NEW - 10)
    assert_same_tokens(model, tokens, expected(name, "eager", False), inputs["attention_mask"])


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_that_stopped_in_the_last_layer_is_taken_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name)
    inputs = prompts(LENGTHS)
    cache = poisoned(model)
    last = cache.layers[-1]
    method = "update_recurrent_state" if hasattr(last, "update_recurrent_state") else "update"
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(last, method, lambda *_, **__: 1 / 0)
        generate(model, inputs, cache=cache)
    assert cache.get_seq_length() == 0
    tokens = generate(model, inputs, cache=cache)
    assert_same_tokens(model, tokens, expected(name, "eager", False), inputs["attention_mask"])


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_cannot_be_made_leave_those_there_are(name: str) -> None:
    model = model_of(name)
    pool = torch_uma.CachePool(model, memory=MEMORY, max_sequences=4)
    cache = torch_uma.UnifiedCache(model, pool=pool)
    with pytest.raises(torch_uma.SequenceError, match="max_sequences"):
        generate(model, prompts((4,) * 5), cache=cache)
    generate(model, prompts(LENGTHS), cache=cache, max_new_tokens=2)
    for change in (
        lambda: copy.deepcopy(cache),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.reorder_cache(torch.tensor([1, 1, 1])),
    ):
        with pytest.raises(torch_uma.SequenceError, match="max_sequences"):
            change()
    with pytest.raises(torch_uma.SequenceError, match="row 7 was asked for"):
        cache.batch_select_indices(torch.tensor([0, 0, 7]))
    assert cache.batch_size == 3
    pool.add().free()
    assert torch_uma.UnifiedCache(model, memory=MEMORY, max_sequences=7).pool.sequences.length.shape == (7,)


@pytest.mark.parametrize("page_size", [1, 16])
def test_room_for_max_tokens_is_enough_for_any_way_there(page_size: int) -> None:
    model = model_of("gpt_oss")
    for first, more in ((40, 50), (5, 60)):
        cache = torch_uma.UnifiedCache(model, max_tokens=first + more, page_size=page_size)
        with torch.no_grad():
            model(torch.zeros(2, first, dtype=torch.int64), cache=cache)
            model(torch.zeros(2, more, dtype=torch.int64), cache=cache)
        assert cache.get_seq_length() == first + more
        fork = copy.deepcopy(cache)
        with pytest.raises(torch_uma.OutOfMemory, match=f"max_tokens={first + more}"), torch.no_grad():
            model(torch.zeros(2, 100, dtype=torch.int64), cache=fork)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("own", [True, False])
def test_what_is_expected_has_room_in_one_run(name: str, own: bool) -> None:
    model = model_of(name)
    pool = None if own else torch_uma.CachePool(model, memory=MEMORY)
    cache = torch_uma.UnifiedCache(model, pool=pool)
    cache.expect(len(LENGTHS), 110)
    assert cache.batch_size == len(LENGTHS) and cache.get_seq_length() == 0
    if own:
        assert cache.pool.plan.arena_bytes < MEMORY
    torch_uma.testing.poison(cache.pool)
    tokens = generate(model, prompts(LENGTHS), cache=cache)
    assert_same_tokens(model, tokens, expected(name, "eager", False), prompts(LENGTHS)["attention_mask"])
    full = model.config.layer_types.index("full_attention")
    assert cache.paths()[full] == "view"
    cache.pool.check()


def test_what_cannot_be_expected_changes_nothing() -> None:
    model = model_of("gpt_oss")
    cache = torch_uma.UnifiedCache(model, memory=MEMORY)
    for batch_size, max_tokens in ((0, 5), (2, 0), (1.5, 5), (2, "9")):
        with pytest.raises(torch_uma.PlanError):
            cache.expect(batch_size, max_tokens)
    with pytest.raises(torch_uma.OutOfMemory):
        cache.expect(2, 10**6)
    assert not cache.is_initialized
    generate(model, prompts((4, 6)), cache=cache, max_new_tokens=5)
    with pytest.raises(torch_uma.SequenceError, match="holds 2 rows and cannot expect 3"):
        cache.expect(3, 50)
    live = cache.pool.stats().live_bytes
    with pytest.raises(torch_uma.OutOfMemory):
        cache.expect(2, 10**6)
    assert cache.pool.stats().live_bytes == live
    cache.expect(2, 200)
    assert cache.pool.stats().live_bytes > live
    cache.pool.check()


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_made_in_inference_mode_serves_outside_of_it(name: str) -> None:
    model = model_of(name)
    inputs = prompts(LENGTHS)
    with torch.inference_mode():
        cache = poisoned(model)
        first = generate(model, inputs, cache=cache, max_new_tokens=3)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1)
    longer = {"input_ids": first.clone(), "attention_mask": mask}
    tokens = generate(model, longer, cache=cache, max_new_tokens=20)
    assert torch.equal(tokens, expected(name, "eager", False)[:, : tokens.shape[1]])


def test_a_cache_is_copied_by_forking_and_cannot_be_pickled() -> None:
    model = model_of("gpt_oss")
    cache = poisoned(model)
    generate(model, prompts((4, 6)), cache=cache, max_new_tokens=5)
    other = copy.copy(cache)
    del cache
    gc.collect()
    assert other.get_seq_length() == 10
    with pytest.raises(TypeError, match="deepcopy"):
        pickle.dumps(other)


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_is_not_pickled(name: str) -> None:
    cache = torch_uma.UnifiedCache(model_of(name), max_tokens=9)
    for _ in range(2):
        for layer in cache.layers:
            with pytest.raises(TypeError, match="of the whole cache forks it"):
                pickle.dumps(layer)
        generate(model_of(name), prompts((4,)), cache=cache, max_new_tokens=2)


def test_a_looped_model_finds_all_its_layers() -> None:
    config = AutoConfig.for_model(
        "dory", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, head_dim=16,
        vocab_size=260, num_hidden_layers=6, n_input_layers=2, n_recurrent_layers=2, n_output_layers=2,
        n_recurrent_loops=3, layer_types=["sliding_attention", "mlp", "full_attention", "mlp", "full_attention", "mlp"],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    cache = torch_uma.UnifiedCache(model, memory=MEMORY)
    num_layers = len(cache.layers)
    tokens = generate(model, prompts((7,)), cache=cache, max_new_tokens=9)
    assert torch.equal(tokens, generate(model, prompts((7,)), max_new_tokens=9))
    assert len(cache.layers) == num_layers > model.config.num_hidden_layers


@pytest.mark.parametrize("by", ["step", "cache"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_more_layers_is_told_so(name: str, by: str) -> None:
    model = model_of(name)
    pool = torch_uma.CachePool(model_of(name), memory=MEMORY)
    pool.plan = dataclasses.replace(pool.plan, layers=pool.plan.layers[:-1])
    sequence = pool.add()
    with (
        pytest.raises(torch_uma.PlanError, match=f"a layer .*plan has {len(pool.plan.layers)} layers"),
        torch.no_grad(),
    ):
        if by == "step":
            with pool.step({sequence: 2}) as cache:
                model(torch.zeros(1, 2, dtype=torch.int64), cache=cache)
        else:
            cache = torch_uma.UnifiedCache(model, memory=MEMORY)
            del cache.layers[-1]
            model(torch.zeros(1, 2, dtype=torch.int64), cache=cache)
    assert sequence.length == 0
    pool.check()


def dropped(model: Any, pool: torch_uma.CachePool, by: str) -> None:
    """Drops a cache that holds rows, and where there are states an open step, in the way of `by`."""
    held = [torch_uma.UnifiedCache(model, pool=pool)]
    generate(model, prompts((4, 6)), cache=held[0], max_new_tokens=5)
    match by:
        case "reference":
            held.clear()
        case "thread":
            thread = threading.Thread(target=held.clear)
            thread.start()
            thread.join()
        case "collector":
            held.append(held)  # type: ignore[arg-type]


@pytest.mark.parametrize("by", ["reference", "thread", "collector"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_go_with_a_cache_wherever_it_is_dropped(
    name: str, by: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    model = model_of(name)
    pool = torch_uma.CachePool(model, memory=MEMORY)
    sequence = pool.add(5)
    gc.collect()
    gc.disable()
    try:
        dropped(model, pool, by)
        clear = torch_uma.books.Sequences._clear

        def collect(*arguments: Any) -> None:
            clear(*arguments)
            gc.collect()

        sequence.free()
        with monkeypatch.context() as patch:
            patch.setattr(torch_uma.books.Sequences, "_clear", collect)
            pool.stats()
    finally:
        gc.enable()
    pool.check()
    assert_all_free(pool)
    assert len(pool.sequences._free_rows) == len(pool.sequences.length)
    assert not [warning for warning in recwarn if issubclass(warning.category, pytest.PytestUnraisableExceptionWarning)]


@pytest.mark.parametrize("name", MODELS)
def test_the_memory_of_a_cache_goes_with_it_without_the_collector(name: str) -> None:
    model = model_of(name)
    cache = poisoned(model)
    generate(model, prompts((4, 6)), cache=cache, max_new_tokens=5)
    arena = weakref.ref(cache.pool.arena.bytes)
    gc.collect()
    gc.disable()
    try:
        del cache
        assert arena() is None
    finally:
        gc.enable()


def test_a_step_that_cannot_be_served_is_not_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("gpt_oss")
    cache = poisoned(model)
    with monkeypatch.context() as patch:
        patch.setattr("torch_uma.integrations.transformers.places.stores_of", lambda pool: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(model, prompts(LENGTHS), cache=cache)
    assert_all_free(cache.pool)
    tokens = generate(model, prompts(LENGTHS), cache=cache)
    assert_same_tokens(model, tokens, expected("gpt_oss", "eager", False), prompts(LENGTHS)["attention_mask"])


def test_a_pool_of_another_model_is_refused() -> None:
    model = model_of("bamba")
    pool = torch_uma.CachePool(model, memory=MEMORY)
    with pytest.raises(torch_uma.PlanError, match="another model"):
        torch_uma.UnifiedCache(model_of("gpt_oss"), pool=pool)
    fewer = type(model.config)(
        num_hidden_layers=2, attn_layer_indices=[1], hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8,
    )  # fmt: skip
    with pytest.raises(torch_uma.PlanError, match="2 layers, the pool 3"):
        torch_uma.UnifiedCache(fewer, pool=pool)
    cache = torch_uma.UnifiedCache(model.config, pool=pool)
    with pytest.raises(torch_uma.SequenceError, match="made for this model"), torch.no_grad():
        cache.update(*torch.zeros(2, 1, 1, 3, 32), 1)  # as many numbers as two heads of 16
    assert cache.get_seq_length() == 0
    for options in ({"page_size": 16}, {"dtype": torch.float32}, {"device": "cpu"}, {"max_sequences": 3}):
        with pytest.raises(torch_uma.PlanError, match=f"give either pool= or {next(iter(options))}="):
            torch_uma.UnifiedCache(model, pool=pool, **options)
    cache.reset()
    pool.close()
    with pytest.raises(torch_uma.ClosedError):
        torch_uma.UnifiedCache(model, pool=pool)


@pytest.mark.parametrize(
    ("made_for", "used_by", "message"),
    [
        ("gpt_oss", "qwen3_next", "layer 0 stores k, v; this forward wants a state there"),
        ("gpt_oss", "bamba", "layer 0 stores k, v; this forward wants a state there"),
        ("qwen3_next", "gpt_oss", "layer 0 stores conv, recurrent; this forward wants keys and values there"),
        ("bamba", "gpt_oss", "layer 0 stores conv, recurrent; this forward wants keys and values there"),
    ],
)
def test_a_cache_of_another_model_is_told_apart(made_for: str, used_by: str, message: str) -> None:
    cache = poisoned(model_of(made_for))
    with pytest.raises(torch_uma.PlanError, match=f"{message}: the cache was made for another model"):
        generate(model_of(used_by), prompts((4,)), cache=cache)
    cache.reset()
    tokens = generate(model_of(made_for), prompts((4,)), cache=cache, max_new_tokens=3)
    assert torch.equal(tokens, generate(model_of(made_for), prompts((4,)), max_new_tokens=3))


def test_layers_that_no_cache_serves_are_refused_at_once() -> None:
    rows = tuple(torch_uma.Row(name=name, shape=(2, 16), dtype=torch.float32) for name in "kvx")
    pool = torch_uma.CachePool(
        [torch_uma.Layer(memories=(torch_uma.Memory(lifetime=torch_uma.Full(), rows=rows),))], memory=MEMORY
    )
    sequence = pool.add()
    with pytest.raises(torch_uma.PlanError, match="one key and one value"), pool.step({sequence: 1}):
        pass
    assert sequence.length == 0
    pool.check()


@pytest.mark.parametrize("max_tokens", [0, -1, 2.5, "7"])
def test_a_length_that_is_none_is_refused(max_tokens: Any) -> None:
    with pytest.raises(torch_uma.PlanError, match="max_tokens of a cache is"):
        torch_uma.UnifiedCache(model_of("gpt_oss"), max_tokens=max_tokens)
    with pytest.raises(torch_uma.PlanError, match="max_sequences of a pool is"):
        torch_uma.UnifiedCache(model_of("gpt_oss"), max_sequences=max_tokens)


def test_an_arena_that_is_full_is_out_of_memory() -> None:
    config = LlamaConfig(
        vocab_size=260, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        num_hidden_layers=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    cache = torch_uma.UnifiedCache(model, memory=40 << 10, page_size=1)
    with pytest.raises(torch_uma.OutOfMemory, match="would not fit an empty arena.*as before") as caught:
        generate(model, prompts((5,)), cache=cache, max_new_tokens=400)
    assert not caught.value.quote.fits_empty
    cache.pool.check()


def test_no_more_tokens_are_removed_than_there_are() -> None:
    model = model_of("gpt_oss")
    cache = poisoned(model)
    generate(model, prompts((4, 6)), cache=cache, max_new_tokens=5)
    with pytest.raises(torch_uma.SequenceError, match="cannot remove 200 of 10 tokens"):
        cache.crop(-200)
    assert cache.get_seq_length() == 10
    cache.crop(-10)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("by", ["more tokens", "a larger batch", "forks", "repeats"])
@pytest.mark.parametrize("name", MODELS)
def test_an_arena_of_the_first_batch_says_so_when_it_is_full(name: str, by: str) -> None:
    model = model_of(name)
    cache = torch_uma.UnifiedCache(model, max_tokens=40)
    generate(model, prompts((8, 8)), cache=cache, max_new_tokens=2)
    held = [cache]
    inputs = prompts((8, 8))
    with pytest.raises(torch_uma.OutOfMemory, match="was sized for the first batch of 2 rows; give memory=$"):
        match by:
            case "more tokens":
                generate(model, prompts((999, 999)), cache=cache, max_new_tokens=2)
            case "a larger batch":
                cache.reset()
                generate(model, prompts((30,) * 9), cache=cache, max_new_tokens=2)
            case "forks":
                for _ in range(9):
                    held.append(copy.deepcopy(cache))
                    longer = torch.cat([inputs["input_ids"]] * 4, dim=1)
                    generate(model, {"input_ids": longer, "attention_mask": torch.ones_like(longer)}, cache=held[-1])
            case "repeats":
                cache.batch_repeat_interleave(9)
                longer = torch.cat([inputs["input_ids"]] * 4, dim=1).repeat_interleave(9, dim=0)
                generate(model, {"input_ids": longer, "attention_mask": torch.ones_like(longer)}, cache=cache)
    cache.pool.check()


def test_a_model_of_fewer_layers_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    options = {"vocab_size": 260, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 64}
    models = [LlamaForCausalLM(LlamaConfig(**options, num_hidden_layers=num)).eval() for num in (3, 2)]
    cache = torch_uma.UnifiedCache(models[0], memory=MEMORY)
    generate(models[0], prompts((5,)), cache=cache, max_new_tokens=3)
    cache.reset()
    assert not caplog.records
    generate(models[1], prompts((5,)), cache=cache, max_new_tokens=2)
    assert "ended before layer 2, so its tokens were not kept" in caplog.text
    assert "made for another model" in caplog.text
