"""What goes wrong, in the form that OpenAI gives it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse


class ApiError(Exception):
    """An answer other than 200, with the reason.

    Args:
        status: of the HTTP response.
        param: the field of the request that is at fault.
        code: a word for programs, such as "context_length_exceeded".
        retry_seconds: when it is worth asking again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_seconds: int | None = None,
    ) -> None:
        message = _printable(message)
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.param = None if param is None else _printable(param)
        self.headers = None if retry_seconds is None else {"Retry-After": str(retry_seconds)}

    @property
    def is_refusal(self) -> bool:
        """Whether it is about what was asked, and when, and nothing has failed."""
        return self.status < 500 or self.headers is not None

    def response(self) -> JSONResponse:
        """The HTTP response that says it."""
        return JSONResponse(self.body(), self.status, self.headers)

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def refusal_of(invalid: RequestValidationError) -> ApiError:
    """A 400 with the first of the reasons."""
    first, *others = invalid.errors()
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    inside = first["loc"][1:]  # of the body
    if not inside and first["type"] == "model_attributes_type":
        return ApiError(400, "the body is no JSON object, or lacks the header Content-Type: application/json")
    if first["type"] == "extra_forbidden":
        name = _dotted(inside)
        return ApiError(400, f"{name} is not supported by this server", param=name, code="unsupported_parameter")
    place = tuple(takewhile(lambda part: not _is_form(part), inside))
    param = _dotted(place) or None
    end = 1 + len(place)
    forms = [
        error["loc"][end] for error in (first, *others) if error["loc"][1:end] == place and len(error["loc"]) > end
    ]
    if forms:
        return ApiError(400, f"{param} is none of {', '.join(map(str, dict.fromkeys(forms)))}", param=param)
    reason = first["msg"].removeprefix("Value error, ")
    return ApiError(400, reason if param is None else f"{param}: {reason}", param=param)


def _printable(text: str) -> str:
    """JSON can hold halves of characters, which no response can."""
    return text.encode(errors="backslashreplace").decode()


def _dotted(place: Sequence[int | str]) -> str:
    return ".".join(map(str, place))


def _is_form(part: int | str) -> bool:
    """Whether a part of a place names one of the forms that a field can have, and no field."""
    return isinstance(part, str) and (part == "str" or "[" in part)
