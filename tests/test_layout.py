"""Lifetimes, declarations and the bytes of an entry."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_uma.errors import PlanError
from torch_uma.layout import Chunk, Full, Layer, Memory, Row, State, Window, lay_out

DTYPES = [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8, torch.float16]
rows_strategy = st.lists(
    st.builds(
        lambda shape, dtype: (tuple(shape), dtype),
        st.lists(st.integers(0, 9), max_size=3),
        st.sampled_from(DTYPES),
    ),
    min_size=1,
    max_size=12,
)


def row(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Row:
    return Row(name=name, shape=shape, dtype=dtype)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 16, 128])
def test_window_needs_exactly_the_tokens_it_sees(num_tokens: int) -> None:
    for length in range(300):
        seen = [position for position in range(length + 1) if length - position < num_tokens]
        assert Window(num_tokens).first_needed(length) == seen[0]


@pytest.mark.parametrize("num_tokens", [1, 3, 16])
def test_chunk_needs_its_own_chunk_only(num_tokens: int) -> None:
    for length in range(100):
        seen = [position for position in range(length + 1) if position // num_tokens == length // num_tokens]
        assert Chunk(num_tokens).first_needed(length) == seen[0]


def test_full_needs_all_and_a_state_no_earlier_token() -> None:
    assert Full().first_needed(1000) == 0
    assert State().first_needed(1000) == 1000


def test_row_bytes() -> None:
    assert row("k", 8, 64).num_bytes == 1024
    assert row("rope_key", 1, 0).num_bytes == 0
    assert row("scale", dtype=torch.float32).num_bytes == 4
    assert row("k", 8, 32, dtype=torch.uint8).num_bytes == 256


@given(rows_strategy, st.booleans())
def test_rows_are_aligned_and_apart(shapes: list[tuple[tuple[int, ...], torch.dtype]], pad_entry: bool) -> None:
    rows = [(index, Row(name="x", shape=shape, dtype=dtype)) for index, (shape, dtype) in enumerate(shapes)]
    layout = lay_out(rows, pad_entry=pad_entry)
    assert [(placed.layer, placed.row) for placed in layout.rows] == rows
    end_bytes = 0
    for placed in layout.rows:
        assert placed.offset_bytes % 16 == 0
        assert end_bytes <= placed.offset_bytes < end_bytes + 16
        end_bytes = placed.offset_bytes + placed.row.num_bytes
    assert end_bytes <= layout.entry_bytes
    assert layout.entry_bytes % 16 == 0 and layout.entry_bytes > 0
    assert layout.padding_bytes == layout.entry_bytes - sum(r.num_bytes for _, r in rows)
    assert layout.padding_bytes <= 16 * len(rows) + 64 * pad_entry


def test_stride_padding_only_off_multiples_of_4_kib() -> None:
    wide = [(layer, row(name, 8, 64)) for layer in range(2) for name in "kv"]
    assert lay_out(wide).entry_bytes == 4096
    assert lay_out(wide, pad_entry=True).entry_bytes == 4096 + 64
    assert lay_out(wide[:3], pad_entry=True).entry_bytes == 3072


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (lambda: Window(0), "at least one token"),
        (lambda: Chunk(-4), "-4"),
        (lambda: row("k", 8, -1), "negative"),
        (lambda: Memory(lifetime="full", rows=(row("k", 1),)), "unknown lifetime 'full'"),
        (lambda: Memory(lifetime=Full, rows=(row("k", 1),)), "unknown lifetime"),
        (lambda: Memory(lifetime=Full(), rows=()), "at least one row"),
        (lambda: Memory(lifetime=Full(), rows=(row("k", 1), row("k", 2))), "must differ"),
        (lambda: Memory(lifetime=Full(), rows=(row("k", 1),), tokens_per_entry=0), "at least one token"),
        (lambda: Memory(lifetime=State(), rows=(row("conv", 1),), tokens_per_entry=4), "one entry a sequence"),
        (lambda: Layer(memories=(Memory(lifetime=Full(), rows=(row("k", 1),)),), shares=0), "nothing of its own"),
    ],
)
def test_refused(declare, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        declare()


@pytest.mark.parametrize(
    "declare",
    [
        lambda: Row(name="k", shape=8, dtype=torch.float32),
        lambda: Row(name="k", shape=("a",), dtype=torch.float32),
        lambda: Row(name="k", shape=(8,), dtype="bf16"),
        lambda: Window("a"),
        lambda: Chunk(2.5),
        lambda: Memory(lifetime=Full(), rows=Row(name="k", shape=(8,), dtype=torch.float32)),
    ],
)
def test_declarations_of_wrong_types_are_refused(declare: Callable[[], object]) -> None:
    with pytest.raises(PlanError, match="not|given"):
        declare()
