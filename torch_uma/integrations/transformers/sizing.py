"""How large the arena of a cache is, for a known number of rows and tokens, and no larger."""

from __future__ import annotations

from typing import Any

import torch

from torch_uma.allocator import Allocator
from torch_uma.errors import PlanError
from torch_uma.layout import Chunk, Layer, Window
from torch_uma.plan import Plan, plan


def plan_for(
    layers: tuple[Layer, ...],
    num_rows: int,
    max_tokens: int,
    is_roomy: bool,
    page_size: int,
    device: torch.device,
    past_tokens: int = 0,
) -> Plan:
    """A plan whose arena holds `num_rows` sequences of `max_tokens`, and what decoding on the way needs beside them.

    `is_roomy`: also what a step of several tokens needs, which reads the window before them and leaves another one; it
    is the room in which windows slide. `past_tokens`: of a step, so many may be taken back; for them windows and chunks
    keep what was before, and there is a second state.
    """
    options: dict[str, Any] = {"page_size": page_size, "pad_entries": device.type == "cpu"}
    boundless = plan(layers, memory="1TiB", **options)
    num_pages = []
    for subpool in boundless.subpools:
        num_pages.append(subpool.num_pages_for(max_tokens))
        if isinstance(subpool.lifetime, Window | Chunk):
            # As many tokens as one query reads, wherever they begin within a page.
            window_pages = (subpool.lifetime.num_tokens + subpool.page_tokens - 2) // subpool.page_tokens + 1
            most_pages = (1 + is_roomy) * window_pages - (-past_tokens // subpool.page_tokens)
            num_pages[-1] = min(-(-max_tokens // subpool.page_tokens), most_pages)
        elif subpool.is_state and past_tokens:
            num_pages[-1] = 2
    demand = [num_rows * pages for pages in num_pages]
    memory = sum(pages * subpool.page_bytes for pages, subpool in zip(demand, boundless.subpools, strict=True))
    # The sink comes on top, and what is left beside bands that begin or end within a page: known once it is placed.
    paged_bytes = [subpool.page_bytes for subpool in boundless.subpools if not subpool.is_state]
    step_bytes = max(256, max(paged_bytes, default=0) // 4)
    most = memory + 4 * sum(paged_bytes) + 16 * step_bytes
    while True:
        memory += step_bytes
        try:
            made = plan(layers, memory=memory, **options)
        except PlanError:
            if memory > most:
                raise
            continue
        if Allocator(made).quote(demand):
            return made
