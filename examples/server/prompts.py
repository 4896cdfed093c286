"""The token ids of what clients send."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from server.errors import ApiError
from server.schema import ChatAsk, CompletionAsk


class Prompts:
    """Makes token ids with a tokenizer, and of chats with its template; raises ApiError for what it does not take."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def of_completion(self, ask: CompletionAsk) -> list[list[int]]:
        return [self._tokens(prompt, "prompt") if isinstance(prompt, str) else prompt for prompt in ask.prompts]

    def of_chat(self, ask: ChatAsk) -> list[int]:
        messages = [message.for_template() for message in ask.messages]
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except (TemplateError, ValueError) as error:
            message = f"the model's chat template does not take these messages: {error}"
            raise ApiError(400, message, param="messages") from error
        return self._tokens(text, "messages", add_special_tokens=False)  # the template has them

    def _tokens(self, text: str, param: str, **options: Any) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can hold halves of characters
            raise ApiError(400, f"a text is no Unicode: {error.reason}", param=param) from error
        tokens: list[int] = self._tokenizer(text, **options).input_ids
        return tokens
