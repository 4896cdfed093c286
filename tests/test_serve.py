"""The server, asked by OpenAI's own client: the answers of `generate()`, limits, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import openai
import pytest
import serve
import tiny_models
import torch
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from serving.app import make_app
from serving.engine import Engine
from serving.metrics import Metrics
from tiny_models import assert_same_tokens

import torch_uma
from torch_uma import ServingLoop
from torch_uma.integrations.transformers import Event

torch.set_num_threads(1)

TOKENIZER = tiny_models.tokenizer()
END = TOKENIZER.eos_token_id
SECONDS = 60.0  # more than anything here may take
decode = partial(TOKENIZER.decode, skip_special_tokens=True)


@lru_cache
def model_of(name: str, attention: str = "torch_uma") -> Any:
    model = tiny_models.build(name, attention=attention)
    model.generation_config.eos_token_id = END
    return model


@lru_cache
def reference(name: str, ids: tuple[int, ...], num_new_tokens: int, seed: int | None = None, **how: Any) -> list[int]:
    """The new tokens of `generate()` with its own cache, greedily unless `how` says otherwise."""
    if seed is not None:
        torch.manual_seed(seed)
    inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    options = {"do_sample": False, "max_new_tokens": num_new_tokens} | how
    tokens = model_of(name, "eager").generate(**inputs, **options)[0, len(ids) :].tolist()
    assert isinstance(tokens, list)
    return tokens


class MovedLoop(ServingLoop):
    """Pages lie somewhere else after every step, and the books are checked."""

    num_steps = 0

    def step(self) -> list[Event]:
        events = super().step()
        self.num_steps += 1
        torch_uma.testing.scramble(self.pool, self.num_steps)
        self.pool.check()
        return events


class Server:
    """A server over a tiny model on a port of its own, in a thread."""

    def __init__(self, name: str = "gpt_oss", *, max_waiting: int = 256, max_body_bytes: int = 1 << 20, **options: Any):
        self.name, self.model = name, model_of(name)
        self.loops: list[MovedLoop] = []
        self.engine = Engine(
            partial(self._make_loop, {"memory": "2MiB", "page_size": 4} | options),
            decode,
            Metrics(),
            max_waiting=max_waiting,
        )
        app = make_app(
            self.engine,
            TOKENIZER,
            name=name,
            max_request_tokens=min(400, self.engine.max_request_tokens),
            defaults=self.model.generation_config,
            max_body_bytes=max_body_bytes,
        )
        config = uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=1)
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.uvicorn.run)
        self.thread.start()
        self.until(lambda: self.uvicorn.started)
        self.port = self.uvicorn.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=SECONDS)

    def _make_loop(self, options: dict[str, Any]) -> MovedLoop:
        loop = MovedLoop(self.model, **options)
        torch_uma.testing.poison(loop.pool)
        self.loops.append(loop)
        return loop

    def close(self) -> None:
        self.client.close()
        self.stop()

    def stop(self) -> None:
        self.uvicorn.should_exit = True
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=SECONDS) as response:
            data: bytes = response.read()
        return data

    def arena(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.get("/arena.json"))
        return report

    def metric(self, name: str, **labels: str) -> float:
        for family in text_string_to_metric_families(self.get("/metrics").decode()):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        raise AssertionError(f"no {name} {labels}")

    @staticmethod
    def until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not is_so():
            assert time.monotonic() < deadline, "it never came to that"
            time.sleep(0.005)

    def until_empty(self) -> None:
        """Wait until nothing is running or waiting; then nothing may be in the arena."""
        self.until(lambda: (report := self.arena())["num_running"] + report["num_waiting"] == 0)
        report = self.arena()
        assert report["live_bytes"] == report["quarantined_bytes"] == report["num_leases"] == 0
        assert all(band["live_pages"] == 0 for band in report["bands"])

    def reference(self, prompt: str | list[int], num_new_tokens: int, **how: Any) -> list[int]:
        """What `generate()` says."""
        ids = TOKENIZER(prompt).input_ids if isinstance(prompt, str) else prompt
        return reference(self.name, tuple(ids), num_new_tokens, **how)

    def check(self, prompt: str | list[int], tokens: list[int], text: str, num_new_tokens: int) -> None:
        """A greedy answer is that of `generate()`, unless two tokens tie, and its text is that of its tokens."""
        ids = TOKENIZER(prompt).input_ids if isinstance(prompt, str) else prompt
        expected = self.reference(ids, num_new_tokens)
        if tokens != expected:
            num = min(len(tokens), len(expected))
            actual, wanted = torch.tensor([ids + tokens[:num]]), torch.tensor([ids + expected[:num]])
            assert_same_tokens(model_of(self.name, "eager"), actual, wanted, torch.ones(1, len(ids)))
            assert not torch.equal(actual, wanted), "one of them ended before"
        assert text == decode(tokens)


def ids_of(choice: Any) -> list[int]:
    tokens: list[int] = choice.model_extra["token_ids"]
    return tokens


IDS = {"return_token_ids": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@contextmanager
def serving(*arguments: Any, **options: Any) -> Iterator[Server]:
    made = Server(*arguments, **options)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(autouse=True)
def nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").until_empty()


# Answers


@pytest.mark.parametrize(
    "prompt",
    ["hello", ["one", "another of them", "é€"], [104, 101, 108], [[1, 2, 3], [200] * 40]],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_a_completion_is_what_generate_says(server: Server, prompt: Any) -> None:
    answer = server.client.completions.create(
        model="gpt_oss", prompt=prompt, max_tokens=30, temperature=0, extra_body=IDS
    )
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    assert [choice.index for choice in answer.choices] == list(range(len(prompts)))
    for each, choice in zip(prompts, answer.choices, strict=True):
        tokens = ids_of(choice)
        server.check(each, tokens, choice.text, 30)
        assert choice.finish_reason == ("stop" if tokens[-1] == END else "length")
        assert choice.finish_reason == "stop" or len(tokens) == 30
    num_prompt = sum(len(TOKENIZER(each).input_ids if isinstance(each, str) else each) for each in prompts)
    num_new = sum(len(ids_of(choice)) for choice in answer.choices)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, num_new)
    assert answer.usage.total_tokens == num_prompt + num_new
    assert (answer.object, answer.model) == ("text_completion", "gpt_oss")


def test_a_completion_has_16_tokens_where_none_are_asked_for(server: Server) -> None:
    answer = server.client.completions.create(model="gpt_oss", prompt="short", temperature=0, extra_body=IDS)
    server.check("short", ids_of(answer.choices[0]), answer.choices[0].text, 16)


@pytest.mark.parametrize("includes_usage", [False, True])
def test_a_streamed_completion_is_the_same(server: Server, includes_usage: bool) -> None:
    asked: dict[str, Any] = {"model": "gpt_oss", "prompt": ["ab", "cde"], "max_tokens": 25, "temperature": 0}
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if includes_usage else {}
    chunks = list(server.client.completions.create(**asked, stream=True, extra_body=IDS, **options))
    texts, tokens, reasons = ["", ""], [[], []], [[], []]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += ids_of(choice)
            reasons[choice.index].append(choice.finish_reason)
    for place, prompt in enumerate(asked["prompt"]):
        server.check(prompt, tokens[place], texts[place], 25)
        assert reasons[place][-1] in ("stop", "length") and set(reasons[place][:-1]) == {None}
        assert len(reasons[place]) == len(tokens[place])  # one after another
    assert len({chunk.id for chunk in chunks}) == 1
    if includes_usage:
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == sum(map(len, tokens)) and chunks[-1].usage.prompt_tokens == 5
    assert all(chunk.usage is None for chunk in chunks[: -1 if includes_usage else None])


MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Who "}, {"type": "text", "text": "is there?"}]},
]
CHAT = "<|user|>Be brief.<|end|><|user|>Who is there?<|end|><|assistant|>"


def test_a_chat_is_what_generate_says_behind_the_template(server: Server) -> None:
    answer = server.client.chat.completions.create(
        model="gpt_oss", messages=MESSAGES, max_completion_tokens=30, temperature=0, extra_body=IDS
    )
    (choice,) = answer.choices
    server.check(CHAT, ids_of(choice), choice.message.content or "", 30)
    turn: list[Any] = [*MESSAGES, choice.message, {"role": "user", "content": "And then?"}]
    server.client.chat.completions.create(model="gpt_oss", messages=turn, max_tokens=1)
    assert (answer.object, choice.message.role) == ("chat.completion", "assistant")
    assert answer.usage is not None and answer.usage.prompt_tokens == len(TOKENIZER(CHAT).input_ids)
    short = server.client.chat.completions.create(
        model="gpt_oss", messages=MESSAGES, max_tokens=3, temperature=0, extra_body=IDS
    )
    assert ids_of(short.choices[0]) == ids_of(choice)[:3]


def test_a_streamed_chat_is_the_same(server: Server) -> None:
    asked: dict[str, Any] = {"model": "gpt_oss", "messages": MESSAGES, "max_tokens": 30, "temperature": 0}
    chunks = list(
        server.client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}, extra_body=IDS
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    choices = [choice for chunk in chunks for choice in chunk.choices]
    tokens = [token for choice in choices[1:] for token in ids_of(choice)]
    server.check(CHAT, tokens, "".join(choice.delta.content or "" for choice in choices), 30)
    assert choices[-1].finish_reason in ("stop", "length")
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(tokens)


def test_a_chat_goes_on_for_as_long_as_there_is_room(server: Server) -> None:
    content = "x" * 330
    prompt = f"<|user|>{content}<|end|><|assistant|>"
    answer = server.client.chat.completions.create(
        model="gpt_oss", messages=[{"role": "user", "content": content}], temperature=0, extra_body=IDS
    )
    (choice,) = answer.choices
    server.check(prompt, ids_of(choice), choice.message.content or "", 400 - len(TOKENIZER(prompt).input_ids))


@pytest.mark.parametrize("stream", [False, True])
def test_seeds_say_what_is_sampled(server: Server, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "gpt_oss", "prompt": "dice", "max_tokens": 20, "n": 3, "seed": 7}
    answer = server.client.completions.create(**asked, temperature=0.8, top_p=0.9, stream=stream, extra_body=IDS)
    tokens: list[list[int]] = [[], [], []]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            tokens[choice.index] += ids_of(choice)
    how: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 0}
    assert tokens == [server.reference("dice", 20, seed=7 + place, **how) for place in range(3)]
    assert tokens[0] != tokens[1]


def test_what_a_request_does_not_say_is_sampled_as_openai_does(server: Server) -> None:
    answer = server.client.completions.create(model="gpt_oss", prompt="dice", max_tokens=20, seed=5, extra_body=IDS)
    how: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert ids_of(answer.choices[0]) == server.reference("dice", 20, seed=5, **how)
    others = [server.client.completions.create(model="gpt_oss", prompt="dice", max_tokens=20) for _ in range(2)]
    assert others[0].choices[0].text != others[1].choices[0].text


@pytest.mark.parametrize("temperature", [0, 1e-38])
def test_no_temperature_to_speak_of_is_greedy(server: Server, temperature: float) -> None:
    answer = server.client.completions.create(
        model="gpt_oss", prompt="cold", max_tokens=5, temperature=temperature, extra_body=IDS
    )
    server.check("cold", ids_of(answer.choices[0]), answer.choices[0].text, 5)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_a_stop_string(server: Server, stream: bool) -> None:
    tokens = server.reference("stop here", 60)
    text = decode(tokens)
    stop = text[11:14]
    assert text.index(stop) == 11
    num_cancelled = server.loops[0].scheduler.stats().cancelled
    asked: dict[str, Any] = {"model": "gpt_oss", "prompt": "stop here", "max_tokens": 60, "temperature": 0}
    answer = server.client.completions.create(**asked, stop=["not in there", stop], stream=stream, extra_body=IDS)
    choices = [choice for part in (answer if stream else [answer]) for choice in part.choices]
    assert "".join(choice.text for choice in choices) == text[:11]
    assert choices[-1].finish_reason == "stop"
    seen = [token for choice in choices for token in ids_of(choice)]
    assert seen == tokens[: len(seen)] and stop in decode(seen) and stop not in decode(seen[:-1])
    assert server.loops[0].scheduler.stats().cancelled == num_cancelled + 1  # it does not go on unheard
    if not stream:
        assert answer.usage.completion_tokens == len(seen)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_model(server: Server, stream: bool) -> None:
    prompt = list(b"how likely")
    completion = server.client.completions.create(
        model="gpt_oss", prompt=prompt, max_tokens=9, temperature=0, logprobs=0, stream=stream, extra_body=IDS
    )
    choices = [choice for part in (completion if stream else [completion]) for choice in part.choices]
    tokens = [token for choice in choices for token in ids_of(choice)]
    values = [value for choice in choices for value in choice.logprobs.token_logprobs]
    with torch.no_grad():
        logits = model_of("gpt_oss", "eager")(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1)[torch.arange(len(tokens)), tokens].tolist()
    assert values == pytest.approx(expected, abs=1e-4)
    names = [name for choice in choices for name in choice.logprobs.tokens]
    assert names == [TOKENIZER.decode([token]) for token in tokens]

    content = "".join(map(chr, prompt))
    chat = server.client.chat.completions.create(
        model="gpt_oss",
        messages=[{"role": "user", "content": content}],
        max_tokens=9,
        temperature=0,
        logprobs=True,
        stream=stream,
        extra_body=IDS,
    )
    entries = [
        (entry, token)
        for part in (chat if stream else [chat])
        for choice in part.choices
        if choice.logprobs
        for entry, token in zip(choice.logprobs.content, ids_of(choice), strict=True)
    ]
    assert entries and all(entry.logprob < 0 for entry, _ in entries)
    for entry, token in entries:
        assert entry.token == TOKENIZER.decode([token])
        assert entry.bytes is None if token > 127 and token < 256 else bytes(entry.bytes) == entry.token.encode()


# Refusals


def refused(
    server: Server, path: str, body: Any, content_type: str = "application/json"
) -> tuple[int, dict[str, Any], Any]:
    """Status, error and headers of what is answered to a body that is not to be liked."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": content_type})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=SECONDS)
    error = json.loads(caught.value.read())["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return caught.value.code, error, caught.value.headers


LIMITS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"prompt": []}, "prompt", "0 prompts"),
    ({"prompt": ["a", ""]}, "prompt", "no tokens"),
    ({"prompt": [1, "a"]}, "prompt", "none of str, list"),
    ({"prompt": True}, "prompt", "none of str, list"),
    ({"prompt": [[1], [260]]}, None, "260"),
    ({"prompt": [-1]}, None, "-1"),
    ({}, "prompt", "required"),
    ({"prompt": "a" * 390, "max_tokens": 11}, "prompt", "390 tokens and 11 new ones are more than the 400"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
    ({"n": 17}, "n", "1 to 16"),
    ({"n": 9, "prompt": ["a", "b"]}, "n", "1 to 16"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
    ({"temperature": "1"}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"seed": -1}, "seed", "greater than or equal to 0"),
    ({"stop": ["a", "b", "c", "d", "e"]}, None, "stop has 5 strings; 4"),
    ({"stop": ["a", ""]}, None, "0 characters"),
    ({"stop": "a" * 257}, None, "257 characters"),
    ({"stop": 3}, "stop", "none of str, list"),
    ({"logprobs": 2}, "logprobs", "0"),
    ({"stream_options": {"include_usage": True}}, None, "with stream only"),
    ({"stream": True, "stream_options": {"include": 1}}, "stream_options.include", "not supported"),
    ({"echo": True}, "echo", "not supported"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
    ({"prompt": "\ud800"}, "prompt", "no Unicode"),
    ({"\ud800": 1}, None, "unicode"),
    ({"model": "gpt-5"}, "model", "there is no model 'gpt-5'"),
]


@pytest.mark.parametrize(("fields", "param", "reason"), LIMITS, ids=lambda value: str(value)[:40])
def test_a_completion_that_cannot_be_is_refused_with_the_reason(
    server: Server, fields: dict[str, Any], param: str | None, reason: str
) -> None:
    before = server.metric("torch_uma_requests_total", outcome="refused")
    body = {"prompt": "a", "max_tokens": 4} | fields if fields else {}
    status, error, _ = refused(server, "/v1/completions", body)
    assert (status, error["type"]) == (404 if param == "model" else 400, "invalid_request_error")
    assert error["param"] == param and reason in error["message"], error
    assert server.metric("torch_uma_requests_total", outcome="refused") == before + 1


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role", "'system'"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content", "none of str, list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "none of"),
        ({"messages": [{"role": "user", "content": "a" * 400}]}, "messages", "more than the 400"),
        ({"max_completion_tokens": 400}, "messages", "more than the 400"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs", "not supported"),
    ],
)
def test_a_chat_that_cannot_be_is_refused_with_the_reason(
    server: Server, fields: dict[str, Any], param: str, reason: str
) -> None:
    status, error, _ = refused(server, "/v1/chat/completions", {"messages": MESSAGES} | fields)
    assert status == 400 and error["param"] == param and reason in error["message"], error


def test_what_the_template_refuses_is_a_400(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TOKENIZER, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(openai.BadRequestError, match="roles must alternate"):
        server.client.chat.completions.create(model="gpt_oss", messages=MESSAGES)


def test_what_asks_for_nothing_is_taken(server: Server) -> None:
    answer = server.client.completions.create(
        model="gpt_oss",
        prompt="plain",
        max_tokens=4,
        temperature=0,
        echo=False,
        best_of=1,
        frequency_penalty=0,
        presence_penalty=0,
        logit_bias={},
        user="someone",
        extra_body=IDS | {"n": None, "stop": None, "stream": None},
    )
    server.check("plain", ids_of(answer.choices[0]), answer.choices[0].text, 4)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"{", 400, "not JSON"),
        (b"[1]", 400, "no JSON object"),
        (b"", 400, "required"),
        (b"[" * 9999, 400, "body"),
        (b"a" * 20_001, 413, "20000 bytes"),
    ],
)
def test_bodies_that_are_none(body: bytes, status: int, reason: str) -> None:
    with serving(max_body_bytes=20_000) as server:
        answered, error, _ = refused(server, "/v1/completions", body)
        assert answered == status and reason in error["message"]


def test_a_body_that_is_not_said_to_be_json_is_told_so(server: Server) -> None:
    status, error, _ = refused(server, "/v1/completions", {"prompt": "a"}, "application/x-www-form-urlencoded")
    assert status == 400 and "lacks the header Content-Type: application/json" in error["message"]


def test_a_body_is_not_read_to_its_end_to_be_too_long() -> None:
    with serving(max_body_bytes=20_000) as server, socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked"
        )
        connection.sendall(f"{head}\r\n\r\n".encode())
        for _ in range(3):
            connection.sendall(b"2000\r\n" + b"a" * 0x2000 + b"\r\n")
        assert b"413" in connection.recv(100)


def test_other_paths_and_methods_are_refused_in_the_same_form(server: Server) -> None:
    assert refused(server, "/v1/embeddings", {})[0] == 404
    assert refused(server, "/v1/models", {})[0] == 405


def test_more_than_may_wait_are_told_to_come_again() -> None:
    with serving(max_waiting=2, max_running=1) as server:
        status, error, headers = refused(server, "/v1/completions", {"prompt": "a", "n": 3})
        assert (status, error["type"], error["code"]) == (503, "server_error", "overloaded")
        assert int(headers["Retry-After"]) > 0
        server.until_empty()
        answer = server.client.completions.create(model="gpt_oss", prompt="a", n=2, max_tokens=2)
        assert len(answer.choices) == 2


# Clients that leave, and engines that fail


def half_read(server: Server, body: dict[str, Any], *, path: str = "/v1/completions", num_bytes: int = 200) -> None:
    """Ask, read so much of the answer, and leave."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=SECONDS) as connection:
        connection.sendall(head.encode() + data)
        num_read = 0
        while num_read < num_bytes:
            num_read += len(connection.recv(num_bytes - num_read)) or num_bytes


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_takes_its_memory_along(server: Server, stream: bool) -> None:
    cancelled = partial(server.metric, "torch_uma_requests_total", outcome="cancelled")
    before, told = cancelled(), server.metric("torch_uma_new_tokens_total")
    body = {"prompt": "a" * 50, "max_tokens": 300, "n": 4, "temperature": 1, "seed": 1, "stream": stream}
    if stream:
        half_read(server, body, num_bytes=1500)
    else:
        gone = threading.Event()
        leaving = threading.Thread(target=lambda: (half_read(server, body, num_bytes=0), gone.set()))
        leaving.start()
        leaving.join(SECONDS)
        assert gone.is_set()
    server.until(lambda: cancelled() == before + 1)
    server.until_empty()
    assert server.metric("torch_uma_new_tokens_total") - told < 4 * 300


def test_a_failing_loop_is_told_to_everybody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as server:
        stream = server.client.completions.create(model="gpt_oss", prompt="a", max_tokens=300, stream=True)
        next(iter(stream))

        def step() -> list[Any]:
            raise RuntimeError("the device fell off")

        monkeypatch.setattr(server.loops[0], "step", step)
        with pytest.raises(openai.APIError, match="RuntimeError: the device fell off"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="the device fell off"):
            server.client.completions.create(model="gpt_oss", prompt="a")
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.get("/health")
        assert caught.value.code == 503 and b"the device fell off" in caught.value.read()
        assert server.metric("torch_uma_requests_total", outcome="failed") == 2
        assert server.loops[0].pool.closed
        assert "RuntimeError: the device fell off" in capsys.readouterr().err  # where the operator looks


def test_who_waits_for_a_whole_answer_hears_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as server:
        step = server.loops[0].step
        left = iter(range(5))

        def failing() -> list[Any]:
            if next(left, None) is None:
                raise RuntimeError("no more")
            return step()

        monkeypatch.setattr(server.loops[0], "step", failing)
        with pytest.raises(openai.InternalServerError, match="no more"):
            server.client.chat.completions.create(model="gpt_oss", messages=MESSAGES)


def test_shutting_down_ends_answers_and_closes_the_pool() -> None:
    with serving() as server:
        stream = server.client.completions.create(model="gpt_oss", prompt="a", max_tokens=390, stream=True, n=8)
        next(iter(stream))
        server.engine.close()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            server.client.completions.create(model="gpt_oss", prompt="a")
        assert server.metric("torch_uma_requests_total", outcome="cancelled") == 1
        assert server.loops[0].pool.closed
    assert not any(thread.name == "engine" and thread is server.engine._thread for thread in threading.enumerate())


def test_a_server_that_stops_does_not_wait_for_its_answers() -> None:
    with serving() as server:
        left = [
            server.client.completions.create(model="gpt_oss", prompt="a", max_tokens=390, stream=True, n=16, seed=seed)
            for seed in range(3)
        ]
        for stream in left:
            next(iter(stream))
        began = time.monotonic()
        server.stop()
        assert 1 < time.monotonic() - began < SECONDS / 2  # a second is what they are given
        assert server.loops[0].pool.closed and server.engine.failure is not None
        for stream in left:
            with pytest.raises(openai.APIError):
                list(stream)


def test_an_engine_whose_loop_cannot_be_made_says_so() -> None:
    with pytest.raises(torch_uma.PlanError):
        Engine(lambda: ServingLoop(model_of("gpt_oss"), memory=100), decode, Metrics())


# What is to be seen


def test_metrics_say_what_happened() -> None:
    with serving() as server:
        server.client.completions.create(model="gpt_oss", prompt="abc", max_tokens=5, temperature=0, n=2)
        server.until_empty()
        assert server.metric("torch_uma_requests_total", outcome="completed") == 1
        assert server.metric("torch_uma_prompt_tokens_total") == 6
        new = server.metric("torch_uma_new_tokens_total")
        assert new == 2 * len(server.reference("abc", 5))
        assert server.metric("torch_uma_first_token_seconds_count") == 2
        assert server.metric("torch_uma_next_token_seconds_count") == new - 2
        assert 0 < server.metric("torch_uma_first_token_seconds_sum") < SECONDS
        assert server.metric("torch_uma_running") == server.metric("torch_uma_waiting") == 0
        for way in ("drop", "offload"):
            assert server.metric("torch_uma_retractions_total", way=way) == 0
        kinds = [server.metric("torch_uma_arena_bytes", kind=kind) for kind in ("live", "hole", "quarantined")]
        kinds += [server.metric("torch_uma_arena_bytes", kind=kind) for kind in ("gap", "slack", "sink")]
        assert sum(kinds) == server.metric("torch_uma_arena_bytes", kind="capacity") == 2 << 20
        assert server.metric("torch_uma_subpool_bytes", subpool="full", kind="peak") > 0
        assert server.metric("torch_uma_subpool_bytes", subpool="window_24", kind="live") == 0


def test_a_loop_with_nothing_to_do_sleeps(server: Server) -> None:
    server.client.completions.create(model="gpt_oss", prompt="abc", max_tokens=5)
    server.until_empty()
    time.sleep(0.1)
    num_steps, spent = server.loops[0].num_steps, time.process_time()
    time.sleep(0.5)
    assert server.loops[0].num_steps == num_steps
    assert time.process_time() - spent < 0.25


def test_retractions_are_counted() -> None:
    with serving(memory="96KiB", max_running=8) as server:
        answer = server.client.completions.create(
            model="gpt_oss", prompt=["a" * 20] * 6, max_tokens=60, temperature=0, extra_body=IDS
        )
        for choice in answer.choices:
            server.check("a" * 20, ids_of(choice), choice.text, 60)
        server.until_empty()
        assert server.metric("torch_uma_retractions_total", way="drop") > 0


def test_the_map_shows_bands_in_their_places(server: Server) -> None:
    stream = server.client.completions.create(model="gpt_oss", prompt="a" * 90, max_tokens=300, stream=True, seed=3)
    parts = iter(stream)
    next(parts)
    server.until(lambda: server.arena()["num_running"] == 1)
    report = server.arena()
    stream.close()
    assert {band["name"] for band in report["bands"]} == {"window_24", "full"}
    for band in report["bands"]:
        num_pages = (band["end_bytes"] - band["start_bytes"]) // band["page_bytes"]
        assert num_pages == band["live_pages"] + band["hole_pages"] + band["quarantined_pages"]
        assert 0 < len(band["cells"]) <= 512 and max(band["cells"]) == 1 and min(band["cells"]) >= 0
    low, high = report["bands"]
    assert report["sink_bytes"] <= low["start_bytes"] < low["end_bytes"] <= high["start_bytes"]
    assert high["end_bytes"] <= report["capacity_bytes"]


def test_the_page_needs_nothing_from_elsewhere(server: Server) -> None:
    page = server.get("/").decode()
    assert page.startswith("<!doctype html>") and 'fetch("arena.json"' in page
    assert "http:" not in page and "https:" not in page and "src=" not in page and "@import" not in page


def test_models_and_health(server: Server) -> None:
    (model,) = server.client.models.list().data
    assert (model.id, model.object) == ("gpt_oss", "model")
    assert json.loads(server.get("/health")) == {"status": "ok"}


# Many at once


@pytest.mark.parametrize(("name", "overlap"), [("gpt_oss", False), ("qwen3_next", True)])
def test_many_streams_a_third_of_which_are_cut_off(name: str, overlap: bool) -> None:
    num_clients, num_each, num_new, num_prompts = 10, 6, 20, 12
    with serving(name, memory="256KiB", max_running=12, overlap=overlap) as server:

        async def chat(client: openai.AsyncOpenAI, number: int) -> bool:
            dice = random.Random(number % num_prompts)
            prompt = [dice.randrange(256) for _ in range(dice.randrange(1, 40))]
            cut = random.Random(number).randrange(1, num_new - 4) if number % 3 == 0 else None
            stream = await client.completions.create(
                model=name, prompt=prompt, max_tokens=num_new, temperature=0, stream=True, extra_body=IDS
            )
            tokens: list[int] = []
            text = ""
            async with stream:
                async for part in stream:
                    tokens += ids_of(part.choices[0])
                    text += part.choices[0].text
                    if len(tokens) == cut:
                        return False
            server.check(prompt, tokens, text, num_new)
            return True

        async def visit(first: int) -> int:
            async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
                return sum([await chat(client, first * num_each + place) for place in range(num_each)])

        async def everybody() -> list[int]:
            return await asyncio.gather(*(visit(first) for first in range(num_clients)))

        finished = sum(asyncio.run(asyncio.wait_for(everybody(), SECONDS)))
        assert finished >= num_clients * num_each * 2 // 3
        server.until_empty()
        outcomes = {o: server.metric("torch_uma_requests_total", outcome=o) for o in ("completed", "cancelled")}
        assert sum(outcomes.values()) == num_clients * num_each and outcomes["completed"] >= finished
        assert not server.engine._answers
        server.until(lambda: not server.uvicorn.server_state.tasks)


# The command line


def test_the_command_line_loads_a_model_from_a_folder(tmp_path: Path) -> None:
    model_of("gpt_oss").save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    given = serve.options().parse_args(["--model", str(tmp_path), "--attention", "eager", "--dtype", "bfloat16"])
    model, tokenizer = serve.load(given)
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager" and not model.training
    assert tokenizer("é").input_ids == list("é".encode()) and tokenizer.chat_template == TOKENIZER.chat_template
    assert model.generation_config.eos_token_id == END


def test_the_command_line_serves_and_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every option, up to the moment at which uvicorn takes over."""
    seen: dict[str, Any] = {}

    def run(app: Any, **options: Any) -> None:
        seen.update(options, app=app, num_threads=threading.active_count())

    monkeypatch.setattr(uvicorn, "run", run)
    words = "--tiny bamba --name mine --memory 1MiB --host-memory 1MiB --max-running 3 --max-waiting 5 --step-tokens 64"
    words += " --max-request-tokens 100 --overlap --host 0.0.0.0 --port 81 --max-answers 2 --max-body-bytes 1000"
    before = threading.active_count()
    serve.main(words.split())
    assert (seen["host"], seen["port"], seen["num_threads"]) == ("0.0.0.0", 81, before + 1)
    assert threading.active_count() == before


def test_the_command_line_says_why_it_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    for words, reason in (["--tiny", "gpt_oss", "--memory", "1KiB"], "bytes"), (["--model", "/nowhere"], "nowhere"):
        with pytest.raises(SystemExit) as caught:
            serve.main(words)
        assert caught.value.code == 1 and reason in capsys.readouterr().err
