"""Models with ways of their own: MiniMax by its own calls, looped ones, and those that are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from test_compile import Graphs
from test_fixed import compile_config
from test_generate import Scramble, assert_all_free
from torch._dynamo.backends.debugging import aot_eager
from torch._inductor.compile_fx import compile_fx
from transformers import AutoConfig, AutoModelForCausalLM, LogitsProcessorList, PreTrainedModel
from transformers.models.minimax.modeling_minimax import MiniMaxCache
from zoo import COMMON, EXPERTS

import torch_uma
from torch_uma.errors import PlanError, SequenceError
from torch_uma.integrations.transformers.own import _REFUSED

torch.set_num_threads(1)

NUM_NEW = 24
LOOPS = {
    "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8,
    "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 3,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    # As released: the first layer has no keys from which a length could be told.
    "minimax": {**EXPERTS, "layer_types": ["linear_attention", "full_attention"] * 2, "block_size": 8},
    "minimax+full_first": {**EXPERTS, "layer_types": ["full_attention", "linear_attention"] * 2, "block_size": 8},
    "dory": LOOPS,
    "inkling2_loop_text": {
        **EXPERTS,
        "sliding_window_size": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 12,
        "d_rel": 4,
        "rel_extent": 16,
        "n_layers_per_attn_res_block": 1,
        "loop_gate_rank": 4,
        "loop_num_passes": 2,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 3,
        "unpadded_vocab_size": COMMON["vocab_size"],
        "layer_types": ["hybrid_sliding", "hybrid"] * 2,
        "mlp_layer_types": ["dense", "sparse"] * 2,
    },
}


@lru_cache
def model_of(name: str, attention: str = "eager") -> PreTrainedModel:
    config = AutoConfig.for_model(
        name.split("+")[0],
        **{**COMMON, "head_dim": 12, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None},
        **OTHERS[name],
    )
    with torch.random.fork_rng():
        torch.manual_seed(sum(name.encode()))
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.eval().requires_grad_(False)


def prompts(num_rows: int, num_tokens: int = 11) -> torch.Tensor:
    return torch.randint(1, COMMON["vocab_size"], (num_rows, num_tokens), generator=torch.manual_seed(num_rows))


def generate(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, **kwargs}
    tokens = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    assert isinstance(tokens, torch.Tensor)
    return tokens


@lru_cache
def uncached(name: str, attention: str, num_rows: int, num_beams: int) -> torch.Tensor:
    return generate(model_of(name, attention), prompts(num_rows), use_cache=False, num_beams=num_beams)


def poisoned(model: PreTrainedModel, **kwargs: Any) -> torch_uma.UnifiedCache:
    cache = torch_uma.UnifiedCache(model, **{"memory": 4 << 20, **kwargs})
    torch_uma.testing.poison(cache.pool)
    return cache


@pytest.mark.parametrize(("num_beams", "page_size"), [(1, 7), (3, 1), (3, 16)])
@pytest.mark.parametrize(("name", "attention"), [(name, "eager") for name in OTHERS] + [("minimax", "torch_uma")])
def test_tokens_are_those_without_a_cache(name: str, attention: str, num_beams: int, page_size: int) -> None:
    model = model_of(name, attention)
    cache = poisoned(model, page_size=page_size)
    moves = LogitsProcessorList([Scramble(cache.pool)])
    tokens = generate(model, prompts(2), cache=cache, num_beams=num_beams, logits_processor=moves)
    assert torch.equal(tokens, uncached(name, attention, 2, num_beams))
    cache.reset()
    assert_all_free(cache.pool)
    assert torch.equal(generate(model, prompts(3), cache=cache), uncached(name, attention, 3, 1))


def test_the_cache_of_a_minimax_is_what_it_works_with() -> None:
    model = model_of("minimax")
    cache = poisoned(model)
    assert isinstance(cache, torch_uma.UnifiedCache) and isinstance(cache, MiniMaxCache)
    generate(model, prompts(2), cache=cache)
    fork = copy.deepcopy(cache)
    assert type(fork) is type(cache) and fork.pool is cache.pool and len(fork) == len(cache) == 4
    more = torch.cat([uncached("minimax", "eager", 2, 1), prompts(2, 5)], dim=1)
    expected = generate(model, more, use_cache=False, max_new_tokens=6)
    for other in (cache, fork):
        assert torch.equal(generate(model, more, cache=other, max_new_tokens=6), expected)
    cache.batch_select_indices(torch.tensor([1]))
    cache.batch_repeat_interleave(2)
    more = torch.cat([expected[1:].expand(2, -1), prompts(2, 3)], dim=1)
    tokens = generate(model, more, cache=cache, max_new_tokens=6)
    assert torch.equal(tokens, generate(model, more, use_cache=False, max_new_tokens=6))
    with pytest.raises(SequenceError):
        cache.crop(-1)
    cache.pool.check()


def test_a_minimax_in_steps_of_a_loop() -> None:
    model = model_of("minimax")
    pool = torch_uma.CachePool(model, memory=4 << 20)
    torch_uma.testing.poison(pool)
    ids = uncached("minimax", "eager", 2, 1)
    sequences = [pool.add(), pool.add()]
    for start, end in ((0, 11), (11, 14), *((i, i + 1) for i in range(14, 20))):
        with pool.step(dict.fromkeys(sequences, end - start)) as cache, torch.no_grad():
            logits = model(ids[:, start:end], cache=cache, **cache.inputs()).logits[:, -1]
        torch_uma.testing.scramble(pool, end)
        if end >= 11:
            assert torch.equal(logits.argmax(dim=-1), ids[:, end])


@pytest.mark.parametrize(
    ("name", "attention", "backend"), [("dory", "eager", aot_eager), ("minimax", "torch_uma", compile_fx)]
)
def test_decode_steps_are_one_graph(name: str, attention: str, backend: Callable[..., Any]) -> None:
    graphs, model = Graphs(backend), model_of(name, attention)
    for _ in range(2):
        cache = poisoned(model, max_tokens=40)
        num_layers = len(cache.layers)
        tokens = generate(model, prompts(2), cache=cache, compile_config=compile_config(graphs))
        assert torch.equal(tokens, uncached(name, attention, 2, 1))
        assert cache.get_seq_length() == tokens.shape[1] - 1 and len(cache.layers) == num_layers
    assert graphs.count == 1


@pytest.mark.parametrize("name", ["minimax", "dory"])
def test_a_forward_that_was_stopped_is_begun_again(name: str) -> None:
    model = model_of(name)
    cache = poisoned(model)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        generate(model, prompts(2), cache=cache)
    hook.remove()
    assert torch.equal(generate(model, prompts(2), cache=cache), uncached(name, "eager", 2, 1))


def test_a_copied_layer_has_no_place() -> None:
    cache = poisoned(model_of("dory"))
    generate(model_of("dory"), prompts(2), cache=cache)
    before = cache.pool.stats()
    for copied in (copy.copy(cache.layers[1]), copy.deepcopy(cache.layers[1])):
        assert type(copied) is type(cache.layers[1]) and not copied.is_sliding
        with pytest.raises(PlanError, match="no place for a copied layer"):
            copied.update(*torch.zeros(2, 2, 2, 1, 12))
    assert cache.pool.stats() == before


REFUSED: dict[str, dict[str, Any]] = {
    "recurrent_gemma": {},
    "reformer": {"is_decoder": True},
    "rwkv": {},
    "xlnet": {"d_head": 12, "d_model": 48, "n_head": 4},
    "xlstm": {},
    "dory": {**LOOPS, "recurrent_kv_cache_mode": "last_loop"},
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_who_is_refused_is_told_why(model_type: str) -> None:
    assert set(REFUSED) - {"dory"} == set(_REFUSED)
    config = AutoConfig.for_model(model_type, **{**COMMON, "head_dim": 12}, **REFUSED[model_type])
    for make in (torch_uma.UnifiedCache, torch_uma.CachePool):
        with pytest.raises(
            PlanError, match=rf"{model_type} cannot remember in an arena: .*; call generate\(\) without"
        ):
            make(config, memory=4 << 20)
