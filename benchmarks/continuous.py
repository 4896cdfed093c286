"""Many requests of unequal lengths by continuous batching, ours and transformers' own, and by `generate()` in batches.

Models of some 50 to 70 million random weights in fp32, eager, so that a forward costs more than the Python around it.
Requests are there from the start: prompts of log-normal lengths between 16 and 512 tokens, each with a number of new
tokens of its own between 16 and 128. Every contestant is a process of its own with the same model, and they serve the
same requests in turns, round after round, while the others wait. A figure is the median of the rounds, and a ratio that
of the ratios within them, to transformers' continuous batching, or to the padded batches where that refuses a model.

`alone` is `generate()` with one request after another, once: its tokens are the reference. `padded` is `generate()` in
batches padded in front, each until its longest answer is there, in the order in which the requests came;
`padded_sorted` has sorted them by length beforehand. `transformers` is its continuous batching, which serves windows
and full attention only; a model that it refuses has the refusal in its place. `arena` is `torch_uma.generate_batch`
with the model's own attention, `torch_uma` the same with attention in place. These three have `--memory` for keys,
values and states, and the settings that were the fastest here.

`peak_bytes` is what the process takes at the most beside what it held before the requests came, as Linux counts it.
A request's tokens may differ from those of `alone` only where the logits of both tokens tie within 1e-4.

    python benchmarks/continuous.py --json continuous.json
    python benchmarks/continuous.py --models gpt_oss --requests 16 --rounds 1 --threads 1
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from generate import COMMON, MODELS
from records import Record, parser, publish, record
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import torch_uma
from torch_uma.memory import parse_bytes

TOLERANCE = 1e-4
PAGE_SIZE = 16
BATCH = 8  # of the padded ones: 4 and 16 are slower or take more
GEOMETRIES = MODELS | {
    # Five windows of 128 tokens, then full attention; its code has sdpa, gpt_oss has not.
    "gemma3": lambda: Gemma3TextConfig(**COMMON, intermediate_size=1376, sliding_window=128),
}
DEFAULT_MODELS = ("llama_2kv", "gpt_oss", "gemma3", "qwen3_next")


class Asked(NamedTuple):
    """One request."""

    prompt: list[int]
    max_new_tokens: int


class Served(NamedTuple):
    """What a pass over all requests took, and what it brought."""

    tokens: list[list[int]]
    seconds: float
    cpu_seconds: float
    peak_bytes: int


def requests_of(num_requests: int, seed: int) -> list[Asked]:
    """Requests whose lengths are log-normal around the middle of their range, and end where it ends."""
    chance = random.Random(seed)

    def length(least: int, most: int) -> int:
        return min(most, max(least, round(math.sqrt(least * most) * math.exp(0.8 * chance.gauss(0, 1)))))

    def prompt() -> list[int]:
        return [chance.randrange(1, COMMON["vocab_size"]) for _ in range(length(16, 512))]

    return [Asked(prompt(), length(16, 128)) for _ in range(num_requests)]


def padded(model: Any, asked: Sequence[Asked], memory: str) -> list[list[int]]:
    tokens = []
    for start in range(0, len(asked), BATCH):
        batch = asked[start : start + BATCH]
        longest = max(len(request.prompt) for request in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, longest - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, longest - len(request.prompt) :] = 1
        most = max(request.max_new_tokens for request in batch)
        new = model.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False)[:, longest:]
        tokens += [row[: request.max_new_tokens].tolist() for row, request in zip(new, batch)]
    return tokens


def padded_sorted(model: Any, asked: Sequence[Asked], memory: str) -> list[list[int]]:
    order = sorted(range(len(asked)), key=lambda index: (len(asked[index].prompt), asked[index].max_new_tokens))
    tokens: list[list[int]] = [[]] * len(asked)
    for index, new in zip(order, padded(model, [asked[index] for index in order], memory)):
        tokens[index] = new
    return tokens


def alone(model: Any, asked: Sequence[Asked], memory: str) -> list[list[int]]:
    return [new for request in asked for new in padded(model, [request], memory)]


def transformers(model: Any, asked: Sequence[Asked], memory: str) -> list[list[int]]:
    """Packed forwards with a dense mask over the keys of all requests: many at once, or long chunks, are slower."""
    bytes_per_token = sum(
        row.num_bytes for layer in torch_uma.plan(model, memory="1TiB").layers for row in layer.memories[0].rows
    )
    settings = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=parse_bytes(memory) // (PAGE_SIZE * bytes_per_token),
        max_batch_tokens=128,
        max_requests_per_batch=8,
        allow_block_sharing=False,  # no two prompts begin alike
        use_cuda_graph=False,
        use_async_batching=False,
    )
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    results: dict[str, Any] = {}
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=settings
    ) as manager:
        names = [manager.add_request(request.prompt, max_new_tokens=request.max_new_tokens) for request in asked]
        while len(results) < len(asked) and manager.is_running():
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                results[result.request_id] = result
    return [results[name].generated_tokens for name in names]


def unified(model: Any, asked: Sequence[Asked], memory: str) -> list[list[int]]:
    """Little is gained by more than 512 tokens a round, which take more memory while they are run."""
    configs = [
        GenerationConfig(max_new_tokens=request.max_new_tokens, do_sample=False, pad_token_id=0) for request in asked
    ]
    generations = torch_uma.generate_batch(
        model, [request.prompt for request in asked], configs, memory=memory, page_size=PAGE_SIZE, step_tokens=512
    )
    return [generation.tokens for generation in generations]


class Contestant(NamedTuple):
    """Who serves, and the attention it is used with; None for the model's own."""

    serve: Callable[[Any, Sequence[Asked], str], list[list[int]]]
    attention: str | None = None


CONTESTANTS = {
    "alone": Contestant(alone),
    "padded": Contestant(padded),
    "padded_sorted": Contestant(padded_sorted),
    "transformers": Contestant(transformers),
    "arena": Contestant(unified),
    "torch_uma": Contestant(unified, "torch_uma"),
}


def memory_bytes(name: str) -> int:
    """What Linux says of this process: `VmRSS` now, or `VmHWM` at the most since it was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measured(contestant: Contestant, model: Any, asked: Sequence[Asked], memory: str) -> Served:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier rounds have freed goes back, and is not taken for free
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    start, cpu_start = time.perf_counter(), time.process_time()
    tokens = contestant.serve(model, asked, memory)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return Served(tokens, seconds, cpu_seconds, memory_bytes("VmHWM") - before)


@torch.no_grad()
def largest_tie(model: Any, asked: Sequence[Asked], tokens: Sequence[list[int]], others: Sequence[list[int]]) -> float:
    """By how much the logits of two tokens differ where two answers part, at the most over all requests."""
    largest = 0.0
    for request, one, other in zip(asked, tokens, others):
        assert len(one) == len(other) == request.max_new_tokens
        if one == other:
            continue
        at = next(index for index in range(len(one)) if one[index] != other[index])
        logits = model(torch.tensor([request.prompt + one[:at]]), use_cache=False).logits[0, -1]
        largest = max(largest, float((logits[one[at]] - logits[other[at]]).abs()))
    return largest


def work(connection: Connection, model_name: str, name: str, options: argparse.Namespace) -> None:
    """A process of its own: serves all requests once for every word it is sent; an exception is an answer, too.

    It ends with the connection.
    """
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(GEOMETRIES[model_name](), dtype=torch.float32).eval()
    contestant = CONTESTANTS[name]
    model.set_attn_implementation(contestant.attention or ("sdpa" if model._supports_sdpa else "eager"))
    asked = requests_of(options.requests, options.seed)
    while True:
        try:
            word = connection.recv()
        except EOFError:
            return
        try:
            if word == "warm up":
                contestant.serve(model, asked[:2], options.memory)
                connection.send(None)
            elif word == "serve":
                connection.send(measured(contestant, model, asked, options.memory))
            else:
                connection.send(largest_tie(model, asked, *word))
        except Exception as error:
            connection.send(error)


class Worker:
    """The process of a contestant, and what its rounds have shown."""

    def __init__(self, model_name: str, name: str, options: argparse.Namespace) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, model_name, name, options), daemon=True)
        self.process.start()
        theirs.close()
        self.rounds: list[Served] = []

    def ask(self, word: object) -> Any:
        self.connection.send(word)
        answer = self.connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        self.connection.close()
        self.process.join()


def compete(model_name: str, options: argparse.Namespace) -> list[Record]:
    """All contestants in turns on one model."""
    reference = Worker(model_name, "alone", options)
    workers = []
    records: list[Record] = []
    try:
        for name in options.contestants:
            worker = Worker(model_name, name, options)
            workers.append(worker)
            try:
                worker.ask("warm up")
            except ValueError as error:  # transformers' own word for models that it does not serve
                print(f"{model_name}: {name} refuses: {error}", file=sys.stderr)
                records.append(record(model_name, "refused", 1, str(error), policy=name))
                workers.remove(worker)
                worker.end()
        reference.ask("warm up")
        reference.rounds.append(reference.ask("serve"))
        for turn in range(options.rounds):
            for worker in workers[turn % len(workers) :] + workers[: turn % len(workers)]:
                worker.rounds.append(worker.ask("serve"))
                print(f"{model_name}: {worker.name} {worker.rounds[-1].seconds:.1f} s", file=sys.stderr)
        expected = reference.rounds[0].tokens
        ties = {worker.name: reference.ask((expected, worker.rounds[-1].tokens)) for worker in workers}
    finally:
        for worker in [reference, *workers]:
            worker.end()
    for worker in workers:
        assert ties[worker.name] < TOLERANCE, f"{worker.name}: tokens differ by {ties[worker.name]} in their logits"
    return records + figures(model_name, reference, workers)


def figures(case: str, reference: Worker, workers: Sequence[Worker]) -> list[Record]:
    """What the rounds have shown, each beside transformers' continuous batching, or the padded batches without it."""
    expected = reference.rounds[0].tokens
    num_tokens = sum(map(len, expected))
    measures: dict[str, tuple[str, Callable[[Served], float]]] = {
        "requests_per_second": ("1/s", lambda served: len(expected) / served.seconds),
        "tokens_per_second": ("1/s", lambda served: num_tokens / served.seconds),
        "cpu_seconds": ("s", lambda served: served.cpu_seconds),
        "peak_bytes": ("B", lambda served: served.peak_bytes),
    }
    by_name = {worker.name: worker for worker in workers}
    beside = by_name.get("transformers", by_name.get("padded"))
    records = []
    for worker in [reference, *workers]:
        for metric, (unit, figure) in measures.items():
            values = [figure(served) for served in worker.rounds]
            more: dict[str, Any] = {"policy": worker.name}
            if beside is not None and worker not in (reference, beside):
                others = [figure(served) for served in beside.rounds]
                more["reference"] = statistics.median(others)
                more["ratio"] = statistics.median(value / other for value, other in zip(values, others))
            records.append(record(case, metric, statistics.median(values), unit, **more))
    for worker in workers:
        same = sum(one == other for one, other in zip(worker.rounds[-1].tokens, expected))
        records.append(record(case, "same_tokens", same, "requests", len(expected), policy=worker.name))
    return records


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", choices=GEOMETRIES, default=list(DEFAULT_MODELS))
    options.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS)[1:])
    options.add_argument("--requests", type=int, default=64)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--memory", default="64MiB")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = options.parse_args()
    records: list[Record] = []
    try:
        for name in arguments.models:
            records += compete(name, arguments)
    finally:  # what was measured is worth having, whatever came then
        publish(records, arguments.json)


if __name__ == "__main__":
    main()
