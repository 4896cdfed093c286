"""What the next round is to be: who is taken out of memory, who comes in, how much of whose prompt is run.

Owns the rules; changes nothing. Whoever runs goes on: if what they grow by does not fit, prompts get shorter chunks,
and then somebody has to go, but never the first of them, so that one always comes to its end. After that whoever waits
comes in, strictly in order, for as long as it fits beside the others; a more important one may take others' place.

Where one waits for room, those before it who have room may be held back, so that their prompts share a forward with
its own: a forward costs the same time for a few tokens as for many. They are until the places that stood empty since
somebody last came in have cost as much as a forward would.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from torch_uma.demands import may_stay, pages_alone
from torch_uma.errors import SequenceError
from torch_uma.refusal import out_of_memory
from torch_uma.scheduling.costs import Costs
from torch_uma.scheduling.decision import GO_ON, Chunk, Decision, Limits, Standing
from torch_uma.scheduling.outlook import Outlook
from torch_uma.scheduling.request import Request
from torch_uma.scheduling.victims import choose_victims
from torch_uma.tables import Int64Array

_LEAST_CHUNK_TOKENS = 16  # that a more important prompt gets where less important ones leave it nothing
_FORWARD_ROUNDS = 0.25  # what a forward of few tokens costs at least, in rounds of those who decode


def decide(standing: Standing, outlook: Outlook, limits: Limits, costs: Costs) -> Decision:
    """The round that follows; OutOfMemory if others hold the pages that the first request needs. Changes nothing.

    SequenceError if it is the rows that they hold.
    """
    if _can_just_go_on(standing, outlook, limits):
        return GO_ON
    draft = _Draft(standing, outlook, limits, costs)
    draft.go_on()
    draft.let_in()
    return draft.decision()


def _can_just_go_on(standing: Standing, outlook: Outlook, limits: Limits) -> bool:
    """Whether there are only those who decode, for whom there is room however it comes: then nobody is looked at."""
    if standing.prompts or standing.waiting or may_stay(standing.books):
        return False
    return standing.allocator.fits(outlook.most_growth(len(standing.decoding), 1 + limits.num_reserved))


class _Draft:
    """A round while it is being decided: who stays, and the stages that those who stay, or come, make together."""

    def __init__(self, standing: Standing, outlook: Outlook, limits: Limits, costs: Costs) -> None:
        self._now = standing
        self._outlook = outlook
        self._limits = limits
        self._costs = costs
        self._num_sure = 1 + limits.num_reserved
        decoding = standing.decoding
        left = decoding.last_rounds - standing.round
        self._growth = outlook.decoding(standing.books, decoding.rows, left)  # [stages, sub-pools, n]
        self._stages: Int64Array = self._growth.sum(axis=2)
        self._prompts = list(standing.prompts)
        self._chunks: list[Chunk] = []
        self._victims: dict[Request, None] = {}
        self._resumed: list[Request] = []
        self._admitted: list[Request] = []
        self._num_preempted = 0
        self._next: Request | None = None  # who waits for room
        self._num_decoding = len(decoding)

    # Those who run

    def go_on(self) -> None:
        """Find chunks for the prompts with which everybody's growth fits; whoever has to goes."""
        if self._take_chunks():
            return
        running = [*self._now.decoding.requests, *self._prompts]
        if not running:
            return
        first = min(running, key=lambda request: request.rank)
        least = self._least_chunk(first) if first in self._prompts else []
        stages = self._with_chunks(least)
        candidates = [request for request in running if request is not first]
        victims = self._choose(candidates, stages[: self._num_sure])
        if victims is None:
            raise self._out_of_memory((stages - self._shares(candidates).sum(axis=0)).max(axis=0))
        self._retract(victims)
        has_taken = self._take_chunks()
        assert has_taken, "the first of them fits with its least chunk"

    def _take_chunks(self) -> bool:
        for chunks in self._chunkings():
            stages = self._with_chunks(chunks)
            if self._fit(stages[: self._num_sure]):
                self._chunks, self._stages = chunks, stages
                return True
        return False

    def _chunkings(self) -> Iterator[list[Chunk]]:
        """Ways to go on with the prompts, from the one that takes most."""
        if not self._prompts:
            yield []
            return
        chunks: list[Chunk] = []
        budget = self._budget
        for request in self._prompts:
            count = _num_left(request)
            if self._limits.is_chunked:
                count = min(count, budget)
            elif chunks and count > budget:
                break
            if count <= 0:
                break
            chunks.append((request, count))
            budget -= count
        assert chunks, "who runs a prompt has a place in the step as who decodes has"
        while len(chunks) > 1:
            yield chunks
            chunks = chunks[:-1]
        yield chunks
        ((request, count),) = chunks
        while self._limits.is_chunked and count > 1:
            count //= 2
            yield [(request, count)]
        decoding = [other for other in self._now.decoding.requests if other not in self._victims]
        if any(other.rank < request.rank for other in decoding):
            yield []

    def _least_chunk(self, request: Request) -> list[Chunk]:
        return [(request, 1 if self._limits.is_chunked else _num_left(request))]

    def _with_chunks(self, chunks: list[Chunk]) -> Int64Array:
        stages = self._stages
        for request, count in chunks:
            assert request.sequence is not None
            share = self._outlook.prompt(
                self._now.books,
                request.sequence.row,
                count,
                is_last=count == _num_left(request),
                left=request.max_tokens - request.num_tokens - 1,
            )
            stages = stages + share
        return stages

    # Those who wait

    def let_in(self) -> None:
        """Let those who wait come in, in order, until one does not fit."""
        for request in self._now.waiting:
            if request.last_round > self._now.num_completed or self._is_behind_victims(request):
                return  # its last token is not known yet; or others come first
            is_alone = not (self._num_running or self._admitted)
            if is_alone and self._num_places < 1:
                raise SequenceError(
                    f"{request!r} needs one of the {len(self._now.books.length)} rows of the pool, and others use them "
                    "all; free a sequence, or make the pool with a larger max_sequences"
                )
            if self._num_places < 1 and not self._less_important(request):
                self._next = request
                return
            num_stages = self._num_sure if is_alone else len(self._stages)
            left = request.max_tokens - request.num_tokens
            count = 0
            if request.offloaded is not None:
                share = self._outlook.restored(request.offloaded.num_tokens, left)
            else:
                count = self._first_chunk(request)
                if not count:
                    return
                share = self._outlook.fresh(request.num_to_run, count, left - 1)
            stages = self._stages + share
            if self._num_places < 1 or not self._fit(stages[:num_stages]):
                if not self._preempt(request, stages):
                    if is_alone and not self._victims:
                        raise self._out_of_memory(stages[: self._num_sure].max(axis=0))
                    self._next = request
                    return
                stages = self._stages + share
            self._stages = stages
            if count:
                self._admitted.append(request)
                self._chunks.append((request, count))
            else:
                self._resumed.append(request)
                self._num_decoding += 1

    def _first_chunk(self, request: Request) -> int:
        """Tokens of its prompt that can be run in this round; 0 for none."""
        budget = self._budget
        if all(request.priority > other.priority for other, _ in self._chunks):
            # It begins, whatever less important prompts take; or it takes the token of one that decodes.
            budget = max(budget, _LEAST_CHUNK_TOKENS if self._chunks else 1)
        if self._limits.is_chunked:
            return max(0, min(request.num_to_run, budget))
        return request.num_to_run if not self._chunks or request.num_to_run <= budget else 0

    def _preempt(self, request: Request, stages: Int64Array) -> bool:
        """Make room for it at the cost of less important ones, where that is possible."""
        candidates = self._less_important(request)
        if not candidates:
            return False
        at_least = 1 if self._num_places < 1 else 0
        victims = self._choose(candidates, stages[: self._num_sure], at_least)
        if victims is None:
            return False
        self._retract(victims)
        self._num_preempted += len(victims)
        return True

    def _less_important(self, request: Request) -> list[Request]:
        """Those whose place it may take."""
        decoding = self._now.decoding
        places = np.flatnonzero(decoding.priorities < request.priority).tolist()
        return [
            other
            for other in (*(decoding.requests[place] for place in places), *self._prompts)
            if other.priority < request.priority and other.rank > request.rank and other not in self._victims
        ]

    def _is_behind_victims(self, request: Request) -> bool:
        return any(victim.rank < request.rank for victim in self._victims)

    # Who has to go

    def _choose(self, candidates: list[Request], stages: Int64Array, at_least: int = 0) -> list[Request] | None:
        if not candidates:
            return None
        chosen = choose_victims(
            self._fit,
            stages,
            self._shares(candidates)[:, : len(stages)],
            priorities=np.array([request.priority for request in candidates], np.int64),
            costs=self._prices(candidates),
            arrivals=np.array([request.arrival for request in candidates], np.int64),
            at_least=at_least,
        )
        return None if chosen is None else [candidates[place] for place in chosen]

    def _retract(self, victims: list[Request]) -> None:
        self._stages = self._stages - self._shares(victims).sum(axis=0)
        chunked = dict(self._chunks)
        for victim in victims:
            self._victims[victim] = None
            if victim in self._prompts:
                self._prompts.remove(victim)
            else:
                self._num_decoding -= 1
        self._chunks = [(request, count) for request, count in chunked.items() if request not in self._victims]

    def _shares(self, requests: list[Request]) -> Int64Array:
        """[n, stages, sub-pools] what goes with each: what it holds, and what it would grow by."""
        rows = _rows(requests)
        shares = np.repeat(pages_alone(self._now.books, rows).T[:, None], len(self._stages), axis=1)
        places = {request: place for place, request in enumerate(self._now.decoding.requests)}
        chunks = dict(self._chunks)
        for share, request in zip(shares, requests):
            if request in places:
                share += self._growth[:, :, places[request]]
            elif request in chunks:
                share += self._with_chunks([(request, chunks[request])]) - self._stages
        return shares

    def _prices(self, requests: list[Request]) -> np.ndarray:
        """[n] seconds that it costs to take each out of memory; twice as much for each time that it was before."""
        prices = [
            min(self._recompute_s(request), self._offload_s(request, self._now.host_bytes))
            * 2.0 ** min(request.num_retractions, 16)
            for request in requests
        ]
        return np.array(prices, np.float64)

    def _recompute_s(self, request: Request) -> float:
        assert request.sequence is not None
        return self._costs.recompute_s(request.sequence.length)

    def _offload_s(self, request: Request, host_bytes: int) -> float:
        """Infinite where it cannot be: without room on the host, or in the middle of a prompt."""
        assert request.sequence is not None
        plan = self._now.allocator.plan
        num_bytes = plan.bytes_per_sequence(request.sequence.length)
        if not request.is_decoding or host_bytes + num_bytes > self._limits.host_bytes:
            return float("inf")
        return self._costs.offload_s(num_bytes)

    # Together

    @property
    def _num_running(self) -> int:
        return self._num_decoding + len(self._prompts)

    @property
    def _num_places(self) -> int:
        num_free_rows = self._now.books.num_free_rows + len(self._victims)
        return min(self._limits.max_running - self._num_running, num_free_rows - len(self._resumed)) - len(
            self._admitted
        )

    @property
    def _budget(self) -> int:
        """Tokens of a prompt that this round has left."""
        return self._limits.step_tokens - self._num_decoding - sum(count for _, count in self._chunks)

    def _fit(self, stages: Int64Array) -> bool:
        """Whether all the stages fit, one after another."""
        allocator = self._now.allocator
        return allocator.fits(stages.max(axis=0).tolist()) or (
            len(stages) > 1 and all(allocator.fits(stage) for stage in stages.tolist())
        )

    def _out_of_memory(self, demand: Int64Array) -> Exception:
        allocator = self._now.allocator
        quote = allocator.quote(np.maximum(demand, 0).tolist())
        return out_of_memory(allocator.plan, allocator.stats().free_bytes, quote)

    def decision(self) -> Decision:
        """What was decided."""
        num_held_back = self._now.num_held_back + len(self._admitted)
        if self._gathers(num_held_back):
            return GO_ON._replace(num_held_back=num_held_back)
        dropped, offloaded, host_bytes = [], [], self._now.host_bytes
        for victim in self._victims:
            assert victim.sequence is not None
            if self._offload_s(victim, host_bytes) < self._recompute_s(victim):
                host_bytes += self._now.allocator.plan.bytes_per_sequence(victim.sequence.length)
                offloaded.append(victim)
            else:
                dropped.append(victim)
        return Decision(
            dropped=tuple(dropped),
            offloaded=tuple(offloaded),
            resumed=tuple(self._resumed),
            admitted=tuple(self._admitted),
            chunks=tuple(self._chunks),
            num_preempted=self._num_preempted,
            num_held_back=0 if self._admitted or self._resumed or not self._now.waiting else num_held_back,
        )

    def _gathers(self, num_held_back: int) -> bool:
        """Whether those who could come in are held back, so that their prompts share a forward with others'."""
        decoding, other = self._now.decoding, self._next
        if not self._admitted or other is None:
            return False  # nobody waits for room
        if other.offloaded is not None or not self._first_chunk(other):
            return False  # who does has no prompt, or its prompt would not have a place in this round
        if self._victims or self._resumed or self._prompts:
            return False  # prompts are run anyway, or others came in beside them
        if num_held_back >= _FORWARD_ROUNDS * len(decoding):
            return False
        if sum(count for _, count in self._chunks) >= self._limits.gather_tokens:
            return False
        if max(request.priority for request in self._admitted) > min(decoding.priorities.min(), other.priority):
            return False
        return any(request.rank < self._admitted[0].rank for request in decoding.requests)  # the first goes on


def _num_left(request: Request) -> int:
    """Tokens of its prompt that have not been run."""
    assert request.sequence is not None
    return request.num_to_run - request.sequence.length


def _rows(requests: list[Request]) -> Int64Array:
    return np.array([request.sequence.row for request in requests if request.sequence is not None], np.int64)
