"""How answers look to a client: the objects of OpenAI's completions and chat completions."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from server.call import Call, Piece
from server.errors import ApiError

Json = dict[str, Any]
LEAST_LOGPROB = -9999.0  # JSON has no infinity


class Token(NamedTuple):
    """A token with its log-probability, and where in its answer the piece begins that it came with."""

    text: str
    logprob: float
    offset: int


class CompletionForm:
    """Answers to completions."""

    prefix, whole_name, part_name = "cmpl", "text_completion", "text_completion"

    def opening(self, index: int) -> Json | None:
        """What comes before the first part of an answer."""
        return None

    def whole(self, index: int, text: str, tokens: list[Token] | None, finish_reason: str | None) -> Json:
        """A whole answer."""
        logprobs = tokens and {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": None,
            "text_offset": [token.offset for token in tokens],
        }
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def part(self, index: int, text: str, tokens: list[Token] | None, finish_reason: str | None) -> Json:
        """A part of a streamed answer."""
        return self.whole(index, text, tokens, finish_reason)


class ChatForm(CompletionForm):
    """Answers to chat completions."""

    prefix, whole_name, part_name = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> Json | None:
        return _choice(index, {"delta": {"role": "assistant", "content": ""}}, None, None)

    def whole(self, index: int, text: str, tokens: list[Token] | None, finish_reason: str | None) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        return _choice(index, {"message": message}, tokens, finish_reason)

    def part(self, index: int, text: str, tokens: list[Token] | None, finish_reason: str | None) -> Json:
        return _choice(index, {"delta": {"content": text} if text else {}}, tokens, finish_reason)


def _choice(index: int, content: Json, tokens: list[Token] | None, finish_reason: str | None) -> Json:
    logprobs = tokens and {
        "content": [
            {
                "token": token.text,
                "logprob": token.logprob,
                # What is decoded alone may be a part of a character, and its bytes are not known then.
                "bytes": None if "\ufffd" in token.text else list(token.text.encode()),
                "top_logprobs": [],
            }
            for token in tokens
        ]
    }
    return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


class Reply:
    """The answer to one call that has begun, whole or in parts.

    Args:
        call: what was asked.
        form: completions' or chat's.
        name: the model's.
        num_prompt_tokens: those of each prompt once, however many answers it gets.
        includes_usage: whether the parts are followed by one with the numbers of tokens.
        includes_ids: whether answers have a field `token_ids`.
        decode: the text of token ids.
    """

    def __init__(
        self,
        call: Call,
        form: CompletionForm,
        *,
        name: str,
        num_prompt_tokens: int,
        includes_usage: bool,
        includes_ids: bool,
        decode: Callable[[list[int]], str],
    ) -> None:
        self._call, self._form, self._decode = call, form, decode
        self._num_prompt_tokens, self._num_new_tokens = num_prompt_tokens, 0
        self._includes_usage, self._includes_ids = includes_usage, includes_ids
        self._lengths = [0] * len(call.prompts)  # characters of each answer so far
        self._head = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    async def whole(self) -> Json:
        """The answer in one; raises ApiError if the engine fails."""
        texts = [""] * len(self._call.prompts)
        tokens: list[list[Token]] = [[] for _ in texts]
        ids: list[list[int]] = [[] for _ in texts]
        reasons: list[str | None] = [None for _ in texts]
        async for piece in self._call:
            tokens[piece.place] += self._tokens(piece) or []
            ids[piece.place] += piece.tokens
            texts[piece.place] += piece.text
            reasons[piece.place] = piece.finish_reason
        choices = [
            self._with_ids(self._form.whole(index, text, tokens[index] or None, reasons[index]), ids[index])
            for index, text in enumerate(texts)
        ]
        return {**self._head, "object": self._form.whole_name, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[str]:
        """The answer as server-sent events; a failure is the last of them."""
        try:
            for index in range(len(self._call.prompts)):
                opening = self._form.opening(index)
                if opening is not None:
                    yield self._part([opening])
            async for piece in self._call:
                tokens = self._tokens(piece)
                if piece.text or piece.finish_reason or tokens or self._includes_ids:
                    part = self._form.part(piece.place, piece.text, tokens, piece.finish_reason)
                    yield self._part([self._with_ids(part, piece.tokens)])
        except ApiError as error:
            yield _event(error.body())
            return
        if self._includes_usage:
            yield _event({**self._head, "object": self._form.part_name, "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _part(self, choices: list[Json]) -> str:
        part = {**self._head, "object": self._form.part_name, "choices": choices}
        return _event(part | {"usage": None} if self._includes_usage else part)

    def _with_ids(self, choice: Json, ids: list[int]) -> Json:
        return choice | {"token_ids": ids} if self._includes_ids else choice

    def _tokens(self, piece: Piece) -> list[Token] | None:
        """Count the tokens of a piece; they themselves where their log-probabilities are told."""
        self._num_new_tokens += len(piece.tokens)
        offset = self._lengths[piece.place]
        self._lengths[piece.place] += len(piece.text)
        if piece.logprobs is None:
            return None
        return [
            Token(self._decode([token]), max(LEAST_LOGPROB, value), offset)
            for token, value in zip(piece.tokens, piece.logprobs)
        ]

    def _usage(self) -> Json:
        prompt, new = self._num_prompt_tokens, self._num_new_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _event(data: Json) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
