"""Keys and values of a fixed size: what a compiled decode step reads with stock attention, whatever the lengths are.

Owns the views: of full attention over the whole room of the rows' run, of a window over as many tokens as it has. They
are made before a forward, so that a graph has them as inputs, each with a storage of its own, and writes the new token
through the view that it reads. What lies behind the last token is hidden by the mask, but attention multiplies it by
0: it is cleared, once, when pages are first used so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torch_uma.integrations.transformers.stores import Store, TokenStore
from torch_uma.layout import Chunk, Window
from torch_uma.ops.reference import encode
from torch_uma.plan import SubPool
from torch_uma.runs import Run

if TYPE_CHECKING:
    from torch_uma.step import Step


@dataclass(frozen=True, kw_only=True)
class FixedTokens:
    """Keys and values of one layer, or its index keys.

    They are [rows, heads, num_columns, head_dim] or, as stored, [rows, num_columns, width].

    They are stored in `dtypes`; those of one byte are viewed as uint8, since torch puts no others at an index. Column 0
    is the row's first token, or, once there are more than `num_columns`, the first that a window holds.
    """

    views: tuple[torch.Tensor, ...]
    dtypes: tuple[torch.dtype, ...]
    num_columns: int
    is_window: bool

    def offset(self, past: int | torch.Tensor) -> int | torch.Tensor:
        """The position of column 0 for the query behind `past` tokens."""
        if not self.is_window:
            return 0
        last = self.num_columns - 1
        return (past - last).clamp(min=0) if isinstance(past, torch.Tensor) else max(past - last, 0)

    def update(self, past: torch.Tensor, new: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Write one new token of each row, behind `past` (0-d int64); returns all columns in the dtype of the new."""
        column = past.clamp(max=self.num_columns - 1).view(1)
        results = []
        for view, dtype, states in zip(self.views, self.dtypes, new, strict=True):
            if view.dim() == 3:
                view = view.unflatten(2, (states.shape[1], states.shape[3])).transpose(1, 2)
            view.index_copy_(2, column, encode(states, dtype).view(view.dtype))
            results.append(view.view(dtype).to(states.dtype))
        return tuple(results)


def fixed_tokens(step: Step, stores: tuple[Store, ...]) -> dict[tuple[int, str], FixedTokens] | None:
    """What a step of one token reads, if every kind of memory has its rows in a run with room; else None.

    By layer, and "tokens" for its keys and values or "index" for its index keys.

    Clears what has not been cleared of that room.
    """
    past = int(step.past[0])
    if not isinstance(step.num_new_tokens, int) or step.num_new_tokens > 1 or (step.past != past).any():
        return None
    extents: dict[int, tuple[int, int, Run]] = {}
    for subpool in step.pool.plan.subpools:
        if subpool.tokens_per_entry > 1:
            return None
        if not subpool.is_state:
            extent = _extent(step, subpool, past)
            if extent is None:
                return None
            extents[subpool.index] = extent
    for k, (start, num_columns, _) in extents.items():
        if start + num_columns > past + 1:  # a window that is full ends with the new token
            step.clear_behind(step.pool.plan.subpools[k], start + num_columns)
    return {
        (layer, part): _view(store, len(step.past), *extents[store.subpool.index])
        for layer, stored in enumerate(stores)
        for part, store in stored.paged.items()
    }


def _extent(step: Step, subpool: SubPool, past: int) -> tuple[int, int, Run] | None:
    """Position of the first column, number of columns, and the run that they lie in."""
    lifetime = subpool.lifetime
    room_tokens = step.room_tokens(subpool)
    if isinstance(lifetime, Chunk) or lifetime == Window(1):
        return None
    start, num_columns = 0, room_tokens
    if isinstance(lifetime, Window):
        start, num_columns = lifetime.first_needed(past), min(lifetime.num_tokens, room_tokens)
    end = -(-(start + num_columns) // subpool.page_tokens)
    run = step.run_of(subpool, start // subpool.page_tokens, end)
    return None if run is None else (start, num_columns, run)


def _view(store: TokenStore, num_rows: int, start: int, num_columns: int, run: Run) -> FixedTokens:
    first_page, pages_between_rows = run
    views = []
    for grid in store.grids:  # [pages, page_size, *shape]
        grid = grid.view(torch.uint8) if grid.dtype.itemsize == 1 else grid
        # A row that is alone has a stride too, for which graphs are made.
        between_rows = pages_between_rows * grid.stride(0) if num_rows > 1 else num_columns * grid.stride(1)
        view = grid.as_strided(
            (num_rows, num_columns, *grid.shape[2:]),
            (between_rows, *grid.stride()[1:]),
            grid.storage_offset() + first_page * grid.stride(0) + start * grid.stride(1),
        )
        views.append(view.transpose(1, 2) if grid.dim() == 4 else view)
    is_window = isinstance(store.subpool.lifetime, Window)
    dtypes = tuple(placed.row.dtype for placed in store.rows)
    return FixedTokens(views=tuple(views), dtypes=dtypes, num_columns=num_columns, is_window=is_window)
