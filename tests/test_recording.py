"""What caches keep of their past: forwards that are taken back leave nothing behind, and what is kept goes again."""

from __future__ import annotations

import copy
import gc
from typing import Any

import numpy as np
import pytest
import torch
from speculating import MEMORY, RECURRENT, assert_all_free, bounded_pages, model_of, poisoned, prompt
from tiny_models import WINDOW

import torch_uma
from torch_uma.errors import SequenceError

torch.set_num_threads(1)


@pytest.mark.parametrize("attention", ["eager", "torch_uma"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "lfm2", "qwen3_next", "mamba2"])
def test_what_was_taken_back_was_never_there(name: str, attention: str) -> None:
    """Batches, several forwards between two crops, and any number of tokens of a forward."""
    model = model_of(name, attention)
    for seed in range(2):
        print("seed", seed)
        chance = np.random.default_rng(seed)
        rows = int(chance.integers(1, 4))
        ids = torch.from_numpy(chance.integers(0, 250, (rows, 90)))
        cache = poisoned(model, page_size=int(chance.choice([1, 5, 16])))
        is_sure = cache.is_croppable
        assert is_sure == (name not in RECURRENT)
        length = 0
        with torch.no_grad():
            expected = model(input_ids=ids).logits
            while length < 45:
                most = None if chance.random() < 0.5 else int(chance.integers(1, 9))
                cache.activate_past_recording(most)
                start, end = length, length
                for _ in range(int(chance.integers(1, 4)) if most is None else 1):
                    count = int(chance.integers(1, 9)) if length else int(chance.integers(1, 30))
                    wrong = torch.from_numpy(chance.integers(0, 250, (rows, count)))
                    kept = int(chance.integers(0, count, endpoint=True))
                    kept = kept if end == length else 0  # behind a wrong token nothing is right
                    kept = max(kept, count - most) if most is not None else kept
                    new = torch.cat([ids[:, end : end + kept], wrong[:, kept:]], dim=1)
                    logits = model(input_ids=new, cache=cache).logits
                    if kept:
                        torch.testing.assert_close(
                            logits[:, :kept], expected[:, end : end + kept], rtol=1e-3, atol=1e-3
                        )
                    length += kept
                    end += count
                    torch_uma.testing.scramble(cache.pool, seed + end)
                if not is_sure and length < end:
                    length = start if most is None or end - start <= most else length
                    if length > start:  # a recurrent state cannot be had of just this length
                        with pytest.raises(SequenceError, match="checkpoint"):
                            cache.crop(length - end)
                        length = start
                cache.crop(length - end)
                assert cache.get_seq_length() == length
                cache.pool.check()
            torch_uma.testing.poison(cache.pool, only_free=True)
            logits = model(input_ids=ids[:, length : length + 3], cache=cache).logits
            torch.testing.assert_close(logits, expected[:, length : length + 3], rtol=1e-3, atol=1e-3)


def test_a_long_prompt_leaves_windows_as_small_as_they_are() -> None:
    model = model_of("mistral", "torch_uma")
    cache = poisoned(model, page_size=4)
    with torch.no_grad():
        cache.activate_past_recording(5)
        model(input_ids=prompt(150), cache=cache)
        cache.pool.check()
        told = bounded_pages(cache.pool)[0]
        assert WINDOW // 4 + 1 <= told <= -(-(WINDOW + 5) // 4) + 1
        with pytest.raises(SequenceError, match="keeps those from"):
            cache.crop(-12)
        assert cache.get_seq_length() == 150
        cache.crop(-5)
        assert bounded_pages(cache.pool)[0] <= WINDOW // 4 + 1
        model(input_ids=prompt(10), cache=cache)


@pytest.mark.parametrize("page_size", [1, 5])
def test_a_past_may_be_longer_than_the_room_in_which_windows_slide(page_size: int) -> None:
    model = model_of("mistral")
    cache = poisoned(model, page_size=page_size)
    ids = prompt(170)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        model(input_ids=ids[:, :40], cache=cache)
        cache.activate_past_recording()
        for _ in range(2):
            for at in range(40, 160, 4):
                logits = model(input_ids=ids[:, at : at + 4], cache=cache).logits
                torch.testing.assert_close(logits, expected[:, at : at + 4], rtol=1e-3, atol=1e-3)
                if at % 3 == 0:
                    torch_uma.testing.scramble(cache.pool, at)
                cache.pool.check()
            cache.crop(-120)
        model(input_ids=ids[:, 40:50], cache=cache)
        cache.crop(-3)
        torch.testing.assert_close(
            model(input_ids=ids[:, 47:60], cache=cache).logits, expected[:, 47:60], rtol=1e-3, atol=1e-3
        )


def test_a_sized_arena_grows_with_what_is_speculative() -> None:
    model = model_of("llama")
    cache = torch_uma.UnifiedCache(model, max_tokens=64)
    cache.activate_past_recording()
    with torch.no_grad():
        model(input_ids=prompt(60), cache=cache)
        cache.crop(0)
        for count in (4, 20, 40):
            pool = cache.pool
            logits = model(input_ids=prompt(count, seed=9), cache=cache).logits
            assert (cache.pool is pool) == (count == 4)
            expected = model(input_ids=torch.cat([prompt(60), prompt(count, seed=9)], dim=1)).logits[:, 60:]
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
            cache.crop(-count)
        model(input_ids=prompt(40), cache=cache)
        with pytest.raises(torch_uma.OutOfMemory, match="max_tokens=64"):
            model(input_ids=prompt(200), cache=cache)  # as tokens of another forward are speculative already
        cache.crop(-40)
        cache.deactivate_past_recording()
        with pytest.raises(torch_uma.OutOfMemory, match="max_tokens=64"):
            model(input_ids=prompt(300), cache=cache)
        cache.pool.check()


def test_layers_say_and_end_what_is_recorded() -> None:
    cache = poisoned(model_of("lfm2"))
    assert [cache.is_recording_past(layer) for layer in range(4)] == [False] * 4
    cache.activate_past_recording()
    assert [cache.is_recording_past(layer) for layer in range(4)] == [True] * 4
    for layer in cache.layers:
        layer.record_past = False
    assert [cache.is_recording_past(layer) for layer in range(4)] == [False] * 4
    cache.layers[0].activate_past_recording()
    assert cache.is_recording_past(2)
    recurrent = poisoned(model_of("qwen3_next"))
    recurrent.activate_past_recording()
    # Of recurrent layers the arena has a checkpoint, and mixers need not know.
    assert [recurrent.is_recording_past(layer) for layer in range(4)] == [False, True, False, True]
    with torch_uma.CachePool(model_of("lfm2"), memory=MEMORY) as pool, pool.step({pool.add(): 3}) as given:
        assert not given.is_recording_past(0)
        for act in (given.activate_past_recording, lambda: setattr(given.layers[0], "record_past", True)):
            with pytest.raises(SequenceError, match="belong to the loop"):
                act()
    for wrong in (0, -1, 1.5):
        with pytest.raises(SequenceError, match="num_tokens of a recording"):
            cache.activate_past_recording(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [None, 25])
def test_a_longer_recording_does_not_bring_back_what_a_shorter_one_left_out(more: int | None) -> None:
    for name, attention in (("mistral", "eager"), ("gemma2", "torch_uma"), ("llama4", "torch_uma")):
        model = model_of(name, attention)
        cache = poisoned(model, page_size=1)
        ids = prompt(80)
        with torch.no_grad():
            expected = model(input_ids=ids).logits
            model(input_ids=ids[:, :33], cache=cache)
            cache.activate_past_recording(3)
            model(input_ids=ids[:, 33:70], cache=cache)
            cache.activate_past_recording(more)
            model(input_ids=ids[:, 70:71], cache=cache)
            cache.pool.check()
            with pytest.raises(SequenceError, match="keeps those from"):
                cache.crop(-21)
            cache.crop(-4)
            logits = model(input_ids=ids[:, 67:70], cache=cache).logits
            torch.testing.assert_close(logits, expected[:, 67:70], rtol=1e-3, atol=1e-3)
            cache.pool.check()


def test_a_fork_of_a_recording_has_no_past() -> None:
    for name in ("mistral", "lfm2", "qwen3_next"):
        model = model_of(name)
        cache = poisoned(model, page_size=3)
        ids = prompt(80)
        with torch.no_grad():
            expected = model(input_ids=ids).logits
            model(input_ids=ids[:, :40], cache=cache)
            cache.activate_past_recording()
            model(input_ids=ids[:, 40:47], cache=cache)
            fork = copy.deepcopy(cache)
            cache.pool.check()
            cache.crop(-7)
            cache.pool.check()
            for each, at in ((cache, 40), (fork, 47), (cache, 43), (fork, 50)):
                logits = model(input_ids=ids[:, at : at + 3], cache=each).logits
                torch.testing.assert_close(logits, expected[:, at : at + 3], rtol=1e-3, atol=1e-3)
                cache.pool.check()
            cache.crop(0)
        if name == "mistral":
            with pytest.raises(SequenceError):
                fork.crop(-7)
        fork.reset()
        cache.reset()
        assert_all_free(cache.pool)


def test_inputs_of_a_forward_that_was_stopped_are_not_recorded() -> None:
    model = model_of("lfm2")
    cache = poisoned(model)
    ids = torch.cat([prompt(60), prompt(60, seed=4)])

    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        expected = model(input_ids=ids).logits
        model(input_ids=ids[:, :20], cache=cache)
        cache.activate_past_recording()
        model(input_ids=ids[:, 20:24], cache=cache)
        seed = 0
        while "state copy" not in cache.paths():  # which an interrupted forward leaves as it was
            torch_uma.testing.scramble(cache.pool, seed)
            copy.deepcopy(cache).crop(0)
            model(input_ids=ids[:, 24 + seed : 25 + seed], cache=cache)
            seed += 1
        length = 24 + seed
        handle = model.model.layers[2].register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=torch.zeros_like(ids[:, :9]), cache=cache)
        handle.remove()
        model(input_ids=ids[:, length : length + 3], cache=cache)
        cache.crop(-5)
        logits = model(input_ids=ids[:, length - 2 : length + 4], cache=cache).logits
        torch.testing.assert_close(logits, expected[:, length - 2 : length + 4], rtol=1e-3, atol=1e-3)
        cache.crop(-6)
        cache.activate_past_recording(2)  # of which fewer inputs are kept than were in the forward that is stopped
        model(input_ids=ids[:, length - 2 : length - 1], cache=cache)
        handle = model.model.layers[2].register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            model(input_ids=torch.zeros_like(ids[:, :19]), cache=cache)
        handle.remove()
        model(input_ids=torch.zeros_like(ids[:, :2]), cache=cache)
        cache.crop(-2)
        logits = model(input_ids=ids[:, length - 1 : length + 4], cache=cache).logits
        torch.testing.assert_close(logits, expected[:, length - 1 : length + 4], rtol=1e-3, atol=1e-3)
    cache.pool.check()


def test_what_is_recorded_goes_with_the_cache() -> None:
    for name in ("mistral", "qwen3_next"):
        model = model_of(name)
        pool = torch_uma.CachePool(model, memory=MEMORY)
        for ending in ("drop", "reset", "select", "deactivate"):
            cache = torch_uma.UnifiedCache(model, pool=pool)
            with torch.no_grad():
                model(input_ids=prompt(30), cache=cache)
                cache.activate_past_recording()
                model(input_ids=prompt(30), cache=cache)
            rows = int(pool.sequences.live.sum())
            assert rows == (2 if name == "qwen3_next" else 1)
            if ending == "reset":
                cache.reset()
            elif ending == "select":
                cache.batch_repeat_interleave(2)
                with pytest.raises(SequenceError):
                    cache.crop(-30)
                cache.reset()
            elif ending == "deactivate":
                cache.deactivate_past_recording()
                assert int(pool.sequences.live.sum()) == 1
            del cache
            gc.collect()
            assert_all_free(pool)
            assert not pool.sequences.live.any()


def test_a_recurrent_state_goes_back_to_its_checkpoint_alone() -> None:
    model = model_of("qwen3_next")
    cache = poisoned(model)
    with torch.no_grad():
        model(input_ids=prompt(30), cache=cache)
        with pytest.raises(SequenceError, match="has replaced the older ones"):
            cache.crop(-1)
        cache.activate_past_recording()
        with pytest.raises(SequenceError, match="there is no checkpoint"):
            cache.crop(-1)
        model(input_ids=prompt(4), cache=cache)
        for count in (1, 3, 5, 33):
            with pytest.raises(SequenceError, match="there is a checkpoint of 30"):
                cache.crop(-count)
            cache.pool.check()
        cache.crop(-4)
        with pytest.raises(SequenceError, match="there is no checkpoint"):
            cache.crop(-4)
        expected = model(input_ids=torch.cat([prompt(30), prompt(2)], dim=1)).logits[:, -2:]
        torch.testing.assert_close(model(input_ids=prompt(2), cache=cache).logits, expected, rtol=1e-3, atol=1e-3)
        cache.crop(-32)
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(
            model(input_ids=prompt(2), cache=cache).logits, model(input_ids=prompt(2)).logits, rtol=1e-3, atol=1e-3
        )
