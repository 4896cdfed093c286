"""What the allocator hands out, takes back, moves and refuses."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from arenas import MoverError, StampedArena, books, small_plan
from worlds import Flag

from torch_uma.allocator import SCALAR_PAGES, Allocator
from torch_uma.errors import LeaseError, OutOfMemory, PageError, PlanError
from torch_uma.placement import EMPTY

STATE, WINDOW, FULL = range(3)
NUM_IDS = 19 + 42 + 128


def one_float() -> Allocator:
    """State: ids 0 to 18; window: 19 (the sink) to 60; full: 61 to 63 (the sink's) to 188."""
    return Allocator(small_plan("one_float"))


def spans(allocator: Allocator) -> list[tuple[int, int]]:
    return [band.span for band in allocator.bands]


# Reserve and release


def test_ids_and_places_of_a_first_demand() -> None:
    allocator = one_float()
    assert allocator.id_base == (0, 19, 61, NUM_IDS) and len(allocator.v2p) == NUM_IDS
    pages = allocator.reserve([3, 4, 5])
    assert pages.dtype == np.int64
    assert pages.tolist() == [0, 1, 2, 20, 21, 22, 23, 64, 65, 66, 67, 68]
    assert allocator.v2p[pages].tolist() == [0, 1, 2, 22, 23, 24, 25, 123, 124, 125, 126, 127]
    assert spans(allocator) == [(0, 3), (22, 26), (123, 128)]
    assert [band.num_live for band in allocator.bands] == [3, 4, 5] == [band.peak_live for band in allocator.bands]
    assert allocator.layout_version == 0
    allocator.check()
    assert allocator.reserve([0, 0, 0]).tolist() == [] and allocator.reserve([0, 1, 0]).tolist() == [24]


def test_ids_come_back_last_in_first_out_and_places_too() -> None:
    allocator = one_float()
    pages = allocator.reserve([3, 4, 5])
    allocator.release(pages[[1, 4, 9, 5, 8]])
    assert allocator.v2p[pages].tolist() == [0, -1, 2, 22, -1, -1, 25, 123, -1, -1, 126, 127]
    again = allocator.reserve([1, 1, 1])
    assert again.tolist() == [pages[1], pages[5], pages[8]]
    assert allocator.v2p[again].tolist() == [1, 24, 124]
    assert spans(allocator) == [(0, 3), (22, 26), (123, 128)]
    allocator.check()


@pytest.mark.parametrize("count", [1, SCALAR_PAGES, SCALAR_PAGES + 1, 30])
def test_released_pages_of_any_mix_and_order_can_be_reserved_again(count: int) -> None:
    allocator = one_float()
    pages = allocator.reserve([9, 10, 15])
    order = np.random.default_rng(count).permutation(pages)
    allocator.release(order[:count])
    assert sum(band.num_live for band in allocator.bands) == len(pages) - count
    assert (allocator.v2p[order[:count]] == -1).all() and (allocator.v2p[order[count:]] >= 0).all()
    allocator.check()
    demand = [sum(allocator.id_base[k] <= page < allocator.id_base[k + 1] for page in order[:count]) for k in range(3)]
    again = allocator.reserve(demand)
    assert allocator.tables.kind[again].tolist() == [k for k, count in enumerate(demand) for _ in range(count)]
    assert sorted(again.tolist()) == sorted(order[:count].tolist())
    allocator.check()


@pytest.mark.parametrize("as_pages", [list, tuple, np.array, lambda pages: np.array(pages, np.int32)])
@pytest.mark.parametrize("count", [2, 20])
def test_ids_may_be_given_in_any_form(count: int, as_pages: Callable[[list[int]], list[int]]) -> None:
    allocator = one_float()
    pages = allocator.reserve([0, 0, 20]).tolist()
    allocator.release(as_pages(pages[:count]))
    assert allocator.bands[FULL].num_live == 20 - count
    allocator.release([])
    allocator.release(np.empty(0, np.int32))
    allocator.check()


def test_a_band_without_pages_is_empty_and_takes_no_room() -> None:
    allocator = one_float()
    pages = allocator.reserve([3, 4, 5])
    for k in range(3):
        allocator.release(pages[allocator.tables.kind[pages] == k], subpool=k)
        assert allocator.bands[k].span == EMPTY
        allocator.check()
    assert len(allocator.reserve([0, 41, 0])) == 41
    assert one_float().quote([19, 0, 0]).fits and one_float().quote([0, 0, 125]).fits
    assert not one_float().quote([0, 0, 126]).fits


def test_every_id_is_used_once_whatever_the_sizes_of_pages() -> None:
    for k, most in enumerate([19, 41, 125]):
        allocator = one_float()
        for _ in range(3):
            pages = [allocator.reserve_one(k) for _ in range(most)]
            first = allocator.plan.subpools[k].first_page
            assert sorted(pages) == list(range(allocator.id_base[k] + first, allocator.id_base[k + 1]))
            assert sorted(allocator.v2p[pages].tolist()) == list(range(first, allocator.plan.subpools[k].num_pages))
            with pytest.raises(OutOfMemory, match="it would not fit|releasing pages would help"):
                allocator.reserve_one(k)
            allocator.check()
            for page in pages:
                allocator.release_one(page)
            allocator.check()
            assert spans(allocator) == [EMPTY] * 3


def test_one_page_is_reserved_as_by_the_vector_path() -> None:
    one, many = one_float(), one_float()
    rnd = random.Random(3)
    for _ in range(300):
        k = rnd.randrange(3)
        live = np.flatnonzero((one.v2p >= 0) & (one.tables.kind == k))[one.plan.subpools[k].first_page :]
        if rnd.random() < 0.55 or not len(live):
            demand = [int(index == k) for index in range(3)]
            if many.quote(demand).fits:
                assert one.reserve_one(k) == many.reserve(demand)[0]
        else:
            page = int(rnd.choice(live))
            one.release_one(page)
            many.release([page])
        assert [band.num_live for band in one.bands] == [band.num_live for band in many.bands]
        one.check()
        many.check()


def test_holes_are_filled_before_a_band_grows() -> None:
    allocator = one_float()
    pages = allocator.reserve([4, 4, 4])
    before = spans(allocator)
    for k, page in enumerate(pages[[1, 5, 9]].tolist()):
        allocator.release_one(page)
        assert allocator.reserve_one(k) == page
        assert spans(allocator) == before
    allocator.release(pages[[1, 5, 9]])
    allocator.reserve([1, 1, 1])
    assert spans(allocator) == before


# What is refused


def wrong_ids(pages: list[int]) -> dict[str, tuple[int, str]]:
    return {
        "sentinel": (-1, rf"page -1 is no page id; ids of this arena are 0 to {NUM_IDS - 1}"),
        "far below": (-(2**31), "page -2147483648 is no page id"),
        "above": (NUM_IDS, f"page {NUM_IDS} is no page id"),
        "another arena's": (10**6, "page 1000000 is no page id"),
        "wrapped": (2**32 + pages[0], f"page {2**32 + pages[0]} is no page id"),
        "sink of the window": (
            19,
            "page 19 is the sink of 'window_8'; it is never handed out and cannot be given back",
        ),
        "sink of full": (63, "page 63 is the sink of 'full'"),
        "dead": (18, "page 18 of 'state' is not live; was it released before?"),
        "dead, the last one": (NUM_IDS - 1, f"page {NUM_IDS - 1} of 'full' is not live"),
        "twice": (pages[2], rf"release of \d+ pages names some of them twice: \[{pages[2]}\]; name each page once"),
    }


@pytest.mark.parametrize("what", wrong_ids([0] * 5))
@pytest.mark.parametrize("count", [5, 8, 9, 20])
def test_release_refuses_what_it_does_not_own(what: str, count: int) -> None:
    allocator = one_float()
    pages = allocator.reserve([8, 8, 8]).tolist()
    lease = allocator.lease(pages[:3], "a copy")
    before = books(allocator)
    wrong, message = wrong_ids(pages)[what]
    for place in (0, count // 2, count - 1):
        mixed = [*pages[: count - 1]]
        mixed.insert(place, wrong)
        for ids in (mixed, np.array(mixed)):
            with pytest.raises(PageError, match=message):
                allocator.release(ids)
            assert books(allocator) == before
    if what != "twice":
        with pytest.raises(PageError, match=message):
            allocator.release_one(wrong)
        for ids in ([wrong], [pages[0], wrong]):
            with pytest.raises(PageError, match=message):
                allocator.lease(ids, "a copy")
    assert books(allocator) == before
    lease.close()
    allocator.check()


@pytest.mark.parametrize("count", [1, 8, 9])
def test_a_double_free_is_refused(count: int) -> None:
    allocator = one_float()
    pages = allocator.reserve([0, 10, 10])
    allocator.release(pages[:count])
    before = books(allocator)
    with pytest.raises(PageError, match=f"page {pages[0]} of 'window_8' is not live; was it released before?"):
        allocator.release(pages[:count])
    assert books(allocator) == before


@pytest.mark.parametrize("count", [3, 12])
def test_with_a_sub_pool_named_only_its_pages_are_taken(count: int) -> None:
    allocator = one_float()
    pages = allocator.reserve([1, 15, 15]).tolist()
    before = books(allocator)
    mixed = pages[16 : 15 + count] + pages[1:2]
    for ids in (mixed, mixed[::-1]):
        with pytest.raises(PageError, match=f"page {pages[1]} is one of 'window_8', not of 'full'"):
            allocator.release(ids, subpool=FULL)
        assert books(allocator) == before
    with pytest.raises(PageError, match="page 0 is one of 'state', not of 'window_8'"):
        allocator.release(pages[:1], subpool=WINDOW)
    assert books(allocator) == before
    allocator.release(pages[16 : 16 + count], subpool=FULL)
    allocator.release(pages[:1], subpool=STATE)
    assert [band.num_live for band in allocator.bands] == [0, 15, 15 - count]


@pytest.mark.parametrize("ids", [[[1, 2]], [1.5], np.zeros((2, 2), np.int32), np.zeros((9, 2), np.int64), "12"])
def test_ids_that_are_no_flat_list_of_whole_numbers_are_refused(ids: list[int]) -> None:
    allocator = one_float()
    allocator.reserve([3, 3, 3])
    before = books(allocator)
    for act in (allocator.release, lambda wrong: allocator.lease(wrong, "a copy")):
        with pytest.raises(PageError, match="page ids are a flat list of whole numbers, not "):
            act(ids)
    assert books(allocator) == before


def test_many_duplicates_are_named_in_part() -> None:
    allocator = one_float()
    pages = allocator.reserve([0, 0, 20]).tolist()
    with pytest.raises(
        PageError, match=r"release of 40 pages names some of them twice: \[64, 65, 66, 67, 68, 69, 70, 71\];"
    ):
        allocator.release(pages * 2)
    with pytest.raises(PageError, match=r"release of 4 pages names some of them twice: \[64, 65\];"):
        allocator.release(pages[:2] * 2)


def test_what_an_out_of_memory_says() -> None:
    allocator = one_float()
    with pytest.raises(
        OutOfMemory,
        match=r"asked for pages \(1 of state, 200 of full\), but full does not fit; 4,000 of 4,096 bytes are free; it "
        "would not fit an empty arena: ask for less, or give the arena more memory",
    ) as never:
        allocator.reserve([1, 0, 200])
    assert isinstance(never.value, MemoryError) and not never.value.quote.fits_empty
    pages = allocator.reserve([0, 41, 0])
    with pytest.raises(OutOfMemory, match="; releasing pages would help: 3 of window_8$"):
        allocator.reserve([1, 0, 0])
    lease = allocator.lease(pages, "a copy")
    with pytest.raises(OutOfMemory, match="but state does not fit; .*; no release of one kind alone would help$"):
        allocator.reserve_one(STATE)
    lease.close()


# Leases


def test_a_leased_page_dies_at_once_and_comes_back_with_its_last_lease() -> None:
    allocator = one_float()
    pages = allocator.reserve([0, 3, 0])
    first, second = allocator.lease(pages[:2], "one"), allocator.lease(pages[1:], "two")
    assert (first.user, first.pages.tolist(), first.places.tolist()) == ("one", [20, 21], [39, 40])
    allocator.release(pages)
    band = allocator.bands[WINDOW]
    assert (band.num_live, band.num_quarantined, band.num_holes, band.span) == (0, 3, 0, (20, 23))
    assert (allocator.v2p[pages] == -1).all() and allocator.tables.occupied[39:42].all()
    with pytest.raises(PageError, match="page 20 of 'window_8' is not live"):
        allocator.release(pages[:1])
    with pytest.raises(PageError, match="page 20 of 'window_8' is not live"):
        allocator.lease(pages[:1], "three")
    # the ids are free, their places are not
    again = allocator.reserve([0, 3, 0])
    assert again.tolist() == pages[::-1].tolist() and allocator.v2p[again].tolist() == [23, 24, 25]
    first.close()
    assert (band.num_live, band.num_quarantined, band.num_holes, band.span) == (3, 2, 0, (21, 26))
    second.close()
    assert (band.num_live, band.num_quarantined, band.num_holes, band.span) == (3, 0, 0, (23, 26))
    allocator.check()


@pytest.mark.parametrize("count", [4, 12])
def test_free_and_leased_pages_may_be_released_together(count: int) -> None:
    allocator = one_float()
    pages = allocator.reserve([2, 0, count + 1])
    lease = allocator.lease(pages[[3, 5]], "a copy")
    allocator.release(pages[2:-1])
    band = allocator.bands[FULL]
    assert (band.num_live, band.num_quarantined, band.num_holes) == (1, 2, count - 4 + 1)
    assert (allocator.bands[STATE].num_live, allocator.bands[STATE].num_quarantined) == (2, 0)
    allocator.check()
    lease.close()
    assert (band.num_live, band.num_quarantined, band.num_holes, band.span) == (1, 0, 0, (127, 128))
    allocator.check()


def test_a_lease_that_ends_on_live_pages_leaves_them_alone() -> None:
    allocator = one_float()
    pages = allocator.reserve([1, 2, 3])
    before = books(allocator)
    allocator.lease(pages, "a copy").close()
    assert books(allocator) == before


def test_the_pages_of_one_lease_come_back_in_every_sub_pool() -> None:
    allocator = one_float()
    pages = allocator.reserve([2, 2, 2])
    lease = allocator.lease(pages, "a copy")
    allocator.release(pages[[0, 3, 5]])
    assert [band.num_quarantined for band in allocator.bands] == [1, 1, 1]
    lease.close()
    assert [(band.num_live, band.num_quarantined) for band in allocator.bands] == [(1, 0)] * 3
    allocator.check()


def test_an_event_is_found_out_by_poll_alone() -> None:
    allocator = one_float()
    pages = allocator.reserve([0, 0, 3])
    flag = Flag(True)
    lease = allocator.lease(pages[:2], "a copy")
    lease.close(flag)
    allocator.release(pages)
    allocator.reserve([1, 1, 1])
    allocator.compact()
    allocator.check()
    assert flag.num_queries == 0 and allocator.bands[FULL].num_quarantined == 2
    assert allocator.poll() == 1
    assert flag.num_queries == 1 and allocator.bands[FULL].num_quarantined == 0
    assert allocator.poll() == 0
    allocator.check()


def test_a_lease_is_of_something_and_ends_once() -> None:
    allocator = one_float()
    pages = allocator.reserve([1, 0, 0])
    before = books(allocator)
    with pytest.raises(LeaseError, match="'a copy' asked for a lease of no pages"):
        allocator.lease([], "a copy")
    assert books(allocator) == before
    lease = allocator.lease(pages, "a copy")
    lease.close()
    with pytest.raises(LeaseError, match="was closed before"):
        lease.close()
    assert books(allocator) == before


def test_ids_do_not_depend_on_when_events_pass() -> None:
    """Ranks that see an event pass at different times still hand out the same ids."""
    for seed in range(5):
        ranks = [one_float(), one_float(), one_float()]
        rnds = [random.Random(1000 * seed + rank) for rank in range(len(ranks))]
        rnd = random.Random(seed)
        live: list[int] = []
        differed = False
        leases: list[list[tuple[object, Flag]]] = [[] for _ in ranks]
        for _ in range(150):
            if rnd.random() < 0.5 and len(live) < 16:
                demand = [rnd.randrange(2), rnd.randrange(3), rnd.randrange(4)]
                reserved = [rank.reserve(demand).tolist() for rank in ranks]
                assert reserved[0] == reserved[1] == reserved[2]
                live += reserved[0]
            elif live:
                pages = rnd.sample(live, rnd.randint(1, len(live)))
                leased = pages[: rnd.randrange(3)]
                for rank, flags in zip(ranks, leases):
                    if leased and len(flags) < 3:
                        flag = Flag()
                        rank.lease(leased, "a transfer").close(flag)
                        flags.append((leased, flag))
                    rank.release(pages)
                live = [page for page in live if page not in pages]
            for rank, flags, own in zip(ranks, leases, rnds):
                for _, flag in flags:
                    flag.has_passed |= own.random() < 0.5
                assert rank.poll() == sum(flag.has_passed for _, flag in flags)
                flags[:] = [pair for pair in flags if not pair[1].has_passed]
                rank.check()
            differed |= ranks[0].v2p.tolist() != ranks[1].v2p.tolist()
        assert differed  # places may differ, and did


# Moves


def scattered() -> tuple[Allocator, StampedArena, list[int]]:
    """State {0, 3, 6}, window {24, 26, 27} and full {108, 112, 127}, each page stamped with its id."""
    plan = small_plan("one_float")
    arena = StampedArena(plan)
    allocator = Allocator(plan, mover=arena.move)
    pages = allocator.reserve([7, 4, 20]).tolist()
    keep = [0, 3, 6, 7, 9, 10, 11, 15, 30]
    allocator.release([page for k, page in enumerate(pages) if k not in keep])
    live = [pages[k] for k in keep]
    for page in live:
        k = int(allocator.tables.kind[page])
        arena.pages(k)[allocator.v2p[page]] = page
    return allocator, arena, live


def assert_content_follows(allocator: Allocator, arena: StampedArena, live: list[int]) -> None:
    allocator.check()
    for page in live:
        assert (arena.pages(int(allocator.tables.kind[page]))[allocator.v2p[page]] == page).all()
    assert (allocator.v2p >= 0).sum() == len(live) + 1 + 3  # and the sinks


def test_compaction_packs_the_ends_first_and_says_what_it_moved() -> None:
    allocator, arena, live = scattered()
    reported: list[list[int]] = []
    allocator.on_moved = lambda pages: reported.append(pages.tolist())
    assert [allocator.v2p[page] for page in live] == [0, 3, 6, 24, 26, 27, 108, 112, 127]
    moved_bytes = allocator.compact()
    assert arena.waves == [(0, [3, 6], [1, 2]), (2, [108, 112], [125, 126]), (1, [27], [25])]
    assert reported == [[live[1], live[2]], [live[6], live[7]], [live[5]]]
    assert moved_bytes == 2 * 208 + 2 * 32 + 96 == arena.moved_bytes() == allocator.stats().moved_bytes
    assert spans(allocator) == [(0, 3), (24, 27), (125, 128)] and allocator.layout_version == 3
    assert_content_follows(allocator, arena, live)
    before = books(allocator)
    assert allocator.compact() == 0 and books(allocator) == before


@pytest.mark.parametrize(
    ("budget_bytes", "moved_bytes", "after"),
    [
        (0, 0, [(0, 7), (24, 28), (108, 128)]),
        (31, 0, [(0, 7), (24, 28), (108, 128)]),
        (32, 32, [(0, 7), (24, 28), (112, 128)]),
        (95, 64, [(0, 7), (24, 28), (125, 128)]),
        (207, 160, [(0, 7), (24, 27), (125, 128)]),
        (208, 208, [(0, 4), (24, 28), (108, 128)]),
        (240, 240, [(0, 4), (24, 28), (112, 128)]),
        (368, 368, [(0, 4), (24, 27), (125, 128)]),
        (416, 416, [(0, 3), (24, 28), (108, 128)]),
        (10**12, 576, [(0, 3), (24, 27), (125, 128)]),
        (-5, 0, [(0, 7), (24, 28), (108, 128)]),
    ],
)
def test_compaction_keeps_to_its_budget(budget_bytes: int, moved_bytes: int, after: list[tuple[int, int]]) -> None:
    allocator, arena, live = scattered()
    assert allocator.compact(budget_bytes) == moved_bytes == arena.moved_bytes()
    assert spans(allocator) == after
    assert_content_follows(allocator, arena, live)


def test_a_budget_is_enough_in_the_end() -> None:
    allocator, arena, live = scattered()
    total_bytes = 0
    while moved_bytes := allocator.compact(208):
        total_bytes += moved_bytes
        assert_content_follows(allocator, arena, live)
    assert total_bytes == 576 and spans(allocator) == [(0, 3), (24, 27), (125, 128)]


def test_pinned_pages_stay_in_compaction() -> None:
    allocator, arena, live = scattered()
    lease = allocator.lease([live[1], live[6]], "a copy")
    handle = allocator.pin_while(lambda: np.array(live[3:4], np.int64))
    assert allocator.compact() == 208 + 96
    assert arena.waves == [(0, [6], [1]), (1, [27], [25])]
    assert spans(allocator) == [(0, 4), (24, 27), (108, 128)]
    assert_content_follows(allocator, arena, live)
    allocator.unpin(handle)
    lease.close()
    assert allocator.compact() > 0
    assert_content_follows(allocator, arena, live)


def test_a_move_runs_as_one_wave_and_pulls_the_frontiers_back() -> None:
    allocator, arena, live = scattered()
    allocator.move(WINDOW, np.array([24, 27]), np.array([21, 35]))
    assert arena.waves == [(1, [24, 27], [21, 35])] and allocator.layout_version == 1
    assert allocator.bands[WINDOW].span == (21, 36) and allocator.bands[WINDOW].num_holes == 12
    assert_content_follows(allocator, arena, live)
    allocator.move(WINDOW, np.array([21, 35]), np.array([25, 27]))
    assert allocator.bands[WINDOW].span == (25, 28)
    assert_content_follows(allocator, arena, live)
    allocator.move(STATE, np.array([0]), np.array([8]))
    assert allocator.bands[STATE].span == (0, 9)
    allocator.move(FULL, np.array([127]), np.array([106]))
    assert allocator.bands[FULL].span == (106, 128)
    assert_content_follows(allocator, arena, live)
    before = books(allocator)
    allocator.move(STATE, np.empty(0, np.int64), np.empty(0, np.int64))
    assert books(allocator) == before


@pytest.mark.parametrize("waves_before_failure", [0, 1])
def test_a_copy_that_fails_leaves_the_books_telling_the_truth(waves_before_failure: int) -> None:
    allocator, arena, live = scattered()
    demand = [13, 0, 8]
    assert allocator.quote(demand).how == "redistribute"
    before = books(allocator)
    arena.waves_before_failure = waves_before_failure
    with pytest.raises(MoverError, match="the copy failed"):
        allocator.reserve(demand)
    assert len(arena.waves) == waves_before_failure == allocator.layout_version
    assert [band["ids"] for band in books(allocator)["bands"]] == [band["ids"] for band in before["bands"]]
    assert_content_follows(allocator, arena, live)
    assert allocator.quote(demand).fits
    pages = allocator.reserve(demand).tolist()
    for page in pages:
        arena.pages(int(allocator.tables.kind[page]))[allocator.v2p[page]] = page
    assert_content_follows(allocator, arena, live + pages)


@pytest.mark.parametrize("waves_before_failure", [0, 1, 2])
def test_a_compaction_that_fails_leaves_the_books_telling_the_truth(waves_before_failure: int) -> None:
    allocator, arena, live = scattered()
    arena.waves_before_failure = waves_before_failure
    with pytest.raises(MoverError):
        allocator.compact()
    assert_content_follows(allocator, arena, live)
    allocator.compact()
    assert spans(allocator) == [(0, 3), (24, 27), (125, 128)]
    assert_content_follows(allocator, arena, live)


def test_without_a_mover_only_the_books_move() -> None:
    allocator = one_float()
    pages = allocator.reserve([5, 0, 0])
    allocator.release(pages[[0, 2]])
    assert allocator.compact() == 2 * 208 and allocator.v2p[pages].tolist() == [-1, 1, -1, 0, 2]
    assert allocator.layout_version == 1
    allocator.check()


# Demands, hints and splits


@pytest.mark.parametrize("demand", [[], [0], [1, 1], [0, 0, 0, 0], [1, -1, 0], [0, 0, -1]])
def test_a_demand_that_is_not_one_count_for_each_sub_pool_is_refused(demand: list[int]) -> None:
    allocator = one_float()
    allocator.release(allocator.reserve([2, 2, 2])[::2])
    before = books(allocator)
    for act in (allocator.quote, allocator.reserve, lambda wrong: allocator.reserve(wrong, runs={0})):
        with pytest.raises(PageError, match="one number of pages, 0 or more, for each of state, window_8, full; got"):
            act(demand)
    assert books(allocator) == before


def test_fractions_of_pages_and_runs_of_foreign_sub_pools_are_refused() -> None:
    allocator = one_float()
    allocator.release(allocator.reserve([2, 2, 2])[::2])
    before = books(allocator)
    for act in (allocator.quote, allocator.reserve):
        with pytest.raises(PageError, match="one number of pages"):
            act([0, 1.0, 0])
    for runs in ({3}, {-1}):
        with pytest.raises(PageError, match="by index, 0 to 2"):
            allocator.reserve([1, 1, 1], runs=runs)
    assert books(allocator) == before
    assert len(allocator.reserve(np.array([1, 0, 2]))) == 3


def test_hints_and_split_exclude_each_other() -> None:
    with pytest.raises(PlanError, match="give hints or split, not both"):
        Allocator(small_plan("one_float"), hints={"state": 0.1}, split={"state": 0.5})


@pytest.mark.parametrize(
    ("sources", "destinations"),
    [
        ([3], [6]),  # not live
        ([-1], [6]),
        ([19 + 22], [6]),  # live, but another sub-pool's
        ([10**6], [6]),
        ([0], [1]),  # not free
        ([0], [19]),
        ([0], [-1]),
        ([0, 1], [6, 19]),
        ([0, 3], [6, 7]),
        ([0, 2], [6, 7]),
        ([0, 1], [6]),
        ([0], [6, 7]),
        ([0, 0], [6, 7]),
        ([0, 1], [6, 6]),
        ([0, 0, 1], [6, 7, 7]),  # as many distinct on both sides
        ([2], [6]),  # pinned
    ],
)
def test_a_move_of_what_is_not_live_or_to_what_is_not_free_is_refused(
    sources: list[int], destinations: list[int]
) -> None:
    allocator = one_float()
    pages = allocator.reserve([3, 4, 5])
    allocator.lease(pages[2:3], "a host copy")
    before = books(allocator)
    with pytest.raises(
        PageError, match=rf"move of {len(sources)} pages of 'state': sources must be live and not pinned"
    ):
        allocator.move(0, np.array(sources), np.array(destinations))
    assert books(allocator) == before
