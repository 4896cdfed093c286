"""The device's view of who holds what: page tables, `v2p` and lengths, in one flat tensor whose address never changes.

Owns that tensor, its host mirror and the staging between them. Decides nothing: what changes is written to the mirror,
and `flush` brings the device up to date with one copy and one scatter of the changed cells, however many there are.
From low to high:

    page table of sub-pool 0 [rows, columns[0]] | page table 1 | ... | v2p [num_ids] | lengths [rows]

A cell of a page table holds a virtual page id or -1. Columns are absolute: tokens `[c * page_tokens, (c + 1) *
page_tokens)` of a row lie in the page of column `c`. A state sub-pool has one column, the row's slot.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torch_uma.arena import keep_address
from torch_uma.layout import Full
from torch_uma.plan import Plan, SubPool

Int32Array = npt.NDArray[np.int32]
IdArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]  # as the mirror holds them, or as the allocator gives them
Int64Array = npt.NDArray[np.int64]

_NUM_STAGING_BUFFERS = 4
_DEFAULT_CELLS = 1 << 24  # 64 MiB for the page tables when nobody says how long a sequence gets
_DEFAULT_TOKENS = 1 << 17  # where no sub-pool keeps a whole sequence, its length is not bounded by the arena


class Tables:
    """The flat tables of one pool, on the host and on the device.

    Args:
        plan: the sub-pools; their order is that of the tables.
        v2p: [num_ids] int32, the allocator's table, read at every flush. The tables keep what it said of dead ids,
            which no cell names.
        num_rows: sequences that can exist at once.
        max_tokens: longest sequence; None for what the arena can hold, within reason.
        device: where the tensor lives; on CUDA its stream is the one current now.

    Attributes:
        mirror: int32, the host's copy of the whole tensor.
        origin: [sub-pools, rows] int64, cell of a row's column 0.
        columns: columns of each page table.
        max_tokens: longest sequence that the tables have columns for.
        version: grows whenever a cell of a page table changes.
        v2p: [num_ids] int32, physical page of a virtual id, a view at a fixed address.
    """

    def __init__(
        self, plan: Plan, v2p: Int32Array, *, num_rows: int, max_tokens: int | None, device: torch.device
    ) -> None:
        self.max_tokens = _longest(plan, num_rows) if max_tokens is None else max_tokens
        self.columns = tuple(_num_columns(subpool, self.max_tokens) for subpool in plan.subpools)
        bases = np.cumsum([0, *(num_rows * columns for columns in self.columns)], dtype=np.int64)
        self.origin: Int64Array = bases[:-1, None] + np.arange(num_rows) * np.array(self.columns)[:, None]
        self.v2p_base = int(bases[-1])
        self.length_base = self.v2p_base + len(v2p)
        self.num_rows = num_rows
        self.version = 0
        self.mirror: Int32Array = np.full(self.length_base + num_rows, -1, np.int32)
        self.mirror[self.v2p_base : self.length_base] = v2p
        self.mirror[self.length_base :] = 0
        self._v2p = v2p
        self._cells: list[Int64Array] = []
        self._ids: list[IdArray] = []
        self._ring = _PinnedRing(device) if device.type == "cuda" else None
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside of it
            self.tensor: Tensor = torch.from_numpy(self.mirror).to(device, copy=True)
            self.v2p = keep_address(self.tensor[self.v2p_base : self.length_base])
            tables = self.tensor[: self.v2p_base].split([num_rows * columns for columns in self.columns])
            self._page_tables = [keep_address(table.view(num_rows, -1)) for table in tables]
        self._array = self.tensor.numpy() if device.type == "cpu" else None

    def page_table(self, index: int) -> Tensor:
        """Page table of a sub-pool: [rows, columns] int32 of virtual ids, a view at a fixed address."""
        return self._page_tables[index]

    @property
    def lengths(self) -> Tensor:
        """[rows] int32, tokens of a row, those of an open step included; a view at a fixed address."""
        return self.tensor[self.length_base :]

    def write(self, cells: Int64Array, values: IdArray | int) -> None:
        """Set cells of the page tables; the device sees it at the next `flush`."""
        self.mirror[cells] = values
        self._cells.append(cells)
        self.version += 1

    def write_lengths(self, rows: Int64Array, lengths: Int64Array | int) -> None:
        """Set the lengths of rows; the device sees it at the next `flush`."""
        cells = rows + self.length_base
        self.mirror[cells] = lengths
        self._cells.append(cells)

    def note_pages(self, ids: IdArray) -> None:
        """Say that the places of these ids have changed; `flush` reads them from `v2p`."""
        self._ids.append(ids)

    def flush(self) -> None:
        """Bring the device up to date, on the arena's stream, with one copy and one scatter. Does not wait for it."""
        # Lists are exchanged before they are read: the collector may run a finalizer that writes at any moment.
        noted, self._ids = self._ids, []
        if noted:
            ids = np.concatenate(noted, dtype=np.int64)
            cells = ids + self.v2p_base
            self.mirror[cells] = self._v2p[ids]
            self._cells.append(cells)
        written, self._cells = self._cells, []
        if not written:
            return
        changed = np.concatenate(written)
        if self._ring is not None:
            self._ring.scatter(self.tensor, changed, self.mirror)
        elif self._array is not None:
            self._array[changed] = self.mirror[changed]


class _PinnedRing:
    """Carries changed cells to a CUDA device; one pinned buffer is filled while the device reads the others."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        self._buffers = [torch.empty(0, dtype=torch.int32) for _ in range(_NUM_STAGING_BUFFERS)]
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_STAGING_BUFFERS
        self._turn = 0

    def scatter(self, table: Tensor, cells: Int64Array, mirror: Int32Array) -> None:
        """Copy `mirror[cells]` to `table[cells]`; waits only if the device is a whole ring behind."""
        turn, count = self._turn, len(cells)
        self._turn = (turn + 1) % _NUM_STAGING_BUFFERS
        copied = self._copied[turn]
        if copied is not None:
            copied.synchronize()
        if len(self._buffers[turn]) < 3 * count:
            self._buffers[turn] = torch.empty(4 * count + 1024, dtype=torch.int32, pin_memory=True)
        # One buffer for both, so that one copy carries them: the cells as int64, then the values as int32.
        array = self._buffers[turn].numpy()
        array[: 2 * count].view(np.int64)[:] = cells
        array[2 * count : 3 * count] = mirror[cells]
        with torch.cuda.stream(self._stream):
            staged = self._buffers[turn][: 3 * count].to(self._device, non_blocking=True)
            copied = self._copied[turn] = torch.cuda.Event()
            copied.record(self._stream)
            torch.ops.torch_uma.remap(table, staged[: 2 * count].view(torch.int64), staged[2 * count :])


def _longest(plan: Plan, num_rows: int) -> int:
    """Tokens of the longest sequence that the arena can hold, bounded so that the tables stay small beside it."""
    paged = [subpool for subpool in plan.subpools if not subpool.is_state]
    if not paged:
        return _DEFAULT_TOKENS
    whole = [_grid_tokens(subpool) for subpool in paged if _keeps_all(subpool)]
    cells_per_token = num_rows * sum(1 / subpool.page_tokens for subpool in paged)
    return min(min(whole, default=_DEFAULT_TOKENS), max(1, int(_DEFAULT_CELLS / cells_per_token)))


def _num_columns(subpool: SubPool, max_tokens: int) -> int:
    if subpool.is_state:
        return 1
    longest = min(max_tokens, _grid_tokens(subpool)) if _keeps_all(subpool) else max_tokens
    return -(-longest // subpool.page_tokens)


def _grid_tokens(subpool: SubPool) -> int:
    return (subpool.num_pages - subpool.first_page) * subpool.page_tokens


def _keeps_all(subpool: SubPool) -> bool:
    return isinstance(subpool.lifetime, Full)
