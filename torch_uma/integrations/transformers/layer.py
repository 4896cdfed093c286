"""What all layers of a cache are: a place in an arena, which the cache's step gives them, and the past of its rows.

The layers stand in for those of transformers, so that its code for masks, lengths and kinds of layers works unchanged.
None owns memory.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch_uma.errors import PlanError, SequenceError
from torch_uma.integrations.transformers.given import GivenStep
from torch_uma.integrations.transformers.steps import OwnSteps

Steps = GivenStep | OwnSteps


class ArenaLayer:
    """A layer whose content lies in an arena.

    `is_croppable`: it can be had as it was before any of the tokens behind which its past is recorded.
    """

    is_croppable = False
    _steps: Steps

    @property
    def record_past(self) -> bool:
        """Whether the past of the cache is recorded, so that mixers have to hand over what they put into a state.

        Set False it ends for all layers.
        """
        return self.is_croppable and self._steps.is_recording

    @record_past.setter
    def record_past(self, is_recording: bool) -> None:
        if not isinstance(self._steps, OwnSteps):
            raise SequenceError("the rows of a step belong to the loop that opened it; fork() its sequences before it")
        rows = self._steps.at_rest()
        if is_recording:
            rows.record(None)
        else:
            rows.stop_recording()

    def __deepcopy__(self, memo: dict[int, Any]) -> ArenaLayer:
        """A layer of the same kind, as looped models append them, that has no place in the arena until it is planned.

        The layers of a cache that was made for a looped model have all their places already.
        """
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__, _steps=Unplanned())
        return copied

    def __copy__(self) -> ArenaLayer:
        return self.__deepcopy__({})

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a layer of a UnifiedCache cannot be pickled, as what it keeps lies in the memory of a pool; "
            "copy.deepcopy() of the whole cache forks it there"
        )


class Unplanned:
    """The steps of a layer that no plan knows: PlanError for whatever is asked of them."""

    def __getattr__(self, name: str) -> NoReturn:
        raise PlanError(
            "the plan of this cache has no place for a copied layer; make the cache of the model, so that the copies "
            "that it works with are planned, or copy.deepcopy() the whole cache, which forks it"
        )
