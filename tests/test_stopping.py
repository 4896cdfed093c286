"""When a request ends: with the token with which `generate()` ends, and for which reason."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from choosing import EvenSum, Request, generated, prompt_of, run
from models import build
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import MaxLengthCriteria, PreTrainedTokenizerFast, StopStringCriteria

from torch_uma.integrations.transformers.serving.options import resolve
from torch_uma.integrations.transformers.serving.stopping import Stopping, stop_strings

MODEL = build("llama")
PARTS = ["".join(letters) for size in (1, 2, 3) for letters in itertools.product("abcdef", repeat=size)][:256]


def words() -> PreTrainedTokenizerFast:
    """A token for each of 256 strings of one to three letters."""
    made = Tokenizer(models.WordLevel({part: i for i, part in enumerate(PARTS)}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made)


WORDS = words()


def test_stop_strings_end_a_text_where_generate_does() -> None:
    rng = np.random.default_rng(1)
    strings = ["ba", "cd", "faced", ["bad", "ee"], ["f" * 30], "abcabc", ["a", "b"]]
    requests = [
        Request(prompt_of(rng, 6), {"stop_strings": strings[seed % 7], "max_new_tokens": 15, "do_sample": True}, seed)
        for seed in range(28)
    ]
    run(MODEL, requests, WORDS)
    for request in requests:
        assert request.tokens == generated(MODEL, request, WORDS), request.options
    assert {request.reasons[-1] for request in requests} == {"stop", "length"}


def test_only_tokens_that_end_a_string_have_the_text_looked_at() -> None:
    strings = stop_strings(WORDS, ("bad", "cc"))
    by_hand = {
        token
        for token, part in enumerate(PARTS)
        if "bad" in part or "cc" in part or any(part.startswith(end) for end in ("ad", "d", "c"))
    }
    assert strings.completing == by_hand and strings is stop_strings(WORDS, ("bad", "cc"))
    rng = np.random.default_rng(2)
    prompt, tokens = prompt_of(rng, 2), []
    stops = 0
    for _ in range(400):
        tokens.append(int(rng.integers(256)))
        expected = bool(strings.criterion(torch.tensor([prompt + tokens]), None))
        assert strings.end(prompt, tokens) == expected
        stops += expected
    assert stops > 10


def test_a_string_may_begin_in_the_prompt() -> None:
    strings = stop_strings(WORDS, ("face",))
    prompt = [PARTS.index("b"), PARTS.index("fa")]
    assert strings.end(prompt, [PARTS.index("ce")]) and not strings.end(prompt[:1], [PARTS.index("ce")])


def test_the_reason_is_a_stop_where_both_come_with_the_same_token() -> None:
    stopping = Stopping(prompt=[1], max_new_tokens=2, eos_token_ids=frozenset({7, 9}))
    assert stopping.reason([7]) == "stop" and stopping.reason([3]) is None
    assert stopping.reason([3, 9]) == "stop" and stopping.reason([3, 4]) == "length"


def test_time_runs_from_when_the_request_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    stopping = resolve(MODEL, [1, 2], max_new_tokens=9, max_time=50.0)[1]
    assert stopping.deadline_s is not None and 50 <= stopping.deadline_s - now < 60
    assert stopping.reason([3]) is None
    monkeypatch.setattr(time, "time", lambda: now + 61)
    assert stopping.reason([3]) == "length"


def test_criteria_of_the_user_see_the_whole_text_and_go_before_those_of_transformers() -> None:
    stopping = resolve(MODEL, [1, 2], max_new_tokens=9, stopping_criteria=[EvenSum(), MaxLengthCriteria(5)])[1]
    assert stopping.reason([4]) is None and stopping.reason([4, 1]) == "stop"
    assert stopping.max_new_tokens == 3 and stopping.reason([4, 2, 2]) == "length"
    mine = StopStringCriteria(WORDS, ["dd"])
    stopping = resolve(MODEL, [1, 2], stop_strings="a", tokenizer=WORDS, stopping_criteria=[mine])[1]
    assert stopping.strings is None and stopping.reason([PARTS.index("a")]) is None
    assert stopping.reason([PARTS.index("add")]) == "stop"
