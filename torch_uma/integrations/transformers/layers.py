"""The layers of a cache: which kind serves what a layer of the model stores, and what a step waits for of each."""

from __future__ import annotations

from collections.abc import Iterable

from torch_uma.errors import PlanError
from torch_uma.integrations.transformers.layer import Steps
from torch_uma.integrations.transformers.prompt import REFERENCE
from torch_uma.integrations.transformers.recording import is_recurrent
from torch_uma.integrations.transformers.states import StateLayer
from torch_uma.integrations.transformers.steps import Part
from torch_uma.integrations.transformers.stores import INDEX_KEY, check_served, groups_of, parts_of_memory
from torch_uma.integrations.transformers.tokens import (
    AttentionLayer,
    CompressedLayer,
    IndexedLayer,
    ReferenceLayer,
    SingleLayer,
)
from torch_uma.integrations.transformers.versions import DummyLayer
from torch_uma.layout import Layer, Lifetime, State, Window


class HybridLayer(StateLayer, AttentionLayer):
    """A layer that has both states, and keys and values."""

    is_croppable = False
    is_compileable = False

    def __init__(
        self, layer: int, number_of_states: int, lifetime: Lifetime, steps: Steps, restarted_by: str = ""
    ) -> None:
        AttentionLayer.__init__(self, layer, lifetime, steps)
        StateLayer.__init__(self, layer, number_of_states, steps, restarted_by)

    def get_max_length(self) -> int:
        """As for keys and values alone."""
        return AttentionLayer.get_max_length(self)


CacheLayer = AttentionLayer | StateLayer | DummyLayer


def make_layers(layers: Iterable[Layer], steps: Steps) -> list[CacheLayer]:
    """One cache layer for each declared layer; those that store nothing get transformers' dummy.

    PlanError for what no cache layer serves.
    """
    made: list[CacheLayer] = []
    for index, layer in enumerate(layers):
        number_of_states, has_index, is_single, groups = 0, False, False, groups_of(layer)
        lifetime: Lifetime | None = None
        for memory in layer.memories:
            if groups and not isinstance(memory.lifetime, Window):
                continue
            if isinstance(memory.lifetime, State):
                number_of_states = max(1, sum(row.name.startswith("conv") for row in memory.rows))
            else:
                check_served(index, memory)
                lifetime = memory.lifetime
                has_index = any(row.name == INDEX_KEY for row in memory.rows)
                is_single = memory.rows[-1].name == "v" and memory.rows[-1].num_bytes == 0
        if number_of_states and has_index:
            raise PlanError(
                f"layer {index} stores index keys beside states; UnifiedCache serves them in layers of each"
            )
        if number_of_states and lifetime is not None:
            made.append(HybridLayer(index, number_of_states, lifetime, steps, layer.restarted_by))
        elif number_of_states:
            made.append(StateLayer(index, number_of_states, steps, layer.restarted_by))
        elif lifetime is not None:
            kind: type[AttentionLayer] = AttentionLayer
            if layer.name == REFERENCE:
                kind = ReferenceLayer
            elif groups or is_single:
                kind = CompressedLayer if groups else SingleLayer
            elif has_index:
                kind = IndexedLayer
            made.append(kind(index, lifetime, steps))
        else:
            made.append(DummyLayer())
        if any(isinstance(memory.lifetime, State) for memory in layer.memories):
            made[-1].is_croppable = not is_recurrent([layer])
    return made


def parts_of(layers: Iterable[Layer]) -> list[Part]:
    """Every layer's tokens, index keys, groups and rows of its state, as far as every forward stores them."""
    parts: list[Part] = []
    for index, layer in enumerate(layers):
        groups = groups_of(layer)
        for memory in layer.memories:
            if not groups or isinstance(memory.lifetime, Window):
                parts += [(index, name) for name in parts_of_memory(memory)]
        parts += [(index, name) for name in groups]
    return parts
