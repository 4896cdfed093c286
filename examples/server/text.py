"""The text of one generation while it grows: nothing is said that a later token could still change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what an incomplete character is decoded to
MOST_PENDING = 3  # bytes of a character that the next token can complete


class Decoder:
    """Text of tokens that come one after another.

    Decodes from the last but one place at which all characters were complete, so that what a token looks like behind
    another is as in the whole text, at a cost that does not grow with it.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._num_complete = 0  # of these tokens, at the last place
        self._num_said = 0  # characters of their text

    def add(self, token: int) -> str:
        """What is certain of the text now and was not before."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        num_pending = len(text) - len(text.rstrip(REPLACEMENT))
        said = self._say(text, len(text) - min(num_pending, MOST_PENDING))
        if not num_pending:
            self._tokens = self._tokens[self._num_complete :]
            self._num_complete = len(self._tokens)
            self._num_said = len(self._decode(self._tokens))
        return said

    def finish(self) -> str:
        """The rest, with a replacement for a character that stayed incomplete."""
        text = self._decode(self._tokens)
        return self._say(text, len(text))

    def _say(self, text: str, end: int) -> str:
        said = text[self._num_said : end]
        self._num_said = max(self._num_said, end)
        return said


class Text:
    """What a client is told: the text of tokens before the first of its stop strings.

    Attributes:
        is_stopped: whether a stop string was found; it is not part of the text, nor is what follows.
    """

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()) -> None:
        self._decoder = Decoder(decode)
        self._stops = tuple(stops)
        self._held = ""  # could be the beginning of a stop string
        self.is_stopped = False

    def add(self, token: int) -> str:
        """What can be told now and could not before."""
        return self._tell(self._decoder.add(token))

    def finish(self) -> str:
        """The rest, where no token is to come."""
        told = self._tell(self._decoder.finish())
        told, self._held = told + self._held, ""
        return told

    def _tell(self, new: str) -> str:
        if self.is_stopped:
            return ""
        text, self._held = self._held + new, ""
        found = [place for place in map(text.find, self._stops) if place >= 0]
        if found:
            self.is_stopped = True
            return text[: min(found)]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        end = len(text) - num_held
        self._held = text[end:]
        return text[:end]


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` with which `stop` begins, and goes on."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if stop.startswith(text[-length:])), 0)
