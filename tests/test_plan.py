"""Plans: band order, grids, capacity and refusals, for every geometry."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_uma.errors import PlanError
from torch_uma.layout import Chunk, Full, Layer, Lifetime, Memory, Row, State, Window
from torch_uma.plan import Plan, SubPool, plan

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
MIB = 2**20


def row(name: str, *shape: int, dtype: torch.dtype = BF16) -> Row:
    return Row(name=name, shape=shape, dtype=dtype)


def layer(lifetime: Lifetime, *rows: Row, per: int = 1) -> Layer:
    return Layer(memories=(Memory(lifetime=lifetime, rows=rows, tokens_per_entry=per),))


def kv(lifetime: Lifetime, num_heads: int = 2, k_size: int = 24, v_size: int | None = None) -> Layer:
    return layer(lifetime, row("k", num_heads, k_size), row("v", num_heads, k_size if v_size is None else v_size))


STATE = layer(State(), row("conv", 48, 3), row("recurrent", 4, 8, 12, dtype=FP32))
BOTH = Layer(memories=STATE.memories + kv(Full()).memories)
# name: layers, expected sub-pools from the low end
GEOMETRIES: dict[str, tuple[list[Layer], list[str]]] = {
    "full": ([kv(Full())] * 3, ["full"]),
    "state": ([STATE] * 3, ["state"]),
    "window": ([kv(Window(40))] * 2, ["window_40"]),
    "chunk": ([kv(Chunk(96))], ["chunk_96"]),
    "state and full": ([STATE, STATE, kv(Full())], ["state", "full"]),
    "window and full": ([kv(Full()), kv(Window(40))], ["window_40", "full"]),
    "chunk and full": ([kv(Chunk(96)), kv(Full())], ["chunk_96", "full"]),
    "state and windows": ([kv(Window(17)), STATE, kv(Window(64))], ["state", "window_64", "window_17"]),
    "windows": ([kv(Window(17)), kv(Window(64)), kv(Window(33))], ["window_64", "window_33", "window_17"]),
    "all": (
        [kv(Full()), kv(Window(17)), STATE, kv(Window(64)), kv(Chunk(48))],
        ["state", "window_64", "chunk_48", "window_17", "full"],
    ),
    "keys wider than values": ([kv(Full(), 2, 40, 24), kv(Window(32), 4, 40, 24)], ["window_32", "full"]),
    "latents": ([layer(Full(), row("latent", 1, 72), row("rope_key", 1, 8))] * 3, ["full"]),
    "latents without rope": ([layer(Full(), row("latent", 1, 72), row("rope_key", 1, 0)), STATE], ["state", "full"]),
    "latents and windows": ([layer(Full(), row("latent", 1, 72)), kv(Window(32))], ["window_32", "full"]),
    "index keys": ([layer(Full(), row("latent", 1, 72), row("index_key", 20, dtype=FP32))] * 2, ["full"]),
    "compressed": (
        [
            Layer(memories=kv(Window(32)).memories + layer(Full(), row("k", 1, 64), per=4).memories),
            Layer(memories=kv(Window(32)).memories + layer(Full(), row("k", 1, 64), per=128).memories),
        ],
        ["window_32", "full_per128", "full_per4"],
    ),
    "compressed beside full": (
        [kv(Full()), layer(Full(), row("k", 1, 64), per=4), STATE],
        ["state", "full_per4", "full"],
    ),
    "fp8 with scales": (
        [layer(Full(), row("k", 2, 24, dtype=FP8), row("k_scale", 2, dtype=FP32), row("v", 2, 24, dtype=FP8))],
        ["full"],
    ),
    "fp4 with scales": (
        [layer(Window(32), row("k", 2, 12, dtype=torch.uint8), row("k_scale", 2, 3, dtype=FP8)), kv(Full())],
        ["window_32", "full"],
    ),
    "different dtypes": ([kv(Full()), layer(Window(32), row("k", 2, 24, dtype=FP8))], ["window_32", "full"]),
    "shared": ([kv(Full()), kv(Window(32)), Layer(shares=0), Layer(), Layer(shares=1)], ["window_32", "full"]),
    "state and keys in one layer": ([BOTH, STATE, BOTH], ["state", "full"]),
}


def make(name: str, memory: int = MIB, page_size: int = 16) -> Plan:
    return plan(GEOMETRIES[name][0], memory=memory, page_size=page_size)


def rows_of(made: Plan) -> list[tuple[int, str]]:
    return [(placed.layer, placed.row.name) for subpool in made.subpools for placed in subpool.layout.rows]


def check_grids(made: Plan) -> None:
    """The rules of the grids, computed anew."""
    attention = [subpool for subpool in made.subpools if not subpool.is_state]
    assert made.arena_bytes % 256 == 0
    assert made.sink_bytes == 0 or made.sink_bytes < 2 * max(subpool.page_bytes for subpool in attention)
    assert (made.sink_bytes == 0) == (not attention)
    for index, subpool in enumerate(made.subpools):
        assert subpool.index == index
        first_bytes = subpool.origin_bytes + subpool.first_page * subpool.page_bytes
        end_bytes = subpool.origin_bytes + subpool.num_pages * subpool.page_bytes
        assert made.sink_bytes <= first_bytes < made.sink_bytes + subpool.page_bytes
        assert made.arena_bytes - subpool.page_bytes < end_bytes <= made.arena_bytes
        assert subpool.origin_bytes % 16 == 0 and subpool.page_bytes % 16 == 0
        if subpool.is_state:
            assert (subpool.first_page, subpool.origin_bytes, subpool.grows) == (0, made.sink_bytes, "up")
        else:
            assert subpool.first_page >= 1
            assert subpool.origin_bytes >= 0 and subpool.origin_bytes + subpool.page_bytes <= made.sink_bytes
            if subpool.grows == "down":
                assert end_bytes == made.arena_bytes
            elif subpool.grows == "up":
                assert first_bytes == made.sink_bytes
            else:
                assert subpool.origin_bytes == 0
    growth = [subpool.grows for subpool in made.subpools]
    if len(growth) > 1:
        assert growth == ["up", *["float"] * (len(growth) - 2), "down"]
    else:
        assert growth == ["down" if attention else "up"]


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_every_geometry(name: str, page_size: int) -> None:
    layers, names = GEOMETRIES[name]
    made = make(name, page_size=page_size)
    assert [subpool.name for subpool in made.subpools] == names
    assert made.layers == tuple(layers)
    check_grids(made)
    declared = [(index, row.name) for index, one in enumerate(layers) for m in one.memories for row in m.rows]
    assert sorted(rows_of(made)) == sorted(declared)
    for subpool in made.subpools:
        assert subpool.page_size == (1 if subpool.is_state else page_size)
        for placed in subpool.layout.rows:
            assert subpool.row(placed.layer, placed.row.name) == placed
    text = str(made)
    for subpool in made.subpools:
        assert f"{subpool.name} " in text and f"{subpool.page_bytes:,}" in text
    assert f"{made.num_sequences(1536):,}" in text


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("page_size", [1, 16])
def test_capacity_is_the_bytes_less_sink_and_slack(name: str, page_size: int) -> None:
    made = make(name, 3 * MIB + 777, page_size)
    for num_tokens in (1, 127, 640):
        count, sequence_bytes = made.num_sequences(num_tokens), made.bytes_per_sequence(num_tokens)
        assert count * sequence_bytes + made.sink_bytes <= made.arena_bytes
        waste = 2 * sum(subpool.page_bytes for subpool in made.subpools)
        assert (count + 1) * sequence_bytes + made.sink_bytes > made.arena_bytes - waste
        pages = zip(made.subpools, made.demand(num_tokens), strict=True)
        assert sequence_bytes == sum(subpool.page_bytes * num_pages for subpool, num_pages in pages)


def test_order_of_several_full_subpools_is_by_bytes_a_token() -> None:
    light, heavy = layer(Full(), row("k", 1, 64)), layer(Full(), row("k", 1, 2048), per=4)
    assert [subpool.name for subpool in plan([light, heavy], memory=MIB).subpools] == ["full", "full_per4"]
    assert [subpool.bytes_per_token for subpool in plan([light, heavy], memory=MIB).subpools] == [128, 1024]


def brute_pages(subpool: SubPool, num_tokens: int) -> int:
    needed = range(subpool.lifetime.first_needed(num_tokens), num_tokens)
    pages = {position // subpool.page_tokens for position in needed}
    # The page that the next token goes to is kept, also if none of its tokens is read any more.
    if num_tokens % subpool.page_tokens:
        pages.add(num_tokens // subpool.page_tokens)
    return len(pages)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_pages_of_a_sequence(page_size: int) -> None:
    made = plan([kv(life) for life in (Full(), Window(1), Window(17), Window(64), Chunk(48), Chunk(1))], memory=4 * MIB)
    made = plan(made.layers + (layer(Full(), row("k", 64), per=4),), memory=4 * MIB, page_size=page_size)
    for subpool in made.subpools:
        for num_tokens in range(300):
            assert subpool.num_pages_for(num_tokens) == brute_pages(subpool, num_tokens), (subpool.name, num_tokens)


def test_a_state_is_held_from_the_start() -> None:
    made = make("state and full")
    assert made.demand(0) == (1, 0)
    assert made.demand(1) == (1, 1)
    assert made.bytes_per_sequence(0) == made.subpools[0].entry_bytes


def test_a_sequence_without_pages_fits_without_limit() -> None:
    assert make("full").num_sequences(0) == sys.maxsize
    assert make("chunk").num_sequences(96) == sys.maxsize


def test_the_sink_costs_no_state_slot() -> None:
    big = layer(State(), row("recurrent", 1000, 1000, dtype=FP32))
    small = kv(Full())
    page_bytes = plan([small], memory=MIB).subpools[0].page_bytes
    sink_bytes = 2 * page_bytes
    made = plan([big, small], memory=7 * 4_000_000 + sink_bytes, page_size=16)
    assert made.subpools[0].num_pages == 7
    assert made.sink_bytes < sink_bytes


def test_pages_of_small_entries_skip_the_whole_sink() -> None:
    made = plan([kv(Full(), 16, 128), kv(Window(32), 1, 8)], memory=4 * MIB)
    window = made.subpools[0]
    assert window.first_page > 100
    check_grids(made)


def test_where_follows_sharing() -> None:
    made = make("shared")
    assert made.where(2) == made.where(0) != []
    assert made.where(4) == made.where(1) != []
    assert made.where(3) == []
    assert [(subpool.name, placed.layer) for subpool, placed in made.where(4)] == [("window_32", 1)] * 2


def test_where_finds_state_and_keys_of_one_layer() -> None:
    found = {(subpool.name, placed.row.name) for subpool, placed in make("state and keys in one layer").where(2)}
    assert found == {("state", "conv"), ("state", "recurrent"), ("full", "k"), ("full", "v")}
    with pytest.raises(KeyError, match="no row 'k'"):
        make("state and full").subpools[0].row(0, "k")


def test_a_draft_is_fused_into_the_entries_of_the_target() -> None:
    target, draft = [kv(Window(32)), kv(Full())], [kv(Full(), 1, 16), Layer(shares=0), STATE]
    made = plan(target, draft=draft, memory=MIB)
    assert [subpool.name for subpool in made.subpools] == ["state", "window_32", "full"]
    assert rows_of(made)[-4:] == [(1, "k"), (1, "v"), (2, "k"), (2, "v")]
    assert made.layers[3].shares == 2 and made.where(3) == made.where(2)
    alone = plan(target, memory=MIB)
    assert made.bytes_per_token == alone.bytes_per_token + 2 * 16 * 2


def test_padding_of_strides_is_optional_and_counted() -> None:
    layers = [kv(Full(), 8, 64), kv(Full(), 8, 64)]
    assert plan(layers, memory=MIB).subpools[0].entry_bytes == 4096
    padded = plan(layers, memory=MIB, pad_entries=True).subpools[0]
    assert (padded.entry_bytes, padded.layout.padding_bytes, padded.page_bytes) == (4160, 64, 16 * 4160)


def test_memory_as_text() -> None:
    assert plan([STATE], memory="2MiB").arena_bytes == 2 * MIB
    assert plan([STATE], memory=MIB + 255).arena_bytes == MIB
    assert plan([STATE], memory=np.int64(MIB)) == plan([STATE], memory=MIB)


def test_whole_numbers_of_numpy() -> None:
    layers = [kv(Full()), STATE]
    given = plan(layers, memory=MIB, page_size=np.int32(4), num_tokens=np.int64(9))
    assert given == plan(layers, memory=MIB, page_size=4, num_tokens=9)
    assert all(type(subpool.page_size) is int for subpool in given.subpools)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"source": []}, "no layers"),
        ({"source": [Layer(), Layer()]}, "no layer stores anything"),
        ({"source": [STATE, "layer"]}, "sequence of Layer"),
        ({"memory": 0}, "not positive"),
        ({"memory": 255}, "no room"),
        ({"memory": "lots"}, "not an amount"),
        ({"memory": 0.5}, "not an amount of memory in bytes"),
        ({"page_size": 0}, "page_size of a plan is at least 1, not 0"),
        ({"page_size": -16}, "at least 1, not -16"),
        ({"page_size": 1.5}, "page_size of a plan is a whole number, not 1.5"),
        ({"page_size": "16"}, "whole number, not '16'"),
        ({"num_tokens": 1.5}, "num_tokens of a plan is a whole number, not 1.5"),
        ({"num_tokens": -1}, "at least 0, not -1"),
        ({"source": [STATE, Layer(shares=2)]}, "shares layer 2, but the layers are 0 to 1"),
        ({"source": [STATE, Layer(shares=-1)]}, "shares layer -1"),
        ({"source": [STATE, Layer(), Layer(shares=1)]}, "stores nothing"),
        ({"source": [Layer(shares=1), Layer(shares=0)]}, "stores nothing"),
        ({"source": [Layer(shares=0), STATE]}, "stores nothing"),
        ({"source": [Layer(memories=STATE.memories * 2)]}, "twice"),
        ({"draft": []}, "no layers"),
        ({"draft": [STATE, Layer(shares=-1)]}, "shares layer -1"),
        ({"source": object()}, "expected"),
        ({"num_tokens": 10**6}, "one sequence of 1000000 tokens needs"),
    ],
)
def test_refused(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan(**{"source": [kv(Full()), STATE], "memory": MIB, **arguments})


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("num_tokens", [1, 333])
def test_a_refused_budget_names_what_it_needs(name: str, num_tokens: int) -> None:
    with pytest.raises(PlanError, match="needs an arena of") as caught:
        plan(GEOMETRIES[name][0], memory=1280, num_tokens=num_tokens)
    needed_bytes = int(str(caught.value).split("arena of ")[1].split()[0])
    assert "there are 1280" in str(caught.value)
    assert plan(GEOMETRIES[name][0], memory=needed_bytes, num_tokens=num_tokens).num_sequences(num_tokens) >= 1
    with pytest.raises(PlanError):
        plan(GEOMETRIES[name][0], memory=needed_bytes - 256, num_tokens=num_tokens)


lifetimes = st.one_of(st.just(Full()), st.just(State()), st.integers(1, 70).map(Window), st.integers(1, 70).map(Chunk))


@st.composite
def memories(draw: st.DrawFn) -> Memory:
    lifetime = draw(lifetimes)
    shapes = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), min_size=1, max_size=3))
    dtypes = st.sampled_from([BF16, FP32, FP8, torch.uint8])
    rows = tuple(row(f"row_{index}", *shape, dtype=draw(dtypes)) for index, shape in enumerate(shapes))
    per = 1 if isinstance(lifetime, State) else draw(st.sampled_from([1, 1, 4, 128]))
    return Memory(lifetime=lifetime, rows=rows, tokens_per_entry=per)


@settings(max_examples=150, deadline=None)
@given(st.lists(memories(), min_size=1, max_size=7), st.integers(300_000, 3_000_000), st.sampled_from([1, 2, 7, 16]))
def test_any_plan(memories: list[Memory], memory: int, page_size: int) -> None:
    made = plan([Layer(memories=(one,)) for one in memories], memory=memory, page_size=page_size)
    assert made.arena_bytes == memory // 256 * 256
    check_grids(made)
    assert len(rows_of(made)) == sum(len(one.rows) for one in memories)
    pairs = list(zip(made.subpools, made.subpools[1:], strict=False))
    assert all(not upper.is_state for _, upper in pairs)
    for lower, upper in pairs:
        if not isinstance(upper.lifetime, Full):
            assert not isinstance(lower.lifetime, Full)
            assert lower.is_state or lower.lifetime.num_tokens >= upper.lifetime.num_tokens
        elif isinstance(lower.lifetime, Full):
            assert lower.bytes_per_token <= upper.bytes_per_token
    for subpool in made.subpools:
        for placed in subpool.layout.rows:
            assert placed.offset_bytes % 16 == 0
    growing = [subpool for subpool in made.subpools if subpool.is_state or isinstance(subpool.lifetime, Full)]
    if len(growing) == len(made.subpools):
        counts = [made.num_sequences(num_tokens) for num_tokens in (1, 2, 30, 31, 100, 1000)]
        assert counts == sorted(counts, reverse=True)
    assert str(made).startswith(f"arena of {made.arena_bytes:,} bytes")
