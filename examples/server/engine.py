"""The thread that drives a serving loop, and how calls come to it and what they bring goes back."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future

from server.arena import Report, report_of
from server.call import Answer, Call, Piece
from server.errors import ApiError
from server.metrics import Metrics
from server.text import Text
from torch_uma import Event, Generation, ServingLoop, TorchUmaError

REPORT_SECONDS = 0.1  # at least, while steps follow one another
RETRY_SECONDS = 1

log = logging.getLogger("uvicorn.error")


class Engine:
    """Drives a serving loop in a thread of its own, which sleeps while there is nothing to do.

    Args:
        make_loop: called once, in that thread, which then is the only one to touch the loop and its pool.
        decode: the text of token ids.
        metrics: counted here.
        max_waiting: generations that may wait for memory; a call that would make it more is refused.

    Attributes:
        failure: why no call is answered any more, or None.
        report: how the loop stood lately.
        max_request_tokens: of the longest prompt and answer that the loop takes.

    Raises what `make_loop` raises. `close`, or the end of a `with` block, ends all calls, the loop and its pool.
    """

    def __init__(
        self,
        make_loop: Callable[[], ServingLoop],
        decode: Callable[[list[int]], str],
        metrics: Metrics,
        *,
        max_waiting: int = 256,
    ) -> None:
        self._make_loop, self._decode, self._max_waiting = make_loop, decode, max_waiting
        self.metrics = metrics
        self.failure: ApiError | None = None
        self.report: Report
        self.max_request_tokens: int
        self._asks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ask_lock = threading.Lock()
        self._is_closing = False
        self._answers: dict[Generation, Answer] = {}  # the open ones
        self._news: defaultdict[asyncio.AbstractEventLoop, list[tuple[Call, Piece | ApiError]]] = defaultdict(list)
        made: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(made,), name="engine", daemon=True)
        self._thread.start()
        made.result()
        metrics.watch(lambda: self.report)

    async def submit(self, call: Call) -> None:
        """Begin a call; raises ApiError where it is refused. Whatever it raises, nothing of the call goes on."""
        begun: Future[None] = Future()

        def begin() -> None:
            try:
                self._begin(call)
            except ApiError as error:
                begun.set_exception(error)
            except (TorchUmaError, ValueError) as error:
                begun.set_exception(ApiError(400, str(error)))
            except Exception as error:
                log.exception("a call could not begin")
                begun.set_exception(ApiError(500, f"{type(error).__name__}: {error}"))
            else:
                begun.set_result(None)

        with self._ask_lock:  # either before the thread has looked for the last time, or refused
            self._check_alive()
            self._asks.put(begin)
        try:
            await asyncio.shield(asyncio.wrap_future(begun))
        except asyncio.CancelledError:
            self.cancel(call)
            raise

    def cancel(self, call: Call) -> None:
        """End what is left of a call; does not wait."""
        self._asks.put(lambda: self._end(call, "cancelled"))

    def close(self) -> None:
        """End every call, the loop and its pool; waits for the step that runs."""
        self._is_closing = True
        self._asks.put(lambda: None)
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What follows runs in the thread.

    def _run(self, made: Future[None]) -> None:
        try:
            self._loop = self._make_loop()
            self.report = report_of(self._loop)
            self.max_request_tokens = self._loop.scheduler.max_request_tokens
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(None)
        outcome = "cancelled"
        failure = ApiError(503, "the server is shutting down", code="shutting_down")
        try:
            with self._loop:
                self._serve()
        except Exception as error:
            log.exception("the serving loop has failed")
            outcome = "failed"
            failure = ApiError(
                500, f"the serving loop has failed: {type(error).__name__}: {error}", code="engine_failed"
            )
        with self._ask_lock:
            self.failure = failure
        for call in {answer.call for answer in self._answers.values()}:
            self._fail(call, failure, outcome)
        while not self._asks.empty():
            self._asks.get()()
        self._deliver()

    def _serve(self) -> None:
        is_busy = False
        reported = 0.0
        while True:
            if not is_busy:
                self._asks.get()()
            while not self._asks.empty():
                self._asks.get()()
            if self._is_closing:
                return
            events = self._loop.step()
            now = time.perf_counter()
            for event in events:
                self._take(event, now)
            self._deliver()
            is_busy = bool(self._loop)
            if not is_busy or now - reported > REPORT_SECONDS:
                self.report, reported = report_of(self._loop), now

    def _begin(self, call: Call) -> None:
        self._check_alive()
        num_waiting = len(self._loop.scheduler.waiting)
        if num_waiting + len(call.prompts) > self._max_waiting:
            message = f"{num_waiting} requests are waiting; {self._max_waiting} may. Ask again later."
            raise ApiError(503, message, code="overloaded", retry_seconds=RETRY_SECONDS)
        try:
            for index, prompt in enumerate(call.prompts):
                seed = None if call.seed is None else (call.seed + index) % 2**63
                generation = self._loop.submit(prompt, seed=seed, **call.options)
                answer = Answer(call, index, generation, Text(self._decode, call.stops))
                call.answers.append(answer)
                self._answers[generation] = answer
        except BaseException:
            self._drop(call)
            raise
        self.metrics.prompt_tokens.inc(sum(map(len, call.prompts)))

    def _check_alive(self) -> None:
        if self.failure is not None:
            self.metrics.requests.labels("failed").inc()
            raise self.failure.with_traceback(None)  # it is raised often, and would remember each time

    def _take(self, event: Event, now: float) -> None:
        answer = self._answers.get(event.generation)
        if answer is None:  # its client has left
            return
        call, text, reason = answer.call, answer.text, event.finish_reason
        if reason in ("error", "cancelled"):
            error = event.generation.error
            self._fail(call, ApiError(500, f"the generation has failed: {type(error).__name__}: {error}"), "failed")
            return
        said, tokens = "", event.tokens
        for count, token in enumerate(tokens, 1):
            if reason != "stop" or count < len(tokens):  # what ends a text is none of it
                said += text.add(token)
            if text.is_stopped:
                tokens, reason = tokens[:count], "stop"
                break
        if reason is not None:
            said += text.finish()
            self._close(answer)
        first, answer.num_tokens = answer.num_tokens, answer.num_tokens + len(tokens)
        logprobs = event.generation.logprobs and event.generation.logprobs[first : answer.num_tokens]
        self._news[call.asyncio_loop].append((call, Piece(answer.index, said, tokens, logprobs, reason)))
        if not any(other.is_open for other in call.answers):
            self.metrics.requests.labels("completed").inc()
        if tokens:
            self.metrics.new_tokens.inc(len(tokens))
            (self.metrics.next_token if first else self.metrics.first_token).observe(now - answer.latest)
            answer.latest = now

    def _close(self, answer: Answer) -> None:
        """Note that nothing more is to come of a generation."""
        answer.is_open = False
        del self._answers[answer.generation]
        if self.failure is None and not answer.generation.is_finished:
            self._loop.cancel(answer.generation)

    def _drop(self, call: Call) -> bool:
        """Cancel the generations of a call that go on; whether there are any."""
        still_open = [answer for answer in call.answers if answer.is_open]
        for answer in still_open:
            self._close(answer)
        return bool(still_open)

    def _end(self, call: Call, outcome: str) -> None:
        if self._drop(call):
            self.metrics.requests.labels(outcome).inc()

    def _fail(self, call: Call, failure: ApiError, outcome: str) -> None:
        self._end(call, outcome)
        self._news[call.asyncio_loop].append((call, failure))

    def _deliver(self) -> None:
        """Wake every asyncio loop once, for all that there is to say."""
        for asyncio_loop, news in self._news.items():
            if not asyncio_loop.is_closed():
                asyncio_loop.call_soon_threadsafe(_tell, news)
        self._news.clear()


def _tell(news: list[tuple[Call, Piece | ApiError]]) -> None:
    for call, piece in news:
        call.take(piece)
