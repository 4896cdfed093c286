"""ServingLoop: many generations of one model at once, over one pool.

Owns the order of events in a step: a round is scheduled, its forwards are launched, tokens are sampled, and what was
sampled is read. Who is in memory is the scheduler's business, how forwards are run that of `forwards`, and how tokens
are chosen and when a text ends that of `sampling` and `stopping`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Ordered
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from torch_uma.counts import whole
from torch_uma.errors import ClosedError, PlanError, SequenceError, TorchUmaError
from torch_uma.integrations.transformers.serving.compiled import CompiledDecode, most_fillers
from torch_uma.integrations.transformers.serving.forwards import Forwards
from torch_uma.integrations.transformers.serving.generation import Event, FinishReason, Generation
from torch_uma.integrations.transformers.serving.last_tokens import LastTokens
from torch_uma.integrations.transformers.serving.launched import Launched
from torch_uma.integrations.transformers.serving.options import resolve
from torch_uma.integrations.transformers.serving.prompts import token_ids
from torch_uma.integrations.transformers.serving.traits import check_compiles, traits_of
from torch_uma.pool import CachePool
from torch_uma.scheduling import Forward, Scheduler

if TYPE_CHECKING:
    from torch_uma.scheduling import Costs


class ServingLoop:
    """Generates for many prompts at once: `submit` them at any time, `step` for as long as the loop is true.

    `submit` returns a Generation, which grows; each `step` returns what is new as Events (`generation`, `tokens`, and
    `finish_reason`, None while it goes on). docs/serving.md shows it. `loop.scheduler.stats()` says what was done so
    far, `loop.pool.stats()` what the memory holds, and `loop.scheduler.quote` what a request would need.

    Args:
        model: of transformers, that can generate. It is run as it is: call `model.eval()` first.
        memory: of the pool that the loop makes: bytes, "8GiB", or a fraction of the free memory; half of it by default.
        page_size, kv_dtype: of that pool, as for CachePool.
        pool: one made of this model instead, which others may use too; it stays open.
        max_running: generations in memory at once; others wait.
        step_tokens: tokens of all forwards of a step; a long prompt comes in chunks of what others leave of it.
        max_request_tokens: the longest prompt and answer together; by default what the pool can hold.
        headroom_steps: who comes in beside others leaves room for so many more tokens of each: the more, the fewer are
            retracted, and the fewer are in memory.
        host_memory: bytes, or "4GiB", for generations that are retracted: taken out of memory for a while, as it is
            short. Those wait there, and are copied back; 0: what they held is computed again.
        overlap: launch a step before the tokens of the one before are read, so that an accelerator is never idle
            meanwhile; a generation that has ended may take part in one more step, for nothing.
        compile: run decode steps through `torch.compile`, one graph for each of a few batch sizes, which idle sequences
            fill up: a pool that is given needs rows for them, `max_sequences` of up to 3/2 of `max_running`. The model
            must attend by "torch_uma".
        tokenizer: for stop strings.
        costs: `torch_uma.scheduling.Costs`, what decides whether a generation that is retracted is computed again; left
            out, the time of a prompt's token is measured as the loop goes.

    A generation gets the tokens that `model.generate()` gives its prompt alone. Several rows in a forward round
    otherwise than one, which matters where two tokens are equally likely but for that.

    One thread drives a loop, the one that made it or its pool: a call from another raises ThreadError.

    Raises PlanError for a model that cannot be served, by name, and for memory that does not hold one request.
    """

    def __init__(
        self,
        model: Any,
        *,
        memory: int | float | str | None = None,
        pool: CachePool | None = None,
        max_running: int = 64,
        step_tokens: int = 2048,
        max_request_tokens: int | None = None,
        headroom_steps: int = 16,
        host_memory: int | str = 0,
        overlap: bool = False,
        compile: bool = False,
        tokenizer: Any = None,
        page_size: int | None = None,
        kv_dtype: torch.dtype | str | None = None,
        costs: Costs | None = None,
    ) -> None:
        max_running = whole(max_running, "max_running of a loop", least=1, error=PlanError)
        self._is_own_pool = pool is None
        if pool is None:
            rows = max_running + (most_fillers(max_running) if compile else 0)
            options: dict[str, Any] = {"page_size": page_size, "kv_dtype": kv_dtype, "max_sequences": rows}
            pool = CachePool(model, memory=memory, **options)
        elif not isinstance(pool, CachePool):
            raise PlanError(f"pool= is a CachePool of this model, not {type(pool).__name__}; or give memory=")
        else:
            for name, value in {"memory": memory, "page_size": page_size, "kv_dtype": kv_dtype}.items():
                if value is not None:
                    raise PlanError(f"pool= has its {name} already; give either pool= or {name}=")
        traits = traits_of(model, pool)
        if compile:
            check_compiles(model, pool)
        self._pool = pool
        self._model = model
        self._tokenizer = tokenizer
        self._num_ahead = 1 if overlap else 0
        self._has_costs = costs is not None
        self._compiled = CompiledDecode(model, pool, max_running) if compile else None
        self._scheduler = Scheduler(
            pool,
            max_running=max_running,
            step_tokens=step_tokens,
            max_request_tokens=max_request_tokens,
            headroom_steps=headroom_steps,
            packed=traits.packed,
            even=traits.even,
            host_memory=host_memory,
            costs=costs,
        )
        if traits.max_positions is not None:  # the last token of a text is never fed
            self._scheduler.max_request_tokens = min(self._scheduler.max_request_tokens, traits.max_positions + 1)
        self._last_tokens = LastTokens(pool)
        self._forwards = Forwards(model, pool, traits, self._last_tokens, self._compiled)
        self._launched: deque[Launched] = deque()
        self._events: list[Event] = []
        self._is_closed = False

    @property
    def pool(self) -> CachePool:
        """The pool that the generations are in."""
        return self._pool

    @property
    def scheduler(self) -> Scheduler:
        """Who decides which generations are in memory: to be asked, not told."""
        return self._scheduler

    def __len__(self) -> int:
        """Generations that are not finished."""
        return 0 if self._is_closed else len(self._scheduler)

    def __bool__(self) -> bool:
        """Whether there is something for `step` to do or to say."""
        return bool(len(self) or self._launched or self._events)

    def submit(
        self,
        input_ids: Ordered[int] | Tensor,
        generation_config: GenerationConfig | None = None,
        *,
        priority: int = 0,
        seed: int | None = None,
        logprobs: bool = False,
        tag: Any = None,
        **overrides: Any,
    ) -> Generation:
        """Take a prompt, token ids [tokens] or [1, tokens], to be generated from.

        `generation_config` and `overrides` say how, as those of `model.generate()` (`max_new_tokens`, 20 by default,
        `do_sample`, `eos_token_id`, ...), `logits_processor` and `stopping_criteria` included. `max_time` runs from
        this call on; whoever waits beyond it gets one token. A higher `priority` is served first. With a `seed` what is
        sampled is that of `generate()` after `torch.manual_seed(seed)` on a CPU. With `logprobs` the log-probability of
        each token is kept, of the model's own logits. `tag` is the caller's own, to be found at the generation.

        Raises SequenceError for what is no prompt, and for one that is too long; OutOfMemory for one that the pool
        could not hold even alone; PlanError for options that a loop does not serve. Then nothing has changed. Reads
        a tensor on a device, and otherwise does not wait.
        """
        self._check_open()
        prompt = token_ids(input_ids, self._model)
        device = self._pool.device
        sampling, stopping = resolve(
            self._model, prompt, generation_config, tokenizer=self._tokenizer, device=device, **overrides
        )
        generator = None
        if seed is not None:
            seed = whole(seed, "the seed of a generation", least=-(1 << 63), error=SequenceError)
            if seed >= 1 << 64:
                raise SequenceError(f"the seed of a generation is below 2**64, not {seed}")
            generator = torch.Generator(device).manual_seed(seed)
        made = Generation(prompt, sampling, stopping, generator=generator, with_logprobs=logprobs, tag=tag)
        made._request = self._scheduler.submit(len(prompt), stopping.max_new_tokens, priority=priority, tag=made)
        return made

    def step(self) -> list[Event]:
        """Do one round: schedule it, run its forwards, and read the tokens of it, or of the one before with overlap.

        Returns what that has brought, in no particular order: nothing where prompts have run in part, or the first
        tokens are still to be read. Without `overlap` it waits for the device. A generation whose processors or
        criteria raise, or whose prompt does in a forward of its own, is finished with "error". Any other error of a
        forward is raised, once the round is taken back, and who was in it goes on with the next step. OutOfMemory if
        others use the pool and nothing fits beside them.
        """
        self._check_open()
        with torch.no_grad(), self._pool.guard.epochs.on_stream():
            self._read_until(self._num_ahead)  # of more where the last step was interrupted
            has_launched = self._launch()
            self._read_until(self._num_ahead if has_launched else 0)
        events, self._events = self._events, []
        return events

    def cancel(self, generation: Generation) -> None:
        """Give a generation up, at any time; nothing happens to one that is finished. Its memory is free from the next
        step on, which has an event of it.
        """
        if not generation.is_finished:
            self._scheduler.cancel(generation.request)
            self._finish(generation, "cancelled")

    def close(self) -> None:
        """Cancel what is not finished and free all memory: the pool is closed if the loop made it.

        A second call does nothing.
        """
        if self._is_closed:
            return
        if not self._pool.closed:
            self._pool.guard.enter()
        self._is_closed = True
        rounds = [launched.round for launched in self._launched]
        self._launched.clear()
        in_flight = [request for round_ in rounds for forward in round_.forwards for request in forward.requests]
        for request in (*self._scheduler.waiting, *self._scheduler.running, *in_flight):
            self._finish(request.tag, "cancelled")
        self._events.clear()
        if self._pool.closed:
            return
        self._scheduler.close()
        if self._compiled is not None:
            self._compiled.close()
        if self._is_own_pool:
            self._pool.close()

    def __enter__(self) -> ServingLoop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()

    # A round

    def _launch(self) -> bool:
        """Schedule a round and run its forwards; returns whether there were any."""
        token_s = None if self._has_costs else self._forwards.pace.token_s
        if token_s is not None:
            self._scheduler.costs = replace(self._scheduler.costs, token_s=token_s)
        scheduled = self._scheduler.schedule()
        launched = Launched(scheduled, self._last_tokens, self._fail)
        try:
            logits = [self._run(forward) for forward in scheduled.forwards]
            for forward, of_forward in zip(scheduled.forwards, logits, strict=True):
                if of_forward is not None:
                    launched.sample(forward, of_forward)
            launched.send()
        except BaseException:
            launched.take_back()
            self._scheduler.abandon(scheduled)
            raise
        self._launched.append(launched)
        return bool(scheduled)

    def _run(self, forward: Forward) -> Tensor | None:
        """The logits of a forward; None where none are wanted, or its only request made it fail."""
        try:
            return self._forwards.run(forward)
        except TorchUmaError:  # no request is to blame for that
            raise
        except Exception as error:
            if len(forward.requests) > 1:
                raise
            self._fail(forward.requests[0].tag, error)
            return None

    def _read_until(self, num_left: int) -> None:
        """Read the tokens of all rounds that are launched but the last `num_left`."""
        while len(self._launched) > num_left:
            self._read()

    def _read(self) -> None:
        """Wait for the tokens of the oldest round that is launched, and see who has come to an end.

        What interrupts that leaves the rest to the next call.
        """
        launched = self._launched[0]
        if launched.unread is None:
            launched.unread = deque(launched.read())
        while launched.unread:
            generation, token, logprob = launched.unread[0]
            if not generation.is_finished and self._take(generation, token, logprob):
                launched.ended.append(generation.request)
            launched.unread.popleft()
        self._scheduler.complete(launched.round, launched.ended)
        self._launched.popleft()

    def _take(self, generation: Generation, token: int, logprob: float) -> bool:
        """Give a generation its next token; returns whether its text has come to an end.

        A criterion of the user may raise, and cancel anybody; what it interrupts is as if it had not begun.
        """
        place, reason = len(self._events), None
        generation.add(token, logprob)
        try:
            reason = generation.stopping.reason(generation.tokens)
        except Exception as error:
            self._fail(generation, error)
        except BaseException:
            generation.take_back()
            raise
        if generation.is_finished:
            reason = None
        self._events.insert(place, Event(generation, [token], reason))
        generation.finish_reason = generation.finish_reason or reason
        return reason is not None

    def _fail(self, generation: Generation, error: Exception) -> None:
        self._scheduler.cancel(generation.request)
        generation.error = error
        self._finish(generation, "error")

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        if not generation.is_finished:
            generation.finish_reason = reason
            self._events.append(Event(generation, [], reason))

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the loop was closed; make another")
