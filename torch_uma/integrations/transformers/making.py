"""How the pools of a cache are made: of what its maker asked for, at once or when the first batch is known."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torch_uma.integrations.transformers.rows import CacheRows
from torch_uma.integrations.transformers.sizing import plan_for
from torch_uma.layout import Layer
from torch_uma.pool import CachePool

_log = logging.getLogger(__name__)

_PAGE_ENTRIES = 16
_SIZED_PAGE_ENTRIES = 8  # a window ends within a page, and begins within one: in small arenas that counts


@dataclass(frozen=True, kw_only=True)
class Making:
    """What a cache was asked to make its pools with; None for what nobody said.

    Attributes:
        max_tokens: of each row.
        page_size: entries.
        max_sequences: of each pool.
        is_in_place: whether attention reads the arena, and so needs no room for windows to slide.
    """

    max_tokens: int | None
    page_size: int | None
    max_sequences: int | None
    is_in_place: Callable[[], bool]

    def rows(
        self, layers: tuple[Layer, ...], device: torch.device | str | None, memory: Any, pool: CachePool | None = None
    ) -> CacheRows:
        """Rows of what these layers store: in `pool`, one of `memory`, or one made on `device` with the first rows."""
        make = partial(self._make_pool, layers, device, memory)
        if pool is None and memory is not None:
            pool = make(1, torch.get_default_device(), self.max_tokens, False, 0)
        return CacheRows(make, pool=pool, max_tokens=self.max_tokens)

    def _make_pool(
        self,
        layers: tuple[Layer, ...],
        device: torch.device | str | None,
        memory: Any,
        num_rows: int,
        tensor_device: torch.device,
        max_tokens: int | None,
        is_roomy: bool,
        past_tokens: int,
    ) -> CachePool:
        on = tensor_device if device is None else torch.device(device)
        options: dict[str, Any] = {"max_sequences": self.max_sequences or max(256, 4 * num_rows), "device": on}
        if memory is None and max_tokens is not None:
            made_roomy = is_roomy or not self.is_in_place()  # the same room as that in which windows slide
            entries = _SIZED_PAGE_ENTRIES if self.page_size is None else self.page_size
            made = CachePool(plan_for(layers, num_rows, max_tokens, made_roomy, entries, on, past_tokens), **options)
        else:
            entries = _PAGE_ENTRIES if self.page_size is None else self.page_size
            made = CachePool(layers, memory=memory, page_size=entries, **options)
        _log.info("took %d bytes on %s for a cache of %d rows", made.plan.arena_bytes, on, num_rows)
        return made
