"""Who forgets in a forward of several tokens is known beforehand, and is not let; who does not may go on."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from test_own import generate, poisoned, prompts
from transformers import DynamicCache
from zoo import build

import torch_uma
from torch_uma.errors import SequenceError
from torch_uma.integrations.transformers.declare import declare

torch.set_num_threads(1)

FORGETFUL = ["mamba", "falcon_mamba", "jamba", "zamba"]
RECURRENT = [*FORGETFUL, "mamba2", "bamba", "qwen3_next", "zamba2", "kimi_linear", "lfm2"]


model_of = lru_cache(build)


@pytest.mark.parametrize("name", RECURRENT)
def test_what_is_seen_on_the_meta_device_is_what_happens(name: str) -> None:
    model = model_of(name)
    ids, cache = prompts(1), DynamicCache(config=model.config)
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[:, -1]
        if name in ("mamba", "falcon_mamba", "mamba2"):  # of these transformers' cache knows no length
            cache.get_seq_length = lambda *_: 6  # type: ignore[method-assign]
        model(ids[:, :6], cache=cache, use_cache=True)
        positions = {"position_ids": torch.arange(6, 11)[None]} if name == "bamba" else {}
        chunked = model(ids[:, 6:], cache=cache, use_cache=True, **positions).logits[:, -1]
    restarted = {layer.restarted_by for layer in declare(model)} - {""}
    assert restarted == ({name} if name in FORGETFUL else set())
    assert torch.allclose(whole, chunked, atol=1e-4) == (not restarted)


@pytest.mark.parametrize("name", FORGETFUL)
def test_it_is_refused_and_the_cache_goes_on(name: str) -> None:
    model, ids = model_of(name), prompts(2)
    expected = generate(model, ids, use_cache=False)
    cache = poisoned(model)
    with pytest.raises(SequenceError, match=f"{name} starts its recurrent states anew .* forget the 4 tokens"):
        generate(model, ids, cache=cache, prefill_chunk_size=4)
    cache.reset()
    with torch.no_grad():
        model(ids[:, :4], cache=cache)
        with pytest.raises(SequenceError, match="one token at a time"):
            model(ids[:, 4:], cache=cache)
        assert cache.get_seq_length() == 4
        for i in range(4, ids.shape[1] - 1):
            model(ids[:, i : i + 1], cache=cache)
    assert torch.equal(generate(model, ids, cache=cache), expected)

    pool = torch_uma.CachePool(model, memory=4 << 20)
    sequences = [pool.add(), pool.add()]
    with torch.no_grad():
        for start, end in ((0, 8), (8, 9)):
            with pool.step(dict.fromkeys(sequences, end - start)) as step:
                model(ids[:, start:end], cache=step, **step.inputs())
        with pytest.raises(SequenceError, match=name), pool.step(dict.fromkeys(sequences, 2)) as step:
            model(ids[:, 9:], cache=step, **step.inputs())
        assert [sequence.length for sequence in sequences] == [9, 9]
