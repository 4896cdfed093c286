"""What a server says of a text that grows: all of it in the end, and nothing that has to be taken back."""

from __future__ import annotations

import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st
from server.text import Text

TOKENIZER = tiny_models.tokenizer()


def decode(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def parts_of(tokens: list[int], stops: tuple[str, ...] = ()) -> tuple[list[str], Text]:
    """What is said behind each token, and at the end where no stop string was found."""
    text = Text(decode, stops)
    parts = []
    for token in tokens:
        parts.append(text.add(token))
        if text.is_stopped:
            return parts, text
    return [*parts, text.finish()], text


words = st.text(st.sampled_from("ab é€𝄞\ufffd"), max_size=12).map(str.encode)
tokens_lists = st.lists(
    words | st.binary(max_size=4) | st.sampled_from([b"\xe2\x82", b"\xf0\x9d\x84", b"\xc3"]), max_size=8
).map(lambda parts: list(b"".join(parts)))
marks = st.integers(256, 259)


@given(tokens_lists, st.lists(st.tuples(st.integers(0, 40), marks), max_size=3))
def test_the_parts_are_the_text(tokens: list[int], inserted: list[tuple[int, int]]) -> None:
    for place, mark in inserted:
        tokens.insert(place, mark)
    parts, _ = parts_of(tokens)
    assert "".join(parts) == decode(tokens)


@given(words.map(bytes.decode))
def test_a_character_is_said_with_its_last_token(text: str) -> None:
    parts, _ = parts_of(list(text.encode()))
    if "\ufffd" not in text:
        assert parts[:-1] == [part for letter in text for part in [""] * (len(letter.encode()) - 1) + [letter]]


@given(st.text("ab€", max_size=20), st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_text_ends_before_its_first_stop_string(text: str, stops: list[str]) -> None:
    tokens = list(text.encode())
    parts, grown = parts_of(tokens, tuple(stops))
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    assert grown.is_stopped == bool(ends)
    if not ends:
        assert "".join(parts) == text
        return
    seen = text[: min(ends)]  # once one is complete
    assert len(parts) == len(seen.encode())
    assert "".join(parts) == seen[: min(seen.index(stop) for stop in stops if stop in seen)]


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    parts, _ = parts_of(list(b"xababc"), ("abc",))
    assert parts == ["x", "", "", "ab", "", ""]
    parts, _ = parts_of(list(b"xab"), ("abc",))
    assert parts == ["x", "", "", "ab"]


@pytest.mark.parametrize("broken", [b"\xff", b"\xe2\x82", b"\xf0\x9d\x84"])
def test_what_is_no_character_is_said_and_does_not_stop_the_text(broken: bytes) -> None:
    parts, _ = parts_of(list(broken * 50 + b"end"))
    assert "".join(parts) == "\ufffd" * 50 + "end"
    assert len("".join(parts[: 50 * len(broken)])) >= 47
