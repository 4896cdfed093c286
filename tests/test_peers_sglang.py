"""The comparison with SGLang's allocators where there is no SGLang: what it says, its requests, and our side of it."""

from __future__ import annotations

import random
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import torch_uma

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

from peers import installed, sglang_allocators  # noqa: E402
from peers.pools import OurPools, grown  # noqa: E402
from peers.sglang_allocators import BATCH, SMALL, exact_bytes_of, growth, num_resident, turnover  # noqa: E402


class Tokens:
    """Memory that is nothing but a number of tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.free_tokens = num_tokens

    def add(self) -> list[int]:
        return []

    def extend(self, request: list[int], num_tokens: int) -> bool:
        if num_tokens > self.free_tokens:
            return False
        self.free_tokens -= num_tokens
        request.append(num_tokens)
        return True

    def finish(self, request: list[int]) -> None:
        self.free_tokens += sum(request)

    def check(self) -> None:
        assert self.free_tokens >= 0


def small_pools(name: str, page_size: int) -> OurPools:
    plan = torch_uma.plan(SMALL[name], memory="1MiB", page_size=page_size)
    return OurPools(plan, max_requests=64, max_tokens=4096)


@pytest.mark.parametrize(("found", "said"), [(None, "here is none"), ("0.5.22", "here is 0.5.22"), ("0.5.23", None)])
def test_what_is_missing_is_said_in_a_sentence(monkeypatch, found: str | None, said: str | None) -> None:
    def version(name: str) -> str:
        assert name == "sglang"
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(installed, "version", version)
    sentence = sglang_allocators.why_not()
    if said is None:
        assert sentence is None
    else:
        assert sentence is not None and said in sentence
        monkeypatch.setattr(sys, "argv", ["sglang_allocators"])
        with pytest.raises(SystemExit, match=said):
            sglang_allocators.main()


def test_requests_grow_by_whole_pages_to_lengths_of_their_mix() -> None:
    chance = random.Random(0)
    grows = [growth((1152, 256), chance) for _ in range(200)]
    assert {tokens[:3] for tokens in grows} == {(512, 512, 128)}
    assert {tokens[3:] for tokens in grows} == {(16,) * count for count in range(9, 17)}


def test_one_percent_finish_in_a_step() -> None:
    steps = turnover(100, random.Random(0))
    assert sum(map(len, steps)) == BATCH and {len(leaving) for leaving in steps} == {2, 3}
    assert all(len(set(leaving)) == len(leaving) and set(leaving) <= set(range(BATCH)) for leaving in steps)


def test_all_that_left_makes_room_and_a_refused_request_takes_nothing() -> None:
    pools = Tokens(100)
    assert num_resident(pools, [(10, 5, 5)] * 9, [(30,), (20, 2), (40,), (9,)], seed=0) == 5
    assert pools.free_tokens == 0
    assert grown(pools, (1,)) is None and pools.free_tokens == 0


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", SMALL)
def test_ours_is_full_only_when_the_bytes_are_used(name: str, page_size: int) -> None:
    pools, chance = small_pools(name, page_size), random.Random(1)
    plan = pools.pool.plan
    wanted = [growth((512, 128), chance) for _ in range(60)]
    others = [growth(chance.choice([(128, 128), (1024, 512)]), chance) for _ in range(60)]
    resident = num_resident(pools, wanted, others, seed=1)
    held_bytes = sum(plan.bytes_per_sequence(sum(tokens)) for tokens in wanted[: resident + 1])
    chunk_bytes = 512 * sum(subpool.entry_bytes for subpool in plan.subpools if not subpool.is_state)
    assert 0 < resident < 60 and held_bytes + chunk_bytes > plan.arena_bytes - plan.sink_bytes
    exact = sum(exact_bytes_of(plan, page_size, sum(tokens)) for tokens in wanted[:resident])
    assert exact < plan.arena_bytes


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", SMALL)
def test_ours_says_where_tokens_go_and_takes_all_back(name: str, page_size: int) -> None:
    pools = small_pools(name, page_size)
    before = pools.pool.stats().free_bytes
    requests = [grown(pools, (length,)) for length in (3, 150, 17)]
    batch = pools.batch(requests)
    for _ in range(20):
        places = pools.decode(batch)
        assert len(places) == len(pools.attention)
        for entries in places:
            assert (entries > 0).all() and len(set(entries.flatten().tolist())) == len(requests)
    assert [request.length for request in requests] == [23, 170, 37]
    pools.finish(requests[1])
    assert pools.compact() >= 0
    ((owner, attribute),) = pools.copiers()
    assert callable(getattr(owner, attribute))
    for request in (requests[0], requests[2]):
        pools.finish(request)
    pools.check()
    assert pools.pool.stats().free_bytes == before


def test_a_mix_of_which_no_request_fits_is_left_out() -> None:
    assert sglang_allocators.fit("gpt-oss-20b", "6MiB", 16, 0) == []
