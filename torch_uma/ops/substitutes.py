"""Who attends over an arena in the place of `attend`'s own code, such as an adapter to a library of kernels.

Owns the register of them, by the arena's address. An op knows no pool, and a library that plans on the host needs the
step; so whoever has both registers here, and is asked at each call.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import Tensor


class Substitute(Protocol):
    """Something that can be asked with the arguments of `attend`."""

    def attend(self, arena: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor] | None:
        """What `attend` gives, or None where it is not served. Must neither wait for a device nor read from it."""


_BY_ADDRESS: dict[int, weakref.ref[Any]] = {}


def register(arena: Tensor, substitute: Substitute) -> None:
    """Ask `substitute` from now on, instead of any before it, for as long as somebody else holds it."""
    _BY_ADDRESS[arena.data_ptr()] = weakref.ref(substitute)


def unregister(arena: Tensor) -> None:
    """Ask nobody any more."""
    _BY_ADDRESS.pop(arena.data_ptr(), None)


def ask(arena: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor] | None:
    """What a substitute gives for these arguments of `attend`; None if there is none, or it does not serve them."""
    if not _BY_ADDRESS:
        return None
    known = _BY_ADDRESS.get(arena.data_ptr())
    substitute = None if known is None else known()
    if substitute is None:
        return None
    served: tuple[Tensor, Tensor] | None = substitute.attend(arena, *arguments, **options)
    return served
