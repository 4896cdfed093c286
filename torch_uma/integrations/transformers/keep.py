"""Keys and values of one layer, or its index keys: stored where a step's places say, and handed over or copied out."""

from __future__ import annotations

import torch

from torch_uma.errors import GradientError, SequenceError
from torch_uma.integrations.transformers.places import StepPlaces
from torch_uma.integrations.transformers.stores import TokenStore
from torch_uma.layout import PlacedRow
from torch_uma.runs import Run

Rows = tuple[torch.Tensor, ...]
"""Keys and values, or index keys alone: for each row of a store [batch, heads, tokens, head_dim]."""

_NO_SCALES = (None, None)


def check_no_gradients(*new: torch.Tensor) -> None:
    """GradientError where what is to be stored records gradients."""
    if torch.is_grad_enabled() and any(states.requires_grad for states in new):
        raise gradient_error()


def gradient_error() -> GradientError:
    return GradientError(
        "a forward that records gradients would write into the cache, whose rows later steps overwrite; "
        "wrap the call in torch.no_grad(), or pass use_cache=False to train"
    )


def check_stored(store: TokenStore, new: Rows) -> None:
    """SequenceError for what the layer does not store: it would be converted or taken for another without a word."""
    for placed, states in zip(store.rows, new, strict=True):
        heads, head_dim = states.shape[1], states.shape[3]
        if placed.row.shape not in ((heads, head_dim), (heads * head_dim,)):
            raise SequenceError(
                f"layer {placed.layer} of the pool stores {placed.row.name!r} of {placed.row.shape} for a token, but "
                f"the model gives {(heads, head_dim)}; use a pool that was made for this model"
            )
        check_computed(placed, states, store.grids[0].device)


def check_computed(placed: PlacedRow, given: torch.Tensor, device: torch.device) -> None:
    """SequenceError if a row is given in another dtype than its model computed it in, or on another device."""
    if given.device != device:
        raise SequenceError(
            f"the pool is on {device}, but the model gives {placed.row.name!r} of layer {placed.layer} on "
            f"{given.device}; make a cache or pool of the model where it is now, or move the model to {device}"
        )
    if placed.row.computed_dtype not in (None, given.dtype) and not torch.is_autocast_enabled(given.device.type):
        raise SequenceError(
            f"the pool was made for a model that computes {placed.row.name!r} of layer {placed.layer} in "
            f"{placed.row.computed_dtype}, but this one gives {given.dtype}; make a new cache or pool of the model as "
            f"it is now, with dtype={given.dtype} if the model itself says another, or move the model back"
        )


def has_dtype(store: TokenStore, new: Rows) -> bool:
    """Whether new keys and values are stored as they are."""
    return all(placed.row.dtype == states.dtype for placed, states in zip(store.rows, new, strict=True))


def write_all(store: TokenStore, entries: torch.Tensor, new: Rows) -> None:
    """`write` on the host with less ado, of rows that are all stored and as they are."""
    for states, grid in zip(new, store.entry_grids, strict=True):
        grid.index_copy_(0, entries.view(-1), states.transpose(1, 2).reshape(entries.numel(), *grid.shape[1:]))


def write(arena: torch.Tensor, store: TokenStore, entries: torch.Tensor, new: Rows) -> None:
    rows = [
        states.transpose(1, 2).reshape(*entries.shape, *placed.row.shape)
        for states, placed in zip(new, store.rows, strict=True)
    ]
    torch.ops.torch_uma.write_rows(
        arena,
        rows,
        entries,
        store.subpool.origin_bytes,
        store.subpool.entry_bytes,
        store.offsets_bytes,
        store.dtypes,
        _NO_SCALES[: len(store.rows)],
    )


def views(store: TokenStore, run: Run, places: StepPlaces, new: Rows) -> Rows:
    """Keys and values of the step as views [batch, heads, tokens, head_dim] of the arena."""
    first_page, pages_between_rows = run
    first_token, num_tokens = places.extent(store.rows[0].layer)
    results = []
    for grid, states in zip(store.grids, new):  # [pages, page_size, *shape]
        batch, heads, _, head_dim = states.shape
        between_pages, between_tokens, *inner = grid.stride()
        if len(inner) == 1:
            inner = [head_dim, *inner]
        size = (batch, heads, num_tokens, head_dim)
        strides = (pages_between_rows * between_pages, inner[0], between_tokens, inner[1])
        first = grid.storage_offset() + first_page * between_pages + first_token * between_tokens
        results.append(grid.as_strided(size, strides, first))
    return tuple(results)


def append(store: TokenStore, run: Run, places: StepPlaces, new: Rows) -> Rows:
    """`views`, with the new tokens written into their last columns; on the host with less ado than `write`."""
    made = views(store, run, places, new)
    for view, states in zip(made, new):
        num_new_tokens = states.shape[2]
        view.narrow(2, view.shape[2] - num_new_tokens, num_new_tokens).copy_(states)
    return made


def gather(places: StepPlaces, store: TokenStore, appends: bool, new: Rows) -> Rows:
    """Keys and values of the step, copied out of the arena; rows that are shorter have zeros in front."""
    gathered = fetch(places.arena, store, places.read(store.subpool), new[0].dtype)
    results = []
    for rows, states in zip(gathered, new, strict=True):
        past = rows.view(*rows.shape[:2], states.shape[1], states.shape[3]).transpose(1, 2)
        results.append(torch.cat([past, states], dim=2) if appends else past)
    return tuple(results)


def fetch(
    arena: torch.Tensor, store: TokenStore, entries: torch.Tensor, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """What entries [batch, tokens] hold, [batch, tokens, width] for each row of the store; zeros for negative ones."""
    fetched: list[torch.Tensor] = torch.ops.torch_uma.gather_rows(
        arena,
        entries,
        store.subpool.origin_bytes,
        store.subpool.entry_bytes,
        store.offsets_bytes,
        store.widths,
        store.dtypes,
        dtype,
        _NO_SCALES[: len(store.rows)],
    )
    return fetched
