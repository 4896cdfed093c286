"""The arena of a cache holds what it was sized for, and little more."""

import random

import pytest
import torch

from torch_uma import Chunk, Full, Layer, Memory, Row, State, Window
from torch_uma.allocator import Allocator
from torch_uma.integrations.transformers.sizing import plan_for


def some_layers(chance: random.Random) -> tuple[Layer, ...]:
    def lifetime():
        return chance.choice([Full(), Full(), Window(chance.randint(1, 40)), Chunk(chance.randint(1, 30)), State()])

    def row():
        return Row(name="x", shape=(chance.randint(1, 40),), dtype=torch.float32)

    return tuple(Layer(memories=(Memory(lifetime=lifetime(), rows=(row(),)),)) for _ in range(chance.randint(1, 5)))


@pytest.mark.parametrize("seed", range(8))
def test_every_row_fits_at_its_full_length(seed: int) -> None:
    chance = random.Random(seed)
    for case in range(60):
        layers, num_rows, max_tokens = some_layers(chance), chance.randint(1, 6), chance.randint(1, 200)
        page_size, is_roomy = chance.choice([1, 2, 7, 16]), chance.random() < 0.5
        plan = plan_for(layers, num_rows, max_tokens, is_roomy, page_size, torch.device("cpu"))
        demand, needed_bytes = [], 0
        for subpool in plan.subpools:
            num_pages = -(-max_tokens // subpool.page_tokens)
            if subpool.is_state:
                num_pages = 1
            elif not isinstance(subpool.lifetime, Full):
                # However they lie within pages, so many tokens are read by one query, and left by a step of several.
                window = subpool.lifetime.num_tokens
                spanned = max(len({(start + i) // page_size for i in range(window)}) for start in range(page_size))
                num_pages = min(num_pages, spanned * (2 if is_roomy else 1))
            demand.append(num_rows * num_pages)
            needed_bytes += demand[-1] * subpool.page_bytes
        assert Allocator(plan).quote(demand), (seed, case)
        paged_bytes = sum(subpool.page_bytes for subpool in plan.subpools if not subpool.is_state)
        assert plan.arena_bytes <= needed_bytes + 4 * paged_bytes + 4096, (seed, case)
