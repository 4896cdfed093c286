"""Traffic: which requests arrive when. Read from the traces that others publish, or made from a seed.

Owns the formats. Lengths are all that counts; texts and shared prefixes are not looked at.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from torch_uma.counts import whole
from torch_uma.errors import TraceError

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_PROMPT_NAMES = ("input_length", "num_prompt_tokens", "prompt_tokens", "prompt_len", "input_tokens")
_NEW_NAMES = ("output_length", "num_new_tokens", "output_tokens", "completion_tokens", "output_len")


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request: `at_s` seconds after the first, with a prompt and an answer of so many tokens."""

    at_s: float
    num_prompt_tokens: int
    num_new_tokens: int
    priority: int = 0


def read_trace(path: str | Path, *, limit: int | None = None) -> list[Arrival]:
    """The requests of a trace, in the order in which they arrive; the first `limit` of them.

    Known are the Azure LLM inference traces (CSV), Mooncake's (JSON lines, timestamps in milliseconds), and JSON or
    JSON lines of objects that name lengths, such as `{"prompt_tokens": 12, "output_tokens": 7}` or ShareGPT's
    conversations with lengths, with `at_s` or nothing to say when. Requests without a prompt or an answer are left out.
    Raises TraceError, with the line, for what is none of these.
    """
    path = Path(path)
    try:
        text = path.open(newline="", encoding="utf-8-sig")
    except OSError as error:
        raise TraceError(f"the trace {path} cannot be read: {error.strerror}") from error
    with text:
        first = text.read(1)
        text.seek(0)
        rows = _json_rows(text, path) if first in ("{", "[") else _csv_rows(text, path)
        arrivals = list(islice((row for row in rows if row is not None), limit))
    if not arrivals:
        raise TraceError(f"the trace {path} has no requests")
    arrivals.sort(key=lambda arrival: arrival.at_s)
    start_s = arrivals[0].at_s
    return [replace(arrival, at_s=arrival.at_s - start_s) for arrival in arrivals]


def generate_trace(
    num_requests: int,
    *,
    prompt_tokens: float,
    new_tokens: float,
    spread: float = 0.0,
    rate_per_s: float | None = None,
    longest_tokens: int = 1 << 20,
    seed: int = 0,
) -> list[Arrival]:
    """Make up requests: log-normal lengths of these means, whose logarithms have the standard deviation `spread`.

    They arrive as a Poisson process of `rate_per_s`, or all at once. Prompts and answers are cut at `longest_tokens`.
    """
    num_requests = whole(num_requests, "num_requests of a trace", least=1, error=TraceError)
    if prompt_tokens < 1 or new_tokens < 1 or spread < 0 or (rate_per_s is not None and rate_per_s <= 0):
        raise TraceError(
            f"a trace has prompts and answers of a token or more, no negative spread and a positive rate; got means of "
            f"{prompt_tokens} and {new_tokens}, spread {spread}, rate {rate_per_s}"
        )
    draw = np.random.default_rng(seed)
    at_s = np.zeros(num_requests) if rate_per_s is None else draw.exponential(1 / rate_per_s, num_requests).cumsum()
    lengths = [
        np.clip(draw.lognormal(np.log(mean) - spread**2 / 2, spread, num_requests).round(), 1, longest_tokens)
        for mean in (prompt_tokens, new_tokens)
    ]
    return [
        Arrival(at_s=float(at), num_prompt_tokens=int(prompt), num_new_tokens=int(new))
        for at, prompt, new in zip(at_s - at_s[0], *lengths)
    ]


def at_once(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """The same requests in the same order, all at the beginning."""
    return [replace(arrival, at_s=0.0) for arrival in arrivals]


def _csv_rows(text: Iterable[str], path: Path) -> Iterator[Arrival | None]:
    reader = csv.DictReader(text)
    names = tuple(reader.fieldnames or ())
    if not set(_AZURE_COLUMNS) <= set(names):
        raise TraceError(f"the trace {path} has the columns {', '.join(names)}, but not {', '.join(_AZURE_COLUMNS)}")
    for row in reader:
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            yield _arrival(at.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (TypeError, ValueError) as error:
            raise TraceError(f"line {reader.line_num} of the trace {path} is no request: {error}") from error


def _json_rows(text: Any, path: Path) -> Iterator[Arrival | None]:
    if text.read(1) == "[":
        text.seek(0)
        try:
            items = json.load(text)
        except json.JSONDecodeError as error:
            raise TraceError(f"the trace {path} is no JSON: {error}") from error
        numbered: Iterable[tuple[int, Any]] = enumerate(items, 1)
    else:
        text.seek(0)
        numbered = ((number, line) for number, line in enumerate(text, 1) if line.strip())
    for number, item in numbered:
        try:
            fields = json.loads(item) if isinstance(item, str) else item
            yield _of_fields(fields)
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(f"request {number} of the trace {path} is none: {error}") from error


def _of_fields(fields: Any) -> Arrival | None:
    if not isinstance(fields, dict):
        raise TypeError(f"{fields!r} is no object")
    prompt, new = _first(fields, _PROMPT_NAMES), _first(fields, _NEW_NAMES)
    at_s = float(fields["timestamp"]) / 1000 if "timestamp" in fields else float(fields.get("at_s", 0.0))
    return _arrival(at_s, prompt, new, int(fields.get("priority", 0)))


def _first(fields: dict[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        if name in fields:
            return int(fields[name])
    raise KeyError(f"it names none of {', '.join(names)}")


def _arrival(at_s: float, prompt: int, new: int, priority: int = 0) -> Arrival | None:
    if prompt < 0 or new < 0:
        raise ValueError(f"lengths of {prompt} and {new} tokens")
    if not prompt or not new:
        return None
    return Arrival(at_s=at_s, num_prompt_tokens=prompt, num_new_tokens=new, priority=priority)
