"""Mask sizes and offsets, and the keys that they are for, are those of transformers' own cache at every length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import build
from test_generate import poisoned
from tiny_models import WINDOW
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

import torch_uma

torch.set_num_threads(1)

NUM_ROWS = 2
Change = Callable[[Cache], None]


class Pair:
    """Our cache and transformers' own, given the same keys: each holds the number of its row and of its token."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.ours = poisoned(model, page_size=5)
        self.config = model.config
        self.theirs = DynamicCache(config=model.config)
        self.heads = model.config.num_key_value_heads
        self.length = 0

    def feed(self, num_new: int) -> None:
        """A forward of `num_new` tokens through all layers; everything that the two say must agree."""
        tokens = torch.arange(self.length, self.length + num_new).float().view(1, 1, -1, 1)
        rows = 1000.0 * torch.arange(NUM_ROWS).view(-1, 1, 1, 1)
        keys = (tokens + rows).expand(NUM_ROWS, self.heads, num_new, 16)
        layers = range(len(self.theirs.layers))
        assert [self.ours.get_mask_sizes(num_new, layer) for layer in layers] == [
            self.theirs.get_mask_sizes(num_new, layer) for layer in layers
        ]
        for layer in layers:
            size, _ = self.theirs.get_mask_sizes(num_new, layer)
            with torch.no_grad():
                found = self.ours.update(keys + layer, -keys, layer)
            wanted = self.theirs.update(keys + layer, -keys, layer)
            assert found[0].shape[2] == size
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        self.length += num_new
        assert self.ours.get_seq_length() == self.theirs.get_seq_length() == self.length
        torch_uma.testing.scramble(self.ours.pool, self.length)
        self.ours.pool.check()

    def both(self, change: Change) -> None:
        """The same to both caches."""
        for cache in (self.ours, self.theirs):
            change(cache)
        assert self.ours.get_seq_length() == self.theirs.get_seq_length()


@pytest.fixture(params=["mistral", "gpt_oss", "llama"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(build(request.param, attention="eager"))


@pytest.mark.parametrize("first", [1, 7, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 2])
def test_until_a_window_is_full_and_on(pair: Pair, first: int) -> None:
    pair.feed(first)
    for _ in range(WINDOW + 3):
        pair.feed(1)


@pytest.mark.parametrize("second", [2, WINDOW - 2, WINDOW, 2 * WINDOW + 3])
def test_another_prompt_behind_the_first(pair: Pair, second: int) -> None:
    for num_new in (5, second, 1, 1, second, 1):
        pair.feed(num_new)


def test_after_tokens_were_taken_back(pair: Pair) -> None:
    pair.feed(WINDOW - 6)
    pair.both(lambda cache: cache.crop(-4))
    pair.length -= 4
    pair.feed(3)
    pair.feed(1)
    pair.both(lambda cache: cache.crop(0))
    for _ in range(WINDOW):
        pair.feed(1)


def test_tokens_that_a_window_has_left_cannot_be_taken_back(pair: Pair) -> None:
    pair.feed(2 * WINDOW)
    if not any(layer.is_sliding for layer in pair.ours.layers):
        pair.both(lambda cache: cache.crop(-WINDOW))
        pair.length -= WINDOW
    else:  # nobody has asked for their past to be recorded
        with pytest.raises(torch_uma.SequenceError, match=r"crop.*activate_past_recording.*reset\(\) starts over"):
            pair.ours.crop(-WINDOW)
    pair.feed(1)


def test_reordered_rows(pair: Pair) -> None:
    pair.feed(9)
    pair.both(lambda cache: cache.reorder_cache(torch.tensor([1, 1])))
    pair.feed(1)
    pair.feed(WINDOW)
    pair.both(lambda cache: cache.reorder_cache(torch.tensor([0, 1])))
    pair.feed(3)


def test_repeated_and_selected_rows(pair: Pair) -> None:
    pair.feed(WINDOW + 4)
    pair.both(lambda cache: cache.batch_repeat_interleave(2))
    pair.both(lambda cache: cache.batch_select_indices(torch.tensor([3, 0])))
    pair.feed(1)
    pair.feed(5)


def test_used_again_and_again(pair: Pair) -> None:
    for num_new in (WINDOW + 9, 3, 1):
        pair.feed(num_new)
        pair.feed(2)
        pair.ours.reset()
        pair.theirs, pair.length = DynamicCache(config=pair.config), 0
        assert [pair.ours.get_mask_sizes(4, layer)[0] for layer in range(len(pair.ours.layers))] == [4] * len(
            pair.ours.layers
        )


def test_rows_that_were_made_early(pair: Pair) -> None:
    pair.both(lambda cache: cache.early_initialization(NUM_ROWS, pair.heads, 16, torch.float32, torch.device("cpu")))
    assert pair.ours.batch_size == NUM_ROWS
    pair.feed(WINDOW - 1)
    pair.feed(2)


def test_what_a_layer_says_of_its_room(pair: Pair) -> None:
    pair.feed(3)
    for ours, theirs in zip(pair.ours.layers, pair.theirs.layers, strict=True):
        assert ours.is_sliding == theirs.is_sliding
        assert ours.get_max_length() == theirs.get_max_length()
