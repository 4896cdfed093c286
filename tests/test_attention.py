"""Attention that reads the arena gives the tokens of stock attention, in generate() and in loops, whatever moves."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import zoo
from models import CHUNK, CONFIGS, build
from test_generate import MEMORY, NUM_NEW, Scramble, generate
from test_loop import Loop, alone, prompt_of
from tiny_models import assert_same_tokens, prompts
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import torch_uma
from torch_uma import CachePool, UnifiedCache
from torch_uma.integrations.transformers.attention import attention

torch.set_num_threads(1)

ATTENDING = ["gpt_oss", "qwen3_next", "bamba", *(name for name in CONFIGS if name != "mamba2")]
LENGTHS = {"llama4": (37, 37, 37)}  # padding shifts its chunks


@lru_cache
def model_of(name: str, attention: str) -> PreTrainedModel:
    return build(name, attention=attention)


@lru_cache
def expected(name: str) -> torch.Tensor:
    return generate(model_of(name, "eager"), prompts(LENGTHS.get(name, (5, 37, 20))))


def poisoned_pool(model: PreTrainedModel, page_size: int) -> CachePool:
    pool = CachePool(model, memory=MEMORY, page_size=page_size, max_sequences=16)
    torch_uma.testing.poison(pool)
    return pool


@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize("name", ATTENDING)
def test_generate_gives_the_tokens_of_stock_attention_while_pages_move(name: str, page_size: int) -> None:
    model = model_of(name, "torch_uma")
    inputs = prompts(LENGTHS.get(name, (5, 37, 20)))
    cache = UnifiedCache(model, memory=MEMORY, page_size=page_size)
    torch_uma.testing.poison(cache.pool)
    hook = Scramble(cache.pool)
    tokens = generate(model, inputs, cache=cache, logits_processor=LogitsProcessorList([hook]))
    assert_same_tokens(model, tokens, expected(name), inputs["attention_mask"])
    assert hook.num_calls == NUM_NEW and cache.pool.allocator.layout_version > 0
    assert "in place" in cache.paths() and not {"view", "gather"} & set(cache.paths())


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", ATTENDING)
def test_rows_of_unequal_length_need_no_mask(name: str, page_size: int) -> None:
    model = model_of(name, "torch_uma")
    pool = poisoned_pool(model, page_size)
    loop = Loop(model, pool)
    lengths = {loop.add(prompt_of(length), chunk=13): length for length in (5, 33, 18)}
    for step in range(NUM_NEW):
        sequences = list(lengths)
        with torch.no_grad(), pool.step(dict.fromkeys(sequences, 1)) as cache:
            assert set(cache.inputs()) == {"position_ids"}
            logits = loop.forward(sequences, cache)
        loop.keep(sequences, logits)
        torch_uma.testing.scramble(pool, step)
        pool.check()
        if step == 9:
            lengths[loop.fork(sequences[1])] = 33
        if step == 20:
            del lengths[sequences[0]]
            sequences[0].free()
    for sequence, length in lengths.items():
        prompt = prompt_of(length)
        tokens = loop.tokens[sequence]
        stock = alone(model_of(name, "eager"), prompt, tokens.shape[1] - length)
        assert_same_tokens(model, tokens, stock, torch.ones_like(prompt))


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "llama4", "deepseek_v3"])
def test_a_prompt_may_come_in_pieces(name: str) -> None:
    prompt = prompts((70,))["input_ids"]
    stock = model_of(name, "eager")(prompt, use_cache=False).logits
    model = model_of(name, "torch_uma")
    for sizes in ([70], [1] * 70, [13, 1, 30, 26], [CHUNK, 54]):
        pool = poisoned_pool(model, 7)
        sequence = pool.add()
        pieces = []
        for part in prompt.split(sizes, dim=1):
            with torch.no_grad(), pool.step({sequence: part.shape[1]}) as cache:
                pieces.append(model(part, cache=cache, **cache.inputs()).logits)
        torch.testing.assert_close(torch.cat(pieces, dim=1), stock, rtol=1e-3, atol=1e-3)


def test_a_model_that_views_what_attention_gives() -> None:
    """And not only reshapes it, which copies what is not contiguous."""
    ids = torch.randint(1, 90, (1, 41), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 5, "do_sample": False}
    model: Any = zoo.build("afmoe")
    expected = model.generate(ids, **options)
    model.set_attn_implementation("torch_uma")
    for cache in (UnifiedCache(model, memory=MEMORY), None):
        tokens = model.generate(ids, **options, prefill_chunk_size=20, cache=cache)
        assert_same_tokens(model, tokens, expected, options["attention_mask"])


@pytest.mark.parametrize("name", ["gpt_oss", "gemma2", "llama4", "deepseek_v3", "llama"])
def test_without_its_cache_it_attends_as_stock_attention_does(name: str) -> None:
    inputs = prompts((31, 9))
    model, stock = model_of(name, "torch_uma"), model_of(name, "eager")
    keep = inputs["attention_mask"].bool()
    torch.testing.assert_close(
        model(**inputs, use_cache=False).logits[keep],
        stock(**inputs, use_cache=False).logits[keep],
        rtol=1e-4,
        atol=1e-4,
    )
    for make in (lambda: DynamicCache(config=model.config), lambda: StaticCache(model.config, max_cache_len=64)):
        tokens = generate(model, inputs, max_new_tokens=12, cache=make(), disable_compile=True)
        assert torch.equal(tokens, generate(stock, inputs, max_new_tokens=12))


def test_sinks_of_each_query_take_a_share_of_what_it_sees() -> None:
    torch.manual_seed(3)
    query, key, value = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6)
    sinks = torch.randn(2, 4, 5, 1)
    found, _ = attention(torch.nn.Module(), query, key, value, None, sinks=sinks)
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) * 8**-0.5
    weights = torch.cat([scores.masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf), sinks], -1).softmax(-1)
    expected = weights[..., :5] @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_gradients_flow_without_a_cache_and_are_refused_with_it() -> None:
    model = build("gpt_oss", attention="torch_uma")
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    tokens = prompts((9,))["input_ids"]
    model(tokens, use_cache=False).logits.sum().backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0
    with pytest.raises(torch_uma.GradientError):
        model(tokens, cache=UnifiedCache(model, memory=MEMORY))


def test_the_implementation_may_change_between_two_calls() -> None:
    model = build("gpt_oss")
    inputs = prompts((9, 30))
    whole = generate(model, inputs, max_new_tokens=40)
    cache = UnifiedCache(model, memory=MEMORY)
    tokens, mask = inputs["input_ids"], inputs["attention_mask"]
    for implementation in ("torch_uma", "eager") * 2:
        model.set_attn_implementation(implementation)
        tokens = generate(model, {"input_ids": tokens, "attention_mask": mask}, max_new_tokens=10, cache=cache)
        mask = torch.cat([mask, mask.new_ones(2, 10)], dim=1)
    assert_same_tokens(model, tokens, whole, inputs["attention_mask"])


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_causal_mask_of_the_users_own(dtype: torch.dtype, per_head: bool) -> None:
    tokens = prompts((21,))["input_ids"]
    chance = torch.Generator().manual_seed(1)
    mask = torch.rand(1, 4 if per_head else 1, 21, 21, generator=chance) > 0.3
    mask = (mask | torch.eye(21, dtype=torch.bool)).tril()
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    given = mask if dtype == torch.bool else additive
    model = model_of("llama", "torch_uma")
    expected_logits = model_of("llama", "eager")(tokens, attention_mask=additive, use_cache=False).logits
    for cut in (21, 13):
        cache = UnifiedCache(model, memory=MEMORY)
        with torch.no_grad():
            logits = [
                model(tokens[:, start:end], attention_mask=given[:, :, start:end, :end], cache=cache).logits
                for start, end in ((0, cut), (cut, 21))
                if start < end
            ]
        torch.testing.assert_close(torch.cat(logits, dim=1), expected_logits, rtol=1e-4, atol=1e-4)


def test_an_announced_step_is_given_up_when_attention_changes() -> None:
    model = build("llama", attention="torch_uma")
    cache = UnifiedCache(model, memory=MEMORY)
    tokens = prompts((9,))["input_ids"]
    with torch.no_grad():
        model(tokens[:, :8], cache=cache)
        handle = model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(tokens[:, 8:], cache=cache)
        handle.remove()
        model.set_attn_implementation("eager")
        logits = model(tokens[:, 8:], cache=cache).logits
        torch.testing.assert_close(logits, model(tokens, use_cache=False).logits[:, -1:], rtol=1e-4, atol=1e-4)


def test_padding_that_is_not_all_in_front() -> None:
    inputs = prompts((40, 25))
    inputs["attention_mask"][0, 7:12] = 0
    inputs["attention_mask"][1, 30] = 0
    for name in ("llama", "gemma2"):
        tokens = generate(
            model_of(name, "torch_uma"), inputs, cache=UnifiedCache(model_of(name, "torch_uma"), memory=MEMORY)
        )
        assert torch.equal(tokens, generate(model_of(name, "eager"), inputs))


def test_a_chunked_layer_says_how_long_it_is() -> None:
    cache = UnifiedCache(model_of("llama4", "torch_uma"), memory=MEMORY, max_tokens=99)
    assert [cache.layers[index].get_max_length() for index in (0, 1)] == [CHUNK, 99]


def test_padding_that_would_shift_chunks_is_refused() -> None:
    model = model_of("llama4", "torch_uma")
    with pytest.raises(torch_uma.SequenceError, match=r"shifts their chunks of 16.*pool\.step"):
        generate(model, prompts((6, 37)), cache=UnifiedCache(model, memory=MEMORY))
    inputs = prompts((37 - CHUNK, 37))
    tokens = generate(model, inputs, cache=UnifiedCache(model, memory=MEMORY))
    assert torch.equal(tokens, generate(model_of("llama4", "eager"), inputs))


def test_a_model_that_hands_nothing_on_is_served_by_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before transformers 5.24, which does not give the keyword arguments to the cache."""
    update = UnifiedCache.update
    monkeypatch.setattr(UnifiedCache, "update", lambda self, key, value, layer, **_: update(self, key, value, layer))
    for name in ("gpt_oss", "llama"):
        cache = UnifiedCache(model_of(name, "torch_uma"), memory=MEMORY)
        inputs = prompts((5, 37, 20))
        tokens = generate(model_of(name, "torch_uma"), inputs, cache=cache)
        assert_same_tokens(model_of(name, "eager"), tokens, expected(name), inputs["attention_mask"])
        assert set(cache.paths()) == {"in place"}
    model = model_of("deepseek_v3", "torch_uma")
    with pytest.raises(torch_uma.SequenceError, match=r"or transformers 5\.24 or newer"):
        generate(model, prompts((9,)), cache=UnifiedCache(model, memory=MEMORY))


def test_a_model_whose_attention_is_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", attention="torch_uma")

    def own(module: Any, query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return query.transpose(1, 2), None

    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "get_interface", lambda name, default: own)
    cache = UnifiedCache(model, memory=MEMORY)
    with pytest.raises(torch_uma.SequenceError, match="attention of layer 0 did not read the arena"):
        generate(model, prompts((9,)), cache=cache)
    # Where there is but one such layer, it is told when the step ends.
    pool = CachePool(model, memory=MEMORY)
    sequence = pool.add()
    with pytest.raises(torch_uma.SequenceError, match="attention of layer 0"), pool.step({sequence: 1}) as one:
        one.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0, kwargs={})
    assert sequence.length == 0
    monkeypatch.undo()
    tokens = generate(model, prompts((9,)), cache=cache)
    assert torch.equal(tokens, generate(model_of("llama", "eager"), prompts((9,))))


def test_a_layer_that_shares_keys_reads_those_of_the_layer_that_stored_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(torch_uma.Row(name=name, shape=(2, 16), dtype=torch.float32) for name in "kv")
    layers = [
        torch_uma.Layer(memories=(torch_uma.Memory(lifetime=torch_uma.Window(9), rows=rows),)),
        torch_uma.Layer(shares=0),
    ]
    monkeypatch.setattr("torch_uma.integrations.transformers.made_for.is_used", lambda config: True)
    pool = CachePool(layers, memory=1 << 16, page_size=4)
    torch_uma.testing.poison(pool)
    sequence = pool.add()
    module = model_of("llama", "torch_uma").model.layers[0].self_attn
    chance = torch.Generator().manual_seed(5)
    keys, values = torch.randn(2, 1, 2, 30, 16, generator=chance)
    past = 0
    for num_new in (11, 1, 5, 1):
        end, first = past + num_new, max(0, past - 8)
        with torch.no_grad(), pool.step({sequence: num_new}) as cache:
            told: dict[str, Any] = {}
            key, value = cache.update(keys[:, :, past:end], values[:, :, past:end], 0, kwargs=told)
            ahead = torch.arange(past, end)[:, None] - torch.arange(first, end)
            mask = (ahead >= 0) & (ahead < 9)
            for given in (told, {}):  # the layer that stores, then the one that shares and is told nothing
                query = torch.randn(1, 4, num_new, 16, generator=chance)
                attended, _ = attention(module, query, key, value, None, **given)
                read = [each[:, :, first:end].repeat_interleave(2, dim=1) for each in (keys, values)]
                stock = torch.nn.functional.scaled_dot_product_attention(query, *read, attn_mask=mask)
                torch.testing.assert_close(attended, stock.transpose(1, 2), rtol=1e-4, atol=1e-4)
        past = end


def test_what_the_arena_cannot_follow_is_refused() -> None:
    """Keys or values that are changed after they were stored, attention to later tokens, masks made of the new keys."""
    model = model_of("llama", "torch_uma")
    module = model.model.layers[0].self_attn
    pool = CachePool(model, memory=MEMORY)
    sequence = pool.add()

    def attend(**changes: Any) -> None:
        with torch.no_grad(), pool.step({sequence: 3}) as cache:
            told: dict[str, Any] = {}
            key, value = torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16)
            key, value = cache.update(key, value, 0, kwargs=told)
            given = {"query": torch.zeros(1, 4, 3, 16), "key": key, "value": value, "attention_mask": None}
            attention(module, **given | told | changes)

    for changes, message in (
        ({"value": torch.zeros(1, 2, 3, 16)}, "changes keys or values"),
        ({"key": torch.ones(1, 2, 3, 16)}, "changes keys or values"),
        ({"is_causal": False}, "attends to later tokens"),
        ({"attention_mask": torch.ones(1, 1, 3, 2, dtype=torch.bool)}, "a mask of 2 columns for 3 keys"),
        ({"attention_mask": torch.ones(1, 1, 3, 3, dtype=torch.bool)}, "shows later tokens"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "shows later tokens"),
        ({"attention_mask": torch.zeros(1, 1, 3, 5)}, "for rows of 3 tokens"),
        ({"attention_mask": torch.ones(1, 1, 3, 3, dtype=torch.int64)}, "for rows of 3 tokens"),
        ({"query": torch.zeros(1, 4, 1, 16)}, "1 queries for 3 new tokens"),
        ({"dropout": 0.1}, "no dropout"),
    ):
        with pytest.raises(torch_uma.SequenceError, match=message):
            attend(**changes)
    pool.check()


def test_a_mask_that_leaves_tokens_out_is_refused() -> None:
    model = model_of("llama", "torch_uma")
    cache = UnifiedCache(model, memory=MEMORY)
    inputs = prompts((12, 12))
    with torch.no_grad():
        model(inputs["input_ids"][:, :8], cache=cache)
        with pytest.raises(
            torch_uma.SequenceError, match="attention_mask of 4 columns was given for rows of 12 tokens"
        ):
            model(inputs["input_ids"][:, 8:], attention_mask=inputs["attention_mask"][:, 8:], cache=cache)
        logits = model(inputs["input_ids"][:, 8:], attention_mask=inputs["attention_mask"], cache=cache).logits
    stock = model(inputs["input_ids"], use_cache=False).logits[:, 8:]
    torch.testing.assert_close(logits, stock, rtol=1e-4, atol=1e-4)


def test_latents_whose_projection_is_hooked_are_refused() -> None:
    model = build("deepseek_v3", attention="torch_uma")
    projection = model.model.layers[0].self_attn.kv_b_proj
    handle = projection.register_forward_hook(lambda module, given, result: result * 2)
    with pytest.raises(torch_uma.PlanError, match="without bias or hooks"):
        generate(model, prompts((9,)), cache=UnifiedCache(model, memory=MEMORY))
    handle.remove()
    generate(model, prompts((9,)), cache=UnifiedCache(model, memory=MEMORY), max_new_tokens=3)


def test_a_cache_of_another_config_serves_stock_keys() -> None:
    model = model_of("llama", "torch_uma")
    cache = UnifiedCache(build("llama").config, memory=MEMORY)
    tokens = generate(model, prompts((9, 9)), cache=cache)
    assert torch.equal(tokens, generate(model_of("llama", "eager"), prompts((9, 9))))
