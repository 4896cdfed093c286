"""Admission is exact: who is admitted fits and goes on, and who is refused could not have been admitted.

Pages are counted here as sets of columns, from what a lifetime says is needed; whether they fit is found by trying
every boundary between the bands.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from arenas import BoundarySearch
from scheduling import random_layers

from torch_uma.errors import OutOfMemory, PlanError
from torch_uma.plan import Plan, plan
from torch_uma.pool import CachePool
from torch_uma.scheduling import Costs, Request, Round, Scheduler

NUM_SITUATIONS = 1_700  # of each seed


class Row:
    """The columns that a row holds in every sub-pool. `leased` of them stay in memory when they are not needed."""

    def __init__(self, plan: Plan, num_tokens: int = 0) -> None:
        self.subpools = plan.subpools
        self.length = 0
        self.columns: list[set[int]] = []
        self.leased: list[set[int]] = [set() for _ in self.subpools]
        self.num_left = [0] * len(self.subpools)  # pages not needed any more, and still leased
        for k, subpool in enumerate(self.subpools):
            needed = {0} if subpool.is_state else self.needed(k, num_tokens)
            self.columns.append(set(range(len(needed))))  # room is in front, wherever it will be used

    @staticmethod
    def of(request: Request, pool: CachePool) -> Row:
        """As the books say it is now."""
        assert request.sequence is not None
        made, books, row = Row(pool.plan), pool.sequences, request.sequence.row
        made.length = request.sequence.length
        for k in range(len(made.subpools)):
            made.columns[k] = set(range(int(books.first[k, row]), int(books.end[k, row])))
            ids = {column: books.tables.mirror[books.tables.origin[k, row] + column] for column in made.columns[k]}
            made.leased[k] = {column for column in ids if pool.allocator.is_leased(_one(ids[column]))[0]}
        return made

    def needed(self, k: int, length: int) -> set[int]:
        """Columns that a query at this length reads."""
        subpool = self.subpools[k]
        first = subpool.lifetime.first_needed(length) // subpool.page_tokens
        return set(range(first, -(-length // subpool.page_tokens)))

    def held(self) -> list[int]:
        return [len(columns) + left for columns, left in zip(self.columns, self.num_left)]

    def step(self, num_new_tokens: int) -> list[int]:
        """Get so much longer; what is held at the fullest."""
        fullest = self.held()
        new = self.length + num_new_tokens
        for k, subpool in enumerate(self.subpools):
            if subpool.is_state:
                continue
            needed, columns = self.needed(k, new), self.columns[k]
            first = subpool.lifetime.first_needed(new) // subpool.page_tokens
            filled = -(-self.length // subpool.page_tokens)
            own = {self.length // subpool.page_tokens} if num_new_tokens == 1 else set()  # read in its step, then dead
            missing = len((needed | own) - columns)
            spare = sum(filled <= column < first for column in columns)  # room that nothing will fill: used elsewhere
            fullest[k] += max(0, missing - spare)
            self.num_left[k] += sum(column < first for column in self.leased[k])
            self.leased[k] = {column for column in self.leased[k] if column >= first}
            self.columns[k] = {column for column in columns if column >= first} | needed
        self.length = new
        return fullest


def _one(page: Any) -> Any:
    return page.reshape(1)


class Situation:
    """A scheduler among others who use its pool; `go_on` is one round of it, and checks what was decided."""

    def __init__(self, rnd: random.Random, outcomes: Counter[str]) -> None:
        self.rnd = rnd
        self.outcomes = outcomes
        made = plan(
            random_layers(rnd, chunks=True), memory=256 * rnd.randint(4, 14), page_size=rnd.choice([1, 2, 3, 5])
        )
        self.pool = CachePool(made, device="meta", max_sequences=rnd.choice([4, 12]), max_tokens=128)
        self.reserve_steps, headroom_steps = rnd.choice([(1, 1), (1, 16), (2, 3), (4, 4), (3, 10)])
        self.steps = [*range(1, self.reserve_steps + 1)]
        if headroom_steps > self.reserve_steps:
            self.steps.append(headroom_steps)
        self.step_tokens = rnd.choice([12, 40, 400])
        self.scheduler = Scheduler(
            self.pool,
            step_tokens=self.step_tokens,
            reserve_steps=self.reserve_steps,
            headroom_steps=headroom_steps,
            chunked=rnd.random() < 0.8,
            host_memory=rnd.choice([0, 1 << 20]),
            costs=Costs(token_s=rnd.choice([1e-9, 1.0]), copy_bytes_per_s=1e6),
        )
        self.max_running = min(self.pool.tables.num_rows, self.step_tokens)
        self.search = BoundarySearch(self.pool.allocator.room.grids, made.sink_bytes, made.arena_bytes)
        self.sequences: list[Any] = []
        self.leases: list[Any] = []

    def stir(self) -> None:
        """Requests come and go, and so do other users of the pool."""
        rnd, pool, scheduler = self.rnd, self.pool, self.scheduler
        while len(scheduler.waiting) < 3:
            most = scheduler.max_request_tokens
            num_tokens = rnd.choice([2, most, rnd.randint(2, most), rnd.randint(2, min(most, 24))])
            num_prompt_tokens = rnd.randint(1, num_tokens - 1)
            scheduler.submit(num_prompt_tokens, num_tokens - num_prompt_tokens, priority=rnd.choice([0, 0, 1, 2]))
        if rnd.random() < 0.05:
            scheduler.cancel(rnd.choice([*scheduler.waiting, *scheduler.running]))
        if rnd.random() < 0.1 and pool.sequences.num_free_rows > 1:
            num_tokens = rnd.randint(1, 20)
            if pool.quote(num_tokens):
                self.sequences.append(pool.add(num_tokens))
        if self.sequences and rnd.random() < 0.12:
            self.sequences.pop(rnd.randrange(len(self.sequences))).free()
        if rnd.random() < 0.05:
            decoding = [request.sequence for request in scheduler.running if request.is_decoding]
            chosen = rnd.choice([*decoding, *self.sequences, None])
            if chosen is not None and any(chosen.num_pages):
                self.leases.append(pool.lease(chosen, "a test"))
        if self.leases and rnd.random() < 0.2:
            self.leases.pop(rnd.randrange(len(self.leases))).close()

    def go_on(self) -> None:
        self.stir()
        pool, scheduler = self.pool, self.scheduler
        scheduler._settle()
        scheduler._let_go_of_given()
        rows = {request: Row.of(request, pool) for request in scheduler.running}
        decoding = set(scheduler._decoding.requests)
        num_held = [band.num_held for band in pool.allocator.bands]
        for row in rows.values():
            num_held = [total - own for total, own in zip(num_held, row.held())]
        self.num_others = num_held
        self.pins = pool.allocator.room.pins()
        tokens = {request: request.num_tokens for request in (*scheduler.waiting, *scheduler.running)}
        try:
            round = scheduler.schedule()
        except OutOfMemory:
            self.outcomes["held by others"] += 1
            self._check_error(rows, decoding)
            self._free_others()
            return
        for victim in (*round.dropped, *round.offloaded):
            del rows[victim]
            decoding.discard(victim)
        if round.dropped or round.offloaded:  # what they held under a lease is others' now
            self.num_others = self._held_by_others(rows, round)
        counts = {r: c for f in round.forwards if not f.is_decode for r, c in zip(f.requests, f.counts)}
        parts = [self._part(row, counts.get(r), r in decoding, r, tokens[r]) for r, row in rows.items()]
        for request in round.resumed:
            parts.append(self._resumed(tokens[request] - 1, request.max_tokens - tokens[request]))
        for request in round.admitted:
            row = Row(pool.plan, tokens[request])
            parts.append(self._part(row, counts[request], False, request, tokens[request]))
        num_sure = 1 + self.reserve_steps
        assert self._fit(parts, num_sure), "what was promised does not fit"
        newcomers = (*round.admitted, *round.resumed)
        if newcomers and not round.dropped and not round.offloaded:
            # Headroom is left by who does not come in alone, nor before less important ones that run.
            is_urgent = any(one.priority > other.priority for one in newcomers for other in rows)
            is_alone = len(parts) == 1
            assert self._fit(parts, num_sure if is_alone or is_urgent else len(self.steps) + 1)
            self.outcomes["admitted"] += 1
        self._check_refused(round, parts, counts, rows)
        for forward in round.forwards:
            pool.begin(forward.batch, forward.num_new_tokens).commit()
        ended = [request for request in scheduler.running if request.num_new_tokens and self.rnd.random() < 0.05]
        self.round = round
        scheduler.complete(round, ended)

    def run_reserved(self) -> None:
        """The decode steps that were reserved beside those of the last round, as they are without another round."""
        self.scheduler._settle()
        for step in range(2, self.reserve_steps + 1):
            batch = [
                r.sequence for r in self.scheduler.running if r.is_decoding and r.max_tokens - r.num_tokens >= step - 1
            ]
            if batch:
                self.pool.begin([sequence for sequence in batch if sequence is not None], 1).commit()
                self.outcomes["reserved"] += 1

    # What was decided

    def _part(
        self, row: Row, count: int | None, is_decoding: bool, request: Request, num_tokens: int
    ) -> list[list[int]]:
        """What a row holds in every stage."""
        stages = [row.held()]
        if is_decoding:
            left, taken = request.max_tokens - num_tokens, 0
        elif count is None:
            return stages * (1 + len(self.steps))
        else:
            stages = [row.step(count)]
            if row.length < num_tokens:
                return stages + [row.held()] * len(self.steps)
            left, taken = request.max_tokens - num_tokens - 1, 1
        most, done = row.held(), 0
        for step in self.steps:
            while done < min(step - taken, left):
                most, done = row.step(1), done + 1
            stages.append(most)
        return stages

    def _resumed(self, num_stored: int, left: int) -> list[list[int]]:
        row = Row(self.pool.plan)
        row.length = num_stored
        for k, subpool in enumerate(self.pool.plan.subpools):
            row.columns[k] = {0} if subpool.is_state else row.needed(k, num_stored)
        stages, done = [row.held()], 0
        for step in self.steps:
            while done < min(step, left):
                most, done = row.step(1), done + 1
            stages.append(most)
        return stages

    def _fit(self, parts: list[list[list[int]]], num_stages: int) -> bool:
        stages = zip(*parts) if parts else [()] * num_stages
        return all(
            self.search.fits([sum(held) for held in zip(self.num_others, *stage)], self.pins)
            for stage, _ in reversed(list(zip(stages, range(num_stages))))
        )

    def _check_refused(
        self,
        round: Round,
        parts: list[list[list[int]]],
        counts: dict[Request, int],
        rows: dict[Request, Row],
    ) -> None:
        """The first that was refused and its growth do not fit beside the others and theirs."""
        scheduler = self.scheduler
        if not scheduler.waiting or round.dropped or round.offloaded:
            return
        refused = scheduler.waiting[0]
        num_decoding = sum(len(forward.requests) for forward in round.forwards if forward.is_decode)
        budget = self.step_tokens - num_decoding - sum(counts.values())
        if len(scheduler.running) == self.max_running or not self.pool.sequences.num_free_rows:
            self.outcomes["no place"] += 1
            return
        num_tokens = refused.num_tokens
        if refused.offloaded is not None:
            mine = self._resumed(num_tokens - 1, refused.max_tokens - num_tokens)
        else:
            count = min(num_tokens, budget) if scheduler._limits.is_chunked else num_tokens
            if count < 1 or (counts and count > budget):
                self.outcomes["no tokens"] += 1
                return
            mine = self._part(Row(self.pool.plan, num_tokens), count, False, refused, num_tokens)
        num_stages = 1 + len(self.steps) if parts else 1 + self.reserve_steps
        assert not self._fit([*parts, mine], num_stages), "it could have been admitted"
        self.outcomes["refused"] += 1
        is_less = [other.priority < refused.priority and other.rank > refused.rank for other in rows]
        if any(is_less):
            kept = [part for part, less in zip(parts, [*is_less, *[False] * len(parts)]) if not less]
            before = self.num_others
            for row, less in zip(rows.values(), is_less):
                if less:
                    leased = [len(columns) + left for columns, left in zip(row.leased, row.num_left)]
                    self.num_others = [a + b for a, b in zip(self.num_others, leased)]
            assert not self._fit([*kept, mine], 1 + self.reserve_steps), "others could have made room for it"
            self.num_others = before
            self.outcomes["refused before less important ones"] += 1

    def _check_error(self, rows: dict[Request, Row], decoding: set[Request]) -> None:
        """Nobody else of the scheduler's could have made room."""
        first = min(rows, key=lambda request: request.rank, default=None)
        if first is None:
            request = self.scheduler.waiting[0]
            assert not self.scheduler.running
            if request.offloaded is not None:
                part = self._resumed(request.num_tokens - 1, request.max_tokens - request.num_tokens)
            else:
                count = (
                    min(request.num_tokens, self.step_tokens)
                    if self.scheduler._limits.is_chunked
                    else request.num_tokens
                )
                part = self._part(Row(self.pool.plan, request.num_tokens), count, False, request, request.num_tokens)
            assert not self._fit([part], 1 + self.reserve_steps)
            return
        left = [0] * len(self.num_others)  # of the others, what is leased stays
        for request, row in rows.items():
            if request is not first:
                left = [a + len(b) for a, b in zip(left, row.leased)]
        self.num_others = [a + b for a, b in zip(self.num_others, left)]
        row = rows[first]
        count = 1 if self.scheduler._limits.is_chunked else first.num_to_run - row.length
        part = self._part(row, None if first in decoding else count, first in decoding, first, first.num_tokens)
        assert not self._fit([part], 1 + self.reserve_steps)

    def _held_by_others(self, rows: dict[Request, Row], round: Round) -> list[int]:
        """Once the round is applied."""
        held = [band.num_held for band in self.pool.allocator.bands]
        for row in rows.values():
            held = [total - own for total, own in zip(held, row.held())]
        for request in (*round.admitted, *round.resumed):
            assert request.sequence is not None
            held = [total - own for total, own in zip(held, request.sequence.num_pages)]
        return held

    def _free_others(self) -> None:
        for lease in self.leases:
            lease.close()
        for sequence in self.sequences:
            sequence.free()
        self.leases, self.sequences = [], []


@pytest.mark.parametrize("seed", range(6))
def test_who_is_admitted_fits_and_who_is_refused_does_not(seed: int) -> None:
    print("seed", seed)
    rnd = random.Random(seed)
    outcomes: Counter[str] = Counter()
    done = 0
    while done < NUM_SITUATIONS:
        try:
            situation = Situation(rnd, outcomes)
        except PlanError:
            continue
        for _ in range(rnd.choice([20, 60, 120])):
            situation.go_on()
            done += 1
        situation.pool.check()
        situation.run_reserved()
        situation.pool.check()
    print(dict(outcomes))
    assert outcomes["refused"] > NUM_SITUATIONS / 4 and outcomes["admitted"] > NUM_SITUATIONS / 10
    assert outcomes["reserved"] and outcomes["held by others"] and outcomes["refused before less important ones"]
