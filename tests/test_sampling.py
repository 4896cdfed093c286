"""Choosing tokens: for many rows of unequal options at once as `generate()` does for each, without a wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from choosing import ENDS, FORMS, NUM_NEW, OPTIONS, NoneTwice, Request, generated, prompt_of, run
from models import build
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, TemperatureLogitsWarper

from torch_uma.errors import ProcessorError, SequenceError
from torch_uma.integrations.transformers.serving.options import resolve
from torch_uma.integrations.transformers.serving.sampling import choose

MODEL = build("llama")


def mixed(rng: np.random.Generator, num_requests: int) -> list[Request]:
    """Requests with the options of a few names each, some of them with a config; what goes together leaves a token."""
    requests = []
    for seed in range(num_requests):
        names = rng.choice(sorted(OPTIONS.keys() - {"prefix"}), size=int(rng.integers(1, 4)), replace=False)
        options: dict[str, Any] = {"max_new_tokens": int(rng.integers(1, 12))}
        for name in names:
            options |= OPTIONS[name]
        config = None
        if rng.random() < 0.5:
            lists = {key: options.pop(key) for key in list(options) if not hasattr(GenerationConfig(), key)}
            config, options = GenerationConfig(**options), lists
        requests.append(Request(prompt_of(rng, int(rng.integers(1, 20))), options, seed, config))
    return requests


@pytest.mark.parametrize("form", FORMS)
def test_each_option_does_what_it_does_in_generate(form: Any) -> None:
    rng = np.random.default_rng(1)
    requests = []
    for seed, (name, options) in enumerate(OPTIONS.items()):
        prompt = prompt_of(rng, 1 if name == "forced_bos" else 17)
        requests.append(Request(prompt, {"max_new_tokens": NUM_NEW, **options}, seed))
    run(MODEL, requests, form=form)
    for name, request in zip(OPTIONS, requests):
        assert request.tokens == generated(MODEL, request), name
    lengths = {name: len(request.tokens) for name, request in zip(OPTIONS, requests)}
    assert lengths["max_length"] == 13 and lengths["default length"] == 20
    assert len({tuple(request.tokens) for request in requests}) > 25


@pytest.mark.parametrize("seed", range(4))
def test_mixtures_of_options_are_those_of_generate(seed: int) -> None:
    print(f"seed {seed}")
    requests = mixed(np.random.default_rng(seed), 24)
    run(MODEL, requests)
    for request in requests:
        assert request.tokens == generated(MODEL, request), (request.options, request.config)


@pytest.mark.parametrize("name", ["mamba2", "falcon_h1", "gemma2"])
def test_every_kind_of_model_is_asked_for_its_defaults(name: str) -> None:
    model = build(name)
    model.generation_config.update(do_sample=True, top_k=20, temperature=1.3, max_new_tokens=6, eos_token_id=ENDS)
    rng = np.random.default_rng(3)
    requests = [
        Request(prompt_of(rng, 9), options, seed)
        for seed, options in enumerate([{}, {"temperature": 0.5}, {"do_sample": False}, {"eos_token_id": None}])
    ]
    run(model, requests)
    for request in requests:
        assert request.tokens == generated(model, request), request.options


def asked(options: dict[str, Any], **given: Any) -> Any:
    return resolve(MODEL, [1, 2, 3], **{"max_new_tokens": 5, **options}, **given)[0]


def test_rows_of_unequal_options_are_chosen_for_as_each_alone() -> None:
    rng = torch.Generator().manual_seed(4)
    names = sorted(OPTIONS) * 3
    samplings = [asked(OPTIONS[name]) for name in names]
    logits = 4 * torch.randn(len(names), 260, generator=rng)
    texts = [torch.randint(0, 256, (3 + row % 7,), generator=rng) for row in range(len(names))]
    for dtype in (torch.float32, torch.bfloat16):
        numbers = logits.to(dtype)
        generators = [torch.Generator().manual_seed(row) for row in range(len(names))]
        together, logprobs = choose(samplings, numbers, texts, generators, logprobs=True)
        assert logprobs is not None
        for row, sampling in enumerate(samplings):
            seeded = torch.Generator().manual_seed(row)
            token, logprob = choose([sampling], numbers[row : row + 1], [texts[row]], [seeded], logprobs=True)
            assert logprob is not None
            assert token == together[row] and logprob == logprobs[row], names[row]
            assert (generators[row].get_state() == seeded.get_state()).all(), names[row]


def test_of_equal_logits_the_first_token_is_taken() -> None:
    logits = torch.randint(0, 3, (300, 4001), generator=torch.Generator().manual_seed(5)).bfloat16()
    tokens, logprobs = choose([asked({})] * 300, logits)
    assert logprobs is None
    assert tokens.tolist() == [row.tolist().index(row.max()) for row in logits]


def test_requests_of_equal_options_share_what_is_done_with_their_logits() -> None:
    options = {"do_sample": True, "top_p": 0.9, "temperature": 0.7, "sequence_bias": {(3,): 1.0}, "eta_cutoff": 0.1}
    assert asked(options) is asked(options) and not asked(options).reads_text
    for changed in ({"top_p": 0.8}, {"sequence_bias": {(3,): 1.5}}, {"eta_cutoff": 0.2}, {"suppress_tokens": [4]}):
        assert asked(options | changed) is not asked(options) and not asked(options | changed).reads_text
    assert asked({"suppress_tokens": [4, 5]}) is not asked({"suppress_tokens": [4, 6]})
    assert asked({}) is asked({"eos_token_id": 4, "max_new_tokens": 9})
    for name in ("repetition", "processor", "bad phrases", "min_new_tokens"):
        assert asked(OPTIONS[name]).reads_text, name


def test_unseeded_rows_are_drawn_together_from_the_generator_of_torch() -> None:
    logits = torch.randn(50, 99, generator=torch.Generator().manual_seed(6))
    torch.manual_seed(7)
    tokens, _ = choose([asked({"do_sample": True, "top_k": 0})] * 50, logits)
    torch.manual_seed(7)
    assert torch.equal(tokens, torch.multinomial(logits.softmax(-1), 1)[:, 0])
    again, _ = choose([asked({"do_sample": True, "top_k": 0})] * 50, logits, generators=[None] * 50)
    assert not torch.equal(tokens, again)


class Broken(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        raise KeyError("lost")


def test_a_processor_that_raises_is_named_before_any_token_is_drawn() -> None:
    broken = asked({"logits_processor": [Broken()]})
    samplings = [asked({"do_sample": True}), broken, asked({})]
    generators = [torch.Generator().manual_seed(row) for row in range(3)]
    before = [generator.get_state() for generator in generators]
    texts = [None, [1, 2], None]
    with pytest.raises(ProcessorError, match=r"rows \[1\] failed: 'lost'") as raised:
        choose(samplings, torch.randn(3, 260), texts, generators)
    assert raised.value.rows == (1,) and isinstance(raised.value.__cause__, KeyError)
    assert all(torch.equal(generator.get_state(), state) for generator, state in zip(generators, before))
    far = asked({"sequence_bias": {(259,): 1.0}})
    with pytest.raises(ProcessorError, match="vocabulary size is 100") as raised:
        choose([far, asked({}), far], torch.randn(3, 100))
    assert raised.value.rows == (0, 2)


@pytest.mark.parametrize(("made", "what"), [(lambda scores: None, "NoneType"), (lambda scores: scores[:, :9], "9")])
def test_a_processor_that_makes_no_scores_is_named(made: Callable[[Tensor], Any], what: str) -> None:
    class Wrong(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
            return made(scores)

    generators = [torch.Generator().manual_seed(1), None]
    before = generators[0].get_state()
    with pytest.raises(ProcessorError, match=rf"rows \[1\] failed: .*{what}") as raised:
        choose(
            [asked({"do_sample": True}), asked({"logits_processor": [Wrong()]})],
            torch.randn(2, 260),
            [None, [1]],
            generators,
        )
    assert raised.value.rows == (1,) and torch.equal(generators[0].get_state(), before)


def test_rows_that_do_not_match_and_missing_texts_are_refused() -> None:
    logits = torch.zeros(2, 260)
    with pytest.raises(SequenceError, match="1 rows are to be chosen for, but there are logits for 2"):
        choose([asked({})], logits)
    with pytest.raises(SequenceError, match="texts for 1"):
        choose([asked({})] * 2, logits, [[1]])
    with pytest.raises(SequenceError, match="generators for 3"):
        choose([asked({})] * 2, logits, None, [None] * 3)
    for texts in (None, [[1], None]):
        with pytest.raises(SequenceError, match="row 1 has a processor that reads its text"):
            choose([asked({}), asked({"repetition_penalty": 1.2})], logits, texts)


def test_a_processor_of_the_user_is_not_changed() -> None:
    mine = NoneTwice()
    mine.table = torch.arange(4)  # type: ignore[attr-defined]
    sampling = asked({"logits_processor": [mine], "suppress_tokens": [1]}, device=torch.device("meta"))
    assert mine.table.device.type == "cpu"  # type: ignore[attr-defined]
    (suppressing,) = [each for each in sampling.processors if each is not mine]
    assert suppressing.suppress_tokens.device.type == "meta"


def test_processors_of_the_user_are_shared_with_nobody() -> None:
    for mine in (TemperatureLogitsWarper(0.5), TemperatureLogitsWarper(0.5)):
        sampling = asked({"logits_processor": [mine]})
        assert sampling.reads_text and sampling.processors[0] is mine


class Zeroing(LogitsProcessor):
    """Writes where it reads."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, :-1] = 0
        return scores


def test_a_processor_may_write_into_what_it_is_given() -> None:
    logits = torch.tensor([[5.0, 1.0, 2.0], [7.0, 1.0, -1.0], [3.0, 4.0, 1.0]])
    before = logits.clone()
    zeroing = asked({"logits_processor": [Zeroing()]})
    tokens, logprobs = choose([zeroing, zeroing, asked({})], logits, [[1]] * 3, logprobs=True)
    assert tokens.tolist() == [2, 0, 1] and torch.equal(logits, before)
    assert torch.equal(logprobs, before.log_softmax(-1)[range(3), tokens])
