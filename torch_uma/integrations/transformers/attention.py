"""`attn_implementation="torch_uma"`: attention that reads keys and values where they lie in the arena.

Owns what transformers calls under this name: the attention function, and the masks that tell it of padding. A layer of
the cache stores the new keys and values and puts a `Reading` into the keyword arguments that its model hands on to the
attention; whatever a `Reading` does not cover, such as a forward without a cache, is computed as stock attention does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from torch_uma.errors import GradientError, SequenceError
from torch_uma.integrations.transformers.chosen import attend_blocks, hide_others, with_choice
from torch_uma.integrations.transformers.reading import Reading, Scores, find
from torch_uma.integrations.transformers.versions import chooses_keys

NAME = "torch_uma"


class InPlace(int):
    """A number of keys that nobody fetches: how masks see that attention will read the arena."""


def is_used(config: PreTrainedConfig | None) -> bool:
    """Whether layers of this text config attend by this implementation."""
    return config is not None and config._attn_implementation == NAME


def register() -> None:
    """Make the implementation known to transformers."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """What attention needs to know beside the lengths that it has.

    For keys in the arena, with plain causal attention: int64 [rows, 1, 1, 0] if that is nothing, so that attention can
    tell that there are such keys; int64 [rows, 1, 1, 1], the first token that is no padding; or, if the padding is not
    all in front, bool [rows, 1, 1, tokens]. Otherwise, and where the model chooses among the keys that are shown, the
    mask of "sdpa", and None in a trace. May synchronise.
    """
    is_plain = not use_vmap and (allow_is_causal_skip or (q_length == 1 and not chooses_keys(kwargs.get("config"))))
    in_place = isinstance(kv_length, InPlace) or torch.compiler.is_compiling()
    if not in_place or not is_plain:
        other: Tensor | None = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=int(kv_length),
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip and not in_place,
            use_vmap=use_vmap,
            **kwargs,
        )
        return other
    if torch.compiler.is_compiling():
        return None if attention_mask is None else attention_mask[:, None, None, :]
    if attention_mask is not None:
        num_tokens = int(kv_offset + kv_length)
        if attention_mask.shape[-1] < num_tokens:
            raise SequenceError(
                f"an attention_mask of {attention_mask.shape[-1]} columns was given for rows of {num_tokens} tokens; "
                "give one for all tokens, those in the cache included"
            )
        attention_mask = attention_mask[:, :num_tokens]
    if attention_mask is None or attention_mask.all():
        return torch.empty((batch_size, 1, 1, 0), dtype=torch.int64, device=kwargs.get("device"))
    starts = attention_mask.int().argmax(dim=-1)
    columns = torch.arange(attention_mask.shape[-1], device=attention_mask.device)
    if torch.equal(attention_mask, columns >= starts[:, None]):
        return starts[:, None, None, None]
    return attention_mask[:, None, None, :]


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    torch_uma: Reading | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` [rows, heads, new, dim] as transformers calls it: [rows, new, heads, value dim], and None.

    With a `Reading` over what it covers in the arena, otherwise over `key` and `value`; of these only the chosen ones,
    `indices` int [rows, new, n] or `block_indices` int64 [rows, choices, new, n], where there are such. `s_aux` [heads]
    are sinks of all queries, `sinks` [rows, heads, new, 1] those of each. SequenceError for what it cannot do there:
    dropout, or masks of other forms over rows of unequal length.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if torch_uma is None and not torch.compiler.is_compiling():
        torch_uma = find(key, value)
    if torch_uma is None:
        if attention_mask is not None and attention_mask.dtype == torch.int64:
            raise SequenceError(
                f"{_name(module)} attends by {NAME!r} to keys that it did not get from this cache; make the cache of "
                "the model that uses it, or of its own config, keep layers that share keys on one device, or use "
                "attn_implementation='sdpa' or 'eager'"
            )
        chosen = (indices, block_indices, kwargs.get("position_ids"))
        attention_mask = hide_others(module, query, key.shape[2], attention_mask, *chosen)
        if softcap is None and s_aux is None and position_bias is None and sinks is None:
            result: tuple[Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scale, **kwargs
            )
            return result
        if s_aux is not None:
            sinks = s_aux.view(1, -1, 1, 1).expand(*query.shape[:3], 1)
        return _plain(query, key, value, attention_mask, scale, softcap, sinks, position_bias).contiguous(), None
    if dropout:
        raise SequenceError("attention over the arena has no dropout; call model.eval(), or pass use_cache=False")
    if torch.is_grad_enabled() and query.requires_grad:
        raise GradientError("attention over the arena records no gradients; wrap the call in torch.no_grad()")
    if not kwargs.get("is_causal", True) or not getattr(module, "is_causal", True):
        raise SequenceError(
            f"{_name(module)} attends to later tokens too, but the arena is read causally; use 'sdpa' or 'eager'"
        )
    if not torch_uma.store.is_latent and (key is not torch_uma.new[0] or value is not torch_uma.new[1]):
        raise SequenceError(
            f"{_name(module)} changes keys or values after it has stored them, which those in the arena cannot follow; "
            "use attn_implementation='sdpa' or 'eager'"
        )
    if attention_mask is not None and attention_mask.shape[-1] == 0:
        attention_mask = None
    scores = Scores(scale, softcap or 0.0, s_aux, position_bias, attention_mask, query_sinks=sinks)
    if block_indices is not None:
        return attend_blocks(torch_uma, module, query, (key, value), scores, block_indices).contiguous(), None
    if indices is not None or torch_uma.places.stores[torch_uma.store.rows[0].layer].index is not None:
        scores = with_choice(torch_uma, scores, indices)
    attend = torch_uma.attend_latents if torch_uma.store.is_latent else torch_uma.attend
    # Some models view what they get as [rows, new, heads * value dim].
    return attend(module, query, key, value, scores).contiguous(), None


def _name(module: torch.nn.Module) -> str:
    return f"layer {getattr(module, 'layer_idx', '?')}"


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Attention over keys and values that are all there, with what torch's own does not offer. Gradients flow."""
    _, heads, num_queries, _ = query.shape
    kv_heads, num_keys = key.shape[1:3]
    grouped = query.unflatten(1, (kv_heads, heads // kv_heads))
    scores = (grouped @ key.unsqueeze(2).transpose(-1, -2)).flatten(1, 2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is None:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_queries)
    scores = scores.float().masked_fill(~mask, torch.finfo(torch.float32).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()], dim=-1)
    weights = scores.softmax(dim=-1)[..., :num_keys].to(value.dtype).unflatten(1, (kv_heads, heads // kv_heads))
    attended: Tensor = weights @ value.unsqueeze(2)
    return attended.flatten(1, 2).transpose(1, 2)
