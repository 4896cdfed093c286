"""The scheduler: which of many requests are in memory, and which forwards are run next.

Owns the order of events in a round. What a request will hold is asked of `outlook`, who has to go is chosen by
`victims`; who waits is in `waiting`, who runs a prompt in `prompting`, who decodes in `decoding`. A round is decided
purely, as a `Decision` (see `deciding`), and then applied, here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np

from torch_uma.counts import whole
from torch_uma.errors import PlanError, SequenceError
from torch_uma.memory import parse_bytes
from torch_uma.pool import CachePool
from torch_uma.scheduling.capacity import Capacity, lengths
from torch_uma.scheduling.costs import Costs
from torch_uma.scheduling.deciding import decide
from torch_uma.scheduling.decision import Decision, Limits, Standing
from torch_uma.scheduling.decoding import Decoding
from torch_uma.scheduling.need import Need
from torch_uma.scheduling.outlook import Outlook
from torch_uma.scheduling.prompting import Prompting
from torch_uma.scheduling.request import Clock, Request
from torch_uma.scheduling.round import Round
from torch_uma.scheduling.stats import SchedulerStats
from torch_uma.scheduling.waiting import Waiting

_MOST_PRIORITY = 1 << 31


class Scheduler:
    """Decides who is in memory and what is run next, for a loop that owns the model and the tokens.

    `submit` requests; then, round for round, `schedule()`, run the forwards of the round, and `complete()` it with
    those that came to their end. To overlap, schedule and launch the next round before the last one is completed.
    docs/serving.md has a whole loop. What it takes and gives (Request, Round, Forward, Need, Costs, SchedulerStats) is
    in `torch_uma.scheduling`. It is true while a request is not finished; its length is how many are not.

    A request is **retracted** when memory is short or a more important one needs it: taken out of memory, and served on
    later. It is dropped, and then its text so far is run again as its prompt, or offloaded, and then copied back.

    Args:
        pool: a CachePool, whose memory is given out; others may use it too.
        max_running: requests in memory at once; by default as many as the pool has rows, and `step_tokens` allow.
        step_tokens: tokens of all forwards of a round. Who decodes takes one each; prompts come in chunks of the rest.
        max_request_tokens: the longest request, prompt and answer, that is taken; by default what the pool can hold.
        chunked: whether prompts may come in chunks; by default not for models that start their states anew then.
        packed: whether a forward may be over requests with unequally many new tokens: attention "torch_uma", no states.
        even: whether a forward must be over requests of one length.
        reserve_steps: after `schedule()`, so many decode steps of all who run, this round's included, are sure to fit.
        headroom_steps: who is admitted beside others leaves room for so many decode steps of all.
        host_memory: bytes, or "4GiB", that may be used for requests that are retracted; 0: all of them are dropped.
        costs: how long it takes to compute a token and to copy a byte, which decides who is dropped and who is
            offloaded; may be set later as well.
        patience_rounds: a request comes before those of the next higher priority that are submitted so many rounds
            after it.
        gather: whether prompts that could begin may wait a few rounds for others, to share their forward, where more
            requests wait than fit; by default where forwards are packed.

    Attributes:
        pool, costs: as given.
        max_request_tokens: the longest request, prompt and answer, that `submit` takes; may be lowered.

    Raises PlanError for numbers that make no sense, and for a pool that cannot hold one request.
    """

    def __init__(
        self,
        pool: CachePool,
        *,
        max_running: int | None = None,
        step_tokens: int = 2048,
        max_request_tokens: int | None = None,
        chunked: bool | None = None,
        packed: bool = False,
        even: bool = False,
        reserve_steps: int = 1,
        headroom_steps: int = 16,
        host_memory: int | str = 0,
        costs: Costs | None = None,
        patience_rounds: int = 1024,
        gather: bool | None = None,
    ) -> None:
        if not isinstance(pool, CachePool):
            raise PlanError(
                f"a scheduler is over a CachePool, not {type(pool).__name__}; CachePool(model, memory=...) makes one"
            )
        rows = pool.tables.num_rows
        step_tokens = whole(step_tokens, "step_tokens of a scheduler", least=1, error=PlanError)
        if max_running is None:
            max_running = min(rows, step_tokens)
        max_running = whole(max_running, "max_running of a scheduler", least=1, error=PlanError)
        if max_running > rows:
            raise PlanError(
                f"max_running is {max_running}, but the pool has {rows} rows; make it with max_sequences={max_running}"
            )
        if max_running > step_tokens:
            raise PlanError(
                f"{max_running} running requests take a token each in every round, more than step_tokens, {step_tokens}"
                "; raise step_tokens or lower max_running"
            )
        reserve_steps = whole(reserve_steps, "reserve_steps of a scheduler", least=1, error=PlanError)
        headroom_steps = whole(headroom_steps, "headroom_steps of a scheduler", least=1, error=PlanError)
        self.pool = pool
        self.costs = costs or Costs()
        restarted = any(layer.restarted_by for layer in pool.plan.layers)
        self._limits = Limits(
            max_running=max_running,
            step_tokens=step_tokens,
            host_bytes=parse_bytes(host_memory, name="host_memory", least=0),
            is_chunked=not restarted if chunked is None else chunked,
            num_reserved=reserve_steps,
            gather_tokens=step_tokens // 4 if (packed if gather is None else gather) else 0,
        )
        if restarted and self._limits.is_chunked:
            name = next(layer.restarted_by for layer in pool.plan.layers if layer.restarted_by)
            raise PlanError(f"{name} starts its states anew in every forward of several tokens; leave chunked= out")
        steps = tuple(range(1, reserve_steps + 1))
        if headroom_steps > reserve_steps:
            steps += (headroom_steps,)
        self._outlook = Outlook(pool.plan, pool.sequences.lifespans, steps)
        self._clock = Clock()
        self._patience_rounds = whole(patience_rounds, "patience_rounds of a scheduler", least=1, error=PlanError)
        self._waiting = Waiting()
        self._decoding = Decoding(pool, self._clock, is_even=even)
        self._prompting = Prompting(pool, is_packed=packed, is_even=even)
        self._given: list[Request] = []  # who has been given all tokens, but not completed
        self._leaving: list[Request] = []  # who is done, and is let go of before the next round
        self._num_held_back = 0
        self._completed = 0
        self._abandoned: set[int] = set()
        self._num_unfinished = 0
        self._stats = SchedulerStats()
        self._capacity = Capacity(pool, max_request_tokens)
        self.max_request_tokens = self._capacity.longest

    # Ask

    def quote(self, num_prompt_tokens: int, max_new_tokens: int) -> Need:
        """Say what a request would need at its fullest, whether it can ever be had, and whether its prompt fits now.

        Changes nothing, and does not synchronise.
        """
        self.pool.guard.enter()
        prompt, new = lengths(num_prompt_tokens, max_new_tokens)
        fits_tables = prompt <= self.pool.tables.max_tokens
        return self._capacity.need(prompt + new, self.pool.quote(prompt) if fits_tables else None)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Requests that wait, those that were retracted included, in the order in which they would be served."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests in memory."""
        requests = (*self._prompting.requests, *self._prompting.through, *self._decoding.requests)
        return tuple(request for request in requests if request.state == "running" and request.sequence is not None)

    @property
    def num_running(self) -> int:
        """How many are `running`, without a look at each."""
        num_leaving = sum(request.sequence is not None for request in self._leaving)
        return len(self._prompting) + self._decoding.num_staying - num_leaving

    def __len__(self) -> int:
        """Requests that are neither finished nor cancelled."""
        return self._num_unfinished

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self._num_unfinished > 0

    def stats(self) -> SchedulerStats:
        """What has been done so far."""
        return SchedulerStats(**vars(self._stats))

    # Act

    def submit(self, num_prompt_tokens: int, max_new_tokens: int, *, priority: int = 0, tag: Any = None) -> Request:
        """Take a request; the higher priority is served first, and may take the memory of a lower one.

        `max_new_tokens` of it at most; `complete` says when it has ended before. `tag` is the caller's own.

        Raises SequenceError for lengths that make no sense or are beyond `max_request_tokens`, OutOfMemory for one that
        the arena could not hold if it were alone.
        """
        self.pool.guard.enter()
        prompt, new = lengths(num_prompt_tokens, max_new_tokens)
        priority = whole(priority, "the priority of a request", least=-_MOST_PRIORITY, error=SequenceError)
        if priority > _MOST_PRIORITY:
            raise SequenceError(f"the priority of a request is at most {_MOST_PRIORITY}, not {priority}")
        self._capacity.check(prompt, new, most=self.max_request_tokens)
        self._stats.submitted += 1
        self._num_unfinished += 1
        place = (self._clock.round - priority * self._patience_rounds, self._stats.submitted)
        request = Request(self._clock, prompt, new, priority, tag, place)
        self._waiting.put(request)
        return request

    def cancel(self, request: Request) -> None:
        """Give a request up, whatever it is doing; its memory is free from the next `schedule()` on.

        Nothing happens to one that is finished or cancelled. SequenceError for one of another scheduler.
        """
        self.pool.guard.enter()
        self._check_own(request)
        if request.is_done:
            return
        self._end(request, "cancelled")
        self._leaving.append(request)
        self._stats.cancelled += 1

    def schedule(self) -> Round:
        """Decide the next round and do all of it but the forwards: retract, resume, admit.

        The forwards of the last round must have been launched; their tokens need not be known. An empty round has
        nothing to run: all is done, or whoever waits does so for a round that is not completed. Raises OutOfMemory
        (SequenceError for rows), with nothing decided, if others hold what the first request needs. Leases whose event
        has passed end first. Does not synchronise.
        """
        self.pool.poll()
        self._settle()
        self._decoding.check_launched()
        self._let_go_of_given()
        standing = Standing(
            books=self.pool.sequences,
            allocator=self.pool.allocator,
            prompts=self._prompting.requests,
            decoding=self._decoding,
            waiting=self._waiting,
            round=self._clock.round,
            num_completed=self._completed,
            host_bytes=self._stats.host_bytes,
            num_held_back=self._num_held_back,
        )
        return self._apply(decide(standing, self._outlook, self._limits, self.costs))

    def complete(self, round: Round, ended: Iterable[Request] = ()) -> list[Request]:
        """Say that the tokens of a round are known, and which requests ended with theirs; returns who is finished.

        Those are the ones that ended, and the ones that got their last token. Rounds are completed in order, and one
        that was scheduled meanwhile has been launched. SequenceError for another round, or a request that has got no
        token; then nothing has changed.
        """
        self.pool.guard.enter()
        ended = list(ended)
        for request in ended:
            self._check_own(request)
            if not request.is_done and request.num_tokens_until(round.number) <= request.num_prompt_tokens:
                raise SequenceError(
                    f"{request!r} has got no token until round {round.number}, so it cannot have ended; cancel() gives "
                    "it up"
                )
        if not round:
            return []
        self._check_own(round.forwards[0].requests[0])
        self._check_next(round)
        self._note_completed(round.number)
        finished = []
        for request in (*ended, *round.last_tokens):
            if request.is_done:
                continue
            num_tokens = request.num_tokens_until(round.number)
            self._end(request, "finished")
            request.take_back(num_tokens)
            if round.number == self._clock.round:
                self._let_go(request)
            else:
                self._leaving.append(request)
            self._stats.finished += 1
            finished.append(request)
        return finished

    def abandon(self, round: Round) -> None:
        """Take back the last round, as its forwards did not all succeed: nobody has got a token from it.

        Whoever was to get one is dropped and recomputed, as is whose state was left half written. The round counts as
        completed. Nothing happens to an empty round; SequenceError for another one.
        """
        self.pool.guard.enter()
        if not round:
            return
        self._check_own(round.forwards[0].requests[0])
        if round.number != self._clock.round or round.number in (self._completed, *self._abandoned):
            raise SequenceError(f"round {round.number} is not the last one, {self._clock.round}, or it is completed")
        torn = self.pool.sequences.torn
        for forward in round.forwards:
            for request, samples in zip(forward.requests, forward.samples.tolist()):
                if request.is_done or request.sequence is None:
                    continue
                if samples:
                    request.hold()
                    request.take_back(request.num_tokens - 1)
                    request.last_round = round.number - 1
                if samples or torn[request.sequence.row]:
                    self._retract(request)
        self._abandoned.add(round.number)
        self._note_completed(self._completed)

    def close(self) -> None:
        """Cancel all requests and free what they hold; the scheduler can go on with others."""
        self.pool.guard.enter()
        for request in (*self._waiting, *self.running, *self._given):
            self.cancel(request)
        self._settle()

    # Inside

    def _settle(self) -> None:
        """Let go of those who are done; whose prompt is through decodes."""
        for request in self._leaving:
            self._let_go(request)
        self._leaving.clear()
        self._decoding.join(self._prompting.pass_on())
        self._decoding.settle()

    def _let_go_of_given(self) -> None:
        """Let go of those who have been given all of their tokens, though the last may not be known yet."""
        if self._decoding.first_end <= self._clock.round:
            for place in np.flatnonzero(self._decoding.last_rounds <= self._clock.round).tolist():
                request = self._decoding.requests[place]
                request.hold()
                self._let_go(request)
                self._given.append(request)
            self._decoding.settle()
        if self._given:
            self._given = [request for request in self._given if not request.is_done]

    def _let_go(self, request: Request) -> None:
        """Free what it holds, wherever it is."""
        if request.sequence is not None:
            if not self._prompting.leave(request):
                self._decoding.leave(request)
            request.sequence.free()
            request.sequence = None
        if request.offloaded is not None:
            self._stats.host_bytes -= request.offloaded.num_bytes
            request.offloaded = None

    def _end(self, request: Request, state: Literal["finished", "cancelled"]) -> None:
        if request.state in ("waiting", "offloaded"):
            self._waiting.take(request)
        request.hold()
        request.state = state
        self._num_unfinished -= 1

    def _retract(self, request: Request, *, is_offloaded: bool = False) -> None:
        """Take it out of memory, to be recomputed or resumed when its turn comes."""
        assert request.sequence is not None
        offloaded = self.pool.offload(request.sequence) if is_offloaded else None  # which may fail, so it comes first
        request.hold()
        request.num_retractions += 1
        request.state = "waiting"
        if offloaded is not None:
            self._decoding.leave(request)
            request.offloaded, request.sequence, request.state = offloaded, None, "offloaded"
            self._stats.offloaded += 1
            self._stats.host_bytes += offloaded.num_bytes
            self._stats.host_bytes_peak = max(self._stats.host_bytes_peak, self._stats.host_bytes)
        else:
            self._stats.dropped += 1
            self._stats.recomputed_tokens += request.sequence.length
            self._let_go(request)
            request.num_to_run = request.num_tokens
        self._waiting.put(request)

    def _apply(self, decision: Decision) -> Round:
        for request in decision.dropped:
            self._retract(request)
        for request in decision.offloaded:
            self._retract(request, is_offloaded=True)
        self._clock.round += 1
        self._num_held_back = decision.num_held_back
        for request in decision.resumed:
            assert request.offloaded is not None
            self._waiting.take(request)
            num_bytes = request.offloaded.num_bytes
            request.sequence = self.pool.restore(request.offloaded)
            request.offloaded, request.state = None, "running"
            request.decode()
            self._stats.host_bytes -= num_bytes
        self._decoding.join(decision.resumed)
        if decision.admitted:
            sequences = self.pool.add_many(request.num_to_run for request in decision.admitted)
            for request, sequence in zip(decision.admitted, sequences, strict=True):
                self._waiting.take(request)
                request.sequence, request.state = sequence, "running"
            self._prompting.join(decision.admitted)
        self._decoding.settle()  # once nothing moves any more
        forwards = [*self._prompting.forwards(decision.chunks), *self._decoding.forwards()]
        if not forwards:  # there is nothing to be completed
            self._abandoned.add(self._clock.round)
            self._note_completed(self._completed)
        self._stats.rounds += 1
        self._stats.preempted += decision.num_preempted
        self._stats.resumed += len(decision.resumed)
        self._stats.prompt_tokens += sum(count for _, count in decision.chunks)
        self._stats.new_tokens += sum(int(np.count_nonzero(forward.samples)) for forward in forwards)
        return Round(
            number=self._clock.round,
            forwards=tuple(forwards),
            last_tokens=self._last_tokens(),
            admitted=decision.admitted,
            resumed=decision.resumed,
            dropped=decision.dropped,
            offloaded=decision.offloaded,
        )

    def _last_tokens(self) -> tuple[Request, ...]:
        """Those who get their last token in this round."""
        decoding = self._decoding
        through = self._prompting.done()
        if decoding.first_end > self._clock.round:
            return through
        places = np.flatnonzero(decoding.last_rounds == self._clock.round).tolist()
        return (*through, *(decoding.requests[place] for place in places))

    def _note_completed(self, number: int) -> None:
        self._completed = number
        while self._completed + 1 in self._abandoned:
            self._completed += 1
            self._abandoned.remove(self._completed)

    def _check_next(self, round: Round) -> None:
        if round.number != self._completed + 1 or round.number > self._clock.round:
            raise SequenceError(
                f"round {round.number} cannot be completed now; {self._completed} of {self._clock.round} are, in order"
            )

    def _check_own(self, request: Request) -> None:
        if not isinstance(request, Request) or request.clock is not self._clock:
            raise SequenceError(f"{request!r} is not a request of this scheduler; submit() makes one")
