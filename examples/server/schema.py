"""What clients may ask for: the requests of OpenAI's completions and chat completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256

# Says nothing about the answer.
IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
# What is not supported, and the value with which it asks for nothing.
NEUTRAL: dict[str, Any] = {
    "echo": False,
    "best_of": 1,
    "suffix": "",
    "logit_bias": {},
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "top_logprobs": 0,
}


class Strict(BaseModel):
    """No field is converted, and none is passed over in silence."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, fields: Any) -> Any:
        """Null is as good as nothing: clients send back what they were sent."""
        return (
            {name: value for name, value in fields.items() if value is not None} if isinstance(fields, dict) else fields
        )


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against who measures lengths; none is sent


class Ask(Strict):
    """What both kinds of requests have."""

    model: str | None = None
    n: int = Field(1, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False  # not of OpenAI; as other servers of open models have it

    @model_validator(mode="before")
    @classmethod
    def _asking(cls, fields: Any) -> Any:
        """Without what asks for nothing."""
        if not isinstance(fields, dict):
            return fields
        return {
            name: value
            for name, value in fields.items()
            if name not in IGNORED and (name not in NEUTRAL or value != NEUTRAL[name])
        }

    @model_validator(mode="after")
    def _checked(self) -> Ask:
        if len(self.stops) > MAX_STOPS:
            raise ValueError(f"stop has {len(self.stops)} strings; {MAX_STOPS} are possible")
        for stop in self.stops:
            if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
                raise ValueError(f"a stop string has {len(stop)} characters; 1 to {MAX_STOP_CHARACTERS} are possible")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are of use with stream only")
        return self

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionAsk(Ask):
    """POST /v1/completions"""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Literal[0] | None = None  # those of the tokens that were chosen, and of no others

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        token_ids = [token for token in self.prompt if isinstance(token, int)]
        return [token_ids] if token_ids else [prompt for prompt in self.prompt if not isinstance(prompt, int)]


class Part(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None

    def for_template(self) -> dict[str, str]:
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        said = {"role": self.role, "content": "".join(parts)}
        return said if self.name is None else said | {"name": self.name}


class ChatAsk(Ask):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
