"""What a model allows of the forwards of a serving loop, as its layers and its attention say.

Owns the questions that a loop asks before its first forward, and the refusal of models that no loop can serve.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torch_uma.errors import PlanError
from torch_uma.integrations.transformers.attention import NAME
from torch_uma.integrations.transformers.made_for import check_made_for, reads_in_place
from torch_uma.integrations.transformers.origin import text_config_of
from torch_uma.integrations.transformers.prompt import REFERENCE
from torch_uma.integrations.transformers.serving.trial import try_together
from torch_uma.integrations.transformers.stores import has_index
from torch_uma.integrations.transformers.versions import cache_argument
from torch_uma.layout import Chunk

if TYPE_CHECKING:
    from torch_uma.pool import CachePool


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a loop may do with a model over a pool.

    `packed`: sequences may take unequally many new tokens in one forward. `even`: the sequences of a forward must hold
    equally many. `cache_argument`: how its forward calls a cache. `keeps_logits`: it can be told for which tokens to
    compute logits. `max_positions`: tokens for which it has learnt where they are; None if it can count on.
    """

    packed: bool
    even: bool
    cache_argument: str
    keeps_logits: bool
    max_positions: int | None


def traits_of(model: Any, pool: CachePool) -> Traits:
    """What the model allows; PlanError or SequenceError for one that a loop cannot serve over this pool, and why.

    A few forwards try it out the first time, for which it synchronises.
    """
    _check_generates(model)
    check_made_for(pool, model)
    layers, in_place = pool.plan.layers, reads_in_place(pool)
    model_type = model.config.model_type
    if any(layer.name == REFERENCE for layer in layers):
        raise PlanError(
            f"{model_type} shows every token its prompt and a window, and has to be told before each forward how long "
            "the prompt is, one number for all rows; run it with generate(), or in a loop over pool.step"
        )
    if not in_place and any(isinstance(memory.lifetime, Chunk) for layer in layers for memory in layer.memories):
        raise PlanError(
            f"{model_type} attends within chunks, which only attention in the arena tells apart; call "
            f"model.set_attn_implementation({NAME!r})"
        )
    argument = cache_argument(model.forward)
    if argument is None:
        raise PlanError(f"the forward of {type(model).__name__} takes no cache, so that no loop can serve it")
    together = try_together(model, pool)
    return Traits(
        packed=together.packed,
        even=not together.uneven,
        cache_argument=argument,
        keeps_logits="logits_to_keep" in inspect.signature(model.forward).parameters,
        max_positions=_max_positions(model),
    )


def check_compiles(model: Any, pool: CachePool) -> None:
    """PlanError if a decode step over rows of any length is not one graph, with the reason."""
    layers, model_type = pool.plan.layers, model.config.model_type
    if has_index(layers):
        raise PlanError(
            f"{model_type} chooses its keys by index keys, of which there are more with each step, and each number of "
            "them would be a graph of its own; leave compile= out"
        )
    if not reads_in_place(pool):
        raise PlanError(
            f"{model_type} attends by {model.config._attn_implementation!r}, for which rows of unequal length are "
            f"copied, and every length would be a graph of its own; call model.set_attn_implementation({NAME!r}) and "
            "make the pool of the model, or leave compile= out"
        )


def _check_generates(model: Any) -> None:
    can_generate = getattr(model, "can_generate", None)
    if can_generate is None or not can_generate():
        raise PlanError(
            f"a loop needs a transformers model that can generate(), with a head that gives logits, but was given a "
            f"{type(model).__name__}; AutoModelForCausalLM makes one"
        )


def _max_positions(model: Any) -> int | None:
    """Behind the last of them a forward is an error, on a GPU one that ends the process: it must not come to that."""
    config = text_config_of(model)
    limit = getattr(config, "max_position_embeddings", None)
    has_learnt = any(
        isinstance(module, torch.nn.Embedding) and ("position" in name or name.endswith("wpe"))
        for name, module in (model.get_decoder() or model).named_modules()
    )
    return int(limit) if limit and has_learnt else None
