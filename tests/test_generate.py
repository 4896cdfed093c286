"""UnifiedCache under generate(): the tokens of the default cache, whatever the arena goes through meanwhile."""

from __future__ import annotations

import copy
import gc
import logging
from functools import lru_cache
from typing import Any

import pytest
import torch
from tiny_models import WINDOW, assert_same_tokens, build, prompts
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache, DynamicCache

import torch_uma

torch.set_num_threads(1)

CASES = [
    ("gpt_oss", "eager"),
    ("qwen3_next", "eager"),
    ("qwen3_next", "sdpa"),
    ("bamba", "eager"),
    ("bamba", "sdpa"),
]
MODELS = ["gpt_oss", "qwen3_next", "bamba"]
LENGTHS = (5, 37, 20)
NUM_NEW = WINDOW + 41
MEMORY = 4 << 20
Inputs = dict[str, torch.Tensor]


@lru_cache
def model_of(name: str, attention: str = "eager") -> PreTrainedModel:
    return build(name, attention=attention)


def generate(model: PreTrainedModel, inputs: Inputs, *, sample: bool = False, **kwargs: Any) -> torch.Tensor:
    kwargs.setdefault("max_new_tokens", NUM_NEW)
    torch.manual_seed(7)
    tokens = model.generate(**inputs, do_sample=sample, **kwargs)
    assert isinstance(tokens, torch.Tensor)
    return tokens


@lru_cache
def expected(name: str, attention: str, sample: bool) -> torch.Tensor:
    return generate(model_of(name, attention), prompts(LENGTHS), sample=sample)


def poisoned(model: PreTrainedModel, **kwargs: Any) -> torch_uma.UnifiedCache:
    kwargs.setdefault("memory", MEMORY)
    cache = torch_uma.UnifiedCache(model, **kwargs)
    torch_uma.testing.poison(cache.pool)
    return cache


def assert_all_free(pool: torch_uma.CachePool) -> None:
    pool.check()
    assert [subpool.live_pages for subpool in pool.stats().subpools] == [0] * len(pool.plan.subpools)


class Scramble(LogitsProcessor):
    """Moves pages between every two decode steps."""

    def __init__(self, pool: torch_uma.CachePool) -> None:
        self.pool = pool
        self.num_calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        torch_uma.testing.scramble(self.pool, self.num_calls)
        if self.num_calls % 3 == 0:
            self.pool.compact()
        self.pool.check()
        return scores


class StopAt(StoppingCriteria):
    """Calls a function when the sequences have a length, once."""

    def __init__(self, length: int, action: Any) -> None:
        self.length, self.action = length, action

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] == self.length:
            self.action()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_tokens_are_those_of_the_default_cache(name: str, attention: str, sample: bool, page_size: int) -> None:
    model = model_of(name, attention)
    inputs = prompts(LENGTHS)
    cache = poisoned(model, page_size=page_size, max_tokens=200 if sample else None)
    tokens = generate(model, inputs, sample=sample, cache=cache)
    if sample:
        assert torch.equal(tokens, expected(name, attention, True))
    else:
        assert_same_tokens(model, tokens, expected(name, attention, False), inputs["attention_mask"])
    assert isinstance(cache, Cache)
    assert cache.get_seq_length() == tokens.shape[1] - 1
    cache.pool.check()


@pytest.mark.parametrize("page_size", [1, 7])
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_pages_may_move_between_any_two_steps(name: str, attention: str, page_size: int) -> None:
    model = model_of(name, attention)
    inputs = prompts(LENGTHS)
    cache = poisoned(model, page_size=page_size)
    hook = Scramble(cache.pool)
    tokens = generate(model, inputs, cache=cache, logits_processor=LogitsProcessorList([hook]))
    assert_same_tokens(model, tokens, expected(name, attention, False), inputs["attention_mask"])
    assert hook.num_calls == NUM_NEW
    assert cache.pool.allocator.layout_version > 0


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_full_layers_are_handed_over_without_a_copy(name: str, attention: str) -> None:
    model = model_of(name, attention)
    width = max(LENGTHS) + NUM_NEW
    cache = poisoned(model, max_tokens=width)
    tokens = generate(model, prompts(LENGTHS), cache=cache)
    kinds = {
        "full_attention": "view",
        "sliding_attention": "view",
        "linear_attention": "state view",
    }
    assert cache.paths() == [kinds[kind] for kind in model.config.layer_types]
    assert tokens.shape[1] == width
    keys_at = [cache.pool.arena.bytes.data_ptr(), cache.pool.arena.bytes.data_ptr() + cache.pool.plan.arena_bytes]
    layer = model.config.layer_types.index("full_attention")
    heads, head_dim = model.config.num_key_value_heads, model.config.hidden_size // model.config.num_attention_heads
    with torch.no_grad():
        keys, _ = cache.layers[layer].update(*torch.zeros(2, len(LENGTHS), heads, 1, head_dim))
    assert keys_at[0] <= keys.data_ptr() < keys_at[1]
    assert keys.shape == (len(LENGTHS), heads, width, head_dim)
    cache.pool.check()


@pytest.mark.parametrize("name", MODELS)
def test_a_window_gives_back_its_pages_in_the_step_in_which_they_die(name: str) -> None:
    model = model_of(name)
    cache = poisoned(model, page_size=8)
    cache_pool = cache.pool

    def check() -> None:
        length = cache.get_seq_length()
        for subpool, stats in zip(cache_pool.plan.subpools, cache_pool.stats().subpools, strict=True):
            if subpool.name == "full":
                continue
            needed = len(LENGTHS) * subpool.num_pages_for(length)
            if isinstance(subpool.lifetime, torch_uma.Window):  # beside the room ahead, which its views need
                first = subpool.lifetime.first_needed(length) // subpool.page_tokens
                assert (cache_pool.sequences.first[subpool.index, : len(LENGTHS)] == first).all()
                most = cache_pool.sequences.lifespans.window_pages(subpool.index)
                assert needed <= stats.live_pages <= 2 * most * len(LENGTHS)
            else:
                assert stats.live_pages == needed

    criteria = StoppingCriteriaList([StopAt(length, check) for length in range(38, 90)])
    generate(model, prompts(LENGTHS), cache=cache, stopping_criteria=criteria)


@pytest.mark.parametrize("name", MODELS)
def test_a_second_generate_continues_on_the_same_cache(name: str) -> None:
    model = model_of(name)
    inputs = prompts(LENGTHS)
    more = torch.randint(0, 256, (len(LENGTHS), 9), generator=torch.Generator().manual_seed(1))
    runs = []
    for cache in (None, poisoned(model)):
        kwargs: dict[str, Any] = {"return_dict_in_generate": True, "do_sample": False, "max_new_tokens": 20}
        first = model.generate(**inputs, **kwargs, **({} if cache is None else {"cache": cache}))
        full = torch.cat([first.sequences, more], dim=1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(len(LENGTHS), 29, dtype=torch.int64)], dim=1)
        runs.append(model.generate(input_ids=full, attention_mask=mask, cache=first.cache, **kwargs).sequences)
    assert_same_tokens(model, runs[1], runs[0], inputs["attention_mask"])


@pytest.mark.parametrize("name", MODELS)
def test_reset_starts_again_with_any_batch(name: str) -> None:
    model = model_of(name)
    cache = poisoned(model)
    arena = cache.pool.arena
    generate(model, prompts((3, 11)), cache=cache, max_new_tokens=40)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_all_free(cache.pool)
    tokens = generate(model, prompts(LENGTHS), cache=cache)
    assert_same_tokens(model, tokens, expected(name, "eager", False), prompts(LENGTHS)["attention_mask"])
    assert cache.pool.arena is arena


@pytest.mark.parametrize("name", MODELS)
def test_deepcopy_forks_and_both_continue(name: str) -> None:
    model = model_of(name)
    inputs = prompts(LENGTHS)
    cache = poisoned(model)
    generate(model, inputs, cache=cache, max_new_tokens=1)
    live = sum(subpool.live_pages for subpool in cache.pool.stats().subpools)
    fork = copy.deepcopy(cache)
    assert fork.pool is cache.pool
    assert sum(subpool.live_pages for subpool in cache.pool.stats().subpools) == live
    seen = inputs["input_ids"]
    for one, seed in ((cache, 2), (fork, 3), (cache, 4)):
        prefix = inputs["input_ids"] if one is fork else seen
        more = torch.randint(0, 256, (len(LENGTHS), 5), generator=torch.Generator().manual_seed(seed))
        new = prefix.shape[1] + 5 - inputs["input_ids"].shape[1]
        longer = {
            "input_ids": torch.cat([prefix, more], dim=1),
            "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, new), value=1),
        }
        tokens = generate(model, longer, cache=one, max_new_tokens=30)
        assert_same_tokens(model, tokens, generate(model, longer, max_new_tokens=30), inputs["attention_mask"])
        seen = tokens if one is cache else seen
        cache.pool.check()
    pool = cache.pool
    del cache, fork, one
    gc.collect()
    assert_all_free(pool)


@pytest.mark.parametrize("name", MODELS)
def test_out_of_memory_leaves_the_last_whole_step(name: str) -> None:
    model = model_of(name)
    inputs = prompts(LENGTHS)
    cache = poisoned(model, page_size=4)
    pool = cache.pool
    hogs: list[torch_uma.Sequence] = []

    def fill() -> None:
        with pytest.raises(torch_uma.OutOfMemory):
            while True:
                hogs.append(pool.add(40))

    with pytest.raises(torch_uma.OutOfMemory, match="more each") as caught:
        generate(model, inputs, cache=cache, stopping_criteria=StoppingCriteriaList([StopAt(60, fill)]))
    length = cache.get_seq_length()
    assert f"hold {[length] * 3} tokens" in str(caught.value)
    assert 59 <= length < max(LENGTHS) + NUM_NEW - 1
    pool.check()
    for hog in hogs:
        hog.free()
    reference = expected(name, "eager", False)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, length + 1 - inputs["input_ids"].shape[1]), value=1)
    rest = {"input_ids": reference[:, : length + 1], "attention_mask": mask}
    tokens = generate(model, rest, cache=cache, max_new_tokens=reference.shape[1] - length - 1)
    assert_same_tokens(model, tokens, reference, inputs["attention_mask"])


def test_a_prompt_that_does_not_fit_leaves_an_empty_cache() -> None:
    model = model_of("gpt_oss")
    cache = poisoned(model, memory=256 << 10)
    with pytest.raises(torch_uma.OutOfMemory, match="full"):
        generate(model, prompts((300, 400)), cache=cache)
    assert_all_free(cache.pool)
    tokens = generate(model, prompts((9, 30)), cache=cache, max_new_tokens=30)
    assert torch.equal(tokens, generate(model, prompts((9, 30)), max_new_tokens=30))


@pytest.mark.parametrize("name", MODELS)
def test_memory_is_taken_for_the_batch_when_it_is_known(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(name)
    width = max(LENGTHS) + NUM_NEW
    cache = torch_uma.UnifiedCache(model, max_tokens=width)
    with pytest.raises(torch_uma.PlanError, match="first forward"):
        _ = cache.pool
    with caplog.at_level(logging.INFO, logger="torch_uma"):
        tokens = generate(model, prompts(LENGTHS), past_key_values=cache)
    assert "took" in caplog.text
    assert cache.pool.plan.num_sequences(width) >= len(LENGTHS)
    assert cache.pool.plan.arena_bytes < 2 * len(LENGTHS) * cache.pool.plan.bytes_per_sequence(width)
    assert_same_tokens(model, tokens, expected(name, "eager", False), prompts(LENGTHS)["attention_mask"])


@pytest.mark.parametrize("name", MODELS)
def test_a_forward_that_records_gradients_is_refused(name: str) -> None:
    model = copy.deepcopy(model_of(name)).requires_grad_(True)
    cache = poisoned(model)
    inputs = prompts(LENGTHS)
    with pytest.raises(torch_uma.GradientError, match="no_grad"):
        model(**inputs, cache=cache)
    assert cache.get_seq_length() == 0
    assert_all_free(cache.pool)
    tokens = generate(model, inputs, cache=cache)
    with pytest.raises(torch_uma.GradientError):
        model(input_ids=tokens[:, -1:], cache=cache)
    assert cache.get_seq_length() == tokens.shape[1] - 1
    assert_same_tokens(model, tokens, expected(name, "eager", False), inputs["attention_mask"])


@pytest.mark.parametrize("name", MODELS)
def test_caches_share_a_pool_and_rows_go_when_a_cache_goes(name: str) -> None:
    model = model_of(name)
    pool = torch_uma.CachePool(model, memory=MEMORY)
    torch_uma.testing.poison(pool)
    first = torch_uma.UnifiedCache(model, pool=pool)
    second = torch_uma.UnifiedCache(model, pool=pool)
    generate(model, prompts((4, 6)), cache=first, max_new_tokens=5)
    tokens = generate(model, prompts(LENGTHS), cache=second)
    assert_same_tokens(model, tokens, expected(name, "eager", False), prompts(LENGTHS)["attention_mask"])
    assert first.get_seq_length() == 10
    del second
    gc.collect()
    pool.check()
    first.reset()
    assert_all_free(pool)
    pool.close()
    with pytest.raises(torch_uma.ClosedError):
        generate(model, prompts((4, 6)), cache=first)


@pytest.mark.parametrize("name", MODELS)
def test_rows_can_be_reordered_repeated_and_selected(name: str) -> None:
    model = model_of(name)
    inputs = prompts(LENGTHS)
    beams = {"num_beams": 3, "max_new_tokens": 30, "num_return_sequences": 2}
    cache = poisoned(model)
    assert torch.equal(generate(model, inputs, cache=cache, **beams), generate(model, inputs, **beams))
    cache.reset()
    generate(model, inputs, cache=cache, max_new_tokens=1)
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 6
    cache.batch_select_indices(torch.tensor([5, 0, 3]))
    chosen = {key: value[[2, 0, 1]] for key, value in inputs.items()}
    first = generate(model, chosen, max_new_tokens=1)
    mask = torch.nn.functional.pad(chosen["attention_mask"], (0, 1), value=1)
    tokens = generate(model, {"input_ids": first, "attention_mask": mask}, cache=cache, max_new_tokens=NUM_NEW - 1)
    assert_same_tokens(model, tokens, generate(model, chosen), chosen["attention_mask"])
    cache.pool.check()


def test_a_crop_takes_tokens_back_where_they_are_still_there() -> None:
    model = model_of("gpt_oss")
    cache = poisoned(model)
    inputs = prompts((12, 20))
    generate(model, inputs, cache=cache, max_new_tokens=1)
    cache.crop(0)
    cache.crop(-5)
    assert cache.get_seq_length() == 15
    with pytest.raises(ValueError, match="negative"):
        cache.crop(3)
    assert_same_tokens(model, generate(model, inputs, cache=cache), generate(model, inputs), inputs["attention_mask"])
    with pytest.raises(torch_uma.SequenceError):
        cache.crop(-40)
    assert cache.get_seq_length() == 20 + NUM_NEW - 1


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_may_come_in_chunks(name: str) -> None:
    model = model_of(name)
    inputs = prompts(LENGTHS)
    chunked: dict[str, Any] = {"prefill_chunk_size": 16}
    tokens = generate(model, inputs, cache=poisoned(model), **chunked)
    assert_same_tokens(model, tokens, expected(name, "eager", False), inputs["attention_mask"])


def stopped_half_way(model: PreTrainedModel, inputs: Inputs, cache: torch_uma.UnifiedCache) -> None:
    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        generate(model, inputs, cache=cache)
    hook.remove()


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_that_stopped_half_way_is_taken_back(name: str) -> None:
    model = model_of(name)
    inputs = prompts(LENGTHS)
    cache = poisoned(model)
    stopped_half_way(model, inputs, cache)
    assert cache.get_seq_length() == 0
    tokens = generate(model, inputs, cache=cache)
    assert_same_tokens(model, tokens, expected(name, "eager", False), inputs["attention_mask"])


@pytest.mark.parametrize("name", MODELS)
def test_a_decode_step_that_stopped_half_way_is_taken_back_or_says_that_it_cannot_be(name: str) -> None:
    model = model_of(name)
    inputs = prompts(LENGTHS)
    cache = poisoned(model)
    first = generate(model, inputs, cache=cache, max_new_tokens=1)
    longer = {"input_ids": first, "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)}
    stopped_half_way(model, longer, cache)
    assert cache.get_seq_length() == max(LENGTHS)
    if name != "gpt_oss":  # a state was changed in place
        with pytest.raises(torch_uma.SequenceError, match="half written"):
            generate(model, longer, cache=cache)
        cache.reset()
    tokens = generate(model, longer, cache=cache, max_new_tokens=NUM_NEW - 1)
    assert_same_tokens(model, tokens, expected(name, "eager", False), inputs["attention_mask"])


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_states_that_lie_at_no_stride_are_copied_and_written_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_uma.batch.alignment_price_bytes", lambda *_: float("inf"))
    model = model_of(name)
    inputs = prompts(LENGTHS)
    pool = torch_uma.CachePool(model, memory=MEMORY)
    torch_uma.testing.poison(pool)
    others = [pool.add() for _ in range(4)]
    slots = [int(pool.allocator.v2p[other.pages[0][0]]) for other in others]
    for slot in (0, 1, 3):
        others[slots.index(sorted(slots)[slot])].free()
    pool.check()
    cache = torch_uma.UnifiedCache(model, pool=pool)
    tokens = generate(model, inputs, cache=cache)
    assert_same_tokens(model, tokens, expected(name, "eager", False), inputs["attention_mask"])
    assert "state copy" in cache.paths() and "state view" not in cache.paths()


def test_rows_can_be_made_early() -> None:
    model = model_of("gpt_oss")
    cache = poisoned(model)
    assert not cache.is_initialized and cache.batch_size == -1
    cache.early_initialization(3, 2, 16, torch.float32, torch.device("cpu"))
    assert cache.is_initialized and cache.batch_size == 3
    inputs = prompts(LENGTHS)
    tokens = generate(model, inputs, cache=cache)
    assert_same_tokens(model, tokens, expected("gpt_oss", "eager", False), inputs["attention_mask"])


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_transformers_refuses_to_speculate_with_states(name: str) -> None:
    model = model_of(name)
    cache = poisoned(model)
    with pytest.raises(ValueError, match="stateful"):
        generate(model, prompts((8,)), cache=cache, prompt_lookup_num_tokens=3)


def test_another_batch_is_refused() -> None:
    model = model_of("bamba")
    cache = poisoned(model)
    generate(model, prompts((4, 6)), cache=cache, max_new_tokens=2)
    with pytest.raises(torch_uma.SequenceError, match="2 rows"), torch.no_grad():
        model(**prompts((3, 3, 3)), cache=cache)
    assert cache.get_seq_length() == 7
    more = prompts((20, 20))
    tokens = {}
    for form in (DynamicCache(config=model.config), cache):
        if form is not cache:
            generate(model, prompts((4, 6)), cache=form, max_new_tokens=2)
        with torch.no_grad():
            tokens[form] = model(more["input_ids"], cache=form).logits
    assert torch.equal(*tokens.values())
