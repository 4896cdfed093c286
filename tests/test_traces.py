"""Traces: what is read of each format, what is refused and in which words, and what a seed makes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from torch_uma.errors import TraceError
from torch_uma.simulate import Arrival, at_once, generate_trace, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48.0000000,7,1
"""


@pytest.fixture
def trace(tmp_path: Path):
    def write(content: str | bytes) -> Path:
        path = tmp_path / "trace"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def lengths(arrivals: list[Arrival]) -> list[tuple[int, int]]:
    return [(arrival.num_prompt_tokens, arrival.num_new_tokens) for arrival in arrivals]


def lines(*objects: object) -> str:
    return "\n".join(map(json.dumps, objects))


# Azure


@pytest.mark.parametrize("begin", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_azure_is_read_in_the_order_of_arrival(trace, begin: str, end: str) -> None:
    arrivals = read_trace(trace(begin + AZURE.replace("\n", end)))
    assert lengths(arrivals) == [(374, 44), (7, 1), (396, 109)]
    assert [arrival.at_s for arrival in arrivals] == pytest.approx([0.0, 1.31941, 4.314579], abs=2e-6)


def test_azure_of_2024_has_a_zone_and_sometimes_no_fraction(trace) -> None:
    rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
    arrivals = read_trace(trace(rows + "2024-05-10 00:00:01+00:00,2399,6\n2024-05-10T00:00:02.5Z,1,2\n"))
    assert [arrival.at_s for arrival in arrivals] == pytest.approx([0.0, 0.99007, 2.49007], abs=2e-6)


def test_zones_count_where_they_differ(trace) -> None:
    """And fractions of a second have as many digits as they have, beside any zone."""
    rows = "2024-05-10 00:00:00.5-05:00,1,5\n2024-05-10 07:00:00.1234567+02:00,1,3\n2024-05-10 05:00:01Z,1,7\n"
    arrivals = read_trace(trace("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows))
    assert lengths(arrivals) == [(1, 3), (1, 5), (1, 7)]
    assert [arrival.at_s for arrival in arrivals] == pytest.approx([0.0, 0.3765433, 0.8765433], abs=2e-6)


def test_the_clocks_of_daylight_saving_do_not_count(trace, monkeypatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        rows = (
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-03-31 01:59:59.000000,1,1\n2024-03-31 03:00:01.000000,1,1\n"
        )
        assert read_trace(trace(rows))[1].at_s == 3602.0
    finally:
        monkeypatch.undo()
        time.tzset()


def test_columns_may_come_in_any_order_and_beside_others(trace) -> None:
    rows = "GeneratedTokens,who,TIMESTAMP,ContextTokens\n5,me,2023-11-16 18:15:46.680590,9\n"
    assert read_trace(trace(rows)) == [Arrival(at_s=0.0, num_prompt_tokens=9, num_new_tokens=5)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("2023-11-16 18:15:51.0,12", "not a field for each of TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("2023-11-16 18:15:51.0,1,234,44", "not a field for each"),  # of a thousand and more
        ("2023-11-16 18:15:51.0+garbage,12,1", "garbage"),
        ("2023-11-16 18:15:51.0,twelve,1", "twelve"),
        ("2023-11-16 18:15:51.0,12.5,1", "12.5"),
        ("2023-11-16 18:15:51.0,-12,1", "-12"),
        ("yesterday,12,1", "yesterday"),
        (",12,1", ""),
    ],
)
def test_a_line_that_is_no_request_is_named(trace, line: str, words: str) -> None:
    with pytest.raises(TraceError, match="line 5 of the trace") as caught:
        read_trace(trace(AZURE + line + "\n"))
    assert words in str(caught.value)


def test_other_columns_are_named(trace) -> None:
    with pytest.raises(TraceError, match="ContextTokens.*but when, how_long"):
        read_trace(trace("when,how_long\n1,2\n"))


@pytest.mark.parametrize(
    ("header", "rows", "at_s"),
    [
        ("num_prefill_tokens,num_decode_tokens,arrived_at", "9,5,0.5\n8,4,2.0", 1.5),  # Vidur's
        ("Timestamp,Model,Request tokens,Response tokens", "5,a,9,5\n45,b,8,4", 40.0),  # BurstGPT's
        ("prompt_tokens,output_tokens,at_s,priority", "9,5,1,0\n8,4,1.25,0", 0.25),
        ("input_toks,output_toks,arrival_time_ns", "9,5,1000000000\n8,4,4000000000", 3.0),
        ("prompt_len,output_len", "9,5\n8,4", 0.0),
    ],
)
def test_columns_of_others_are_read(trace, header: str, rows: str, at_s: float) -> None:
    arrivals = read_trace(trace(f"{header}\n{rows}\n"))
    assert lengths(arrivals) == [(9, 5), (8, 4)]
    assert [arrival.at_s for arrival in arrivals] == [0.0, at_s]


# Mooncake and lengths


def test_mooncake_has_milliseconds(trace) -> None:
    text = lines(
        {"timestamp": 3000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]},
        {"timestamp": 4500, "input_length": 7322, "output_length": 490, "hash_ids": [0, 14]},
    )
    arrivals = read_trace(trace(text))
    assert lengths(arrivals) == [(6758, 500), (7322, 490)]
    assert [arrival.at_s for arrival in arrivals] == [0.0, 1.5]


@pytest.mark.parametrize("as_lines", [True, False])
@pytest.mark.parametrize(
    "names",
    [
        ("input_length", "output_length"),
        ("num_prompt_tokens", "num_new_tokens"),
        ("prompt_tokens", "completion_tokens"),
        ("prompt_len", "output_len"),
        ("input_tokens", "output_tokens"),
    ],
)
def test_lengths_have_many_names(trace, names: tuple[str, str], as_lines: bool) -> None:
    objects = [{names[0]: 10 + i, names[1]: 3.0, "at_s": 9.5 - i, "priority": i} for i in range(3)]
    arrivals = read_trace(trace(lines(*objects) if as_lines else "\n " + json.dumps(objects, indent=1)))
    assert lengths(arrivals) == [(12, 3), (11, 3), (10, 3)]
    assert [arrival.at_s for arrival in arrivals] == [0.0, 1.0, 2.0]
    assert [arrival.priority for arrival in arrivals] == [2, 1, 0]


def test_without_times_all_come_at_once_in_their_order(trace) -> None:
    arrivals = read_trace(trace(lines(*({"prompt_tokens": n, "output_tokens": 1} for n in (5, 3, 4)))))
    assert lengths(arrivals) == [(5, 1), (3, 1), (4, 1)]
    assert {arrival.at_s for arrival in arrivals} == {0.0}


def test_blank_lines_and_empty_requests_are_left_out(trace) -> None:
    text = '\n\n{"prompt_tokens": 0, "output_tokens": 4}\n\n{"prompt_tokens": 4, "output_tokens": 0}\n'
    assert lengths(read_trace(trace(text + '{"prompt_tokens": 4, "output_tokens": 9}\n\n'))) == [(4, 9)]
    with pytest.raises(TraceError, match="no requests"):
        read_trace(trace(text))


# ShareGPT


def test_sharegpt_is_its_first_two_turns_at_four_bytes_a_token(trace) -> None:
    def turns(*texts: str) -> list[dict[str, str]]:
        return [{"from": who, "value": text} for who, text in zip(("human", "gpt") * 3, texts)]

    objects = [
        {"id": "a", "conversations": turns("x" * 40, "y" * 7, "z" * 999)},
        {"id": "b", "conversations": turns("alone")},
        {"id": "c", "conversations": []},
        {"id": "d", "conversations": turns("ü" * 4, "y")},
    ]
    assert lengths(read_trace(trace(json.dumps(objects)))) == [(10, 2), (2, 1)]


def test_messages_are_turns_too_and_lengths_go_before_texts(trace) -> None:
    messages = [{"role": "user", "content": "x" * 8}, {"role": "assistant", "content": "y" * 12}]
    text = lines({"messages": messages}, {"conversation": messages, "prompt_tokens": 5, "output_tokens": 6})
    assert lengths(read_trace(trace(text))) == [(2, 3), (5, 6)]


def test_a_turn_may_be_cut_within_a_letter_or_without_a_text(trace) -> None:
    texts = [("\ud83d", 1), (None, None), ("y" * 8, 2)]
    objects = [{"messages": [{"content": "x"}, {"content": answer}]} for answer, _ in texts]
    assert lengths(read_trace(trace(lines(*objects)))) == [(1, size) for _, size in texts if size]


# What is none of it


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt_tokens": 1, "output_tokens": 1}\n{"prompt_tokens": 1', "line 2 of the trace"),
        ('{"prompt_tokens": 1, "output_tokens": 1}\n\n[1, 2]', r"line 3 of the trace .*\[1, 2\] is no object"),
        ('[{"prompt_tokens": 1, "output_tokens": 1}, 7]', "request 2 of the trace .* 7 is no object"),
        ('[{"prompt_tokens": 1}]', "request 1 .* names none of output_length"),
        ('{"prompt_tokens": "many", "output_tokens": 1}', "line 1 .*many"),
        ('{"prompt_tokens": 1.5, "output_tokens": 1}', "line 1 .* 1.5 is no whole number"),
        ('{"prompt_tokens": Infinity, "output_tokens": 1}', "line 1 .*infinity"),
        ('{"prompt_tokens": 1, "output_tokens": NaN}', "line 1 .*NaN"),
        ('{"prompt_tokens": null, "output_tokens": 1}', "line 1 .*None"),
        ('{"prompt_tokens": 1, "output_tokens": 1, "at_s": NaN}', "line 1 .* arrives at nan"),
        ('{"prompt_tokens": 1, "output_tokens": 1, "timestamp": "now"}', "line 1 .*now"),
        ('{"conversations": "hello"}', "line 1 .* no list, but 'hello'"),
        ('{"conversations": ["hello", "you"]}', "line 1 .* names none of value, content"),
        ('{"messages": [{"content": [{"type": "text"}]}]}', "line 1 .* is no text, but"),
        ('{"prompt_tokens": true, "output_tokens": 1}', "line 1 .* True is no number"),
        ('{"prompt_tokens": 1, "output_tokens": 1, "at_s": false}', "line 1 .* False is no number"),
        ('{"prompt_tokens": 1, "output_tokens": 1, "priority": 1e12}', "line 1 .* priority .* at most"),
        (AZURE + '"2023-11-16 18:15:51.0,12,1\n', "is no CSV: unexpected end"),
        ("[{]", "is no JSON"),
        ("[]", "has no requests"),
        ("", "columns .* but none"),
        ("hello", "is no JSON, and of a CSV .* but hello"),
        (b"\x1f\x8b\x08\x00\xff\xfe", "is no text"),
    ],
)
def test_what_is_no_trace_is_refused_in_words(trace, text: str | bytes, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        read_trace(trace(text))


@pytest.mark.parametrize(("begin", "words"), [('{"x": ', "line 1 .*recursion"), ("", "is no JSON.*recursion")])
def test_what_is_nested_too_deep_is_refused(trace, begin: str, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        read_trace(trace(begin + "[" * 100_000))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere cannot be read: No such file"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path)
    reads, writes = os.pipe()
    with open(reads), open(writes, "w") as pipe:
        pipe.write(AZURE)
        pipe.close()
        with pytest.raises(TraceError, match="cannot be read: .*not seekable"):
            read_trace(f"/dev/fd/{reads}")


def test_a_limit_takes_those_that_arrive_first(trace) -> None:
    path = trace(AZURE)
    assert lengths(read_trace(path, limit=2)) == [(374, 44), (7, 1)]
    assert read_trace(path, limit=99) == read_trace(path)
    for limit in (0, -1, 1.5):
        with pytest.raises(TraceError, match="limit of a trace"):
            read_trace(path, limit=limit)  # type: ignore[arg-type]


# Made ones


def test_a_seed_makes_the_same_trace_again() -> None:
    made = generate_trace(50, prompt_tokens=100, new_tokens=10, spread=0.7, rate_per_s=3, seed=5)
    assert made == generate_trace(50, prompt_tokens=100, new_tokens=10, spread=0.7, rate_per_s=3, seed=5)
    assert made != generate_trace(50, prompt_tokens=100, new_tokens=10, spread=0.7, rate_per_s=3, seed=6)
    assert made[0].at_s == 0.0 and sorted(made, key=lambda arrival: arrival.at_s) == made


def test_means_spread_and_rate_are_those_that_were_asked_for() -> None:
    count = 20_000
    made = generate_trace(count, prompt_tokens=1000, new_tokens=200, spread=0.8, rate_per_s=20)
    prompts, new = np.array(lengths(made)).T
    assert prompts.mean() == pytest.approx(1000, rel=0.03) and new.mean() == pytest.approx(200, rel=0.03)
    assert np.log(prompts).std() == pytest.approx(0.8, rel=0.03)
    gaps = np.diff([arrival.at_s for arrival in made])
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03) and gaps.std() == pytest.approx(1 / 20, rel=0.05)
    assert abs(np.corrcoef(prompts, new)[0, 1]) < 0.05


def test_without_spread_or_rate_all_are_alike_and_at_once() -> None:
    assert set(generate_trace(9, prompt_tokens=7, new_tokens=3)) == {
        Arrival(at_s=0.0, num_prompt_tokens=7, num_new_tokens=3)
    }


def test_lengths_stay_within_their_bounds() -> None:
    made = generate_trace(500, prompt_tokens=30, new_tokens=1, spread=3.0, longest_tokens=100)
    for sizes in np.array(lengths(made)).T:
        assert sizes.min() >= 1 and sizes.max() <= 100
    assert max(arrival.num_prompt_tokens for arrival in made) == 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_tokens": 0.5},
        {"new_tokens": 0},
        {"spread": -1},
        {"rate_per_s": 0},
        {"rate_per_s": float("nan")},
        {"prompt_tokens": float("nan")},
        {"spread": float("nan")},
        {"prompt_tokens": float("inf")},
        {"spread": float("inf")},
        {"rate_per_s": float("inf")},
    ],
)
def test_numbers_that_make_no_trace(wrong: dict[str, float]) -> None:
    with pytest.raises(TraceError, match="a trace has prompts and answers"):
        generate_trace(3, **{"prompt_tokens": 5, "new_tokens": 5, **wrong})  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="num_requests"):
        generate_trace(0, prompt_tokens=5, new_tokens=5)
    for name, number in (("longest_tokens", 0), ("longest_tokens", 1.5), ("seed", -1), ("seed", "first")):
        with pytest.raises(TraceError, match=name):
            generate_trace(3, prompt_tokens=5, new_tokens=5, **{name: number})  # type: ignore[arg-type]
    with np.errstate(invalid="ignore"), pytest.raises(TraceError, match="not at nan s"):
        generate_trace(3, prompt_tokens=5, new_tokens=5, rate_per_s=1e-320)
    assert lengths(generate_trace(1, prompt_tokens=5, new_tokens=5, spread=1e200)) == [(1, 1)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"at_s": float("nan")},
        {"at_s": -float("inf")},
        {"num_prompt_tokens": 0},
        {"num_new_tokens": 1.5},
        {"priority": 0.5},
        {"priority": 1 << 40},
        {"priority": -(1 << 40)},
    ],
)
def test_numbers_that_make_no_request(wrong: dict[str, float]) -> None:
    with pytest.raises(TraceError, match="a request"):
        Arrival(**{"at_s": 0.0, "num_prompt_tokens": 1, "num_new_tokens": 1} | wrong)  # type: ignore[arg-type]


def test_at_once_keeps_the_order() -> None:
    made = generate_trace(20, prompt_tokens=50, new_tokens=5, spread=1.0, rate_per_s=2)
    assert lengths(at_once(made)) == lengths(made)
    assert {arrival.at_s for arrival in at_once(made)} == {0.0}
