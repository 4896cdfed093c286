"""The invariants of an arena's books, walked by independent bookkeeping: every number is counted anew.

1. Bands are disjoint, in order, inside the arena and above the sink.
2. Per band: span = live + holes + quarantined, and outside the span nothing is held.
3. `v2p` and its inverse agree on the live pages; no page and no virtual id is held twice; an id is live or on its
   stack, once.
4. live + holes + quarantined + gaps + slack + sink = capacity, in bytes.
5. A quarantined page is leased; a leased page is live or quarantined; lease counts are those of the open leases.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from torch_uma.band import SINK, Band, PageTables
from torch_uma.errors import InvariantError
from torch_uma.ledger import Ledger
from torch_uma.plan import Plan
from torch_uma.stats import slack_bytes


def audit(plan: Plan, bands: Sequence[Band], tables: PageTables, ledger: Ledger) -> None:
    """Raise InvariantError at the first invariant that does not hold. Grows with the arena: for tests and debugging."""
    edge_bytes = plan.sink_bytes
    counted_bytes = gap_bytes = 0
    present = [band for band in bands if band.high > band.low]
    for band in present:
        _require(
            band.start_bytes() >= edge_bytes,
            f"{_name(plan, band)} starts below byte {edge_bytes}, where the one before ends",
        )
        gap_bytes += band.start_bytes() - edge_bytes
        edge_bytes = band.end_bytes()
    _require(
        edge_bytes <= plan.arena_bytes, f"the last band ends at byte {edge_bytes}, past the arena of {plan.arena_bytes}"
    )
    gap_bytes += plan.arena_bytes - edge_bytes - slack_bytes(plan, bands)
    for band in bands:
        counted_bytes += _audit_band(plan, band, tables) * band.grid.page_bytes
    total_bytes = counted_bytes + gap_bytes + slack_bytes(plan, bands) + plan.sink_bytes
    _require(
        total_bytes == plan.arena_bytes,
        f"pages, gaps, slack and sink add up to {total_bytes} of {plan.arena_bytes} bytes",
    )
    _audit_leases(tables, ledger)


def _audit_band(plan: Plan, band: Band, tables: PageTables) -> int:
    """Check one band by itself; returns live + holes + quarantined, counted from the tables."""
    name, grid = _name(plan, band), band.grid
    start, end = tables.base[band.index], tables.base[band.index + 1]
    owner, occupied = tables.owner[start:end], tables.occupied[start:end] != 0
    v2p, hole_at = tables.v2p[start:end], tables.hole_at[start:end]
    first = band.first_page
    _require(
        bool((owner[:first] == SINK).all()) and not occupied[:first].any(), f"{name}: a page of the sink was handed out"
    )
    if band.high > band.low:
        _require(
            grid.first_page <= band.low and band.high <= grid.num_pages, f"{name}: span {band.span} leaves its grid"
        )
        _require(grid.grows != "up" or band.low == grid.first_page, f"{name}: the low end starts at {band.low}")
        _require(grid.grows != "down" or band.high == grid.num_pages, f"{name}: the high end ends at {band.high}")
    else:
        _require((band.low, band.high) == (0, 0), f"{name}: empty, but its span is {band.span}")
    live = np.flatnonzero(owner >= 0)
    held = np.flatnonzero(occupied)
    holes = np.flatnonzero(hole_at >= 0)
    _require(bool(occupied[live].all()), f"{name}: a live page counts as free")
    for what, pages in (("held", held), ("hole", holes)):
        inside = not len(pages) or (band.low <= pages[0] and pages[-1] < band.high)
        _require(inside, f"{name}: a {what} page lies outside the span {band.span}")
    _require(not occupied[holes].any(), f"{name}: a hole counts as held")
    counts = (len(live), len(holes), len(held) - len(live))
    booked = (band.num_live, band.num_holes, band.num_quarantined)
    _require(counts == booked, f"{name}: (live, holes, quarantined) are {counts}, booked as {booked}")
    _require(sum(counts) == band.high - band.low, f"{name}: {counts} do not fill the span {band.span}")
    stack = band.holes[hole_at[holes]]
    _require(
        bool((stack == holes).all()) and (not len(holes) or int(hole_at[holes].max()) < band.top),
        f"{name}: the hole stack is off",
    )
    ids = owner[live]
    _require(len(np.unique(ids)) == len(ids), f"{name}: one id owns two pages")
    _require(
        bool(((ids >= start + first) & (ids < end)).all()), f"{name}: a page is owned by an id of another sub-pool"
    )
    _require(bool((v2p[ids - start] == live).all()), f"{name}: v2p and its inverse disagree")
    _require(int((v2p[first:] >= 0).sum()) == len(live), f"{name}: v2p names pages that nobody owns")
    free_ids = band.ids[: band.num_free_ids]
    distinct = np.unique(np.concatenate([free_ids, ids]))
    _require(len(distinct) == len(free_ids) + len(ids) == end - start - first, f"{name}: ids were lost or doubled")
    return sum(counts)


def _audit_leases(tables: PageTables, ledger: Ledger) -> None:
    counts = np.zeros_like(ledger.counts)
    for lease in ledger.leases:
        counts[lease.places] += 1
    _require(bool((counts == ledger.counts).all()), "lease counts are not those of the open leases")
    leased = counts > 0
    _require(bool(tables.occupied[leased].all()), "a leased page counts as free")
    quarantined = (tables.occupied != 0) & (tables.owner < 0)
    _require(bool(leased[quarantined].all()), "a page is quarantined, but nobody leases it")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(message)


def _name(plan: Plan, band: Band) -> str:
    return f"sub-pool {plan.subpools[band.index].name!r}"
