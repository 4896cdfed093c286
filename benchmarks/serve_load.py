"""Many clients at the server of the examples: streamed answers, a third of which are cut off at some token.

The server runs a tiny random model in a process of its own; clients are OpenAI's. Every answer that is not cut off must
have the tokens of `generate()` with the prompt alone, unless two tokens tie (then the two logits, in fp64, are within
1e-4). In the end nothing may be left: no live page, no lease, no request, and no more threads and files in the server's
process than after the first half of the load. How much its memory has grown is reported for both halves.

    python benchmarks/serve_load.py [--json PATH]
    python benchmarks/serve_load.py --tiny qwen3_next --memory 512KiB --server "--overlap --host-memory 4MiB"
"""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import psutil  # type: ignore[import-untyped]
import torch
from prometheus_client.parser import text_string_to_metric_families
from records import parser, publish, record

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NUM_PROMPTS = 100  # different ones
NUM_WARM = 50
LONGEST_PROMPT, LONGEST_ANSWER = 60, 48
SECONDS = 120.0  # more than a server takes to begin, or a request


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt, and the tokens that `generate()` gives it."""

    tokens: list[int]
    answer: list[int]
    num_new_tokens: int


@dataclass(kw_only=True)
class Seen:
    """What clients have seen: answers that have come to their end, by prompt, and what they waited."""

    answers: list[tuple[Prompt, list[int]]] = field(default_factory=list)
    num_cut: int = 0
    num_tokens: int = 0
    first_s: list[float] = field(default_factory=list)
    next_s: list[float] = field(default_factory=list)


class Server:
    """The server's process, seen from outside."""

    def __init__(self, port: int, pid: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._process = psutil.Process(pid)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=SECONDS) as answer:
            return str(answer.read(), "utf-8")

    def metrics(self) -> dict[str, float]:
        """Metrics by name and labels."""
        families = text_string_to_metric_families(self.get("/metrics"))
        return {" ".join((s.name, *s.labels.values())): s.value for family in families for s in family.samples}

    def rss_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def held(self) -> tuple[int, int]:
        """Threads and files that the process has."""
        return self._process.num_threads(), self._process.num_fds()

    def wait_until_empty(self) -> dict[str, Any]:
        """Where the arena is when no request is left; raises TimeoutError if one stays."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            arena: dict[str, Any] = json.loads(self.get("/arena.json"))
            if arena["num_running"] + arena["num_waiting"] == 0:
                return arena
            time.sleep(0.05)
        raise TimeoutError("requests are left that nobody waits for")

    def wait_until_no_more_than(self, held: tuple[int, int]) -> None:
        """Wait for connections to be closed; raises TimeoutError if there stay more threads or files than these."""
        deadline = time.monotonic() + SECONDS
        while any(now > before for now, before in zip(self.held(), held)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.held()} threads and files are left, after {held} before")
            time.sleep(0.1)


@contextmanager
def serving(arguments: Sequence[str]) -> Iterator[Server]:
    """A server on a free port, until the end of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(EXAMPLES / "serve.py"), "--port", str(port), "--log-level", "warning", *arguments]
    process = subprocess.Popen(command)
    try:
        server = Server(port, process.pid)
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                server.get("/health")
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
        yield server
    finally:
        process.terminate()
        process.wait(SECONDS)


def prompts_of(tiny: Any, model: Any) -> list[Prompt]:
    """Random prompts of unequal lengths, with what `generate()` says to each alone."""
    dice = random.Random(0)
    made = []
    for _ in range(NUM_PROMPTS):
        tokens = [dice.randrange(256) for _ in range(dice.randint(1, LONGEST_PROMPT))]
        num_new_tokens = dice.randint(8, LONGEST_ANSWER)
        ids = torch.tensor([tokens])
        text = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_new_tokens)
        made.append(Prompt(tokens=tokens, answer=text[0, len(tokens) :].tolist(), num_new_tokens=num_new_tokens))
    return made


async def ask(client: openai.AsyncOpenAI, model_name: str, prompt: Prompt, cut: int | None, seen: Seen) -> None:
    """One streamed request, cut off after `cut` tokens if there are as many."""
    began = time.perf_counter()
    stream = await client.completions.create(
        model=model_name,
        prompt=prompt.tokens,
        max_tokens=prompt.num_new_tokens,
        temperature=0,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    tokens: list[int] = []
    async with stream:
        async for part in stream:
            now = time.perf_counter()
            (seen.next_s if tokens else seen.first_s).append(now - began)
            began = now
            tokens += (part.choices[0].model_extra or {})["token_ids"]
            if len(tokens) == cut:
                break
    seen.num_tokens += len(tokens)
    if len(tokens) == cut:
        seen.num_cut += 1
    else:
        seen.answers.append((prompt, tokens))


async def load(
    server: Server, model_name: str, prompts: Sequence[Prompt], numbers: Sequence[int], *, num_clients: int, seen: Seen
) -> None:
    """Requests of these numbers by clients that each send one after another."""
    left = iter(numbers)

    async def visit() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=SECONDS
        ) as client:
            for number in left:
                dice = random.Random(number)
                prompt = dice.choice(prompts)
                cut = dice.randint(1, len(prompt.answer)) if number % 3 == 0 else None
                await ask(client, model_name, prompt, cut, seen)

    await asyncio.gather(*(visit() for _ in range(num_clients)))


def num_tied(tiny: Any, model: Any, seen: Seen) -> int:
    """How many answers differ from those of `generate()` where two tokens tie; AssertionError for other differences."""
    count = 0
    for prompt, tokens in seen.answers:
        if tokens != prompt.answer:
            count += 1
            num = min(len(tokens), len(prompt.answer))
            actual, expected = (torch.tensor([prompt.tokens + answer[:num]]) for answer in (tokens, prompt.answer))
            assert not torch.equal(actual, expected), f"an answer of {len(tokens)} tokens is not complete"
            tiny.assert_same_tokens(model, actual, expected, torch.ones(1, len(prompt.tokens)))
    return count


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=1000, help="(%(default)s)")
    options.add_argument("--clients", type=int, default=50, help="at the same time (%(default)s)")
    options.add_argument("--tiny", default="gpt_oss", help="the model (%(default)s)")
    options.add_argument("--memory", default="256KiB", help="of the arena, less than the clients need (%(default)s)")
    options.add_argument("--server", default="", metavar="OPTIONS", help="more options of serve.py")
    given = options.parse_args()
    sys.path.append(str(EXAMPLES))
    tiny = importlib.import_module("tiny_models")
    model = tiny.build(given.tiny)
    model.generation_config.eos_token_id = tiny.tokenizer().eos_token_id
    prompts = prompts_of(tiny, model)
    with serving(["--tiny", given.tiny, "--memory", given.memory, *shlex.split(given.server)]) as server:

        def run(numbers: Sequence[int], seen: Seen) -> None:
            asyncio.run(load(server, given.tiny, prompts, numbers, num_clients=given.clients, seen=seen))
            arena = server.wait_until_empty()
            assert arena["live_bytes"] == arena["quarantined_bytes"] == arena["num_leases"] == 0, arena

        run(range(NUM_WARM), Seen())
        rss_bytes = [server.rss_bytes()]
        seen, half = Seen(), given.requests // 2
        began = time.perf_counter()
        run(range(half), seen)
        rss_bytes.append(server.rss_bytes())
        held = server.held()
        run(range(half, given.requests), seen)
        seconds = time.perf_counter() - began
        rss_bytes.append(server.rss_bytes())
        server.wait_until_no_more_than(held)
        metrics = server.metrics()
    assert len(seen.answers) + seen.num_cut == given.requests
    outcomes = {name: metrics[f"torch_uma_requests_total {name}"] for name in ("completed", "cancelled")}
    assert sum(outcomes.values()) == given.requests + NUM_WARM, metrics
    case = f"{given.tiny}, {given.requests} streams, {given.clients} clients"
    records = [
        record(case, "requests", given.requests / seconds, "1/s"),
        record(case, "tokens", seen.num_tokens / seconds, "1/s"),
        record(case, "finished", len(seen.answers), "requests"),
        record(case, "cut off", seen.num_cut, "requests"),
        record(case, "other than generate(), at a tie", num_tied(tiny, model, seen), "requests"),
        record(case, "retracted", metrics["torch_uma_retractions_total drop"], "times, computed again"),
        record(case, "retracted", metrics["torch_uma_retractions_total offload"], "times, to host memory"),
        record(case, "first token, median", quantile(seen.first_s, 0.5) * 1e3, "ms"),
        record(case, "first token, 99 of 100", quantile(seen.first_s, 0.99) * 1e3, "ms"),
        record(case, "next token, median", quantile(seen.next_s, 0.5) * 1e3, "ms"),
        record(case, "next token, 99 of 100", quantile(seen.next_s, 0.99) * 1e3, "ms"),
        record(case, "memory of the server", rss_bytes[0] / 1e6, "MB"),
        record(case, "growth in the first half", (rss_bytes[1] - rss_bytes[0]) / 1e6, "MB"),
        record(case, "growth in the second half", (rss_bytes[2] - rss_bytes[1]) / 1e6, "MB"),
    ]
    publish(records, given.json)


if __name__ == "__main__":
    main()
