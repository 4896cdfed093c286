"""Counts as users give them: whole numbers, numpy's and torch's as well."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
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


def whole_or_each(value: Any, name: str, *, least: int, error: Callable[[str], Exception]) -> int | list[int]:
    """`value` as `whole` gives it; of several values, such as a list or an array has, each."""
    if isinstance(value, int | str) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        return whole(value, name, least=least, error=error)
    return [whole(number, name, least=least, error=error) for number in value]
