"""How much a client may send, and what becomes of an answer when it leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

T = TypeVar("T")


class BodyLimit:
    """An ASGI application around another: 413 for a body longer than `max_bytes`, whatever its headers say."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        num_declared = int(declared) if declared.isdecimal() else 0
        num_received = 0

        async def receive_limited() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if max(num_declared, num_received) > self._max_bytes:
                raise HTTPException(413, f"the body has more than the {self._max_bytes} bytes that are possible")
            return message

        await self._app(scope, receive_limited, send)


class EventStream(StreamingResponse):
    """Server-sent events; `on_close` is called when the client has them all, or has left."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None]) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache"})
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns, or None if the client leaves before; then it is cancelled."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
