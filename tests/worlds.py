"""An allocator beside what its callers know of it: random operations, and everything that must hold after each.

What must hold is computed by other means than the allocator's: contents are stamped into words, pins and quarantine
are kept here as sets, and whether a demand fits is found by trying every boundary between the bands.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from arenas import BoundarySearch, MoverError, StampedArena, books, small_plan

from torch_uma.allocator import Allocator
from torch_uma.band import PageArray
from torch_uma.errors import OutOfMemory, PageError
from torch_uma.ledger import Lease
from torch_uma.placement import Span

Place = tuple[int, int]  # sub-pool, physical page


class Flag:
    """An event that a test lets pass."""

    def __init__(self, has_passed: bool = False) -> None:
        self.has_passed = has_passed
        self.num_queries = 0

    def query(self) -> bool:
        self.num_queries += 1
        return self.has_passed


class World:
    """A small arena, its allocator and its callers.

    Attributes:
        live: by sub-pool, the stamp that each live page carries.
        leases: of each lease that is open or waits for its flag, the places and their stamps.
        flags: the leases that are closed and wait.
        steps: of each open step, its pages and where they were when it was opened.
        quarantined: places whose page was released under a lease.
        outcomes: how often what came out.
    """

    def __init__(self, shape: str, page_size: int, frontiers: str = "", *, memory: int = 2816) -> None:
        self.plan = small_plan(shape, memory=memory, page_size=page_size)
        self.names = [subpool.name for subpool in self.plan.subpools]
        self.kinds = range(len(self.names))
        hints = dict.fromkeys(self.names[:2], 0.3) if frontiers == "hints" else None
        split = dict.fromkeys(self.names, 1 / len(self.names)) if frontiers == "split" else None
        self.arena = StampedArena(self.plan)
        self.allocator = Allocator(self.plan, mover=self.arena.move, hints=hints, split=split)
        self.grids = [band.grid for band in self.allocator.bands]
        self.search = BoundarySearch(self.grids, self.plan.sink_bytes, self.plan.arena_bytes)
        self.live: list[dict[int, int]] = [{} for _ in self.names]
        self.leases: dict[Lease, dict[Place, int]] = {}
        self.flags: dict[Lease, Flag] = {}
        self.steps: dict[object, tuple[list[int], list[Place]]] = {}
        self.quarantined: set[Place] = set()
        self.outcomes: Counter[str] = Counter()
        self.num_stamps = 0
        self.moved: list[int] = []
        self.allocator.on_moved = lambda pages: self.moved.extend(pages.tolist())

    # Operations; each returns whether there was anything to do

    def reserve(self, rnd: random.Random) -> bool:
        counts = self.held()
        some = [2 + (grid.num_pages - grid.first_page) // 4 for grid in self.grids]
        demand = [rnd.choice([0, 0, 0, 1, 1, 2, 3, rnd.randrange(most)]) for most in some]
        if rnd.random() < 0.3:  # exactly what there is room for, or one page more
            k = rnd.choice(self.kinds)
            room = self.search.most(k, [c + d for c, d in zip(counts, demand)], self.pins())
            demand[k] = max(0, room - counts[k] + rnd.choice([0, 0, 1]))
        runs = {k for k in self.kinds if rnd.random() < 0.2}
        if rnd.random() < 0.2:
            self.arena.waves_before_failure = rnd.choice([0, 0, 1, 2])
        self._reserve(demand, lambda: self.allocator.reserve(demand, runs=runs), rnd)
        return True

    def reserve_one(self, rnd: random.Random) -> bool:
        index = rnd.choice(self.kinds)
        demand = [int(k == index) for k in self.kinds]
        self._reserve(demand, lambda: np.array([self.allocator.reserve_one(index)], np.int64), rnd)
        return True

    def release(self, rnd: random.Random) -> bool:
        free = self.outside_steps()
        if rnd.random() < 0.3:
            index = rnd.choice(self.kinds)
            pages = rnd.sample(free[index], rnd.randint(0, len(free[index])))
            self._release(pages, lambda: self.allocator.release(pages, subpool=index))
        else:
            pages = [page for of in free for page in rnd.sample(of, min(len(of), rnd.choice([0, 1, 2, len(of) // 2])))]
            rnd.shuffle(pages)
            self._release(pages, lambda: self.allocator.release(np.array(pages, np.int64)))
        return bool(pages)

    def release_one(self, rnd: random.Random) -> bool:
        pages = [page for of in self.outside_steps() for page in of]
        if not pages:
            return False
        page = rnd.choice(pages)
        self._release([page], lambda: self.allocator.release_one(page))
        return True

    def release_wrongly(self, rnd: random.Random) -> bool:
        pages = [page for of in self.live for page in of]
        pages = rnd.sample(pages, min(len(pages), rnd.choice([0, 1, 3, 20])))
        dead = np.flatnonzero(self.allocator.v2p < 0).tolist()
        bases = self.allocator.id_base
        sinks = [base for base, subpool in zip(bases, self.plan.subpools) if subpool.first_page]
        wrong = [-1, -2, bases[-1], -(2**31), *pages[:1], *sinks, *rnd.sample(dead, min(2, len(dead)))]
        pages.insert(rnd.randint(0, len(pages)), rnd.choice(wrong))
        before = books(self.allocator)
        with pytest.raises(PageError):
            self.allocator.release(np.array(pages, np.int64))
        assert books(self.allocator) == before
        return True

    def open_lease(self, rnd: random.Random) -> bool:
        pages = [page for of in self.live for page in of]
        if not pages or len(self.leases) > 5:
            return False
        pages = rnd.sample(pages, rnd.randint(1, min(4, len(pages))))
        stamps = {page: stamp for of in self.live for page, stamp in of.items()}
        lease = self.allocator.lease(np.array(pages, np.int64), "test")
        self.leases[lease] = {place: stamps[page] for page, place in zip(pages, self.places(pages))}
        return True

    def close_lease(self, rnd: random.Random) -> bool:
        still_open = [lease for lease in self.leases if lease not in self.flags]
        if not still_open:
            return False
        lease = rnd.choice(still_open)
        if rnd.random() < 0.4:
            self.flags[lease] = Flag()
            lease.close(self.flags[lease])  # only poll() ends it
        else:
            lease.close()
            self._end_leases([lease])
        return True

    def poll(self, rnd: random.Random) -> bool:
        if not self.flags:
            return False
        for flag in self.flags.values():
            assert not flag.num_queries, "an event was asked outside poll()"
            flag.has_passed = rnd.random() < 0.6
        passed = [lease for lease, flag in self.flags.items() if flag.has_passed]
        assert self.allocator.poll() == len(passed)
        for flag in self.flags.values():
            assert flag.num_queries == 1
            flag.num_queries = 0
        self._end_leases(passed)
        return True

    def open_step(self, rnd: random.Random) -> bool:
        pages = [page for of in self.outside_steps() for page in of]
        if not pages or len(self.steps) > 1:
            return False
        pages = rnd.sample(pages, rnd.randint(1, min(3, len(pages))))
        handle = self.allocator.pin_while(lambda: np.array(pages, np.int64))
        self.steps[handle] = (pages, self.places(pages))
        return True

    def close_step(self, rnd: random.Random) -> bool:
        if not self.steps:
            return False
        handle = rnd.choice(list(self.steps))
        self.allocator.unpin(handle)
        del self.steps[handle]
        return True

    def compact(self, rnd: random.Random) -> bool:
        budget_bytes = rnd.choice([None, None, 0, 100, 500])
        if rnd.random() < 0.3:
            self.arena.waves_before_failure = rnd.choice([0, 0, 1])
        before, pins, spans = books(self.allocator), self.pins(), [band.span for band in self.allocator.bands]
        self.arena.waves.clear()
        try:
            moved_bytes = self.allocator.compact(budget_bytes)
        except MoverError:
            self.outcomes["compact failed"] += 1
        else:
            assert moved_bytes == self.arena.moved_bytes()
            assert budget_bytes is None or moved_bytes <= budget_bytes
            if budget_bytes is None:
                self._check_packed(spans, pins)
            self.outcomes["compact moved" if moved_bytes else "compact idle"] += 1
        self.arena.waves_before_failure = None
        self._check_only_moved(before)
        return True

    def move(self, rnd: random.Random) -> bool:
        index = rnd.choice(self.kinds)
        free, pinned = self.allocator.free_places(index).tolist(), self.pinned()
        assert not {(index, page) for page in free} & (pinned | set(self.places(list(self.live[index]))))
        sources = [page for k, page in self.places(list(self.live[index])) if (k, page) not in pinned]
        count = min(len(free), len(sources), rnd.randint(1, 5))
        if not count:
            return False
        before = books(self.allocator)
        pages, places = np.array(rnd.sample(sources, count)), np.array(rnd.sample(free, count))
        self.allocator.move(index, pages, places)
        self._check_only_moved(before)
        return True

    # What must hold

    def verify(self) -> None:
        """What must hold after every operation."""
        allocator = self.allocator
        allocator.check()
        expected_live = np.zeros(allocator.id_base[-1], np.bool_)
        for k, subpool in enumerate(self.plan.subpools):
            pages = np.array(list(self.live[k]), np.int64)
            stamps = np.array(list(self.live[k].values()), np.int64)
            content = self.arena.pages(k)[allocator.v2p[pages]]
            assert (content == stamps[:, None]).all(), "content did not follow its owner"
            sinks = np.arange(subpool.first_page) + allocator.id_base[k]
            expected_live[pages] = expected_live[sinks] = True
            band = allocator.bands[k]
            num_quarantined = sum(index == k for index, _ in self.quarantined)
            assert (band.num_live, band.num_quarantined) == (len(pages), num_quarantined)
        assert ((allocator.v2p >= 0) == expected_live).all()
        assert not self.arena.words[: self.plan.sink_bytes // 16].any(), "somebody wrote into the sink"
        for places in self.leases.values():
            for (k, page), stamp in places.items():
                assert (self.arena.pages(k)[page] == stamp).all(), "a leased page was handed out"
        for pages_of_step, places_then in self.steps.values():
            assert self.places(pages_of_step) == places_then, "a page of an open step moved"

    def _reserve(self, demand: list[int], act: Callable[[], PageArray], rnd: random.Random) -> None:
        allocator = self.allocator
        before, how, pinned = books(allocator), self._cheapest(demand), self.pinned()
        quote = allocator.quote(demand)
        assert (quote.demand, quote.how) == (tuple(demand), how)
        assert allocator.room._fits_in_place(demand) == (how == "in_place"), "the shortcut is not exact"
        assert books(allocator) == before
        self.arena.waves.clear()
        try:
            pages = act().tolist()
        except OutOfMemory as error:
            assert how == "refused" and error.quote == quote
            assert books(allocator) == before and not self.arena.waves
            self._check_refusal(demand, error, rnd)
        except MoverError:
            self._check_only_moved(before)
            how = "failed"
            assert allocator.quote(demand).fits, "a copy that failed has lost room"
        else:
            assert how != "refused"
            assert self.arena.moved_bytes() == quote.move_bytes
            moving = [index for index, _, _ in self.arena.waves]
            assert len(set(moving)) == len(moving) and not (how == "in_place" and moving)
            assert not (how == "compact" and any(self.grids[index].grows == "float" for index in moving))
            assert len(pages) == sum(demand)
            for k, count in enumerate(demand):
                self._write(k, pages[:count], pinned)
                pages = pages[count:]
        self.arena.waves_before_failure = None
        self.outcomes[how] += 1

    def _cheapest(self, demand: list[int]) -> str:
        """The first of the three steps for which there are boundaries, or "refused"."""
        bands = self.allocator.bands
        spans: list[Span | None] = [band.span if band.num_span else None for band in bands]
        stretched = [band.num_span + max(0, count - band.num_holes) for band, count in zip(bands, demand)]
        if self.search.fits(stretched, spans):
            return "in_place"
        counts, pins = [c + d for c, d in zip(self.held(), demand)], self.pins()
        floats = [grid.grows == "float" for grid in self.grids]
        of_ends = [s if is_float else c for s, c, is_float in zip(stretched, counts, floats)]
        if self.search.fits(of_ends, [s if is_float else p for s, p, is_float in zip(spans, pins, floats)]):
            return "compact"
        return "redistribute" if self.search.fits(counts, pins) else "refused"

    def _check_refusal(self, demand: list[int], error: OutOfMemory, rnd: random.Random) -> None:
        quote, pins, pinned, counts = error.quote, self.pins(), self.pinned(), self.held()
        binding = None
        for k, count in enumerate(demand):
            counts[k] += count
            if binding is None and not self.search.fits(counts, pins):
                binding = self.names[k]
        assert quote.binding == binding and f"{binding} does not fit" in str(error)
        assert quote.fits_empty == self.search.fits(demand, [None] * len(demand))
        relief: dict[str, int | None] = {}
        helpful = []
        for k, name in enumerate(self.names):
            pages = list(self.live[k])
            loose = [page for page, place in zip(pages, self.places(pages)) if place not in pinned]
            missing = counts[k] - self.search.most(k, counts, pins)
            relief[name] = missing if missing <= len(loose) else None
            if missing <= len(loose):
                helpful.append(rnd.sample(loose, missing))
        assert quote.relief == relief
        if helpful and rnd.random() < 0.3:
            first, *others = rnd.choice(helpful)
            self._release(others, lambda: self.allocator.release(others))
            assert not self.allocator.quote(demand).fits, "fewer pages would have helped"
            self._release([first], lambda: self.allocator.release([first]))
            assert self.allocator.quote(demand).fits, "what would help did not help"
            self.outcomes["relieved"] += 1

    def _check_packed(self, spans: list[Span], pins: list[Span | None]) -> None:
        for band, (low, high), pin, count in zip(self.allocator.bands, spans, pins, self.held()):
            first, end = pin or (high, low)
            packed_low, packed_high = max(count, end - low), max(count, high - first)
            most = {"up": packed_low, "down": packed_high, "float": min(packed_low, packed_high)}
            assert band.num_span <= most[band.grid.grows], f"{self.names[band.index]} is not packed"

    def _check_only_moved(self, before: dict[str, Any]) -> None:
        """Ids are as before and live somewhere; those that moved were reported, pinned ones are not among them."""
        after = books(self.allocator)
        assert [band["ids"] for band in after["bands"]] == [band["ids"] for band in before["bands"]]
        assert [page >= 0 for page in after["v2p"]] == [page >= 0 for page in before["v2p"]]
        assert after["leases"] == before["leases"]
        changed = {page for page, (new, old) in enumerate(zip(after["v2p"], before["v2p"])) if new != old}
        assert changed <= set(self.moved)
        self.moved.clear()

    # What the callers know

    def held(self) -> list[int]:
        return [len(pages) + sum(index == k for index, _ in self.quarantined) for k, pages in enumerate(self.live)]

    def pinned(self) -> set[Place]:
        leased = {place for places in self.leases.values() for place in places}
        return leased | {place for _, places in self.steps.values() for place in places}

    def pins(self) -> list[Span | None]:
        pinned = self.pinned()
        pages = [[page for index, page in pinned if index == k] for k in self.kinds]
        return [(min(of), max(of) + 1) if of else None for of in pages]

    def places(self, pages: list[int]) -> list[Place]:
        kinds = np.searchsorted(self.allocator.id_base, pages, side="right") - 1
        return list(zip(kinds.tolist(), self.allocator.v2p[np.array(pages, np.int64)].tolist()))

    def outside_steps(self) -> list[list[int]]:
        in_steps = {page for pages, _ in self.steps.values() for page in pages}
        return [[page for page in of if page not in in_steps] for of in self.live]

    def _write(self, index: int, pages: list[int], pinned: set[Place]) -> None:
        first, end = (
            self.allocator.id_base[index] + self.plan.subpools[index].first_page,
            self.allocator.id_base[index + 1],
        )
        for page, place in zip(pages, self.places(pages)):
            assert first <= page < end and page not in self.live[index]
            assert place not in pinned, "a pinned page was handed out"
            self.num_stamps += 1
            self.live[index][page] = self.num_stamps
            self.arena.pages(index)[place[1]] = self.num_stamps

    def _release(self, pages: list[int], act: Callable[[], None]) -> None:
        places = self.places(pages)
        act()
        leased = {place for places_of in self.leases.values() for place in places_of}
        for page, place in zip(pages, places):
            del self.live[place[0]][page]
            if place in leased:
                self.quarantined.add(place)

    def _end_leases(self, leases: list[Lease]) -> None:
        for lease in leases:
            del self.leases[lease]
            self.flags.pop(lease, None)
        self.quarantined &= {place for places in self.leases.values() for place in places}
