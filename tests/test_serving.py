"""A serving loop: the tokens of generate() for each prompt, whoever else is there, comes, goes and is retracted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from served import alone, assert_all_free, assert_as_alone, model_of, prompt_of, run, tight_pool, tokenizer
from torch._dynamo.backends.debugging import aot_eager
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import StoppingCriteria

import torch_uma
from torch_uma import CachePool, ClosedError, OutOfMemory, PlanError, SequenceError, ServingLoop, ThreadError
from torch_uma.scheduling import Costs

torch.set_num_threads(1)

GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "top_k": 20, "temperature": 1.3, "repetition_penalty": 1.2}
BOTH = [(0, True), ("1MiB", False)]
SERVED = [
    ("llama", "torch_uma", "110KiB", [(0, False), (0, True), ("1MiB", False), ("1MiB", True)]),
    ("gpt_oss", "torch_uma", "90KiB", BOTH),
    ("gpt_oss", "eager", "90KiB", [(0, False)]),
    ("qwen3_next", "sdpa", "60KiB", BOTH),
    ("bamba", "torch_uma", "50KiB", BOTH),
    ("mamba2", "eager", "50KiB", [(0, True)]),  # whose memory does not grow
    ("jamba", "eager", "50KiB", BOTH),  # whose prompts come whole
    ("deepseek_v3", "torch_uma", "60KiB", BOTH),
    ("deepseek_v4", "eager", "90KiB", [(0, True)]),  # whose rows are equally long, and are mostly states and windows
    ("git", "eager", "120KiB", [(0, True)]),  # which does not look at positions
    ("biogpt", "torch_uma", "120KiB", [(0, True)]),  # which cannot be packed
]
LENGTHS = (5, 40, 17, 9, 22, 31)


@pytest.mark.parametrize(
    ("name", "attention", "memory", "host_memory", "overlap"), [(*case, *way) for *case, ways in SERVED for way in ways]
)
def test_tokens_are_those_of_each_prompt_alone(
    name: str, attention: str, memory: str, host_memory: int | str, overlap: bool
) -> None:
    """Greedy and sampled requests side by side, chunked prompts, and memory for half of them."""
    model = model_of(name, attention)
    pool = tight_pool(model, memory)
    loop = ServingLoop(model, pool=pool, max_running=8, step_tokens=16, host_memory=host_memory, overlap=overlap)
    asked = [(SAMPLED if place % 2 else GREEDY) | {"max_new_tokens": 20 + place} for place in range(len(LENGTHS))]
    generations = [
        loop.submit(prompt_of(length), seed=place, **options)
        for place, (length, options) in enumerate(zip(LENGTHS, asked, strict=True))
    ]
    assert len(loop) == len(LENGTHS)
    run(loop)
    for place, (generation, options) in enumerate(zip(generations, asked, strict=True)):
        assert generation.finish_reason == "length" and generation.is_finished
        assert_as_alone(model, generation, place, **options)
    stats = loop.scheduler.stats()
    print(name, attention, stats)
    assert (stats.offloaded if host_memory else stats.dropped) > 0 or name in ("mamba2", "deepseek_v4")
    loop.close()
    assert_all_free(pool)


def test_more_headroom_retracts_fewer() -> None:
    model = model_of("llama", "torch_uma")
    retracted = {}
    for headroom_steps in (1, 40):
        loop = ServingLoop(model, pool=tight_pool(model, "110KiB"), max_running=8, headroom_steps=headroom_steps)
        for length in LENGTHS:
            loop.submit(prompt_of(length), max_new_tokens=24, do_sample=False)
        run(loop)
        retracted[headroom_steps] = loop.scheduler.stats().dropped
        loop.close()
    assert retracted[1] > retracted[40] == 0


def submit_all(loop: ServingLoop, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> list[torch_uma.Generation]:
    return [loop.submit(prompt_of(length), **{**GREEDY, "max_new_tokens": 20, **options}) for length in lengths]


def test_events_bring_every_token_once_in_order_and_one_end() -> None:
    model = model_of("llama")
    loop = ServingLoop(model, pool=tight_pool(model, "110KiB"), max_running=8, step_tokens=16, overlap=True)
    generations = submit_all(loop, logprobs=True)
    streamed: dict[torch_uma.Generation, list[int]] = {generation: [] for generation in generations}
    ends: list[torch_uma.Generation] = []
    for event in run(loop):
        assert event.generation not in ends
        streamed[event.generation] += event.tokens
        if event.finish_reason is not None:
            ends.append(event.generation)
    assert sorted(map(id, ends)) == sorted(map(id, generations))
    for generation in generations:
        assert streamed[generation] == generation.tokens and generation.num_tokens == len(generation.prompt) + 20
        text = torch.tensor([generation.prompt + generation.tokens])
        expected = model(text, use_cache=False).logits[0, -21:-1].log_softmax(-1).gather(1, text[0, -20:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(generation.logprobs), expected, rtol=1e-3, atol=1e-3)
    assert not loop and loop.step() == []
    loop.close()


def test_the_higher_priority_starts_with_the_next_step_and_the_others_end_alike() -> None:
    model = model_of("gpt_oss")
    pool = tight_pool(model, "90KiB")
    loop = ServingLoop(model, pool=pool, max_running=8, step_tokens=64)
    others = submit_all(loop, (30, 31, 32))
    for _ in range(8):
        loop.step()
    urgent = loop.submit(prompt_of(33), priority=5, max_new_tokens=20, **GREEDY)
    events = loop.step()
    assert urgent in [event.generation for event in events] and len(urgent.tokens) == 1
    run(loop)
    assert loop.scheduler.stats().preempted > 0
    for generation in (urgent, *others):
        assert_as_alone(model, generation, max_new_tokens=20, **GREEDY)
    loop.close()
    assert_all_free(pool)


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_cancelled_ends_at_once_and_changes_nobody(overlap: bool) -> None:
    model = model_of("qwen3_next", "sdpa")
    pool = tight_pool(model, "70KiB")
    loop = ServingLoop(model, pool=pool, max_running=3, step_tokens=16, host_memory="1MiB", overlap=overlap)
    generations = submit_all(loop)
    num_steps, cancelled = 0, []
    while loop:
        for event in loop.step():
            assert event.finish_reason == event.generation.finish_reason
        torch_uma.testing.scramble(pool, num_steps)
        if num_steps in (0, 3, 9, 14):  # one that waits, a prompt in part, some that decode
            victim = next(each for each in reversed(generations) if not each.is_finished)
            loop.cancel(victim)
            loop.cancel(victim)
            cancelled.append(victim)
            tokens = list(victim.tokens)
            assert victim.finish_reason == "cancelled"
            events = [event for event in loop.step() if event.generation is victim]
            assert [(event.tokens, event.finish_reason) for event in events] == [([], "cancelled")]
            assert victim.tokens == tokens == alone(model, victim.prompt, max_new_tokens=20, **GREEDY)[: len(tokens)]
        num_steps += 1
        pool.check()
    for generation in generations:
        if generation not in cancelled:
            assert_as_alone(model, generation, max_new_tokens=20, **GREEDY)
    assert len(cancelled) == 4
    loop.cancel(generations[0])  # which is finished
    assert generations[0].finish_reason == "length"
    loop.close()
    assert_all_free(pool)


class Act(LogitsProcessor):
    """Does something at a length of the text, and nothing to the scores."""

    def __init__(self, num_tokens: int, action: Callable[[], Any]) -> None:
        self.num_tokens, self.action = num_tokens, action

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == self.num_tokens:
            self.action()
        return scores


@pytest.mark.parametrize("overlap", [False, True])
def test_a_processor_sees_its_text_and_may_cancel_or_raise(overlap: bool) -> None:
    model = model_of("llama")
    loop = ServingLoop(model, memory="1MiB", max_running=8, overlap=overlap)
    generations = submit_all(loop, (9, 12))

    def fail() -> None:
        raise ArithmeticError("a processor of mine")

    for length, action in ((5, lambda: loop.cancel(generations[0])), (7, fail)):
        processors = LogitsProcessorList([Act(length + 4, action)])
        generations.append(loop.submit(prompt_of(length), logits_processor=processors, max_new_tokens=20, **GREEDY))
    events = run(loop)
    assert [generation.finish_reason for generation in generations] == ["cancelled", "length", "length", "error"]
    assert [event.finish_reason for event in events if event.generation is generations[3]][-1] == "error"
    assert isinstance(generations[3].error, torch_uma.TorchUmaError)
    assert isinstance(generations[3].error.__cause__, ArithmeticError)
    assert len(generations[3].tokens) == (3 if overlap else 4)  # the last one was in flight
    for generation in generations:
        expected = alone(model, generation.prompt, max_new_tokens=20, **GREEDY)
        assert generation.tokens == expected[: len(generation.tokens)]
    loop.close()


class Fails(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        raise ArithmeticError("a criterion of mine")


class Interrupted(BaseException):
    pass


class Acts(StoppingCriteria):
    """Does something at a length of the text, once, and ends nothing."""

    def __init__(self, num_tokens: int, action: Callable[[], Any]) -> None:
        self.num_tokens, self.action, self.is_done = num_tokens, action, False

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] == self.num_tokens and not self.is_done:
            self.is_done = True
            self.action()
        return torch.tensor([False])


def raises(error: BaseException) -> Callable[[], Any]:
    def act() -> None:
        raise error

    return act


@pytest.mark.parametrize("overlap", [False, True])
def test_a_criterion_may_cancel_or_raise_behind_the_token_that_it_has_seen(overlap: bool) -> None:
    model = model_of("llama")
    loop = ServingLoop(model, memory="1MiB", max_running=8, overlap=overlap)
    generations: list[torch_uma.Generation] = []
    for action in (lambda: loop.cancel(generations[0]), raises(ArithmeticError())):
        criteria = StoppingCriteriaList([Acts(7 + 4, action)])
        generations.append(loop.submit(prompt_of(7), stopping_criteria=criteria, max_new_tokens=4, **GREEDY))
    events = run(loop)
    expected = alone(model, prompt_of(7), max_new_tokens=4, **GREEDY)
    for generation, reason in zip(generations, ("cancelled", "error"), strict=True):
        told = [event for event in events if event.generation is generation]
        assert [event.tokens for event in told] == [*([token] for token in expected), []]
        assert [event.finish_reason for event in told] == [None] * 4 + [reason]
        assert generation.finish_reason == reason and generation.tokens == expected
    loop.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_interrupted_while_tokens_are_chosen_or_read_goes_on_from_there(overlap: bool) -> None:
    """Tokens that others had drawn in that step are drawn again, from the same numbers."""
    model = model_of("llama")
    loop = ServingLoop(model, memory="1MiB", max_running=24, step_tokens=64, overlap=overlap)
    options = SAMPLED | {"max_new_tokens": 12, "logprobs": True}
    pending = [Interrupted()]

    def interrupt_once() -> None:
        if pending:
            raise pending.pop()

    actions: list[dict[str, Any]] = [
        {},
        {"stopping_criteria": StoppingCriteriaList([Acts(LENGTHS[1] + 3, raises(Interrupted()))])},
        {},
        {"logits_processor": LogitsProcessorList([Act(LENGTHS[3] + 5, interrupt_once)])},
    ]
    generations = [
        loop.submit(prompt_of(length), seed=length, **options, **acts) for length, acts in zip(LENGTHS, actions)
    ]
    num_raised, num_steps = 0, 0
    while loop:
        if num_steps < 12:  # whose prompt comes before the forward of the others, in the same round
            generations.append(loop.submit(prompt_of(5), seed=5, **options))
        try:
            loop.step()
        except Interrupted:
            num_raised += 1
        loop.pool.check()
        num_steps += 1
        assert num_steps < 200
    assert num_raised == 2
    for generation in generations:
        assert generation.logprobs is not None and len(generation.logprobs) == 12
        assert_as_alone(model, generation, len(generation.prompt), **SAMPLED, max_new_tokens=12)
    loop.close()


def test_each_ends_as_its_options_say() -> None:
    model, words = model_of("llama"), tokenizer()
    loop = ServingLoop(model, memory="1MiB", max_running=8, tokenizer=words, overlap=True)
    prompt = prompt_of(11)
    tokens = alone(model, prompt, max_new_tokens=20, **GREEDY)
    end = tokens[6]
    asked: list[tuple[dict[str, Any], str]] = [
        ({"eos_token_id": end}, "stop"),
        ({"stop_strings": words.decode(tokens[7:9])}, "stop"),
        ({"max_new_tokens": 1}, "length"),
        ({"max_new_tokens": None, "max_length": 14}, "length"),
        ({"max_time": 0.0}, "length"),
        ({"stopping_criteria": StoppingCriteriaList([Fails()])}, "error"),
    ]
    generations = []
    for options, _ in asked:
        config = GenerationConfig(max_new_tokens=20, do_sample=False)
        generations.append(loop.submit(torch.tensor([prompt]), config, **options))
    run(loop)
    for generation, (options, reason) in zip(generations, asked, strict=True):
        assert generation.finish_reason == reason, options
        assert generation.tokens == tokens[: len(generation.tokens)]
    num_tokens = [len(generation.tokens) for generation in generations]
    assert num_tokens == [tokens.index(end) + 1, num_tokens[1], 1, 3, 1, 1]
    assert generations[1].text(words).endswith(words.decode(tokens[7:9])) and num_tokens[1] <= 9
    assert isinstance(generations[5].error, ArithmeticError)
    assert str(generations[0]) == f"Generation(11 + {num_tokens[0]} tokens, stop)"
    loop.close()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
@pytest.mark.parametrize("error", [ArithmeticError, Interrupted])
def test_a_forward_that_raises_is_taken_back_and_the_loop_goes_on(
    name: str, error: type[BaseException], overlap: bool
) -> None:
    model = model_of(name)
    pool = tight_pool(model, "1MiB")
    loop = ServingLoop(model, pool=pool, max_running=8, step_tokens=16, overlap=overlap)
    options = SAMPLED | {"max_new_tokens": 20}
    generations = [loop.submit(prompt_of(length), seed=length, **options) for length in LENGTHS]
    failing = set(range(4, 40, 7))
    num_calls = num_raised = 0

    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls in failing:
            raise error("halfway through")

    handle = model.model.layers[1].register_forward_hook(hook, with_kwargs=True)
    try:
        while loop:
            try:
                loop.step()
            except error:
                num_raised += 1
            pool.check()
    finally:
        handle.remove()
    told = [generation for generation in generations if generation.finish_reason == "error"]
    assert num_raised > 0 and num_raised + len(told) == len(failing)
    assert not told or error is ArithmeticError
    for generation in generations:
        if generation not in told:
            assert_as_alone(model, generation, len(generation.prompt), **options)
        else:
            assert isinstance(generation.error, error)
    loop.close()
    assert_all_free(pool)


def test_what_cannot_be_served_is_refused_and_nothing_changes() -> None:
    model = model_of("llama")
    pool = tight_pool(model, "200KiB")
    loop = ServingLoop(model, pool=pool, max_running=4, max_request_tokens=60)
    refused: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ([], {}, SequenceError, "no tokens"),
        ("text", {}, SequenceError, "tokenizer"),
        ([1.5], {}, SequenceError, "whole number"),
        ([3, -1], {}, SequenceError, "at least 0"),
        ([3, 260], {}, SequenceError, "token 260 .* 260"),
        (torch.ones(2, 3, dtype=torch.int64), {}, SequenceError, r"\(2, 3\)"),
        (torch.ones(3), {}, SequenceError, "float32"),
        (7, {}, SequenceError, "int"),
        (prompt_of(5), {"max_new_tokens": 56}, SequenceError, "60"),
        (prompt_of(5), {"seed": "one"}, SequenceError, "seed"),
        (prompt_of(5), {"priority": 0.5}, SequenceError, "priority"),
        (prompt_of(5), {"num_beams": 2}, PlanError, "num_beams"),
        (prompt_of(5), {"num_return_sequences": 2, "do_sample": True}, PlanError, "num_return_sequences"),
        (prompt_of(5), {"stop_strings": "x"}, PlanError, "tokenizer"),
        (prompt_of(5), {"assistant_model": model}, PlanError, "assistant_model"),
        (prompt_of(5), {"no_such_option": 1}, PlanError, "no_such_option"),
    ]
    for prompt, options, error, message in refused:
        with pytest.raises(error, match=message):
            loop.submit(prompt, **{"max_new_tokens": 5, **options})
    roomy = ServingLoop(model, pool=pool, max_running=4)
    with pytest.raises(OutOfMemory, match="5 tokens and 5000 new ones is longer than the 197"):
        roomy.submit(prompt_of(5), max_new_tokens=5000)
    assert not loop and len(loop) == 0 and loop.scheduler.stats().submitted == 0
    loop.close()
    loop.close()
    with pytest.raises(ClosedError, match="loop was closed"):
        loop.submit(prompt_of(5))
    with pytest.raises(ClosedError, match="loop was closed"):
        loop.step()
    assert not pool.closed
    assert_all_free(pool)


def test_a_loop_that_cannot_be_is_refused() -> None:
    llama = model_of("llama")
    pool = tight_pool(llama, "200KiB")
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: ServingLoop(llama, pool=pool, memory="1MiB"), "pool= has its memory"),
        (lambda: ServingLoop(llama, pool=pool.plan), "a CachePool of this model, not Plan"),
        (lambda: ServingLoop(model_of("gpt_oss"), pool=pool), "another model"),
        (lambda: ServingLoop(llama.model, memory="1MiB"), "can generate"),
        (lambda: ServingLoop(model_of("unlimited_ocr_text", "eager"), memory="1MiB"), "unlimited_ocr .* prompt"),
        (lambda: ServingLoop(model_of("llama4", "eager"), memory="1MiB"), "chunks"),
        (lambda: ServingLoop(model_of("bloom"), memory="1MiB"), "bloom .* another implementation"),
        (lambda: ServingLoop(model_of("rwkv", "eager"), memory="1MiB"), "rwkv"),
        (lambda: ServingLoop(model_of("llama", "eager"), memory="1MiB", compile=True), "'eager'.*compile="),
        (lambda: ServingLoop(model_of("deepseek_v32"), memory="1MiB", compile=True), "index keys.*compile="),
        (lambda: ServingLoop(llama, memory="1MiB", max_running=0), "max_running"),
        (lambda: ServingLoop(llama, memory="1MiB", host_memory="much"), "much"),
    ]
    for make, message in refused:
        with pytest.raises(PlanError, match=message):
            make()


def test_nobody_is_let_go_beyond_the_positions_that_a_model_has_learnt() -> None:
    model = model_of("biogpt", "eager")
    most = model.config.max_position_embeddings
    with ServingLoop(model, memory="8MiB", max_running=2) as loop:
        with pytest.raises(SequenceError, match=f"{most + 1}"):
            loop.submit(prompt_of(most - 10), max_new_tokens=12)
        generation = loop.submit(prompt_of(most - 10), max_new_tokens=11, **GREEDY)
        run(loop, scrambled=False)
        assert len(generation.tokens) == 11


def test_what_others_hold_is_waited_for_by_an_error() -> None:
    model = model_of("llama")
    pool = tight_pool(model, "110KiB")
    other = pool.add(80)
    loop = ServingLoop(model, pool=pool, max_running=4)
    generation = loop.submit(prompt_of(40), max_new_tokens=20, **GREEDY)
    with pytest.raises(OutOfMemory):
        loop.step()
    other.free()
    run(loop)
    assert_as_alone(model, generation, max_new_tokens=20, **GREEDY)
    loop.close()


def test_another_thread_can_do_nothing_and_changes_nothing() -> None:
    model = model_of("llama")
    loop = ServingLoop(model, memory="1MiB", max_running=2, overlap=True)
    generation = loop.submit(prompt_of(9), max_new_tokens=5, **GREEDY)
    loop.step()
    acts = (loop.step, loop.close, lambda: loop.cancel(generation), lambda: loop.submit(prompt_of(3)))
    with ThreadPoolExecutor(1) as thread:
        for act in acts:
            with pytest.raises(ThreadError):
                thread.submit(act).result()
    run(loop)
    assert generation.finish_reason == "length"
    loop.close()
    assert loop.pool.closed


def test_a_pool_that_is_closed_takes_its_generations_with_it() -> None:
    model = model_of("llama")
    pool = tight_pool(model, "110KiB")
    loop = ServingLoop(model, pool=pool, max_running=2, overlap=True)
    generations = submit_all(loop)
    for _ in range(5):
        loop.step()
    pool.close()
    with pytest.raises(ClosedError, match="pool was closed"):
        loop.step()
    loop.close()
    assert all(generation.finish_reason == "cancelled" for generation in generations)
    assert not loop


def test_a_loop_that_is_closed_early_gives_all_memory_back() -> None:
    model = model_of("gpt_oss")
    pool = tight_pool(model, "90KiB")
    with ServingLoop(model, pool=pool, max_running=4, step_tokens=16, overlap=True, host_memory="1MiB") as loop:
        generations = submit_all(loop)
        for _ in range(15):
            loop.step()
    unfinished = [generation for generation in generations if generation.finish_reason != "length"]
    assert unfinished and all(generation.finish_reason == "cancelled" for generation in unfinished)
    assert_all_free(pool)
    with ServingLoop(model, memory="90KiB", page_size=4, max_running=4) as loop:
        submit_all(loop)
        loop.step()
        own = loop.pool
    assert own.closed


def test_the_pace_of_prompts_is_told_to_the_scheduler() -> None:
    model = model_of("llama")
    with ServingLoop(model, memory="1MiB", max_running=4) as loop:
        before = loop.scheduler.costs
        submit_all(loop)
        run(loop)
        assert loop.scheduler.costs.token_s != before.token_s
        assert loop.scheduler.costs.copy_bytes_per_s == before.copy_bytes_per_s


def test_costs_that_are_given_are_kept() -> None:
    given = Costs(token_s=3.0, copy_bytes_per_s=1e6)
    with ServingLoop(model_of("llama"), memory="1MiB", max_running=4, costs=given) as loop:
        submit_all(loop)
        run(loop)
        assert loop.scheduler.costs == given


@pytest.fixture
def compiled_lightly(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Graphs are made as by inductor, but run op by op; gives a list that has an element for each."""
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return aot_eager(graph, inputs)

    torch.compiler.reset()
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: original(model, backend=backend, **options))
    yield graphs
    torch.compiler.reset()


def test_compiled_decode_steps_have_a_graph_for_each_of_a_few_sizes(compiled_lightly: list[int]) -> None:
    model = model_of("llama")
    loop = ServingLoop(model, memory="1MiB", page_size=4, max_running=6, step_tokens=24, compile=True, overlap=True)
    torch_uma.testing.poison(loop.pool)
    num_new = [12, 15, 18, 9, 9]
    generations = [
        loop.submit(prompt_of(length), max_new_tokens=count, **GREEDY) for length, count in zip(LENGTHS, num_new)
    ]
    run(loop)
    for generation, count in zip(generations, num_new, strict=True):
        assert_as_alone(model, generation, max_new_tokens=count, **GREEDY)
    assert 2 <= len(compiled_lightly) <= 4  # of 6, 4, 2 and 1 rows
    loop.close()


def test_states_and_fillers_in_compiled_steps() -> None:
    """By inductor, as other backends do not write states in place."""
    torch.compiler.reset()
    model = model_of("bamba")
    pool = tight_pool(model, "200KiB")
    loop = ServingLoop(model, pool=pool, max_running=4, compile=True)
    generations = submit_all(loop, (5, 21, 12))
    run(loop)
    for generation in generations:
        assert_as_alone(model, generation, max_new_tokens=20, **GREEDY)
    loop.close()
    assert_all_free(pool)
    torch.compiler.reset()


@pytest.mark.parametrize("max_sequences", [5, 16])
def test_where_fillers_find_no_room_a_step_runs_as_it_is(
    max_sequences: int, compiled_lightly: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row, or no page: the pool is as full as it gets."""
    model = model_of("llama")
    pool = CachePool(model, memory="70KiB", page_size=4, max_sequences=max_sequences)
    loop = ServingLoop(model, pool=pool, max_running=5, compile=True)
    generations = submit_all(loop, (9, 7, 5), max_new_tokens=12)
    num_rows: list[int] = []
    step = CachePool.step
    monkeypatch.setattr(CachePool, "step", lambda *given: num_rows.append(len(given[1])) or step(*given))
    run(loop, scrambled=False)
    for generation in generations:
        assert_as_alone(model, generation, max_new_tokens=12, **GREEDY)
    print(num_rows)
    assert num_rows.count(3) > (0 if max_sequences > 5 else 10)
    assert (4 in num_rows) is (max_sequences > 5)
    loop.close()
    assert_all_free(pool)
