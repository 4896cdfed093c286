"""Prompts as users give them: lists, arrays and tensors of token ids, batches with padding among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_uma.counts import whole
from torch_uma.errors import SequenceError

_IGNORED = ("token_type_ids", "special_tokens_mask", "length", "position_ids")
"""What tokenizers give beside, and a prompt alone says as well."""


def token_ids(input_ids: Any, model: Any) -> list[int]:
    """The ids of one prompt, [tokens] or [1, tokens]; SequenceError for what is none, or not in the vocabulary."""
    if isinstance(input_ids, Tensor):
        if input_ids.dim() == 2 and len(input_ids) == 1:
            input_ids = input_ids[0]
        if input_ids.dim() != 1 or input_ids.is_floating_point() or input_ids.dtype == torch.bool:
            raise SequenceError(
                f"a prompt is token ids [tokens] or [1, tokens], not {input_ids.dtype} of {tuple(input_ids.shape)}"
            )
        input_ids = input_ids.tolist()
    elif isinstance(input_ids, str | bytes | Mapping):
        raise SequenceError(
            f"a prompt is token ids, not {type(input_ids).__name__}; tokenizer(text).input_ids makes them of a text"
        )
    elif not isinstance(input_ids, Iterable):
        raise SequenceError(
            f"a prompt is token ids, [tokens], and not one {type(input_ids).__name__}; a single prompt of a batch "
            "stands in a list as well"
        )
    ids = [whole(token, "a token id of a prompt", least=0, error=SequenceError) for token in input_ids]
    if not ids:
        raise SequenceError("a prompt of no tokens gives nothing to go on from; begin with the model's bos_token_id")
    num_known = model.get_input_embeddings().num_embeddings
    if max(ids) >= num_known:
        raise SequenceError(f"token {max(ids)} of a prompt is not among the {num_known} that the model has")
    return ids


def prompts_of(inputs: Any, pad_token_id: int | None = None) -> list[Any]:
    """The prompts of a batch, without their padding: a list of them, a tensor, or what a tokenizer returns.

    `pad_token_id` is a token that no text begins or ends with. SequenceError for a batch with more than text in it, for
    a mask that does not go with its ids, and for a tensor that is padded and has none.
    """
    mask = None
    if isinstance(inputs, Mapping) or hasattr(inputs, "input_ids"):
        fields = dict(inputs)
        ids, mask = fields.pop("input_ids", None), fields.pop("attention_mask", None)
        others = sorted(set(fields) - set(_IGNORED))
        if ids is None or others:
            what = f"has {', '.join(others)}, and a loop takes text alone" if others else "has no input_ids"
            raise SequenceError(f"this batch {what}; give input_ids, and attention_mask where they are padded")
        inputs = ids
    if isinstance(inputs, str | bytes) or not isinstance(inputs, Iterable):
        raise SequenceError(f"a batch is a list of prompts, each of token ids, not {type(inputs).__name__}")
    prompts = list(inputs)
    if mask is None:
        if isinstance(inputs, Tensor) and inputs.dim() == 2 and inputs.numel() and pad_token_id is not None:
            _check_unpadded(inputs, pad_token_id)
        return prompts
    masks = list(mask)
    if len(masks) != len(prompts):
        raise SequenceError(f"an attention_mask of {len(masks)} rows was given for {len(prompts)} prompts")
    return [_unpadded(prompt, seen) for prompt, seen in zip(prompts, masks, strict=True)]


def _check_unpadded(ids: Tensor, pad_token_id: int) -> None:
    padded = (ids[:, [0, -1]] == pad_token_id).any(dim=1).nonzero()
    if len(padded):
        raise SequenceError(
            f"row {int(padded[0])} of these prompts is padded with token {pad_token_id}, which counts as text where "
            "there is no attention_mask; give all that the tokenizer returned, or lists without padding"
        )


def _unpadded(prompt: Any, seen: Any) -> Any:
    ids, shown = torch.as_tensor(prompt), torch.as_tensor(seen)
    if ids.shape != shown.shape or ids.dim() != 1:
        raise SequenceError(
            f"an attention_mask has one number for each token, but these are {tuple(shown.shape)} for "
            f"{tuple(ids.shape)}"
        )
    return ids[shown.to(ids.device) != 0]
