"""The tables: what is written on the host is on the device after one flush, at addresses that never change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pools import Content, advance, layer, make_pool

from torch_uma.errors import InvariantError
from torch_uma.layout import Chunk, Full, Layer, State, Window
from torch_uma.plan import plan
from torch_uma.pool import CachePool
from torch_uma.tables import Tables
from torch_uma.testing import scramble

CPU = torch.device("cpu")


def make_tables(num_rows: int = 3, max_tokens: int | None = 10) -> Tables:
    made = plan([layer(Full()), layer(Window(4)), layer(State())], memory=4096, page_size=2)
    return Tables(made, np.arange(7, dtype=np.int32), num_rows=num_rows, max_tokens=max_tokens, device=CPU)


def test_the_parts_lie_one_behind_the_other_in_one_tensor() -> None:
    tables = make_tables()
    assert tables.columns == (1, 5, 5)
    parts = [*(tables.page_table(k) for k in range(3)), tables.v2p, tables.lengths]
    assert [tuple(part.shape) for part in parts] == [(3, 1), (3, 5), (3, 5), (7,), (3,)]
    address = tables.tensor.data_ptr()
    for part in parts:
        assert part.data_ptr() == address and part.dtype == torch.int32
        address += 4 * part.numel()
    assert (tables.origin == [[0, 1, 2], [3, 8, 13], [18, 23, 28]]).all()
    assert all((tables.page_table(k) == -1).all() for k in range(3))
    assert tables.v2p.tolist() == list(range(7)) and tables.lengths.tolist() == [0, 0, 0]


def test_the_device_sees_changes_at_the_next_flush() -> None:
    v2p = np.arange(7, dtype=np.int32)
    made = plan([layer(Full())], memory=4096, page_size=2)
    tables = Tables(made, v2p, num_rows=2, max_tokens=10, device=CPU)
    tables.write(np.array([1, 7]), np.array([5, 6], np.int32))
    tables.write(np.array([1]), -1)
    tables.write_lengths(np.array([1]), 9)
    v2p[3] = 30
    tables.note_pages(np.array([3], np.int32))
    v2p[3] = 31
    assert (tables.page_table(0) == -1).all() and tables.v2p[3] == 3 and tables.lengths[1] == 0
    tables.flush()
    assert tables.page_table(0).tolist() == [[-1] * 5, [-1, -1, 6, -1, -1]]
    assert tables.v2p[3] == 31 and tables.lengths.tolist() == [0, 9]
    version = tables.version
    tables.flush()
    assert tables.version == version


def test_what_a_finalizer_writes_during_a_flush_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = make_tables()
    tables.write(np.array([3]), 5)
    tables.note_pages(np.array([2], np.int64))
    late = [lambda: tables.write(np.array([4]), 6), lambda: tables.note_pages(np.array([1], np.int64))]
    original = np.concatenate

    def collect(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if late:
            late.pop()()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(np, "concatenate", collect)
        tables.flush()
    assert not late
    assert tables._ids and tables._cells
    tables.flush()
    assert tables.tensor.tolist() == tables.mirror.tolist() and tables.tensor[3:5].tolist() == [5, 6]


@pytest.mark.parametrize(
    ("layers", "num_rows", "max_tokens"),
    [
        ([layer(Full())], 4, 762),  # what the grid holds
        ([layer(Full()), layer(Full(), 4)], 4, 762),  # the dearer of the two
        ([layer(State())], 4, 1 << 17),
        ([layer(Window(8)), layer(Chunk(4))], 4, 1 << 17),
        ([layer(Window(8))], 1 << 9, 3 * (1 << 15)),  # 2^24 cells
    ],
)
def test_without_max_tokens_the_tables_hold_what_the_arena_can(
    layers: list[Layer], num_rows: int, max_tokens: int
) -> None:
    made = plan(layers, memory=1 << 14, page_size=3)
    tables = Tables(made, np.empty(0, np.int32), num_rows=num_rows, max_tokens=None, device=torch.device("meta"))
    assert abs(tables.max_tokens - max_tokens) <= 300
    assert tables.mirror.nbytes <= 1 << 27


def test_full_attention_needs_no_more_columns_than_its_grid_has_pages() -> None:
    pool = make_pool("hybrid", max_tokens=1 << 16)
    full = pool.plan.subpools[-1]
    assert pool.tables.columns[-1] == full.num_pages - full.first_page
    assert pool.tables.columns[1] == -(-(1 << 16) // 3)


def test_addresses_stay_and_the_device_agrees_through_traffic() -> None:
    pool = make_pool("every")
    content = Content(pool)
    addresses = [pool.tables.tensor.data_ptr(), *(pool.tables.page_table(k).data_ptr() for k in range(6))]
    sequences = []
    for turn in range(12):
        sequences.append(pool.add(turn))
        content.add(sequences[-1])
        advance(content, sequences, 1 + turn % 3)
        scramble(pool, turn)
        if turn % 4 == 3:
            content.free(sequences[0])
            sequences.pop(0).free()
        pool.check()
    assert addresses == [pool.tables.tensor.data_ptr(), *(pool.tables.page_table(k).data_ptr() for k in range(6))]


def test_a_step_reads_the_tables_of_its_own_begin() -> None:
    pool = make_pool("hybrid")
    sequence = pool.add()
    step = pool.begin([sequence], 7)
    row = sequence.row
    for k, ids in enumerate(sequence.pages):
        table = pool.tables.page_table(k)[row]
        assert table[table >= 0].tolist() == ids.tolist()
        assert pool.tables.v2p[torch.from_numpy(ids).long()].tolist() == pool.allocator.v2p[ids].tolist()
    assert pool.tables.lengths[row] == 7  # the step's own tokens included
    step.abort()
    pool.check()
    assert pool.tables.lengths[row] == 0


def test_check_sees_a_device_that_differs() -> None:
    pool = make_pool("hybrid")
    pool.add(9)
    pool.check()
    pool.tables.tensor[0] = 12345
    with pytest.raises(InvariantError, match="1 cells of the device's tables differ"):
        pool.check()


def test_tables_made_in_inference_mode_can_be_written_outside() -> None:
    with torch.inference_mode():
        pool = CachePool([layer(Full())], memory=4096, page_size=2, device="cpu")
    pool.begin([pool.add()], 3).commit()
    pool.tables.tensor.add_(0)
    pool.check()
