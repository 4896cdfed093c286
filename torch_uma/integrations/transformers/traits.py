"""What a model allows of the forwards of a serving loop, as its layers and its attention say.

Owns the questions that a loop asks before its first forward, and the refusal of models that no loop can serve.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_uma.errors import PlanError, SequenceError
from torch_uma.integrations.transformers.attention import NAME, is_used
from torch_uma.integrations.transformers.cache import UnifiedCache
from torch_uma.integrations.transformers.made_for import check_made_for, config_of
from torch_uma.integrations.transformers.prompt import REFERENCE
from torch_uma.integrations.transformers.stores import parts_of_memory
from torch_uma.integrations.transformers.versions import cache_argument
from torch_uma.layout import Chunk, Layer, State

if TYPE_CHECKING:
    from torch_uma.pool import CachePool


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a loop may do with a model over a pool.

    `packed`: sequences may take unequally many new tokens in one forward. `even`: the sequences of a forward must hold
    equally many. `cache_argument`: how its forward calls a cache. `keeps_logits`: it can be told for which tokens to
    compute logits.
    """

    packed: bool
    even: bool
    cache_argument: str
    keeps_logits: bool


def traits_of(model: Any, pool: CachePool) -> Traits:
    """What the model allows; PlanError for one that a loop cannot serve over this pool, with the reason."""
    _check_generates(model)
    check_made_for(pool, model)
    layers, in_place = pool.plan.layers, _is_in_place(pool)
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
    assert argument is not None
    return Traits(
        packed=_can_pack(pool),
        even=_has_groups(layers) or (not in_place and _has_blocks(layers)),
        cache_argument=argument,
        keeps_logits="logits_to_keep" in inspect.signature(model.forward).parameters,
    )


def check_compiles(model: Any, pool: CachePool) -> None:
    """PlanError if a decode step over rows of any length is not one graph, with the reason."""
    layers, model_type = pool.plan.layers, model.config.model_type
    if any("index" in parts_of_memory(memory) for layer in layers for memory in layer.memories):
        raise PlanError(
            f"{model_type} chooses its keys by index keys, of which there are more with each step, and each number of "
            "them would be a graph of its own; leave compile= out"
        )
    if not _is_in_place(pool):
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


def _is_in_place(pool: CachePool) -> bool:
    """Whether attention reads the arena, or there is none."""
    layers = pool.plan.layers
    attends = any(not isinstance(memory.lifetime, State) for layer in layers for memory in layer.memories)
    return not attends or is_used(config_of(pool))


def _can_pack(pool: CachePool) -> bool:
    try:
        UnifiedCache._check_packed(pool, [1, 2])
    except SequenceError:
        return False
    return True


def _has_groups(layers: tuple[Layer, ...]) -> bool:
    """Whether any layer makes one entry of a group of tokens, which ends in the same step for all rows."""
    return any(memory.tokens_per_entry > 1 for layer in layers for memory in layer.memories)


def _has_blocks(layers: tuple[Layer, ...]) -> bool:
    """Whether any layer chooses blocks of keys, which begin with column 0 of each row."""
    rows = (row for layer in layers for memory in layer.memories for row in memory.rows)
    return any(row.name == "index_key" and len(row.shape) > 1 for row in rows)
