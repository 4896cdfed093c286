"""generate_batch: prompts of unequal length at once, in every form, with the tokens of generate() for each."""

from __future__ import annotations

import unittest
from typing import Any

import pytest
import torch
from served import assert_all_free, assert_as_alone, model_of, prompt_of, tight_pool, tokenizer
from transformers import BatchEncoding, GenerationConfig, LogitsProcessor, LogitsProcessorList, TextStreamer
from transformers.generation.streamers import BaseStreamer

import torch_uma
from torch_uma import Event, OutOfMemory, PlanError, SequenceError, ServingLoop, generate_batch

torch.set_num_threads(1)

LENGTHS = (9, 33, 4, 21, 15)
PROMPTS = [prompt_of(length) for length in LENGTHS]
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}


def padded(side: str) -> dict[str, torch.Tensor]:
    width = max(LENGTHS)
    rows, masks = [], []
    for prompt in PROMPTS:
        pad = [0] * (width - len(prompt))
        rows.append(pad + prompt if side == "left" else prompt + pad)
        masks.append(pad + [1] * len(prompt) if side == "left" else [1] * len(prompt) + pad)
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(masks)}


@pytest.mark.parametrize(
    "inputs",
    [
        PROMPTS,
        [torch.tensor(prompt) for prompt in PROMPTS],
        padded("left"),
        BatchEncoding(padded("right")),
        BatchEncoding({"input_ids": PROMPTS, "token_type_ids": PROMPTS}),
        {"input_ids": PROMPTS, "attention_mask": [[1] * length for length in LENGTHS]},
    ],
    ids=["lists", "tensors", "padded in front", "padded behind", "encoding", "lists with masks"],
)
def test_prompts_of_every_form_in_their_order(inputs: Any) -> None:
    model = model_of("gpt_oss")
    generations = generate_batch(model, inputs, memory="1MiB", max_running=4, **GREEDY)
    assert [generation.prompt for generation in generations] == PROMPTS
    for generation in generations:
        assert generation.finish_reason == "length"
        assert_as_alone(model, generation, **GREEDY)


def test_a_tensor_without_padding() -> None:
    model = model_of("llama")
    prompts = torch.tensor([prompt_of(8), prompt_of(8)[::-1]])
    generations = generate_batch(model, prompts, memory="1MiB", **GREEDY)
    assert [generation.prompt for generation in generations] == prompts.tolist()
    assert generate_batch(model, [], memory="1MiB") == []


def test_options_seeds_and_priorities_of_each_prompt() -> None:
    model = model_of("qwen3_next", "sdpa")
    configs = [GenerationConfig(max_new_tokens=6 + n, do_sample=n % 2 == 1, top_k=9, pad_token_id=0) for n in range(5)]
    order: list[int] = []

    def note(loop: ServingLoop, event: Event) -> None:
        if event.finish_reason is not None:
            order.append(PROMPTS.index(event.generation.prompt))

    generations = generate_batch(
        model,
        PROMPTS,
        configs,
        memory="1MiB",
        max_running=1,
        seeds=[3, 4, 5, None, 7],
        priorities=[0, 3, 1, 4, 2],
        on_event=note,
    )
    assert order == [3, 1, 4, 2, 0]
    for generation, config, seed in zip(generations, configs, [3, 4, 5, None, 7], strict=True):
        assert len(generation.tokens) == config.max_new_tokens
        if seed is not None:
            assert_as_alone(model, generation, seed, generation_config=config)


def test_several_answers_to_one_prompt_lie_side_by_side() -> None:
    model = model_of("llama")
    options = {"do_sample": True, "max_new_tokens": 8, "temperature": 1.5}
    many = generate_batch(model, PROMPTS[:2], memory="1MiB", num_return_sequences=3, seeds=20, **options)
    assert [generation.prompt for generation in many] == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
    for seed, generation in enumerate(many, 20):
        assert_as_alone(model, generation, seed, **options)
    config = GenerationConfig(num_return_sequences=2, pad_token_id=0, **options)
    two = generate_batch(model, PROMPTS[1:2], config, memory="1MiB", seeds=[23])
    assert [generation.tokens for generation in two] == [generation.tokens for generation in many[3:5]]


class Kept(BaseStreamer):
    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        assert not self.ended
        self.pieces.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("overlap", [False, True])
def test_streamers_get_the_prompt_and_every_token(overlap: bool, capsys: pytest.CaptureFixture[str]) -> None:
    model, words = model_of("llama"), tokenizer()
    streamers = [Kept(), None, TextStreamer(words, skip_prompt=True), Kept(), None]
    generations = generate_batch(
        model, PROMPTS, memory="1MiB", streamers=streamers, overlap=overlap, progress=True, **GREEDY
    )
    for generation, streamer in zip(generations, streamers, strict=True):
        if isinstance(streamer, Kept):
            assert streamer.ended
            assert streamer.pieces == [generation.prompt, *([token] for token in generation.tokens)]
    captured = capsys.readouterr()
    assert captured.out.strip() == words.decode(generations[2].tokens)
    assert "5/5" in captured.err


def test_a_callback_may_cancel() -> None:
    model = model_of("llama")
    pool = tight_pool(model, "110KiB")
    seen: list[Event] = []

    def stop_early(loop: ServingLoop, event: Event) -> None:
        seen.append(event)
        if len(event.generation.tokens) == 5:
            loop.cancel(event.generation)

    generations = generate_batch(model, PROMPTS, pool=pool, max_running=4, on_event=stop_early, **GREEDY)
    for generation in generations:
        assert generation.finish_reason == "cancelled" and len(generation.tokens) == 5
        assert [event.finish_reason for event in seen if event.generation is generation] == [None] * 5 + ["cancelled"]
    assert_all_free(pool)


class Raises(LogitsProcessor):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 12:
            raise self.error
        return scores


@pytest.mark.parametrize("error", [ArithmeticError("mine"), KeyboardInterrupt()])
def test_whatever_is_raised_memory_is_given_back(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    pool = tight_pool(model, "200KiB")
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else torch_uma.TorchUmaError
    options = GREEDY | {"logits_processor": LogitsProcessorList([Raises(error)])}
    with pytest.raises(expected):
        generate_batch(model, PROMPTS, pool=pool, max_running=4, **options)
    assert_all_free(pool)
    pools: list[torch_uma.CachePool] = []
    close = torch_uma.CachePool.close

    def noted(pool: torch_uma.CachePool) -> None:
        pools.append(pool)
        close(pool)

    generate_batch(model, PROMPTS[:1], memory="1MiB", **GREEDY)  # what models allow is known from here on
    monkeypatch.setattr(torch_uma.CachePool, "close", noted)
    with pytest.raises(expected):
        generate_batch(model, PROMPTS, memory="200KiB", overlap=True, **options)
    assert [pool.closed for pool in pools] == [True]


def test_a_pool_that_was_given_keeps_what_others_have() -> None:
    model = model_of("bamba")
    pool = tight_pool(model, "200KiB")
    other = pool.add(20)
    with torch.no_grad(), pool.step({other: 9}) as cache:
        model(torch.tensor([PROMPTS[0]]), cache=cache, **cache.inputs())
    pages = other.num_pages
    for generation in generate_batch(
        model, PROMPTS, pool=pool, max_running=4, headroom_steps=2, host_memory="1MiB", **GREEDY
    ):
        assert_as_alone(model, generation, **GREEDY)
    assert not pool.closed and other.length == 9 and other.num_pages == pages
    other.free()
    assert_all_free(pool)


def test_what_does_not_go_together_is_refused() -> None:
    model = model_of("llama")
    refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ("a text", {}, SequenceError, "list of prompts"),
        (7, {}, SequenceError, "list of prompts"),
        ({"attention_mask": torch.ones(1, 2)}, {}, SequenceError, "no input_ids"),
        ({"input_ids": PROMPTS, "pixel_values": torch.ones(1)}, {}, SequenceError, "pixel_values"),
        ({"input_ids": PROMPTS, "attention_mask": [[1]]}, {}, SequenceError, "1 rows .* 5 prompts"),
        ({"input_ids": PROMPTS, "attention_mask": [[1]] * 5}, {}, SequenceError, r"\(1,\) for \(9,\)"),
        ([PROMPTS[0], []], {}, SequenceError, r"inputs\[1\]: .* no tokens"),
        (["a", "b"], {}, SequenceError, "tokenizer"),
        (PROMPTS, {"seeds": [1, 2]}, SequenceError, "seeds= has 2 for 5"),
        (PROMPTS, {"priorities": [1]}, SequenceError, "priorities= has 1 for 5"),
        (PROMPTS, {"seeds": 1.5}, SequenceError, "whole number"),
        (PROMPTS, {"seeds": 1 << 64}, SequenceError, "below"),
        (PROMPTS, {"seed": 1}, SequenceError, "seeds="),
        (PROMPTS, {"priority": 1}, SequenceError, "priorities="),
        (PROMPTS, {"priorities": 3}, SequenceError, "priorities= is a list with one for each prompt, not int"),
        (PROMPTS, {"streamers": [None]}, SequenceError, "streamers= has 1 for 5"),
        (PROMPTS, {"streamers": Kept()}, SequenceError, "streamers= is a list with one for each prompt, not Kept"),
        (PROMPTS, {"generation_config": {"top_k": 3}}, SequenceError, "one for each prompt, not dict"),
        (PROMPTS, {"generation_config": [{}] * 5}, PlanError, "GenerationConfig, not dict"),
        (PROMPTS[0], {}, SequenceError, r"inputs\[0\]: .* a single prompt of a batch stands in a list"),
        (torch.tensor([[1, 2], [3, 256]]), {}, SequenceError, "row 1 .* padded with token 256"),
        (PROMPTS, {"generation_config": [None]}, SequenceError, "generation_config= has 1 for 5"),
        (PROMPTS, {"num_return_sequences": 0}, SequenceError, "at least 1"),
        (PROMPTS, {"num_return_sequences": 2, "streamers": [None] * 5}, SequenceError, "several answers"),
        (PROMPTS, {"num_beams": 3}, PlanError, "num_beams"),
        (PROMPTS, {"max_new_tokens": 9000}, OutOfMemory, r"inputs\[0\]: .*9 tokens and 9000 new ones .* bytes in all"),
    ]
    for inputs, options, error, message in refused:
        with pytest.raises(error, match=message):
            generate_batch(model, inputs, memory="200KiB", **{"max_new_tokens": 4, **options})
    with pytest.raises(PlanError, match="AutoModelForCausalLM makes one"):
        generate_batch(model.config, PROMPTS, memory="200KiB")


def test_a_config_for_each_prompt_brings_no_warning_about_options_beside_it() -> None:
    model = model_of("llama")
    config = GenerationConfig(max_new_tokens=3, do_sample=True, num_return_sequences=2, pad_token_id=256)
    with unittest.TestCase().assertNoLogs("transformers", "WARNING"):
        many = generate_batch(model, PROMPTS[:2], [config, None], memory="1MiB")
    assert [generation.prompt for generation in many] == [PROMPTS[0], PROMPTS[0], PROMPTS[1]]
    assert config.num_return_sequences == 2


def test_generate_batch_leaves_the_model_as_it_was() -> None:
    model = model_of("llama")
    before = model.generation_config.to_dict()
    chance = torch.get_rng_state()
    generate_batch(model, PROMPTS, memory="1MiB", seeds=1, do_sample=True, max_new_tokens=4)
    assert model.generation_config.to_dict() == before and not model.training
    assert torch.equal(torch.get_rng_state(), chance)
