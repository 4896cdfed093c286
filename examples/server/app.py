"""The server as an ASGI application: which paths there are, and what a request may ask for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from transformers import GenerationConfig

from server.call import Call
from server.connection import BodyLimit, EventStream, while_connected
from server.engine import Engine
from server.errors import ApiError, refusal_of
from server.prompts import Prompts
from server.replies import ChatForm, CompletionForm, Reply
from server.schema import Ask, ChatAsk, CompletionAsk

DEFAULT_NEW_TOKENS = 16  # of a completion; the answer of a chat may be as long as there is room
LEAST_TEMPERATURE = 1e-3  # logits over less could be too large for a number
PAGE = Path(__file__).with_name("page.html")


def make_app(
    engine: Engine,
    tokenizer: Any,
    *,
    name: str,
    max_request_tokens: int,
    defaults: GenerationConfig,
    max_answers: int = 16,
    max_body_bytes: int = 1 << 20,
) -> FastAPI:
    """Make the application, which closes the engine when it shuts down.

    Args:
        engine: answers the calls.
        tokenizer: makes token ids of texts and, with its template, of chats.
        name: the model's, for clients.
        max_request_tokens: of a prompt and its answer.
        defaults: how tokens are chosen where a request does not say it.
        max_answers: that one request may ask for: `n` for each of its prompts.
        max_body_bytes: of a request.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    app.add_middleware(BodyLimit, max_bytes=max_body_bytes)
    to_tokens = Prompts(tokenizer)
    started = int(time.time())

    def check(ask: Ask, prompts: Sequence[list[int]], num_new_tokens: int) -> None:
        param = "messages" if isinstance(ask, ChatAsk) else "prompt"
        if ask.model not in (None, name):
            message = f"there is no model {ask.model!r}; this is {name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        if not 0 < ask.n * len(prompts) <= max_answers:
            message = f"{len(prompts)} prompts with n={ask.n}; 1 to {max_answers} answers can be asked for at once"
            raise ApiError(400, message, param="n" if prompts else param)
        if not all(prompts):
            raise ApiError(400, "a prompt has no tokens", param=param)
        longest = max(map(len, prompts))
        if longest + num_new_tokens > max_request_tokens:
            message = f"{longest} tokens and {num_new_tokens} new ones are more than the {max_request_tokens} possible"
            raise ApiError(400, message, param=param, code="context_length_exceeded")

    async def answer(
        request: Request,
        ask: Ask,
        prompts: Sequence[list[int]],
        *,
        num_new_tokens: int,
        logprobs: bool,
        form: CompletionForm,
    ) -> Response:
        check(ask, prompts, num_new_tokens)
        options = {"max_new_tokens": num_new_tokens, "logprobs": logprobs, **sampling(ask, defaults)}
        each = [prompt for prompt in prompts for _ in range(ask.n)]
        call = Call(each, options, seed=ask.seed, stops=ask.stops)
        await engine.submit(call)
        reply = Reply(
            call,
            form,
            name=name,
            num_prompt_tokens=sum(map(len, prompts)),
            includes_usage=ask.includes_usage,
            includes_ids=ask.return_token_ids,
            decode=tokenizer.decode,
        )
        if ask.stream:
            return EventStream(reply.events(), on_close=partial(engine.cancel, call))
        try:
            whole = await while_connected(request, reply.whole())
        finally:
            engine.cancel(call)
        return Response(status_code=499) if whole is None else JSONResponse(whole)

    @app.post("/v1/completions")
    async def completions(ask: CompletionAsk, request: Request) -> Response:
        prompts = await asyncio.to_thread(to_tokens.of_completion, ask)
        return await answer(
            request,
            ask,
            prompts,
            num_new_tokens=ask.max_tokens or DEFAULT_NEW_TOKENS,
            logprobs=ask.logprobs is not None,
            form=CompletionForm(),
        )

    @app.post("/v1/chat/completions")
    async def chat(ask: ChatAsk, request: Request) -> Response:
        prompt = await asyncio.to_thread(to_tokens.of_chat, ask)
        return await answer(
            request,
            ask,
            [prompt],
            num_new_tokens=ask.max_completion_tokens or ask.max_tokens or max(1, max_request_tokens - len(prompt)),
            logprobs=ask.logprobs is True,
            form=ChatForm(),
        )

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": name, "object": "model", "created": started, "owned_by": "torch-uma"}
        return {"object": "list", "data": [model | {"max_model_len": max_request_tokens}]}

    @app.get("/health")
    async def health() -> JSONResponse:
        if engine.failure is not None:
            return JSONResponse({"status": "failed", "reason": engine.failure.message}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(engine.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/arena.json")
    async def arena() -> JSONResponse:
        return JSONResponse(engine.report.json())

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE.read_text())

    @app.exception_handler(ApiError)
    async def refuse(_: Request, error: ApiError) -> JSONResponse:
        if error.is_refusal:
            engine.metrics.requests.labels("refused").inc()
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def refuse_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return await refuse(request, refusal_of(error))

    @app.exception_handler(HTTPException)
    async def refuse_http(request: Request, error: HTTPException) -> JSONResponse:
        refusal = ApiError(error.status_code, str(error.detail))
        return await refuse(request, refusal) if error.status_code == 413 else refusal.response()

    @app.exception_handler(Exception)
    async def fail(_: Request, error: Exception) -> JSONResponse:
        return ApiError(500, f"{type(error).__name__}: {error}").response()

    return app


def sampling(ask: Ask, defaults: GenerationConfig) -> dict[str, Any]:
    """How tokens are chosen: what a request does not say is as the model's makers have it, or else as OpenAI has."""
    temperature = next(value for value in (ask.temperature, defaults.temperature, 1.0) if value is not None)
    if temperature < LEAST_TEMPERATURE:
        return {"do_sample": False}
    top_p = next(value for value in (ask.top_p, defaults.top_p, 1.0) if value is not None)
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": defaults.top_k or 0}
