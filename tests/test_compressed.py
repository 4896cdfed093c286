"""DeepSeek-V4 over an arena: entries of groups of tokens, tokens that wait for their group, and keys stored once."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
from test_generate import Scramble, assert_all_free
from test_own import generate, poisoned, prompts
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, LogitsProcessorList, PreTrainedModel
from zoo import COMMON, EXPERTS

import torch_uma
from torch_uma.errors import OutOfMemory, PlanError, SequenceError
from torch_uma.integrations.transformers.declare import declare
from torch_uma.layout import Full, State, Window

torch.set_num_threads(1)

OPTIONS: dict[str, Any] = {
    **COMMON,
    **EXPERTS,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 24,
    "sliding_window": 8,
    # With few heads the indexer's scores tie at 0, and which entries it takes depends on how many there are.
    "o_groups": 2,
    "o_lora_rank": 12,
    "index_n_heads": 32,
    "index_head_dim": 20,
    "index_topk": 3,
    "hc_mult": 2,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
    "layer_types": [
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "sliding_attention",
        "compressed_sparse_attention",
    ],
}


@lru_cache
def model_of(last: str = "compressed_sparse_attention") -> PreTrainedModel:
    """A model whose last layer is of this kind, as a step ends with it."""
    config = AutoConfig.for_model("deepseek_v4", **OPTIONS)
    config.layer_types[-1] = last
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval().requires_grad_(False)


@lru_cache
def expected(num_rows: int, num_beams: int = 1, last: str = "compressed_sparse_attention") -> torch.Tensor:
    return generate(model_of(last), prompts(num_rows), num_beams=num_beams, max_new_tokens=40)


@pytest.mark.parametrize(("num_beams", "page_size"), [(1, 1), (1, 7), (3, 1), (3, 16)])
def test_tokens_are_those_of_the_default_cache(num_beams: int, page_size: int) -> None:
    model = model_of()
    cache = poisoned(model, page_size=page_size)
    moves = LogitsProcessorList([Scramble(cache.pool)])
    tokens = generate(model, prompts(2), cache=cache, num_beams=num_beams, max_new_tokens=40, logits_processor=moves)
    assert torch.equal(tokens, expected(2, num_beams))
    cache.reset()
    assert_all_free(cache.pool)
    assert torch.equal(generate(model, prompts(3), cache=cache, max_new_tokens=40), expected(3))
    assert cache.paths() == ["view"] * 4


def test_keys_and_entries_in_fewer_bits_and_what_chooses_them_in_all() -> None:
    model = model_of()
    cache = poisoned(model, kv_dtype="float8_e4m3fn", page_size=3)
    dtypes = {
        placed.row.name: placed.row.dtype for subpool in cache.pool.plan.subpools for placed in subpool.layout.rows
    }
    assert dtypes["k"] == dtypes["compressor"] == torch.float8_e4m3fn
    assert {dtype for name, dtype in dtypes.items() if "_" in name or name == "indexer"} == {torch.float32}
    ids = expected(2)
    with torch.no_grad():
        ours = model(ids[:, :30], cache=cache).logits
        torch_uma.testing.scramble(cache.pool, 1)
        cache.batch_select_indices(torch.tensor([1, 0]))
        again = model(ids[[1, 0], 30:31], cache=cache).logits[[1, 0], -1]
        whole = model(ids[:, :31], use_cache=False).logits
    for part, exact in ((ours, whole[:, :30]), (again, whole[:, 30])):
        assert part.isfinite().all()
        assert 1e-4 < (part - exact).abs().mean() / exact.abs().mean() < 0.2


@pytest.mark.parametrize("last", ["heavily_compressed_attention", "sliding_attention"])
def test_whatever_layer_comes_last(last: str) -> None:
    cache = poisoned(model_of(last), max_tokens=60)
    tokens = generate(model_of(last), prompts(2), cache=cache, max_new_tokens=40)
    assert torch.equal(tokens, expected(2, last=last))
    assert cache.get_seq_length() == tokens.shape[1] - 1


@pytest.mark.parametrize("chunk", [1, 5, 12])
def test_a_prompt_in_chunks_and_another_behind_it(chunk: int) -> None:
    model, ids = model_of(), prompts(2, 23)
    cache = poisoned(model, page_size=2)
    for num_more in (1, 6):
        tokens = generate(model, ids, cache=cache, max_new_tokens=9, prefill_chunk_size=chunk)
        assert torch.equal(tokens, generate(model, ids, use_cache=False, max_new_tokens=9))
        torch_uma.testing.scramble(cache.pool, num_more)
        ids = torch.cat([tokens, prompts(2, num_more)], dim=1)
    cache.pool.check()


def test_forks_and_selected_rows_go_their_own_ways() -> None:
    model = model_of()
    for num_tokens in (10, 11, 12):
        ids = prompts(2, num_tokens)
        cache = poisoned(model, page_size=3)
        with torch.no_grad():
            model(ids, cache=cache)
        caches = [cache, copy.deepcopy(cache), copy.deepcopy(cache)]
        caches[1].batch_select_indices(torch.tensor([1, 0, 1]))
        caches[2].batch_repeat_interleave(2)
        rows = [ids, ids[[1, 0, 1]], ids.repeat_interleave(2, dim=0)]
        more = [prompts(len(each), 3) for each in rows]
        for step in range(3):
            for each, text in zip(caches, more, strict=True):
                with torch.no_grad():
                    model(text[:, step : step + 1], cache=each)
                torch_uma.testing.scramble(cache.pool, step)
        for each, past, text in zip(caches, rows, more, strict=True):
            text = torch.cat([past, text, prompts(len(past), 1)], dim=1)
            tokens = generate(model, text, cache=each, max_new_tokens=9)
            assert torch.equal(tokens, generate(model, text, use_cache=False, max_new_tokens=9))
        cache.pool.check()


def test_steps_of_a_loop() -> None:
    model = model_of()
    pool = torch_uma.CachePool(model, memory=4 << 20, page_size=2)
    torch_uma.testing.poison(pool)
    ids = expected(2)
    sequences = [pool.add(), pool.add()]
    for start, end in ((0, 7), (7, 11), *((i, i + 1) for i in range(11, 30))):
        with pool.step(dict.fromkeys(sequences, end - start)) as cache, torch.no_grad():
            logits = model(ids[:, start:end], cache=cache, **cache.inputs()).logits[:, -1]
        torch_uma.testing.scramble(pool, end)
        if end >= 11:
            assert torch.equal(logits.argmax(dim=-1), ids[:, end])
    sequences.append(pool.add())
    with (
        pytest.raises(SequenceError, match="one length together"),
        torch.no_grad(),
        pool.step(dict.fromkeys(sequences, 1)) as cache,
    ):
        model(ids[:1, :1].expand(3, 1), cache=cache, **cache.inputs())


def test_a_forward_that_was_stopped_tears_the_rows_and_no_more() -> None:
    model, cache = model_of(), poisoned(model_of())
    generate(model, prompts(2), cache=cache, max_new_tokens=5)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(prompts(2, 1), cache=cache)
    hook.remove()
    with pytest.raises(SequenceError, match="half written"), torch.no_grad():
        model(prompts(2, 1), cache=cache)
    cache.reset()
    assert torch.equal(generate(model, prompts(2), cache=cache, max_new_tokens=40), expected(2))


def test_out_of_memory_leaves_the_last_whole_step() -> None:
    model = model_of()
    pool = torch_uma.CachePool(model, memory=1 << 15, page_size=2)
    torch_uma.testing.poison(pool)
    cache = torch_uma.UnifiedCache(model, pool=pool)
    with pytest.raises(OutOfMemory):
        generate(model, prompts(2), cache=cache, max_new_tokens=400)
    length = cache.get_seq_length()
    cache.batch_select_indices(torch.tensor([1]))
    ids = generate(model, prompts(2), use_cache=False, max_new_tokens=length - 10)[1:]
    tokens = generate(model, ids, cache=cache, max_new_tokens=3)
    assert torch.equal(tokens, generate(model, ids, use_cache=False, max_new_tokens=3))


@pytest.mark.parametrize("num_candidates", [1, 5])
def test_candidates_are_tried_and_taken_back(num_candidates: int) -> None:
    model, ids = model_of(), prompts(1, 7).repeat(1, 4)
    cache = poisoned(model, page_size=3)
    tokens = generate(
        model,
        ids,
        cache=cache,
        custom_generate=torch_uma.speculate,
        prompt_lookup_num_tokens=num_candidates,
        max_new_tokens=40,
    )
    assert torch.equal(tokens, generate(model, ids, max_new_tokens=40))
    cache.pool.check()


def test_what_it_cannot_do_it_says() -> None:
    model = copy.deepcopy(model_of())
    cache = poisoned(model)
    generate(model, prompts(2), cache=cache, max_new_tokens=3)
    with pytest.raises(SequenceError, match="state"):
        cache.crop(-1)
    model.set_attn_implementation("torch_uma")
    with pytest.raises(PlanError, match=r"layer 0 stores its keys once.*'eager'"):
        generate(model, prompts(2), cache=poisoned(model), max_new_tokens=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_declared_is_what_its_own_layers_hold(dtype: torch.dtype) -> None:
    config = AutoConfig.for_model("deepseek_v4", **OPTIONS)
    model = AutoModel.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(input_ids=prompts(2, 9), cache=cache, use_cache=True)
    for layer, held in zip(declare(model), cache.layers, strict=True):
        lifetimes = [(memory.lifetime, memory.tokens_per_entry) for memory in layer.memories]
        rows = {row.name: row for memory in layer.memories for row in memory.rows}
        assert rows["k"].shape == (1, 16) and rows["v"].num_bytes == 0 and rows["k"].dtype == held.keys.dtype == dtype
        if layer.name == "sliding_attention":
            assert lifetimes == [(Window(8), 1)]
            continue
        rate = held.compress_rate
        assert lifetimes == [(Window(8), 1), (State(), 1), (Full(), rate)]
        num_checked = 0
        for name, entries in held.compressed_kv.items():
            assert (rows[name].shape, rows[name].dtype) == (tuple(entries.shape[2:]), entries.dtype)
            for kind in ("buffer_kv", "buffer_gate", "overlap_kv", "overlap_gate"):
                kept = getattr(held, kind, {}).get(name)
                if kept is not None:
                    row = rows[f"{name}_{kind}"]
                    tokens = rate if "overlap" in kind else rate - 1
                    assert (row.shape, row.dtype) == ((tokens, *kept.shape[2:]), kept.dtype)
                    num_checked += 1
        assert num_checked == (2 if "heavily" in layer.name else 8)
