"""What a loop runs: batch sizes of graphs, logits of the last tokens alone, and nothing read back on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from served import model_of, prompt_of
from torch.utils._python_dispatch import TorchDispatchMode

import torch_uma
from torch_uma import ServingLoop
from torch_uma.integrations.transformers.serving.compiled import filled_size, most_fillers

torch.set_num_threads(1)


def test_there_are_few_sizes_of_graphs_and_none_is_far_from_what_is_asked() -> None:
    for most_rows in (1, 2, 7, 64, 100, 512):
        sizes = [filled_size(num_rows, most_rows) for num_rows in range(1, most_rows + 1)]
        assert all(num_rows <= size <= most_rows for num_rows, size in enumerate(sizes, 1))
        assert sizes == sorted(sizes) and sizes[-1] == most_rows
        assert most_fillers(most_rows) == max(size - num_rows for num_rows, size in enumerate(sizes, 1))
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512]


class Watched(TorchDispatchMode):
    """Notes what waits for a device where there is one, and the shapes of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op._overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "unique_dim"):
            self.waits.append(str(op))
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention", ["torch_uma", "eager"])
def test_a_round_is_launched_without_a_look_at_the_tokens_of_the_one_before(attention: str) -> None:
    model = model_of("llama", attention)
    options = {"do_sample": True, "top_k": 5, "max_new_tokens": 12}
    with ServingLoop(model, memory="1MiB", max_running=8, step_tokens=16, overlap=True) as loop:
        for length in (5, 20, 30):
            loop.submit(prompt_of(length), seed=length, **options)
        loop.submit(prompt_of(9), repetition_penalty=1.3, do_sample=False, max_new_tokens=12)
        num_rounds = 0
        while len(loop):
            with torch.no_grad(), Watched() as watched:
                loop._launch()
            assert watched.waits == [], num_rounds
            num_rounds += 1
            if len(loop._launched) > 1:
                loop._read()
        assert num_rounds > 12


@pytest.mark.parametrize(("name", "attention"), [("llama", "torch_uma"), ("qwen3_next", "eager")])
def test_only_the_last_token_of_a_prompt_has_logits(name: str, attention: str) -> None:
    """Those of all tokens of a prompt can be larger than its keys and values."""
    model = model_of(name, attention)
    shapes: list[tuple[int, ...]] = []
    handle = model.lm_head.register_forward_hook(lambda module, args, out: shapes.append(tuple(out.shape)))
    try:
        with ServingLoop(model, memory="1MiB", max_running=8, step_tokens=64) as loop:
            shapes.clear()
            for length in (5, 20, 30, 30):
                loop.submit(prompt_of(length), do_sample=False, max_new_tokens=3)
            while loop:
                loop.step()
    finally:
        handle.remove()
    print(name, shapes)
    assert shapes and all(rows * tokens <= 4 for rows, tokens, _ in shapes)


def test_a_model_without_a_choice_of_logits_is_served_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    prompts = [prompt_of(length) for length in (5, 20, 30, 30)]
    options: dict[str, Any] = {"memory": "1MiB", "step_tokens": 64, "do_sample": False, "max_new_tokens": 5}
    expected = [generation.tokens for generation in torch_uma.generate_batch(model, prompts, **options)]
    whole = type(model).forward

    def forward(self: Any, input_ids: Any, cache: Any = None, position_ids: Any = None, use_cache: Any = None) -> Any:
        return whole(self, input_ids, cache=cache, position_ids=position_ids, use_cache=use_cache)

    monkeypatch.setattr(type(model), "forward", forward)
    given = [generation.tokens for generation in torch_uma.generate_batch(model, prompts, **options)]
    assert given == expected
