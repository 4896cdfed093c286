"""All bands of one arena: quote, reserve, release, compact.

The truth is in host memory; nothing here waits for a device or reads from one. Bytes are moved by `mover`, which
whoever owns the arena passes in; without it only the books move. What a page id is: one flat space of virtual ids,
sub-pool `k` owning `[id_base[k], id_base[k + 1])`; -1 is no page. Ids are stable, the physical pages behind them
(`v2p`) are not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from torch_uma.audit import audit
from torch_uma.band import NO_PAGE, Band, PageArray, PageTables
from torch_uma.errors import PageError
from torch_uma.ledger import Lease, Ledger, PlaceArray
from torch_uma.moves import MovePlan, Wave, pack, plan_moves, trimmed
from torch_uma.placement import Quote, Span
from torch_uma.plan import Plan
from torch_uma.refusal import named_twice, out_of_memory, unusable_ids
from torch_uma.room import Room
from torch_uma.stats import Stats, arena_stats

Mover = Callable[[int, PageArray, PageArray], None]

SCALAR_PAGES = 8  # up to so many pages, a loop over Python ints beats vector operations


class Allocator:
    """Hands out pages of every sub-pool of a plan, and moves them when that makes room.

    Args:
        plan: the sub-pools and their grids.
        hints: share of the arena by sub-pool name; says where floats start, limits nothing.
        split: share of the arena by sub-pool name; freezes the frontiers there, which makes fixed pools.
        mover: called with (sub-pool index, source pages, destination pages) once for each wave, before the books
            change.

    Attributes:
        id_base: where each sub-pool's ids start; one longer than the sub-pools.
        v2p: [num_ids] int32, physical page of an id in its sub-pool's grid, -1 for a dead id. Read only.
        layout_version: counts the waves of moves so far: what was derived from physical pages holds while it stays.
        on_moved: called with the ids that a wave has moved.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        hints: Mapping[str, float] | None = None,
        split: Mapping[str, float] | None = None,
        mover: Mover | None = None,
    ) -> None:
        self.plan = plan
        self.mover = mover
        self.on_moved: Callable[[PageArray], None] | None = None
        self.layout_version = 0
        self.tables = PageTables([subpool.num_pages for subpool in plan.subpools])
        self.id_base = tuple(self.tables.base)
        self.v2p = self.tables.v2p
        self.ledger = Ledger(self.id_base[-1], self._reclaim)
        self._in_steps: dict[object, Callable[[], PageArray]] = {}
        self._base_of_band = np.array(self.id_base, np.int64)
        self.room = Room(plan, self.tables, self.ledger, self.open_step_places, hints=hints, split=split)
        self.bands: list[Band] = self.room.bands

    # Ask

    def quote(self, demand: Sequence[int]) -> Quote:
        """Say whether `demand` (pages per sub-pool, in band order) fits.

        The quote says at what cost in moved bytes, or what would help. Changes nothing. Raises PageError for a demand
        that is not one whole number of pages for each sub-pool.
        """
        self._check_demand(demand)
        return self.room.quote(demand)

    def fits(self, more_pages: Sequence[int]) -> bool:
        """Say whether so many pages more of each sub-pool than are held now could be had; negative: so many fewer.

        Fewer means that they are released first, any that are not pinned: pinned ones stay, however many are named.
        Changes nothing. Raises PageError for what is not one whole number for each sub-pool.
        """
        try:
            more = [operator.index(count) for count in more_pages]
        except TypeError:
            more = []
        if len(more) != len(self.bands):
            raise PageError(
                f"pages more or fewer are one whole number for each of {', '.join(self.room.names)}; got {more_pages!r}"
            )
        return self.room.fits(more)

    # Act

    def reserve(self, demand: Sequence[int], *, runs: Collection[int] = ()) -> PageArray:
        """Take `demand[k]` pages of every sub-pool `k`, all or nothing.

        Sub-pools in `runs` prefer physically consecutive pages, ascending in the order returned; it is a preference
        only. Returns [sum(demand)] int64 ids, those of sub-pool 0 first. Moves pages where the quote says so. Raises
        OutOfMemory with the quote, and then nothing has changed.
        """
        spans = fresh = None
        if runs:
            self._check_demand(demand)
            if not set(runs) <= set(range(len(self.bands))):
                raise PageError(f"runs names sub-pools by index, 0 to {len(self.bands) - 1}; got {sorted(runs)}")
            spans, fresh = self.room.fresh_runs(demand, runs)
        if spans is None:
            if len(demand) != len(self.bands):
                self._check_demand(demand)
            for band, count in zip(self.bands, demand):
                if not 0 <= count <= band.num_holes:
                    self._check_demand(demand)
                    spans = self._make_room(demand)
                    break
        num_pages = sum(demand)
        if type(num_pages) is not int:
            self._check_demand(demand)
        ids = np.empty(num_pages, np.int64)
        pages = np.empty(num_pages, np.int64)
        start = 0
        for k, count in enumerate(demand):
            if not count:
                continue
            band = self.bands[k]
            end = start + count
            if spans is not None and (count > band.num_holes or (fresh and k in fresh)):
                band.extend(*spans[k])
            pages[start:end] = band.take_run(count) if k in runs else band.pop_holes(count)
            band.num_free_ids -= count
            ids[start:end] = band.ids[band.num_free_ids : band.num_free_ids + count][::-1]
            band.count_live(count)
            start = end
        tables = self.tables
        places = pages + tables.base_of[ids]
        tables.v2p[ids] = pages
        tables.owner[places] = ids
        tables.occupied[places] = 1
        return ids

    def reserve_one(self, index: int) -> int:
        """Take one page of one sub-pool: `reserve` for the commonest case, without vectors."""
        band = self.bands[index]
        if not band.num_holes and not self.room.extend_by_one(index):
            return int(self.reserve([int(k == index) for k in range(len(self.bands))])[0])
        page = band.pop_hole()
        band.num_free_ids -= 1
        page_id = int(band.ids[band.num_free_ids])
        place = band.base + page
        tables = self.tables
        tables.v2p_cells[page_id] = page
        tables.owner_cells[place] = page_id
        tables.occupied_bytes[place] = 1
        band.count_live(1)
        return page_id

    def reserve_at(self, index: int, pages: PageArray) -> PageArray:
        """Take these free places of `free_places(index)`, each named once; returns their ids, int64. Moves nothing."""
        band, count = self.bands[index], len(pages)
        if not count:
            return np.empty(0, np.int64)
        band.extend(min(band.low, int(pages.min())), max(band.high, int(pages.max()) + 1))
        band.claim_holes(pages)
        band.num_free_ids -= count
        ids = band.ids[band.num_free_ids : band.num_free_ids + count].astype(np.int64)
        tables = self.tables
        tables.v2p[ids] = pages
        tables.owner[band.base + pages] = ids
        tables.occupied[band.base + pages] = 1
        band.count_live(count)
        return ids

    def release(self, pages: npt.NDArray[np.integer] | Sequence[int], *, subpool: int | None = None) -> None:
        """Give pages back, of any mix of sub-pools (with `subpool`, of that one alone).

        A leased page dies at once as an id and becomes free when its last lease ends. Raises PageError for a dead id,
        an id named twice, a sentinel, the sink or an id of another sub-pool, and then nothing has changed.
        """
        ids = self._as_ids(pages)
        count = len(ids)
        if count <= SCALAR_PAGES:
            self._release_few(ids.tolist(), subpool)
            return
        tables = self.tables
        ids = np.sort(ids)  # by sub-pool, then, and what is named twice stands side by side
        places = self.places(ids, subpool)
        if np.count_nonzero(ids[1:] == ids[:-1]):
            raise PageError(
                f"release of {count} pages names some of them twice: {named_twice(ids)}; name each page once"
            )
        tables.v2p[ids] = NO_PAGE
        tables.owner[places] = NO_PAGE
        leased = self.ledger.counts[places] > 0 if self.ledger.leases else None
        edges = ids.searchsorted(self._base_of_band).tolist()
        for band, start, end in zip(self.bands, edges, edges[1:]):
            num_ids = end - start
            if not num_ids:
                continue
            band.ids[band.num_free_ids : band.num_free_ids + num_ids] = ids[start:end]
            band.num_free_ids += num_ids
            band.num_live -= num_ids
            freed = places[start:end]
            if leased is not None:
                kept = leased[start:end]
                band.num_quarantined += int(np.count_nonzero(kept))
                freed = freed[~kept]
            tables.occupied[freed] = 0
            band.push_holes(freed - band.base)
            band.pull_back()

    def release_one(self, page: int) -> None:
        """Give one page back: `release` for the commonest case, without vectors."""
        self._release_few([page], None)

    def move(self, index: int, source_pages: PageArray, destination_pages: PageArray) -> None:
        """Move live, unpinned pages of one sub-pool to free places of `free_places(index)`, as one wave."""
        band = self.bands[index]
        sources = np.asarray(source_pages, np.int64)
        destinations = np.asarray(destination_pages, np.int64)
        if not len(sources):
            return
        owner = self.tables.owner[band.base : band.base + band.grid.num_pages]
        movable = np.setdiff1d(np.flatnonzero(owner >= 0), self.room.pinned_places(index) - band.base)
        if (
            not len(sources) == len(destinations) == len(np.unique(sources)) == len(np.unique(destinations))
            or not np.isin(sources, movable).all()
            or not np.isin(destinations, self.free_places(index)).all()
        ):
            raise PageError(
                f"move of {len(sources)} pages of {self.plan.subpools[index].name!r}: sources must be live and not "
                "pinned, destinations distinct and free; ask free_places() first"
            )
        self._run(Wave(index, sources, destinations))
        band.pull_back()

    def free_places(self, index: int) -> PageArray:
        """The pages to which a live page could move now: the holes and the gaps beside the band, ascending."""
        return self.room.free_places(index)

    def compact(self, budget_bytes: int | None = None) -> int:
        """Pack the bands into their own holes, ends first, moving at most `budget_bytes` (None: no limit).

        Returns the bytes moved. Pinned pages stay.
        """
        left_bytes = 1 << 62 if budget_bytes is None else budget_bytes
        moved_bytes = 0
        for band in sorted(self.bands, key=lambda band: band.grid.grows == "float"):
            page_bytes = band.grid.page_bytes
            packed = pack(band, self.room.pin(band.index), left_bytes // page_bytes)
            if packed is None:
                continue
            wave, _ = packed
            self._run(wave)
            band.pull_back()
            left_bytes -= len(wave.sources) * page_bytes
            moved_bytes += len(wave.sources) * page_bytes
        return moved_bytes

    # Pins

    def lease(self, pages: npt.NDArray[np.integer] | Sequence[int], user: str) -> Lease:
        """Pin live pages until the lease is closed: they stay where they are, and are not handed out if released.

        Raises PageError for ids that are not live, LeaseError for no pages.
        """
        ids = self._as_ids(pages)
        return self.ledger.open(ids, self.places(ids, None), user)

    def poll(self) -> int:
        """End the leases whose event has passed; returns how many."""
        return self.ledger.poll()

    def pin_while(self, pages: Callable[[], PageArray]) -> object:
        """Pin the pages of an open step for moves, until `unpin`; `pages` gives their ids, asked for only by moves."""
        handle = object()
        self._in_steps[handle] = pages
        return handle

    def unpin(self, handle: object) -> None:
        """End `pin_while`."""
        del self._in_steps[handle]

    def open_step_places(self) -> Iterator[PlaceArray]:
        """The places pinned by open steps."""
        for pages in self._in_steps.values():
            yield self.places(pages(), None)

    # Look

    def places(self, ids: PageArray, subpool: int | None) -> PlaceArray:
        """[n] int64 flat places of live ids; raises PageError for any that is not live or not of `subpool`."""
        tables = self.tables
        if len(ids) and ids.min() < 0:
            raise PageError(self._explain(ids, subpool))
        try:
            places = tables.base_of[ids] + tables.v2p[ids]
        except IndexError:
            raise PageError(self._explain(ids, subpool)) from None
        if np.count_nonzero(tables.owner[places] != ids) or (
            subpool is not None and (tables.kind[ids] != subpool).any()
        ):
            raise PageError(self._explain(ids, subpool))
        return places

    def any_leased(self) -> bool:
        """Whether there is a live page with a lease that has not ended."""
        return any((self.tables.owner[lease.places] >= 0).any() for lease in self.ledger.leases)

    def is_leased(self, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """[n] bool, which of these live ids have a lease that has not ended."""
        if not self.ledger.leases:
            return np.zeros(len(ids), np.bool_)
        is_leased: npt.NDArray[np.bool_] = self.ledger.counts[self.tables.base_of[ids] + self.tables.v2p[ids]] > 0
        return is_leased

    def stats(self) -> Stats:
        """Where the bytes of the arena are now."""
        return arena_stats(self.plan, self.bands)

    def check(self) -> None:
        """Walk the invariants by independent bookkeeping; raises InvariantError with what does not hold."""
        audit(self.plan, self.bands, self.tables, self.ledger)

    # Inside

    def _release_few(self, pages: list[int], subpool: int | None) -> None:
        tables, num_ids = self.tables, self.id_base[-1]
        places = []
        for page in pages:
            page_in_grid = tables.v2p_cells[page] if 0 <= page < num_ids else NO_PAGE
            place = self.id_base[tables.kind_cells[page]] + page_in_grid if page_in_grid >= 0 else NO_PAGE
            if (
                place < 0
                or tables.owner_cells[place] != page
                or (subpool is not None and tables.kind_cells[page] != subpool)
            ):
                raise PageError(self._explain(np.array(pages, np.int64), subpool))
            places.append(place)
        if len(pages) > 1 and len(set(pages)) < len(pages):
            twice = named_twice(np.array(pages))
            raise PageError(f"release of {len(pages)} pages names some of them twice: {twice}; name each page once")
        leases = self.ledger.leases
        for page, place in zip(pages, places):
            band = self.bands[tables.kind_cells[page]]
            tables.v2p_cells[page] = NO_PAGE
            tables.owner_cells[place] = NO_PAGE
            band.ids[band.num_free_ids] = page
            band.num_free_ids += 1
            band.num_live -= 1
            if leases and self.ledger.counts[place]:
                band.num_quarantined += 1
                continue
            tables.occupied_bytes[place] = 0
            band.push_hole(place - band.base)
            band.pull_back()

    def _make_room(self, demand: Sequence[int]) -> list[Span]:
        """Targets under which the demand fits, after the moves that it takes."""
        solution = self.room.solve(demand)
        if solution is None:
            raise out_of_memory(self.plan, self.stats().free_bytes, self.room.quote(demand))
        if solution.how != "in_place":
            self._apply(plan_moves(self.bands, solution.targets))
        return solution.targets

    def _apply(self, plan: MovePlan) -> None:
        for band, target in zip(self.bands, plan.targets):
            if band.high > band.low:
                band.retract(*trimmed(band, target))
        for wave in plan.waves:
            self._run(wave)
            self.bands[wave.subpool].retract(*plan.targets[wave.subpool])

    def _run(self, wave: Wave) -> None:
        """Move the pages of one wave, bytes first: if the mover fails, the books still say where the content is."""
        band, tables = self.bands[wave.subpool], self.tables
        sources, destinations = wave.sources, wave.destinations
        if not len(sources):
            return
        if self.mover is not None:
            self.mover(wave.subpool, sources, destinations)
        low, high = min(band.low, int(destinations.min())), max(band.high, int(destinations.max()) + 1)
        if (low, high) != band.span:
            band.extend(low, high)
        band.claim_holes(destinations)
        ids = tables.owner[band.base + sources].astype(np.int64)
        tables.owner[band.base + sources] = NO_PAGE
        tables.owner[band.base + destinations] = ids
        tables.v2p[ids] = destinations
        tables.occupied[band.base + sources] = 0
        tables.occupied[band.base + destinations] = 1
        band.push_holes(sources)
        band.moved_pages += len(sources)
        self.layout_version += 1
        if self.on_moved is not None:
            self.on_moved(ids)

    def _reclaim(self, places: PlaceArray) -> None:
        """Free the quarantined ones among the places whose last lease has ended."""
        freed = places[self.tables.owner[places] == NO_PAGE]
        for band in self.bands:
            first, last = freed.searchsorted((self.id_base[band.index], self.id_base[band.index + 1]))
            if first == last:
                continue
            mine = freed[first:last]
            self.tables.occupied[mine] = 0
            band.num_quarantined -= len(mine)
            band.push_holes(mine - band.base)
            band.pull_back()

    def _as_ids(self, pages: npt.NDArray[np.integer] | Sequence[int]) -> PageArray:
        """The ids as int64, refusing what is no flat list of whole numbers."""
        ids = np.asarray(pages)
        if ids.dtype == np.int32 and ids.ndim == 1:
            return ids.astype(np.int64)
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
            raise PageError(f"page ids are a flat list of whole numbers, not {ids.dtype} of shape {ids.shape}")
        return ids.astype(np.int64)

    def _check_demand(self, demand: Sequence[int]) -> None:
        try:
            is_sound = len(demand) == len(self.bands) and all(operator.index(count) >= 0 for count in demand)
        except TypeError:
            is_sound = False
        if not is_sound:
            names = ", ".join(self.room.names)
            raise PageError(f"a demand is one number of pages, 0 or more, for each of {names}; got {tuple(demand)}")

    def _explain(self, ids: npt.NDArray[np.integer], subpool: int | None) -> str:
        return unusable_ids(self.bands, self.room.names, ids, subpool)
