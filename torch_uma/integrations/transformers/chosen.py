"""Keys that a model has chosen by index keys: what that means for attention over the arena, and for stock attention.

Owns the translation from the columns in which a model counts keys, which end with the longest row, to positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_uma.errors import SequenceError
from torch_uma.integrations.transformers.reading import Reading, Scores


def with_choice(reading: Reading, scores: Scores, columns: Tensor | None) -> Scores:
    """The scores of a layer that attends to `columns` int [rows, new, n] alone, of those that its mask shows.

    Without `columns` the mask alone says what was chosen. SequenceError for a mask that has not a column for each key.
    Waits for the device where a mask alone says what was chosen.
    """
    places, mask = reading.places, scores.mask
    num_columns = places.max_past + places.num_new_tokens
    if mask is None or mask.shape[-1] != num_columns or (columns is None and mask.dtype != torch.bool):
        given = "none" if mask is None else f"{mask.dtype} {tuple(mask.shape)}"
        raise SequenceError(
            f"layer {reading.store.rows[0].layer} chooses among {num_columns} keys by a mask, {given}, that was made "
            "of the keys it was handed, which are the new ones alone; use attn_implementation='sdpa' or 'eager'"
        )
    is_all = columns is None or columns.shape[-1] >= num_columns
    if is_all and places.is_even and places.num_new_tokens > 1:
        return scores
    shown = _shown(mask)[:, 0].expand(places.num_rows, -1, -1)
    if columns is None:
        columns = shown.byte().topk(int(shown.sum(dim=-1).amax())).indices
    columns = columns.long()
    positions = torch.where(shown.gather(-1, columns), columns - places.columns_in_front[:, :, None], -1)
    return scores._replace(mask=None, indices=positions)


def attend_blocks(
    reading: Reading, module: torch.nn.Module, query: Tensor, new: tuple[Tensor, Tensor], scores: Scores, blocks: Tensor
) -> Tensor:
    """As `Reading.attend`, where `blocks` int64 [rows, choices, new, n] were chosen for equal shares of the heads.

    -1 is for none. Blocks begin with the sequence. SequenceError for padding in front of rows, which shifts them.
    """
    block_size = _block_size(module)
    if scores.mask is not None:
        raise SequenceError(
            f"layer {reading.store.rows[0].layer} attends to blocks of {block_size} tokens, which padding in front of "
            "the rows shifts; use pool.step, which needs no padding, or attn_implementation='sdpa' or 'eager'"
        )
    key, value = new
    num_heads, num_choices, num_kv_heads = query.shape[1], blocks.shape[1], key.shape[1]
    num_groups = max(num_choices, num_kv_heads)  # of heads that read the same keys
    within = torch.arange(block_size, device=blocks.device)
    positions = torch.where(blocks[..., None] >= 0, blocks[..., None] * block_size + within, -1).flatten(-2)
    attended = []
    for group in range(num_groups):
        heads = slice(group * num_heads // num_groups, (group + 1) * num_heads // num_groups)
        own = scores._replace(
            indices=positions[:, group * num_choices // num_groups],
            sinks=None if scores.sinks is None else scores.sinks[heads],
        )
        head = group * num_kv_heads // num_groups
        attended.append(reading.attend_head(query[:, heads], key, value, head, own))
    return torch.cat(attended, dim=2)


def hide_others(
    module: torch.nn.Module,
    query: Tensor,
    num_keys: int,
    mask: Tensor | None,
    columns: Tensor | None,
    blocks: Tensor | None,
    position_ids: Tensor | None,
) -> Tensor | None:
    """The mask of stock attention where a model leaves it to the attention to hide keys that it has not chosen.

    SequenceError where these are not the keys that it chose among.
    """
    if blocks is not None:
        if position_ids is None:
            position_ids = torch.arange(num_keys - query.shape[2], num_keys, device=query.device)[None]
        position_ids = position_ids.expand(query.shape[0], -1)
        made: Tensor = module.indexer.build_block_mask(  # type: ignore[operator, union-attr]
            blocks, mask, num_keys, query.dtype, query.device, position_ids
        )
        return made
    if columns is None:
        return mask
    if mask is None or mask.shape[-1] != num_keys:
        raise SequenceError(
            f"layer {getattr(module, 'layer_idx', '?')} chooses among the keys of another layer, which attention by "
            "'torch_uma' reads in that layer alone; use attn_implementation='sdpa' or 'eager'"
        )
    shown = _shown(mask)
    chosen = torch.zeros_like(shown.expand(columns.shape[0], -1, -1, -1)).scatter(-1, columns.long()[:, None], True)
    return shown & chosen


def _shown(mask: Tensor) -> Tensor:
    """Which columns a mask shows, that is bool or added to the scores."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def _block_size(module: torch.nn.Module) -> int:
    return int(module.indexer.block_size)  # type: ignore[arg-type, union-attr]
