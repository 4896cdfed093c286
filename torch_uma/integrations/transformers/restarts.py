"""Whether a layer goes on with its recurrent state in a forward of several tokens, or starts it anew.

Some models do the latter, which only their own code can put right: a prompt in chunks, or a second one behind the
first, then comes out as if the first had not been there. It is seen on the meta device, whatever a model is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


class _Reads(TorchFunctionMode):
    """Notes in `read` which of some tensors, by id, are read; to be written, or asked for a shape, does not count."""

    def __init__(self, ids: Iterable[int]) -> None:
        super().__init__()
        self._ids = frozenset(ids)
        self.read: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_:
            self._note((args[1:], kwargs))
        elif func.__name__ != "__get__":
            self._note((args, kwargs))
        return func(*args, **kwargs)

    def _note(self, arguments: Any) -> None:
        self.read |= self._ids.intersection(id(leaf) for leaf in tree_leaves(arguments))


def restarting(layers: Iterable[Any], go_on: Callable[[], None]) -> list[Any]:
    """Those of transformers' cache layers whose recurrent state `go_on`, a forward of several tokens, does not read."""
    held = [(layer, state) for layer in layers for state in states_of(layer)]
    if not held:
        return []
    with _Reads(id(state) for _, state in held) as reads:
        go_on()
    return [layer for layer, state in held if id(state) not in reads.read]


def states_of(layer: Any) -> list[torch.Tensor]:
    """The recurrent states of one of transformers' cache layers."""
    return [state for state in getattr(layer, "recurrent_states", {}).values() if state is not None]
