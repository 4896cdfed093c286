"""Tokens that are taken back: assisted generation over UnifiedCache, and the loop that has it for states too."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from models import CONFIGS, build
from speculating import PROMPT_TOKENS, RECURRENT, assert_all_free, bounded_pages, model_of, poisoned, prompt
from tiny_models import PAD, WINDOW, assert_same_tokens
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicCache
from transformers.generation import utils
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator

import torch_uma
from torch_uma.errors import PlanError, SequenceError
from torch_uma.integrations.transformers import speculation

torch.set_num_threads(1)

NUM_NEW = WINDOW + 25
CASES = [
    *((name, "eager") for name in ["gemma2", "gpt_oss", "mistral", "lfm2", *RECURRENT]),
    *((name, "sdpa") for name in ["llama", "mistral", "qwen3_next"]),
    *((name, "torch_uma") for name in ["llama", "gemma2", "gpt_oss", "mistral", "deepseek_v3", "llama4", "lfm2"]),
    *((name, "torch_uma") for name in ["qwen3_next", "bamba"]),
]


@lru_cache
def assistant_of(name: str) -> PreTrainedModel:
    """A model that mostly, and not always, says what the model `name` says."""
    assistant = build(name)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        for parameter in assistant.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.008)
    return assistant


def generate(model: PreTrainedModel, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, **kwargs}
    tokens = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
    assert isinstance(tokens, torch.Tensor)
    return tokens


@lru_cache
def greedy(name: str, num_tokens: int = PROMPT_TOKENS) -> torch.Tensor:
    return generate(model_of(name), prompt(num_tokens))


class StopAfter(StoppingCriteria):
    """Stops at a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


class Interrupt(StopAfter):
    """Raises at a length."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] >= self.length:
            raise KeyboardInterrupt
        return super().__call__(input_ids, scores, **kwargs)


class Tally:
    """How many candidates were kept and how many refused; before each verdict pages move."""

    def __init__(self) -> None:
        self.kept = self.refused = 0
        self.pool: torch_uma.CachePool | None = None

    def note(self, num_candidates: int, num_matches: int) -> None:
        self.kept += int(num_matches)
        self.refused += num_candidates - int(num_matches)
        if self.pool is not None:
            torch_uma.testing.scramble(self.pool, self.kept + 1000 * self.refused)
            if self.kept % 3 == 0:
                self.pool.check()


@pytest.fixture
def tally(monkeypatch: pytest.MonkeyPatch) -> Tally:
    """Counts the candidates of every generator."""
    tally = Tally()
    for kind in (PromptLookupCandidateGenerator, AssistedCandidateGenerator):
        update = kind.update_candidate_strategy

        def noting(self: Any, ids: Any, scores: torch.Tensor, matches: int, update: Any = update) -> None:
            tally.note(scores.shape[1] - 1, matches)
            update(self, ids, scores, matches)

        monkeypatch.setattr(kind, "update_candidate_strategy", noting)
    return tally


@pytest.fixture
def truth(monkeypatch: pytest.MonkeyPatch, tally: Tally) -> list[torch.Tensor]:
    """What prompt lookup finds from now on: the continuation of the text that is put in here, with mistakes."""
    told: list[torch.Tensor] = []
    chance = np.random.default_rng(11)

    class Lookup(PromptLookupCandidateGenerator):
        def get_candidates(self, input_ids: Any, **kwargs: Any) -> Any:
            start, count = input_ids.shape[1], int(chance.integers(0, self.num_output_tokens + 1))
            found = told[0][:, start : start + count].clone()
            if chance.random() < 0.6 and found.shape[1]:
                found[0, chance.integers(found.shape[1])] = 251
            return torch.cat([input_ids, found], dim=1), None

    for module in (utils, speculation):
        monkeypatch.setattr(module, "PromptLookupCandidateGenerator", Lookup)
    return told


def ways_of(name: str) -> list[dict[str, Any]]:
    own = {"custom_generate": torch_uma.speculate}
    return [own] if name in RECURRENT else [{}, own]


@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize(("name", "attention"), CASES)
def test_tokens_are_those_of_greedy_decoding(
    name: str, attention: str, page_size: int, truth: list[torch.Tensor], tally: Tally
) -> None:
    model, expected = model_of(name, attention), greedy(name)
    truth.append(expected)
    plain = poisoned(model, page_size=page_size)
    generate(model, prompt(), cache=plain)
    for way in ways_of(name):
        cache = poisoned(model, page_size=page_size)
        tally.kept, tally.refused, tally.pool = 0, 0, cache.pool
        tokens = generate(model, prompt(), cache=cache, prompt_lookup_num_tokens=5, **way)
        assert_same_tokens(model, tokens, expected, torch.ones_like(prompt()))
        assert tally.kept > 10 and tally.refused > 10, (tally.kept, tally.refused)
        assert cache.get_seq_length() == tokens.shape[1] - 1
        cache.pool.check()
        cache.deactivate_past_recording()
        assert all(map(int.__le__, bounded_pages(cache.pool), bounded_pages(plain.pool)))
        cache.reset()
        assert_all_free(cache.pool)


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "lfm2", "qwen3_next"])
def test_an_arena_that_was_sized_for_the_batch_is_enough(name: str, truth: list[torch.Tensor], tally: Tally) -> None:
    for attention in ("eager", "torch_uma"):
        model = model_of(name, attention)
        truth[:] = [generate(model_of(name), prompt(), max_new_tokens=NUM_NEW + 20)]  # candidates go beyond the end
        for way in ways_of(name):
            cache = torch_uma.UnifiedCache(model, max_tokens=PROMPT_TOKENS + NUM_NEW)
            tokens = generate(model, prompt(), cache=cache, prompt_lookup_num_tokens=25, **way)
            assert_same_tokens(model, tokens, greedy(name), torch.ones_like(prompt()))
            cache.pool.check()
    assert tally.kept and tally.refused


@pytest.mark.parametrize("name", ["gemma2", "lfm2"])
def test_an_assistant_may_have_a_cache_of_its_own(name: str, tally: Tally) -> None:
    model, assistant = model_of(name), assistant_of(name)
    for way in ({"assistant_model": assistant}, {"assistant": assistant, "custom_generate": torch_uma.speculate}):
        tokens = generate(model, prompt(), cache=poisoned(model, page_size=7), **way)
        assert_same_tokens(model, tokens, greedy(name), torch.ones_like(prompt()))
    cache, own = poisoned(model, page_size=3), poisoned(assistant, page_size=2)
    shared = torch_uma.UnifiedCache(assistant, pool=cache.pool)
    for assistant_cache in (own, shared, own):
        tally.pool = assistant_cache.pool
        cache.reset()
        options = {"assistant": assistant, "assistant_cache": assistant_cache}
        tokens = generate(model, prompt(), cache=cache, custom_generate=torch_uma.speculate, **options)
        assert_same_tokens(model, tokens, greedy(name), torch.ones_like(prompt()))
        assert assistant_cache.get_seq_length() > PROMPT_TOKENS
        cache.pool.check()
    assert tally.kept > 10 and tally.refused > 10, (tally.kept, tally.refused)


def test_an_assistant_without_states_serves_a_model_with_states(tally: Tally) -> None:
    model, assistant = model_of("qwen3_next"), model_of("llama")
    options = {"assistant": assistant, "custom_generate": torch_uma.speculate}
    tokens = generate(model, prompt(), cache=poisoned(model), **options)
    assert_same_tokens(model, tokens, greedy("qwen3_next"), torch.ones_like(prompt()))
    assert tally.refused > 10


def test_the_first_layers_of_a_model_may_be_its_assistant(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    tokens = generate(model, prompt(), cache=poisoned(model), assistant_early_exit=2)
    assert_same_tokens(model, tokens, greedy("llama"), torch.ones_like(prompt()))


@pytest.mark.parametrize("name", ["gemma2", "qwen3_next", "lfm2"])
def test_a_criterion_stops_within_candidates(name: str, truth: list[torch.Tensor], tally: Tally) -> None:
    model = model_of(name)
    for stop in (PROMPT_TOKENS + 7, PROMPT_TOKENS + 20):
        truth[:] = [greedy(name)]
        criteria = StoppingCriteriaList([StopAfter(stop)])
        cache = poisoned(model)
        options = {"prompt_lookup_num_tokens": 8, "custom_generate": torch_uma.speculate}
        tokens = generate(model, prompt(), cache=cache, stopping_criteria=criteria, **options)
        assert torch.equal(tokens, greedy(name)[:, :stop])
        assert cache.get_seq_length() == stop - 1
        tokens = generate(model, tokens, cache=cache, max_new_tokens=greedy(name).shape[1] - stop, **options)
        assert_same_tokens(model, tokens, greedy(name), torch.ones_like(prompt()))
    end = int(greedy(name)[0, PROMPT_TOKENS + 9])
    expected = generate(model, prompt(), eos_token_id=end)
    tokens = generate(model, prompt(), cache=poisoned(model), eos_token_id=end, **options)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_next", "lfm2"])
def test_whoever_interrupts_finds_no_candidates_in_the_cache(name: str, truth: list[torch.Tensor]) -> None:
    model = model_of(name)
    options = {"prompt_lookup_num_tokens": 8, "custom_generate": torch_uma.speculate}
    truth[:] = [greedy(name)]
    num_at_candidates = 0
    for stop in range(PROMPT_TOKENS + 1, PROMPT_TOKENS + 12):
        cache = poisoned(model)
        with pytest.raises(KeyboardInterrupt):
            generate(model, prompt(), cache=cache, stopping_criteria=StoppingCriteriaList([Interrupt(stop)]), **options)
        assert not cache._own().is_recording
        held = cache.get_seq_length()
        num_at_candidates += int(held < stop - 1)
        assert held < stop
        with torch.no_grad():
            logits = model(input_ids=greedy(name)[:, held : stop + 3], cache=cache).logits
            expected = model(input_ids=greedy(name)[:, : stop + 3]).logits[:, held:]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        cache.pool.check()
    assert (num_at_candidates > 0) == (name in RECURRENT)


@pytest.mark.parametrize("name", ["gemma2", "qwen3_next"])
def test_prompts_come_in_pieces_padded_or_as_embeddings(name: str, truth: list[torch.Tensor], tally: Tally) -> None:
    model = model_of(name)
    options = {"prompt_lookup_num_tokens": 4, "custom_generate": torch_uma.speculate}
    truth[:] = [greedy(name)]
    tokens = generate(model, prompt(), cache=poisoned(model), prefill_chunk_size=8, **options)
    assert_same_tokens(model, tokens, greedy(name), torch.ones_like(prompt()))
    padded: dict[str, Any] = {
        "input_ids": torch.cat([torch.full((1, 5), PAD), prompt()], dim=1),
        "attention_mask": torch.cat([torch.zeros(1, 5).long(), torch.ones_like(prompt())], dim=1),
        "max_new_tokens": NUM_NEW,
        "do_sample": False,
    }
    truth[:] = [model.generate(**padded)]
    assert torch.equal(model.generate(**padded, cache=poisoned(model), **options), truth[0])
    embeddings: dict[str, Any] = {"inputs_embeds": model.get_input_embeddings()(prompt()), "max_new_tokens": NUM_NEW}
    truth[:] = [model.generate(**embeddings, do_sample=False)]
    assert torch.equal(truth[0], greedy(name)[:, PROMPT_TOKENS:])
    tokens = model.generate(**embeddings, do_sample=False, cache=poisoned(model), **options)
    assert torch.equal(tokens, truth[0])
    assert tally.kept and tally.refused


def test_a_model_of_states_alone_goes_on_with_new_text(truth: list[torch.Tensor], tally: Tally) -> None:
    model = model_of("mamba2")
    turns: list[list[torch.Tensor]] = []
    for options in ({}, {"prompt_lookup_num_tokens": 4, "custom_generate": torch_uma.speculate}):
        cache = poisoned(model)
        truth[:] = turns[0] if turns else truth
        first = generate(model, prompt(), cache=cache, **options)
        new = torch.cat([first[:, -1:], prompt(6, seed=8)], dim=1)
        truth[:] = turns[0][1:] if turns else truth
        turns.append([first, generate(model, new, cache=cache, **options)])
        assert cache.get_seq_length() == PROMPT_TOKENS + 2 * NUM_NEW + 5
    assert torch.equal(turns[0][0], turns[1][0]) and torch.equal(turns[0][1], turns[1][1])
    assert tally.kept and tally.refused


def test_scores_and_logits_are_those_of_each_token(truth: list[torch.Tensor]) -> None:
    model = model_of("qwen3_next")
    truth.append(greedy("qwen3_next"))
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.01}
    options = {"max_new_tokens": 20, "do_sample": False, **wanted}
    ids = prompt()
    plain: Any = model.generate(input_ids=ids, **options)
    cache = poisoned(model)
    found: Any = model.generate(
        input_ids=ids, cache=cache, prompt_lookup_num_tokens=4, custom_generate=torch_uma.speculate, **options
    )
    assert torch.equal(found.sequences, plain.sequences) and found.cache is cache
    for some, others in ((found.scores, plain.scores), (found.logits, plain.logits)):
        torch.testing.assert_close(torch.stack(some), torch.stack(others), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_without_candidates_sampling_draws_the_same_numbers(name: str, truth: list[torch.Tensor]) -> None:
    model = model_of(name)
    truth.append(prompt()[:, :0])
    drawn = []
    for options in ({}, {"prompt_lookup_num_tokens": 4, "custom_generate": torch_uma.speculate}):
        torch.manual_seed(9)
        drawn.append(generate(model, prompt(), do_sample=True, top_k=20, cache=poisoned(model), **options))
    assert torch.equal(*drawn)


def test_a_candidate_is_kept_as_often_as_it_would_be_sampled(truth: list[torch.Tensor]) -> None:
    model = model_of("llama")
    ids = prompt(8)
    truth.append(generate(model, ids, max_new_tokens=3))
    options = {"do_sample": True, "top_k": 4, "max_new_tokens": 3, "cache": poisoned(model)}
    torch.manual_seed(1)
    seen = []
    for way in ({}, {"prompt_lookup_num_tokens": 2, "custom_generate": torch_uma.speculate}):
        counts = torch.zeros(2, 260)
        for _ in range(100):
            options["cache"].reset()
            tokens = generate(model, ids, **options, **way)
            for place in range(2):
                counts[place, tokens[0, -2 + place]] += 1
        seen.append(counts / 100)
    assert (seen[0] - seen[1]).abs().max() < 0.3  # four standard deviations of a difference of two shares


def test_generating_without_an_assistant_ends_its_recording(truth: list[torch.Tensor]) -> None:
    model = model_of("mistral")
    truth.append(greedy("mistral"))
    cache = poisoned(model)
    tokens = generate(model, prompt(), cache=cache, prompt_lookup_num_tokens=4)
    assert cache.is_recording_past(0) and not cache.is_compileable
    long = generate(model, tokens, cache=cache, max_new_tokens=100)
    assert not cache.is_recording_past(0) and cache.is_compileable
    plain = poisoned(model)
    assert torch.equal(long, generate(model, tokens, cache=plain, max_new_tokens=100))
    assert bounded_pages(cache.pool) <= bounded_pages(plain.pool)


@pytest.mark.parametrize("name", ["mistral", "qwen3_next"])
def test_memory_that_runs_out_leaves_a_cache_that_goes_on(name: str, truth: list[torch.Tensor]) -> None:
    model = model_of(name)
    truth.append(greedy(name))
    options = {"prompt_lookup_num_tokens": 6, "custom_generate": torch_uma.speculate}
    cache = poisoned(model, page_size=4)
    hog: list[torch_uma.Sequence] = []
    criteria = StoppingCriteriaList([StopAfter(PROMPT_TOKENS + 12)])
    tokens = generate(model, prompt(), cache=cache, stopping_criteria=criteria, **options)
    with pytest.raises(torch_uma.OutOfMemory):
        while True:
            hog.append(cache.pool.add(4))
    with pytest.raises(torch_uma.OutOfMemory, match="rows of this cache hold"):
        generate(model, tokens, cache=cache, **options)
    cache.pool.check()
    for sequence in hog:
        sequence.free()
    tokens = greedy(name)[:, : int(cache.get_seq_length()) + 1]
    left = greedy(name).shape[1] - tokens.shape[1]
    tokens = generate(model, tokens, cache=cache, max_new_tokens=left, **options)
    assert_same_tokens(model, tokens, greedy(name), torch.ones_like(prompt()))


def test_wrong_uses_are_refused_before_anything_is_run() -> None:
    model = model_of("qwen3_next")
    cache = poisoned(model)
    lookup = {"prompt_lookup_num_tokens": 3}
    other = LlamaForCausalLM(LlamaConfig(**{**CONFIGS["llama"]().to_dict(), "vocab_size": 9, "pad_token_id": None}))
    wrong: list[tuple[type[Exception], str, torch.Tensor, dict[str, Any]]] = [
        (SequenceError, "this batch has 2", torch.cat([prompt(), prompt()]), lookup),
        (PlanError, "needs candidates", prompt(), {}),
        (PlanError, "needs candidates", prompt(), {**lookup, "assistant": model_of("llama")}),
        (PlanError, "no attentions", prompt(), {**lookup, "output_attentions": True, "return_dict_in_generate": True}),
        (PlanError, "prompt_lookup_num_tokens", prompt(), {"prompt_lookup_num_tokens": 0}),
        (PlanError, "max_matching_ngram_size", prompt(), {**lookup, "max_matching_ngram_size": 0}),
        (PlanError, "vocabulary", prompt(), {"assistant": other}),
        (PlanError, "recurrent layers", prompt(), {"assistant": model}),
        (PlanError, "UnifiedCache", prompt(), {**lookup, "cache": DynamicCache(config=model.config)}),
        (PlanError, "UnifiedCache", prompt(), {**lookup, "use_cache": False}),
    ]
    for error, message, ids, options in wrong:
        with pytest.raises(error, match=message):
            generate(model, ids, **{"cache": cache, "custom_generate": torch_uma.speculate, **options})
        assert cache.batch_size == -1
    restarting = tuple(dataclasses.replace(layer, restarted_by="mamba") for layer in cache._declared)
    cache._declared = restarting
    with pytest.raises(PlanError, match="mamba starts its recurrent states anew"):
        generate(model, prompt(), cache=cache, custom_generate=torch_uma.speculate, **lookup)
