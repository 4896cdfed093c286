"""Random lives of a scheduler among other users of its pool, beside a plain account of every request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pools import make_pool

from torch_uma.errors import OutOfMemory, SequenceError
from torch_uma.ledger import Lease
from torch_uma.scheduling import Costs, Forward, Request, Round, Scheduler
from torch_uma.sequence import Sequence
from torch_uma.testing import scramble


@dataclass
class Account:
    """What is known of a request: new tokens that were asked for, and those that have arrived."""

    asked: int = 0
    known: int = 0
    is_cancelled: bool = False
    is_finished: bool = False


class Life(RuleBasedStateMachine):
    """Up to two rounds are in flight; their tokens arrive in order."""

    kinds = "hybrid"

    @initialize(
        memory=st.integers(7, 16),
        page_size=st.sampled_from([1, 3, 4]),
        step_tokens=st.sampled_from([6, 20, 200]),
        packed=st.booleans(),
        reserve_steps=st.sampled_from([1, 3]),
        headroom_steps=st.sampled_from([1, 8]),
        host_memory=st.sampled_from([0, 500, 1 << 20]),
        token_s=st.sampled_from([1e-9, 1.0]),
        patience_rounds=st.sampled_from([1, 10, 1000]),
        gather=st.booleans(),
    )
    def start(self, memory: int, page_size: int, token_s: float, **arguments: Any) -> None:
        self.pool = make_pool(self.kinds, memory=256 * memory, page_size=page_size, max_sequences=6, max_tokens=64)
        costs = Costs(token_s=token_s, copy_bytes_per_s=1e6)
        self.scheduler = Scheduler(self.pool, costs=costs, **arguments)
        self.accounts: dict[Request, Account] = {}
        self.in_flight: list[tuple[Round, list[Request]]] = []
        self.sequences: list[Sequence] = []
        self.leases: list[Lease] = []
        self.num_rounds = 0

    # Requests

    @rule(prompt=st.integers(1, 40), new=st.integers(1, 20), priority=st.sampled_from([0, 0, 1]))
    def submit(self, prompt: int, new: int, priority: int) -> None:
        if prompt + new > self.scheduler.max_request_tokens:
            with pytest.raises((OutOfMemory, SequenceError)):
                self.scheduler.submit(prompt, new, priority=priority)
            return
        assert self.scheduler.quote(prompt, new).fits_empty
        self.accounts[self.scheduler.submit(prompt, new, priority=priority)] = Account()

    @precondition(lambda self: self.accounts)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.accounts)))
        account = self.accounts[request]
        account.is_cancelled |= not account.is_finished
        self.scheduler.cancel(request)

    # Rounds

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule(num_run=st.sampled_from([9, 9, 9, 9, 0, 1]), is_torn=st.booleans())
    def schedule(self, num_run: int, is_torn: bool) -> None:
        try:
            round = self.scheduler.schedule()
        except (OutOfMemory, SequenceError):
            assert self.sequences or self.leases, "nobody else holds anything"
            return
        self.num_rounds += 1
        sampled = []
        for forward in round.forwards:
            for request, start, count, samples in zip(
                forward.requests, forward.starts.tolist(), forward.counts, forward.samples.tolist()
            ):
                account = self.accounts[request]
                assert request.sequence is not None and request.sequence.length == start
                text = request.num_prompt_tokens + account.asked
                assert samples == (start + count == text) and start + count <= text
                if not forward.is_decode:  # all of it is known
                    assert start + count <= request.num_prompt_tokens + account.known
                if samples:
                    account.asked += 1
                    sampled.append(request)
                    assert account.asked <= request.max_new_tokens
                    assert (request in round.last_tokens) == (account.asked == request.max_new_tokens)
        if num_run < len(round.forwards):
            self._fail(round, num_run, is_torn, sampled)
            return
        for forward in round.forwards:
            self._launch(forward)
        if round:
            self.in_flight.append((round, sampled))

    @precondition(lambda self: self.in_flight)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        round, sampled = self.in_flight.pop(0)
        alive = [request for request in sampled if not self._is_done(request)]
        for request in alive:
            self.accounts[request].known += 1
        ended = data.draw(st.lists(st.sampled_from(alive), unique=True, max_size=2)) if alive else []
        expected = {r for r in alive if r in ended or self.accounts[r].known == r.max_new_tokens}
        assert set(self.scheduler.complete(round, ended)) == expected
        for request in expected:
            account = self.accounts[request]
            account.is_finished, account.asked = True, account.known
            assert request.state == "finished" and request.num_new_tokens == account.known

    # Others

    @precondition(lambda self: self.pool.sequences.num_free_rows > 1)
    @rule(num_tokens=st.integers(1, 12))
    def add(self, num_tokens: int) -> None:
        if self.pool.quote(num_tokens):
            self.sequences.append(self.pool.add(num_tokens))

    @precondition(lambda self: self.pool.sequences.num_free_rows > 1 and self.scheduler.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.scheduler.running)).sequence
        assert sequence is not None
        self.sequences.append(sequence.fork())

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        sequence.free()

    @precondition(lambda self: self.scheduler.running or self.sequences)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([*(r.sequence for r in self.scheduler.running), *self.sequences]))
        assert sequence is not None
        if any(sequence.num_pages):
            self.leases.append(self.pool.lease(sequence, "a test"))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def close_lease(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        lease.close()

    @rule(seed=st.integers(0, 1000))
    def scramble(self, seed: int) -> None:
        scramble(self.pool, seed)

    # What must hold

    @invariant()
    def holds(self) -> None:
        self.pool.check()
        scheduler, stats = self.scheduler, self.scheduler.stats()
        undone = [request for request, account in self.accounts.items() if not self._is_done(request)]
        assert len(scheduler) == len(undone) and bool(scheduler) == bool(undone)
        given = [request for request in undone if request.state == "running" and request.sequence is None]
        assert {*scheduler.waiting, *scheduler.running, *given} == set(undone)
        assert [request.rank for request in scheduler.waiting] == sorted(r.rank for r in scheduler.waiting)
        for request, account in self.accounts.items():
            if account.is_cancelled:
                assert request.state == "cancelled"
            else:
                assert request.num_new_tokens == account.asked >= account.known
                assert (request.state == "finished") == account.is_finished
        assert stats.submitted == len(self.accounts)
        assert stats.finished == sum(account.is_finished for account in self.accounts.values())
        assert stats.cancelled == sum(account.is_cancelled for account in self.accounts.values())
        assert stats.host_bytes == sum(r.offloaded.num_bytes for r in self.accounts if r.offloaded is not None)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for lease in self.leases:
            lease.close()
        for sequence in self.sequences:
            sequence.free()
        self.leases, self.sequences = [], []
        for _ in range(3000):
            while self.in_flight:
                self._complete_all()
            if not self.scheduler:
                break
            self.schedule(9, False)
        assert not self.scheduler
        self.scheduler.schedule()
        assert not any(subpool.live_pages for subpool in self.pool.stats().subpools)
        self.holds()

    # Inside

    def _is_done(self, request: Request) -> bool:
        return self.accounts[request].is_cancelled or self.accounts[request].is_finished

    def _launch(self, forward: Forward) -> None:
        self.pool.begin(forward.batch, forward.num_new_tokens).commit()

    def _fail(self, round: Round, num_run: int, is_torn: bool, sampled: list[Request]) -> None:
        for forward in round.forwards[:num_run]:
            self._launch(forward)
        forward = round.forwards[num_run]
        step = self.pool.begin(forward.batch, forward.num_new_tokens)
        step.state_touched = is_torn
        step.abort()
        self.scheduler.abandon(round)
        for request in sampled:
            self.accounts[request].asked -= 1

    def _complete_all(self) -> None:
        round, sampled = self.in_flight.pop(0)
        alive = [request for request in sampled if not self._is_done(request)]
        for request in alive:
            self.accounts[request].known += 1
        for request in self.scheduler.complete(round):
            account = self.accounts[request]
            account.is_finished, account.asked = True, account.known
            assert account.known == request.max_new_tokens


class WindowsAndMore(Life):
    kinds = "every"


@pytest.mark.parametrize("life", [Life, WindowsAndMore])
def test_random_lives(life: type[Life]) -> None:
    run_state_machine_as_test(life, settings=settings(max_examples=60, stateful_step_count=60, deadline=None))
