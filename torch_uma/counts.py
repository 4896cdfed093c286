"""Counts as users give them: whole numbers, numpy's and torch's as well."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any


def whole(value: Any, name: str, *, least: int, error: Callable[[str], Exception]) -> int:
    """`value` as an int; raises `error` for what is no whole number, or one below `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise error(f"{name} is a whole number, not {value!r}") from None
    if number < least:
        raise error(f"{name} is at least {least}, not {number}")
    return number
