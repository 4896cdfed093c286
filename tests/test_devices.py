"""UnifiedCache over a model whose layers run on two devices: a pool on each, and what one does the other does too."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import models
import pytest
import tiny_models
import torch
from accelerate import dispatch_model
from accelerate.utils import send_to_device
from models import CONFIGS
from pools import snapshot
from tiny_models import WINDOW, assert_same_tokens, prompts
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3nTextConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicCache
from two_devices import FIRST, SECOND, Devices, spread

import torch_uma
from torch_uma.integrations.transformers.devices import devices_of
from torch_uma.integrations.transformers.reading import Reading

torch.set_num_threads(1)

CASES = [
    ("llama", "sdpa"),
    ("llama", "torch_uma"),
    ("gemma2", "eager"),
    ("gemma2", "torch_uma"),
    ("qwen3_next", "eager"),
    ("qwen3_next", "torch_uma"),
    ("deepseek_v3", "eager"),
    ("deepseek_v3", "torch_uma"),
]
LENGTHS = (5, 31, 20)
NUM_NEW = 13
MEMORY = 1 << 20
FORMS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampling": {"do_sample": True},
}


@pytest.fixture(autouse=True)
def _devices() -> Iterator[None]:
    with Devices():
        yield


def build(name: str, attention: str) -> PreTrainedModel:
    of = models if name in CONFIGS else tiny_models
    model: PreTrainedModel = of.build(name, attention=attention)
    return model


@lru_cache
def model_of(name: str, attention: str = "eager") -> PreTrainedModel:
    return spread(build(name, attention), 2)


def generate(model: PreTrainedModel, form: str = "greedy", lengths: tuple[int, ...] = LENGTHS, **kw: Any) -> Any:
    torch.manual_seed(7)
    return model.generate(**prompts(lengths), **{"max_new_tokens": NUM_NEW, **FORMS[form], **kw})


@lru_cache
def expected(name: str, attention: str = "eager", form: str = "greedy") -> torch.Tensor:
    """By the default cache, which keeps each layer's keys and values where they were made."""
    return generate(model_of(name, attention), form)


def poisoned(model: PreTrainedModel, **kwargs: Any) -> torch_uma.UnifiedCache:
    cache = torch_uma.UnifiedCache(model, **{"memory": MEMORY, **kwargs})
    for pool in cache.pools:
        torch_uma.testing.poison(pool)
    return cache


def check(cache: torch_uma.UnifiedCache) -> None:
    for pool in cache.pools:
        pool.check()


def live_pages(pools: tuple[torch_uma.CachePool, ...]) -> list[list[int]]:
    return [[subpool.live_pages for subpool in pool.stats().subpools] for pool in pools]


def held(cache: torch_uma.UnifiedCache) -> list[Any]:
    """What the sequences of each pool hold, in which pages."""
    taken = []
    for pool in cache.pools:
        now = snapshot(pool)
        # Steps that were aborted have numbers too, and what may be shared is looked at before it is written.
        del now["sequences"]["last_epoch"], now["sequences"]["may_share"]
        taken.append((now["sequences"], now["cells"], now["num_shared"]))
    return taken


class Scramble(LogitsProcessor):
    """Moves the pages of all pools between every two decode steps."""

    def __init__(self, cache: torch_uma.UnifiedCache) -> None:
        self.cache, self.seed, self.num_moved = cache, 0, [0, 0]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seed += 1
        for number, pool in enumerate(self.cache.pools):
            self.num_moved[number] += torch_uma.testing.scramble(pool, self.seed)
        check(self.cache)
        return scores


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_tokens_are_those_of_the_default_cache(name: str, attention: str, form: str) -> None:
    model = model_of(name, attention)
    cache = poisoned(model, page_size=4)
    assert [pool.device for pool in cache.pools] == [FIRST, SECOND]
    scramble = Scramble(cache)
    tokens = generate(model, form, cache=cache, logits_processor=LogitsProcessorList([scramble]))
    if form == "greedy":
        mask = prompts(LENGTHS)["attention_mask"]
        assert_same_tokens(build(name, attention), tokens, expected(name, attention, form), mask)
    else:
        assert torch.equal(tokens, expected(name, attention, form))
    assert min(scramble.num_moved) > 0
    assert all(pool.arena.bytes.device == pool.device for pool in cache.pools)
    assert cache.get_seq_length() == tokens.shape[1] - 1


@pytest.mark.parametrize("name", ["gemma2", "qwen3_next"])
def test_arenas_are_sized_for_what_lies_there(name: str) -> None:
    model = spread(build(name, "eager"), 1)
    cache = torch_uma.UnifiedCache(model, max_tokens=max(LENGTHS) + NUM_NEW)
    assert cache.pools == ()
    with pytest.raises(torch_uma.PlanError, match="first forward"):
        _ = cache.pool
    assert torch.equal(generate(model, cache=cache), expected(name))
    first, second = cache.pools
    assert 0 < 2 * first.plan.arena_bytes < second.plan.arena_bytes
    assert [bool(layer.memories) for layer in first.plan.layers] == [True, False, False, False]
    assert [bool(layer.memories) for layer in second.plan.layers] == [False, True, True, True]


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_memory_that_runs_out_on_one_device_changes_neither(name: str) -> None:
    model = model_of(name)
    reference, cache = DynamicCache(config=model.config), poisoned(model, page_size=1)
    tokens = prompts((9,) * 3)["input_ids"]
    for form in (reference, cache):
        with torch.no_grad():
            logits = model(tokens, cache=form).logits[:, -1]
    cache.reorder_cache(torch.tensor([0, 1, 1]))  # and from now on each page is taken when it is needed
    reference.reorder_cache(torch.tensor([0, 1, 1]))
    for step in range(7):
        tokens = logits.argmax(-1, keepdim=True)
        full = cache.pools[step % 2]
        taken = exhaust(full)
        before = held(cache)
        with (
            torch.no_grad(),
            pytest.raises(torch_uma.OutOfMemory, match=f"on {full.device}: .* 3 rows of this cache hold"),
        ):
            model(tokens, cache=cache)
        assert held(cache) == before
        assert cache.get_seq_length() == 9 + step
        full.allocator.release(taken)
        for pool in cache.pools:
            torch_uma.testing.poison(pool, only_free=True)
        check(cache)
        with torch.no_grad():
            logits = model(tokens, cache=cache).logits[:, -1]
            torch.testing.assert_close(logits, model(tokens, cache=reference).logits[:, -1])
        assert [sequence.length for rows in cache._own().rows._rows for sequence in rows.sequences] == [10 + step] * 6


def exhaust(pool: torch_uma.CachePool) -> Any:
    """Takes all pages of full attention; returns them."""
    k = next(subpool.index for subpool in pool.plan.subpools if subpool.name == "full")
    taken, count = [], 1 << 12
    while count:
        demand = [0] * len(pool.plan.subpools)
        demand[k] = count
        if pool.allocator.quote(demand):
            taken += pool.allocator.reserve(demand).tolist()
        else:
            count //= 2
    return taken


@pytest.mark.parametrize("name", ["gemma2", "qwen3_next"])
def test_memory_that_runs_out_in_the_first_forward_leaves_no_rows(name: str) -> None:
    model = model_of(name)
    cache = poisoned(model, memory={FIRST: MEMORY, SECOND: "40KiB"}, page_size=1)
    with pytest.raises(torch_uma.OutOfMemory, match="on cpu:1"):
        generate(model, cache=cache, lengths=(150,))
    assert (len(cache._own().rows), cache.get_seq_length()) == (0, 0)
    assert sum(map(sum, live_pages(cache.pools))) == 0
    tokens = generate(model, cache=cache, lengths=(5,), max_new_tokens=3)
    assert torch.equal(tokens, generate(model, lengths=(5,), max_new_tokens=3))
    check(cache)


def test_pools_that_cannot_all_be_made_are_not_made() -> None:
    model = model_of("llama")
    with pytest.raises(torch_uma.PlanError, match="memory=16 is no room"):
        torch_uma.UnifiedCache(model, memory={FIRST: MEMORY, SECOND: 16})
    cache = torch_uma.UnifiedCache(model, max_tokens=40)
    made = cache._own().rows._rows
    second, made[1]._make_pool = made[1]._make_pool, _fails
    with pytest.raises(torch_uma.PlanError, match="none left"):
        generate(model, cache=cache, lengths=(5, 5))
    assert cache.pools == ()
    made[1]._make_pool = second
    tokens = generate(model, cache=cache, lengths=(5,), max_new_tokens=9)
    assert torch.equal(tokens, generate(model, lengths=(5,), max_new_tokens=9))


def _fails(*_: Any) -> Any:
    raise torch_uma.PlanError("none left")


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_next"])
def test_a_fork_goes_its_own_way_on_both(name: str) -> None:
    model = model_of(name)
    cache = poisoned(model, page_size=4)
    first = generate(model, cache=cache, max_new_tokens=6)
    fork = copy.deepcopy(cache)
    assert fork.pools == cache.pools
    tails = [torch.full((3, 1), 7), torch.full((3, 1), 9)]
    found = []
    for tail, one in zip(tails * 2, [cache, fork, None, None], strict=True):
        found.append(continue_from(model, first, tail, one))
        if one is not None:
            check(one)
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert not torch.equal(found[0][:, -5:], found[1][:, -5:])
    pages = live_pages(cache.pools)
    del fork
    gc.collect()
    assert all(sum(now) < sum(before) for now, before in zip(live_pages(cache.pools), pages, strict=True))


def continue_from(model: PreTrainedModel, first: torch.Tensor, tail: torch.Tensor, cache: Any) -> torch.Tensor:
    tokens = torch.cat([first, tail], dim=1)
    mask = torch.ones_like(tokens)
    mask[:, : max(LENGTHS)] = prompts(LENGTHS)["attention_mask"]
    return model.generate(tokens, attention_mask=mask, cache=cache, max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize("name", ["gemma2", "qwen3_next"])
def test_reset_takes_another_batch_on_both(name: str) -> None:
    model = model_of(name)
    cache = poisoned(model, page_size=4)
    generate(model, cache=cache, lengths=(4, 9))
    cache.reset()
    assert sum(map(sum, live_pages(cache.pools))) == 0
    assert torch.equal(generate(model, cache=cache), expected(name))


def mixed() -> PreTrainedModel:
    """Full attention alone on the first device, windows on the second."""
    kinds = ["full_attention"] * 2 + ["sliding_attention"] * 2
    config = Gemma2Config(**{**CONFIGS["gemma2"]().to_dict(), "layer_types": kinds})
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return spread(model.eval().requires_grad_(False), 2)


def test_crop_is_refused_on_both_where_one_refuses() -> None:
    model = mixed()
    cache, other = poisoned(model, page_size=2), poisoned(model, page_size=2)
    tokens = prompts((2 * WINDOW,))["input_ids"]
    with torch.no_grad():
        for form in (cache, other):
            model(tokens, cache=form)
        before = held(cache)
        with pytest.raises(torch_uma.SequenceError, match="cannot crop"):
            cache.crop(-5)
        assert held(cache) == before
        following = tokens[:, :1]
        assert torch.equal(model(following, cache=cache).logits, model(following, cache=other).logits)


def test_crop_shortens_on_both() -> None:
    for name in ("llama", "deepseek_v3"):
        model = model_of(name)
        cache = poisoned(model, page_size=2)
        tokens = prompts((21,))["input_ids"]
        with torch.no_grad():
            model(tokens, cache=cache)
            cache.crop(-8)
            assert cache.get_seq_length() == 13
            logits = model(tokens[:, 13:], cache=cache).logits
            torch.testing.assert_close(logits, model(tokens).logits[:, 13:])
        check(cache)


@pytest.mark.parametrize("act", ["select", "fork"])
def test_rows_that_cannot_be_made_on_one_device_are_made_on_neither(act: str) -> None:
    model = model_of("qwen3_next")
    cache = poisoned(model, max_sequences=9, page_size=4)
    first = generate(model, cache=cache, max_new_tokens=6)
    others = [cache.pools[1].add() for _ in range(4)]
    before = held(cache)
    with pytest.raises(torch_uma.SequenceError, match="max_sequences"):
        if act == "fork":
            copy.deepcopy(cache)
        else:
            cache.batch_repeat_interleave(2)
    assert held(cache) == before
    for sequence in others:
        sequence.free()
    tail = torch.full((3, 1), 7)
    assert torch.equal(continue_from(model, first, tail, cache), continue_from(model, first, tail, None))
    if act == "select":
        cache.batch_repeat_interleave(2)
        assert cache.batch_size == 6
    check(cache)


def test_expect_makes_room_on_both_or_on_neither() -> None:
    model = model_of("gemma2")
    cache = poisoned(model, memory={FIRST: MEMORY, SECOND: "48KiB"}, page_size=4)
    with pytest.raises(torch_uma.OutOfMemory, match="on cpu:1"):
        cache.expect(3, 400)
    assert sum(map(sum, live_pages(cache.pools))) == 0 and cache.batch_size == -1
    cache.expect(1, 60)
    first = generate(model, cache=cache, lengths=(5,), max_new_tokens=6)
    before = held(cache)
    with pytest.raises(torch_uma.OutOfMemory, match="on cpu:1"):
        cache.expect(1, 4000)
    assert held(cache) == before
    with pytest.raises(torch_uma.SequenceError, match="holds 1 rows"):
        cache.expect(2, 60)
    cache.expect(1, 80)
    assert cache.layers[1].get_max_length() == 80  # full attention on the first device
    tokens = model.generate(first, cache=cache, max_new_tokens=9, do_sample=False)
    assert torch.equal(tokens, model.generate(first, max_new_tokens=9, do_sample=False))


@pytest.mark.parametrize("number", [1, 3])
def test_an_interrupted_forward_counts_on_neither(number: int) -> None:
    """In a layer of the first device, and in one of the second, when the first has been through already."""
    for name in ("gemma2", "qwen3_next"):
        model = model_of(name)
        cache = poisoned(model, page_size=4)
        first = generate(model, cache=cache, max_new_tokens=6)
        layer = model.model.layers[number]
        hook = layer.register_forward_pre_hook(_interrupt)
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            model(first[:, -1:], cache=cache)
        hook.remove()
        assert cache.get_seq_length() == first.shape[1] - 1
        tail = torch.full((3, 1), 7)
        if name == "qwen3_next":  # whose states were changed in place
            with pytest.raises(torch_uma.SequenceError, match="half written"):
                continue_from(model, first, tail, cache)
            cache.reset()
        assert torch.equal(continue_from(model, first, tail, cache), continue_from(model, first, tail, None))
        check(cache)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_layers_that_a_loop_adds_lie_where_it_runs() -> None:
    config = AutoConfig.for_model(
        "dory", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, head_dim=16,
        vocab_size=260, num_hidden_layers=6, n_input_layers=2, n_recurrent_layers=2, n_output_layers=2,
        n_recurrent_loops=3, layer_types=["sliding_attention", "mlp", "full_attention", "mlp", "full_attention", "mlp"],
    )  # fmt: skip
    model = spread(AutoModelForCausalLM.from_config(config).eval().requires_grad_(False), 1)
    model.generation_config.eos_token_id = None
    cache = poisoned(model)
    assert [[bool(layer.memories) for layer in pool.plan.layers] for pool in cache.pools] == [
        [True, False, False, False, False],
        [False, True, True, True, True],
    ]
    assert torch.equal(generate(model, cache=cache), generate(model))


def test_layers_that_share_keys_from_one_to_the_other() -> None:
    """The model hands them on, to the other device too; but those in the arena stay where they are."""
    given = CONFIGS["llama"]().to_dict() | {"intermediate_size": [96] * 4, "sliding_window": WINDOW}
    config = Gemma3nTextConfig(
        **{key: given[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")},
        **{key: given[key] for key in ("head_dim", "intermediate_size", "sliding_window", "initializer_range")},
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        laurel_rank=8,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=tiny_models.VOCABULARY,
        activation_sparsity_pattern=[0.0] * 4,
        altup_num_inputs=2,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    model = spread(model, 1)
    assert torch.equal(generate(model, cache=poisoned(model)), generate(model))
    model.set_attn_implementation("torch_uma")
    with pytest.raises(torch_uma.SequenceError, match="keep layers that share keys on one device"):
        generate(model, cache=poisoned(model))


def test_states_are_looked_at_where_they_lie() -> None:
    model = model_of("qwen3_next")
    reference, cache = DynamicCache(config=model.config), poisoned(model)
    for form in (reference, cache):
        generate(model, cache=form, max_new_tokens=4)
    for layer, device in ((0, FIRST), (2, SECOND)):
        state = cache.get_recurrent_state(layer)
        assert state is not None and state.device == device
        torch.testing.assert_close(state, reference.get_recurrent_state(layer))


def test_memory_goes_back_on_both() -> None:
    model = model_of("qwen3_next", "torch_uma")
    cache = poisoned(model)
    pools = cache.pools
    generate(model, cache=cache, max_new_tokens=3)
    assert all(pool.guard.steps for pool in pools), "the last step is read until somebody calls"
    del cache
    gc.collect()
    assert sum(map(sum, live_pages(pools))) == 0
    for pool in pools:
        pool.check()
    cache = poisoned(model)
    generate(model, cache=cache, max_new_tokens=3)
    arenas = [weakref.ref(pool.arena) for pool in cache.pools]
    for pool in cache.pools:
        pool.close()
    gc.collect()
    assert [arena() for arena in arenas] == [None, None]
    with pytest.raises(torch_uma.ClosedError):
        generate(model, cache=cache)
    cache.reset()


def test_what_a_pool_on_each_device_excludes() -> None:
    model = model_of("llama")
    cache = poisoned(model)
    pool = torch_uma.CachePool(model.config, memory=MEMORY)
    refused: list[tuple[str, Callable[[], object]]] = [
        (r"cpu:0, cpu:1.*cache\.pools", lambda: cache.pool),
        ("cpu:0, cpu:1.*leave pool= out", lambda: torch_uma.UnifiedCache(model, pool=pool)),
        ("cpu:0, cpu:1.*leave device= out", lambda: torch_uma.UnifiedCache(model, device="cpu")),
        ("cpu:0, cpu:1, and a pool lies on one", lambda: torch_uma.CachePool(model, memory=MEMORY)),
        ("names cpu:1, but .*cpu:0, cpu:1", lambda: torch_uma.UnifiedCache(model, memory={"cpu:1": MEMORY})),
        ("no device here", lambda: torch_uma.UnifiedCache(model, memory={"gpu": MEMORY})),
    ]
    for message, call in refused:
        with pytest.raises(torch_uma.PlanError, match=message):
            call()
    assert not cache.is_compileable


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_memory_on_another_device_than_a_layer_is_an_error_with_both(name: str) -> None:
    model = model_of(name)
    for device, wrong in (
        (FIRST, "the pool is on cpu:0, but the model gives '.*' of layer 2 on cpu:1"),
        (SECOND, "the pool is on cpu:1, but the model gives '.*' of layer 0 on cpu:0"),
    ):
        cache = torch_uma.UnifiedCache(model.config, memory=MEMORY, device=device)
        with pytest.raises(torch_uma.SequenceError, match=wrong):
            generate(model, cache=cache)
        assert cache.get_seq_length() == 0
        cache.pool.check()


def test_a_model_that_moved_is_an_error_and_may_come_back() -> None:
    model = build("llama", "eager")
    cache = torch_uma.UnifiedCache(model, memory=MEMORY)
    model.to("meta")
    with torch.no_grad(), pytest.raises(torch_uma.SequenceError, match="is on cpu, but the model .* on meta"):
        model(torch.ones(3, 3, dtype=torch.long, device="meta"), cache=cache)
    assert cache.get_seq_length() == 0
    tokens = generate(build("llama", "eager"), cache=cache)
    assert torch.equal(tokens, expected("llama"))


def test_where_layers_run() -> None:
    for name in ("llama", "gemma2", "qwen3_next", "deepseek_v3", "mamba2", "lfm2"):
        assert devices_of(model_of(name)) == (FIRST, SECOND)
    model = build("llama", "eager")
    assert devices_of(model) == (torch.device("cpu"),)
    assert devices_of(model.config) == ()
    model.model.layers[2:].to("meta")
    assert devices_of(model) == (torch.device("cpu"), torch.device("meta"))
    assert devices_of(spread(build("llama", "eager"), 0)) == (SECOND,)


def test_layers_that_run_on_one_device_have_one_pool_there() -> None:
    model = spread(build("gemma2", "eager"), 0)  # beside an embedding that is somewhere else
    assert model.model.embed_tokens.weight.device == FIRST
    for how in ({"memory": MEMORY}, {"memory": {SECOND: "1MiB"}}, {"max_tokens": 90}):
        cache = torch_uma.UnifiedCache(model, **how)
        assert torch.equal(generate(model, cache=cache), expected("gemma2"))
        assert cache.pools == (cache.pool,) and cache.pool.device == SECOND
    assert torch_uma.CachePool(model, memory=MEMORY).device == SECOND


def test_weights_that_lie_on_the_disk_run_where_their_hooks_say(tmp_path: Path) -> None:
    model = build("llama", "eager")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    layers = {f"model.layers.{i}": "cpu" if i == 1 else "disk" for i in range(4)}
    model = dispatch_model(model, places | layers, offload_dir=tmp_path, skip_keys=["cache"])
    assert model.model.layers[0].self_attn.q_proj.weight.is_meta
    cache = poisoned(model)
    assert cache.pool.device == torch.device("cpu")
    assert torch.equal(generate(model, cache=cache, max_new_tokens=5), expected("llama")[:, : max(LENGTHS) + 5])


def test_a_reading_goes_through_hooks_as_it_is() -> None:
    """What a layer hands to its attention, should a module with a hook lie between: on one device nothing is copied."""
    key, value = torch.ones(1, 2, 1, 4, device=SECOND), torch.ones(1, 2, 1, 4, device=SECOND)
    places, store = object(), object()
    reading = Reading(places=places, store=store, new=(key, value))  # type: ignore[arg-type]
    sent = send_to_device({"torch_uma": reading}, SECOND)["torch_uma"]
    assert isinstance(sent, Reading) and sent.places is places and sent.store is store
    assert sent.new[0] is key and sent.new[1] is value
