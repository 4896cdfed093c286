"""Every decoder of the installed transformers under UnifiedCache: the tokens of the default cache, or a refusal.

`python tests/test_models.py` writes docs/models.md, a line for each decoder; as a test each is compared with its line.
"""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import zoo
from tiny_models import assert_same_tokens
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers import __version__ as VERSION

import torch_uma
from torch_uma.errors import PlanError, SequenceError
from torch_uma.integrations.transformers.attention import NAME
from torch_uma.layout import Full, State
from torch_uma.plan import Plan

torch.set_num_threads(1)

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "models.md"
LENGTHS = (5, 5 + zoo.CHUNK)  # padded by a whole chunk, as chunks in the arena must be
NUM_NEW = 12
NUM_BEAMS = 2
FAR = 8  # tokens back from the last: behind every window
NAMES = sorted({*zoo.decoders(), *zoo.MODELS})

# Not decoders that `generate()` runs on a CPU with the default cache, and how it says so.
OUT_OF_SCOPE: dict[str, str] = {
    "blip_text_model": "BlipForConditionalGeneration.generate() missing 1 required positional argument: 'pixel_values'",
    "blt": "'BltConfig' object has no attribute 'num_hidden_layers'",
    "diffusion_gemma_text": "topk(): argument 'k' must be int",  # answers in blocks, by diffusion
    "evolla": "'EvollaConfig' has no model that generates",
    "idefics": "Exactly 1 of pixel_values, image_encoder_embeddings or perceiver_embeddings",
    "kyutai_speech_to_text": "'NoneType' object has no attribute 'shape'",  # of the sound
    "pi0": "'PI0ForConditionalGeneration' object has no attribute 'generation_config'",
    "voxtral_realtime_text": "You must specify exactly one of input_features or encoder_inputs_embeds",
}

_ELSEWHERE = "{} cannot remember in an arena"
# What UnifiedCache refuses, and the beginning of its error.
REFUSED: dict[str, str] = {
    # It computes every token anew.
    "openai-gpt": "openai-gpt takes no cache",
    # They keep what they remember in their modules, or in other objects than a cache.
    "recurrent_gemma": _ELSEWHERE.format("recurrent_gemma"),
    "reformer": _ELSEWHERE.format("reformer"),
    "rwkv": _ELSEWHERE.format("rwkv"),
    "xlnet": _ELSEWHERE.format("xlnet"),
    "xlstm": _ELSEWHERE.format("xlstm"),
    # It views keys in a shape that only a contiguous copy has.
    "gpt_neox_japanese": "gpt_neox_japanese does not run on the meta device, or itself, with",
    # What its layers between those for text attend to are images.
    "mllama_text_model": "layer 3 of mllama_text_model, of the kind full_attention, stores nothing for text alone",
}

# Where attention in place is right and the default is not, for the reason that is given.
CORRECTED: dict[str, str] = {
    "moshi": "in place, windows in the prompt too, where transformers masks it as full attention",
}

# Here the default cache is wrong, and the oracle is the forward without one.
UNCACHED = ("minimax",)

# Where padding in front changes what a model sees, by its blocks or its prompt: prompts of one length.
EVEN = ("deepseek_v4", "minimax_m3_vl_text", "unlimited_ocr_text")

Inputs = dict[str, torch.Tensor]


class Disturb(LogitsProcessor):
    """Moves pages between any two forwards, after it has noted how the first new token was served."""

    def __init__(self, unified: torch_uma.UnifiedCache) -> None:
        self.unified = unified
        self.paths: list[str] = []
        self.num_calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == 2:
            self.paths = self.unified.paths()
        if self.num_calls > 1:
            torch_uma.testing.scramble(self.unified.pool, self.num_calls)
        return scores


def prompts(model: PreTrainedModel) -> Inputs:
    """Two prompts, the shorter one padded in front."""
    is_even = model.config.get_text_config(decoder=True).model_type in EVEN
    tokens = torch.randint(1, zoo.VOCABULARY - 1, (2, max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor(LENGTHS[1:] * 2 if is_even else LENGTHS)
    mask = torch.arange(max(LENGTHS)) >= max(LENGTHS) - lengths[:, None]
    return {"input_ids": torch.where(mask, tokens, zoo.PAD), "attention_mask": mask.long()}


def generate(model: PreTrainedModel, num_beams: int, **options: Any) -> Any:
    """Tokens, and of beams their scores."""
    options = {"use_cache": True, "do_sample": False, "max_new_tokens": NUM_NEW} | options
    return model.generate(
        **prompts(model), num_beams=num_beams, return_dict_in_generate=True, output_scores=num_beams > 1, **options
    )


def assert_same(model: PreTrainedModel, actual: Any, expected: Any, num_beams: int) -> None:
    """Passes for the same tokens, and where two candidates tie."""
    if torch.equal(actual.sequences, expected.sequences):
        return
    if num_beams == 1:
        assert_same_tokens(model, actual.sequences, expected.sequences, prompts(model)["attention_mask"])
    else:
        torch.testing.assert_close(actual.sequences_scores, expected.sequences_scores, atol=1e-5, rtol=0)


def assert_remembers(model: PreTrainedModel) -> None:
    """Passes if the first new token depends on a token that lies far back."""
    tokens = prompts(model)["input_ids"][1:].repeat(2, 1)
    tokens[1, -FAR] = tokens[1, -FAR] % 90 + 1
    options: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True}
    logits = model.generate(input_ids=tokens, output_logits=True, **options).logits[0]
    assert (logits[0] - logits[1]).abs().max() > 1e-2


def run(model: PreTrainedModel, unified: torch_uma.UnifiedCache, expected: dict[int, Any]) -> list[str]:
    """Greedy and beam search in a poisoned arena whose pages move: the tokens that are expected; how it was served."""
    paths: list[str] = []
    for num_beams, oracle in expected.items():
        unified.reset()
        torch_uma.testing.poison(unified.pool)
        disturb = Disturb(unified)
        found = generate(model, num_beams, cache=unified, logits_processor=LogitsProcessorList([disturb]))
        assert_same(model, found, oracle, num_beams)
        assert disturb.num_calls == NUM_NEW
        unified.pool.check()
        paths = paths or disturb.paths
    return paths


def line_of(name: str) -> str:
    """The line of a decoder in the page, once it has been put to the test."""
    model = zoo.build(name)
    if name in REFUSED:
        with pytest.raises(PlanError) as caught:
            torch_uma.UnifiedCache(model, memory="16MiB")
        message = str(caught.value)
        assert message.startswith(REFUSED[name]), message
        return _row(name, f"refused: {REFUSED[name]} …", *[""] * 6)
    assert_remembers(model)
    is_uncached = name.partition("+")[0] in UNCACHED
    expected = {beams: generate(model, beams, use_cache=not is_uncached) for beams in (1, NUM_BEAMS)}
    unified = torch_uma.UnifiedCache(model, memory="16MiB", page_size=4, max_tokens=max(LENGTHS) + NUM_NEW)
    plan = unified.pool.plan
    assert sum(_stored_bytes(plan)) > 0
    kinds = [layer.name for layer in plan.layers]
    served = []
    for attention in ("eager", NAME):
        model.set_attn_implementation(attention)
        try:
            if attention == NAME and name in CORRECTED:
                with pytest.raises(AssertionError, match="differs first"):
                    run(model, unified, expected)
                served.append(CORRECTED[name])
            else:
                served.append(_by_kind(kinds, run(model, unified, expected)))
        except (PlanError, SequenceError) as error:
            served.append(f"refused: {str(error).split(';')[0].split(':')[0]}")
    assert not all(text.startswith("refused") for text in served)
    a_token, a_sequence = _stored_bytes(plan)
    return _row(
        name,
        _counted(kinds),
        ", ".join(subpool.name for subpool in plan.subpools),
        f"{a_token:,}",
        f"{a_sequence:,}",
        *served,
        ("no cache" if is_uncached else "default cache") + (", prompts of one length" if name in EVEN else ""),
    )


def _stored_bytes(plan: Plan) -> tuple[int, int]:
    """What grows with every token of a sequence, and what does not."""
    a_token = a_sequence = 0
    for subpool in plan.subpools:
        lifetime = subpool.lifetime
        if isinstance(lifetime, Full):
            a_token += subpool.entry_bytes // subpool.tokens_per_entry
        else:
            num_entries = 1 if isinstance(lifetime, State) else lifetime.num_tokens
            a_sequence += subpool.entry_bytes * num_entries
    return a_token, a_sequence


def _counted(kinds: Sequence[str]) -> str:
    return ", ".join(f"{kind} ×{count}" for kind, count in collections.Counter(kinds).items())


def _by_kind(kinds: Sequence[str], paths: Sequence[str]) -> str:
    """The path of each kind of layer, said once where it is the same for all."""
    found = {kind: sorted({path for k, path in zip(kinds, paths, strict=True) if k == kind}) for kind in kinds}
    told = {kind: " or ".join(paths_of_kind) for kind, paths_of_kind in found.items()}
    if len(set(told.values())) == 1:
        return next(iter(told.values()))
    return ", ".join(f"{kind}: {path}" for kind, path in told.items() if path != "none")


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


HEAD = """# Models

**{served} of {all} decoders give the tokens of their oracle**, with stock attention, with `torch_uma`, or with both;
{refused} are refused, with the error in their lines. A name with a `+` is a type in another layout.

These are the decoder-only model types of transformers {version}, each as a tiny random model in fp32: greedy search and
beam search over two prompts of unequal length, past every window, while pages move between any two forwards.
`python tests/test_models.py` writes this page, and as a test compares every line with what it finds.

Bytes are those of the tiny model: what every token adds, and what a sequence holds beside. The paths are those of the
first new token, as `cache.paths()` says them; the oracle is transformers' own cache, or no cache where that is wrong.
"""
COLUMNS = (
    _row(
        "decoder",
        "layers",
        "sub-pools",
        "bytes a token",
        "bytes a sequence",
        "stock attention",
        "`torch_uma`",
        "oracle",
    ),
    _row(*["---"] * 8),
)


@cache
def page() -> dict[str, str]:
    """The lines of the page by the name of the decoder."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line for line in rows[2:]}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OUT_OF_SCOPE])
def test_tokens_are_those_of_the_oracle_or_the_type_is_refused(name: str) -> None:
    assert name in page(), f"new: {name}; run python tests/test_models.py, and see whether it should be refused"
    assert line_of(name) == page()[name]


@pytest.mark.parametrize("name", OUT_OF_SCOPE)
def test_what_is_out_of_scope_does_not_generate(name: str) -> None:
    assert name in NAMES and name not in page()
    with pytest.raises((TypeError, AttributeError, ValueError, LookupError)) as caught:
        generate(zoo.build(name), 1)
    assert OUT_OF_SCOPE[name] in str(caught.value)


def test_the_page_has_the_types_that_there_are() -> None:
    assert set(page()) == {*NAMES} - {*OUT_OF_SCOPE}
    assert {*REFUSED, *OUT_OF_SCOPE} <= {*NAMES}
    assert PAGE.read_text() == text([page()[name] for name in NAMES if name in page()])


def text(lines: Sequence[str]) -> str:
    """The page with these lines."""
    refused = sum(line.split(" | ")[1].startswith("refused: ") for line in lines)
    head = HEAD.format(version=VERSION, served=len(lines) - refused, all=len(lines), refused=refused)
    within = [
        f"- {decoder}: {', '.join(others)}"
        for decoder, models in zoo.decoders().items()
        if (others := [model for model in models if model != decoder]) and decoder not in OUT_OF_SCOPE
    ]
    return "\n".join([head, *COLUMNS, *lines, "", "## Models around these decoders", "", *within, ""])


if __name__ == "__main__":
    PAGE.write_text(text([line_of(name) for name in NAMES if name not in OUT_OF_SCOPE]))
