"""Which other engine is installed here, if any."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str:
    """As its distribution says; "none" without one."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
