"""Models that remember in ways of their own: who cannot use this cache and why, and what others ask of it.

Owns the names of such models. What is found by looking at what a model does instead, whatever its name, is in
`restarts`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from torch_uma.errors import PlanError
from torch_uma.layout import Layer

if TYPE_CHECKING:
    from torch_uma.integrations.transformers.states import StateLayer

_REFUSED = {
    "recurrent_gemma": "it keeps its RG-LRU and convolution states in its modules, where forks, beams and conversations"
    " in turns overwrite one another's",
    "reformer": "its attention hashes buckets of past hidden states, which only its ReformerDynamicCache holds",
    "rwkv": "its states are a list that it takes as state= and no cache sees, and which is wrong for batches",
    "xlnet": "it remembers hidden states, which it takes as mems= and no cache sees",
    "xlstm": "its layers change the states of an xLSTMCache and never tell how many tokens they stand for",
}
"""By model type, what is missing."""

LIGHTNING = "lightning"
"""The row of a layer of lightning attention, by which a cache of a MiniMax is known."""


def check_remembers(config: PreTrainedConfig) -> None:
    """Raise PlanError for a model that keeps what it remembers where no cache can hold it."""
    why = _REFUSED.get(config.model_type)
    if why is None and getattr(config, "recurrent_kv_cache_mode", None) == "last_loop":
        why = (
            "with recurrent_kv_cache_mode='last_loop' its first loops take the keys of another loop out of the cache's "
            "layers, which in an arena have none to be taken"
        )
    if why is not None:
        raise PlanError(
            f"{config.model_type} cannot remember in an arena: {why}; call generate() without cache=, which then keeps "
            "what the model itself makes"
        )


class Lightning:
    """What a MiniMax calls: it gives the states of its layers of lightning attention to the cache as a whole."""

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """The live state [rows, heads, head_dim, head_dim] of a layer, or None while no row has one."""
        return self._state_layer(layer_idx).read(LIGHTNING, 0)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Keeps the state of a layer."""
        self._state_layer(layer_idx).write(LIGHTNING, 0, linear_cache)

    def __len__(self) -> int:
        return len(self.layers)

    if TYPE_CHECKING:
        layers: list[Any]

        def _state_layer(self, layer_idx: int) -> StateLayer: ...


def with_lightning(layers: Iterable[Layer]) -> bool:
    """Whether any layer stores a state of lightning attention."""
    return any(row.name == LIGHTNING for layer in layers for memory in layer.memories for row in memory.rows)


@lru_cache
def as_minimax_cache(*bases: Any) -> type[Any]:
    """A class with these bases that a MiniMax takes for the only one that it works with."""
    # Imported here, as a model's module is: by whoever has such a model.
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    first = bases[-1]
    return type(first.__name__, (*bases, MiniMaxCache), {"__module__": first.__module__, "__doc__": first.__doc__})
