"""Traffic: which requests arrive when. Read from the traces that others publish, or made from a seed.

Owns the formats. Lengths are all that counts: texts are only measured, and shared prefixes are not looked at.
"""

from __future__ import annotations

import csv
import json
import math
import re
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from torch_uma.counts import whole
from torch_uma.errors import TraceError

_PROMPT_NAMES = (
    *("input_length", "num_prompt_tokens", "prompt_tokens", "prompt_len", "input_tokens", "input_toks"),
    *("ContextTokens", "num_prefill_tokens", "Request tokens"),
)
_NEW_NAMES = (
    *("output_length", "num_new_tokens", "output_tokens", "completion_tokens", "output_len", "output_toks"),
    *("GeneratedTokens", "num_decode_tokens", "Response tokens"),
)
_DATE_NAME = "TIMESTAMP"
_TIME_NAMES = {"timestamp": 1e3, "at_s": 1.0, "arrived_at": 1.0, "Timestamp": 1.0, "arrival_time_ns": 1e9}  # a second
_TURNS_NAMES = ("conversations", "conversation", "messages")
_TEXT_NAMES = ("value", "content")
_BYTES_PER_TOKEN = 4  # of English text, with the vocabularies that are in use
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")
_MOST_PRIORITY = 1 << 31  # that a scheduler takes


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request: `at_s` seconds after the first, with a prompt and an answer of so many tokens, one or more.

    TraceError for numbers that are none of a request.
    """

    at_s: float
    num_prompt_tokens: int
    num_new_tokens: int
    priority: int = 0

    def __post_init__(self) -> None:
        if not self.at_s > -math.inf:  # at infinity comes what waits for something else
            raise TraceError(f"a request arrives at some time, not at {self.at_s} s")
        whole(self.num_prompt_tokens, "num_prompt_tokens of a request", least=1, error=TraceError)
        whole(self.num_new_tokens, "num_new_tokens of a request", least=1, error=TraceError)
        if whole(self.priority, "the priority of a request", least=-_MOST_PRIORITY, error=TraceError) > _MOST_PRIORITY:
            raise TraceError(f"the priority of a request is at most {_MOST_PRIORITY}, not {self.priority}")


def read_trace(path: str | Path, *, limit: int | None = None) -> list[Arrival]:
    """The requests of a trace, in the order in which they arrive; the first `limit` of them.

    Known are the Azure LLM inference traces (CSV), Mooncake's (JSON lines, `timestamp` in milliseconds), and CSV, JSON
    or JSON lines that name lengths, such as `{"prompt_tokens": 12, "output_tokens": 7}`, or hold texts as those of
    ShareGPT, whose first turn is the prompt and whose second the answer, at four bytes a token; `at_s` says when, if
    anything does. Requests without a prompt or an answer are left out. Raises TraceError, with the line or the number
    of the request, for what is none of these.
    """
    if limit is not None:
        limit = whole(limit, "the limit of a trace", least=1, error=TraceError)
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as text:
            rows = _json_rows(text, path) if _first_character(text) in ("{", "[") else _csv_rows(text, path)
            arrivals = [row for row in rows if row is not None]
    except OSError as error:
        raise TraceError(f"the trace {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"the trace {path} is no text: {error}") from error
    except csv.Error as error:
        raise TraceError(f"the trace {path} is no CSV: {error}") from error
    if not arrivals:
        raise TraceError(f"the trace {path} has no requests")
    arrivals.sort(key=lambda arrival: arrival.at_s)
    start_s = arrivals[0].at_s
    return [replace(arrival, at_s=arrival.at_s - start_s) for arrival in arrivals[:limit]]


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
    longest_tokens = whole(longest_tokens, "longest_tokens of a trace", least=1, error=TraceError)
    seed = whole(seed, "the seed of a trace", least=0, error=TraceError)
    are_means = all(1 <= mean < math.inf for mean in (prompt_tokens, new_tokens)) and 0 <= spread < math.inf
    if not are_means or (rate_per_s is not None and not 0 < rate_per_s < math.inf):
        raise TraceError(
            f"a trace has prompts and answers of a token or more, no negative spread and a positive rate, all finite; "
            f"got means of {prompt_tokens} and {new_tokens}, spread {spread}, rate {rate_per_s}"
        )
    draw = np.random.default_rng(seed)
    at_s = np.zeros(num_requests) if rate_per_s is None else draw.exponential(1 / rate_per_s, num_requests).cumsum()
    lengths = [
        np.clip(draw.lognormal(np.log(mean) - spread * spread / 2, spread, num_requests).round(), 1, longest_tokens)
        for mean in (prompt_tokens, new_tokens)
    ]
    return [
        Arrival(at_s=float(at), num_prompt_tokens=int(prompt), num_new_tokens=int(new))
        for at, prompt, new in zip(at_s - at_s[0], *lengths)
    ]


def at_once(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """The same requests in the same order, all at the beginning."""
    return [replace(arrival, at_s=0.0) for arrival in arrivals]


def _first_character(text: TextIO) -> str:
    """What a file begins with, blanks aside."""
    character = " "
    while character.isspace():
        character = text.read(1)
    text.seek(0)
    return character


def _csv_rows(text: TextIO, path: Path) -> Iterator[Arrival | None]:
    reader = csv.DictReader(text, strict=True)
    names = tuple(reader.fieldnames or ())
    if not all(set(known) & set(names) for known in (_PROMPT_NAMES, _NEW_NAMES)):
        raise TraceError(
            f"the trace {path} is no JSON, and of a CSV it has not the columns of a prompt and an answer, such as "
            f"ContextTokens and GeneratedTokens or prompt_tokens and output_tokens, but {', '.join(names) or 'none'}"
        )
    for row in reader:
        try:
            if None in row or None in row.values():
                raise ValueError(f"it has not a field for each of {', '.join(names)}")
            yield _of_fields(row)
        except (ValueError, OverflowError) as error:
            raise TraceError(f"line {reader.line_num} of the trace {path} is no request: {error}") from error


def _seconds(timestamp: Any) -> float:
    """Of a date and time, in its zone if it names one."""
    match = _TIMESTAMP.fullmatch(str(timestamp).strip())
    if match is None:
        raise ValueError(f"{timestamp!r} is no date and time such as 2023-11-16 18:15:46.680590")
    at, fraction, zone = match.groups()
    zone = "+00:00" if zone in (None, "Z") else zone
    return datetime.fromisoformat(at + zone).timestamp() + float(fraction or 0)


def _json_rows(text: TextIO, path: Path) -> Iterator[Arrival | None]:
    items: Iterable[Any]
    if _first_character(text) == "[":
        try:
            items, unit = json.load(text), "request"
        except (json.JSONDecodeError, RecursionError) as error:
            raise TraceError(f"the trace {path} is no JSON: {error}") from error
    else:
        items, unit = text, "line"
    for number, item in enumerate(items, 1):
        if unit == "line" and not item.strip():
            continue
        try:
            yield _of_fields(json.loads(item) if unit == "line" else item)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise TraceError(f"{unit} {number} of the trace {path} is no request: {error}") from error


def _of_fields(fields: Any) -> Arrival | None:
    if not isinstance(fields, dict):
        raise TypeError(f"{reprlib.repr(fields)} is no object")
    turns = next((fields[name] for name in _TURNS_NAMES if name in fields), None)
    if turns is not None and not any(name in fields for name in _PROMPT_NAMES):
        prompt, new = _turn_tokens(turns)
    else:
        prompt, new = _first(fields, _PROMPT_NAMES), _first(fields, _NEW_NAMES)
    return _arrival(_time_of(fields), prompt, new, _whole(fields.get("priority", 0)))


def _time_of(fields: dict[str, Any]) -> float:
    """In seconds; the beginning, if nothing is said of it."""
    if _DATE_NAME in fields:
        return _seconds(fields[_DATE_NAME])
    return next((_number(fields[name]) / unit for name, unit in _TIME_NAMES.items() if name in fields), 0.0)


def _turn_tokens(turns: Any) -> tuple[int, int]:
    """Of a conversation's first turn and its second, as far as it has them."""
    if not isinstance(turns, list):
        raise TypeError(f"its turns are no list, but {reprlib.repr(turns)}")
    sizes = [_text_bytes(_first(turn, _TEXT_NAMES)) for turn in turns[:2]]
    prompt, new = (-(-size // _BYTES_PER_TOKEN) for size in (*sizes, 0, 0)[:2])
    return prompt, new


def _text_bytes(text: Any) -> int:
    """Of a turn's text; one that only calls tools has none."""
    if text is not None and not isinstance(text, str):
        raise TypeError(f"the text of a turn is no text, but {reprlib.repr(text)}")
    return len((text or "").encode(errors="surrogatepass"))  # which a text that was cut somewhere may end with


def _first(fields: Any, names: tuple[str, ...]) -> Any:
    if isinstance(fields, dict):
        for name in names:
            if name in fields:
                return fields[name]
    raise ValueError(f"it names none of {', '.join(names)}")


def _arrival(at_s: float, prompt: Any, new: Any, priority: int = 0) -> Arrival | None:
    num_prompt_tokens, num_new_tokens = _whole(prompt), _whole(new)
    if num_prompt_tokens < 0 or num_new_tokens < 0:
        raise ValueError(f"lengths of {num_prompt_tokens} and {num_new_tokens} tokens")
    if not math.isfinite(at_s):
        raise ValueError(f"it arrives at {at_s}")
    if not num_prompt_tokens or not num_new_tokens:
        return None
    return Arrival(at_s=at_s, num_prompt_tokens=num_prompt_tokens, num_new_tokens=num_new_tokens, priority=priority)


def _whole(value: Any) -> int:
    """A number as people write it, 12.0 and "12" included."""
    number = int(value)
    if number != _number(value):
        raise ValueError(f"{value!r} is no whole number")
    return number


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(f"{value} is no number")
    return float(value)
