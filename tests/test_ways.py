"""Every way in which generate() goes through a cache: the tokens of transformers' own, or of a forward without one."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from models import build
from old_versions import IS_OLD
from test_generate import Inputs, Scramble, generate, poisoned
from tiny_models import PAD, assert_same_tokens, prompts
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast, pipeline
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer, TextStreamer

import torch_uma
from torch_uma import UnifiedCache

torch.set_num_threads(1)

STOCK = [
    ("llama", "sdpa"),
    ("gemma2", "eager"),
    ("gpt_oss", "eager"),
    ("qwen3_next", "sdpa"),
    ("bamba", "sdpa"),
    ("mamba2", "eager"),
    ("lfm2", "sdpa"),
    ("deepseek_v3", "sdpa"),
    ("falcon_h1", "sdpa"),
]
IN_PLACE = [("gpt_oss", "torch_uma"), ("deepseek_v3", "torch_uma"), ("falcon_h1", "torch_uma")]
CASES = [case for case in [*STOCK, *IN_PLACE] if not (IS_OLD and case == ("deepseek_v3", "torch_uma"))]
CONTINUED = [case for case in CASES if not (IS_OLD and case[0] == "mamba2")]
PIPED = [case for case in CONTINUED if case in (("gpt_oss", "torch_uma"), ("bamba", "sdpa"), ("mamba2", "eager"))]
STATEFUL = ("qwen3_next", "bamba", "mamba2", "lfm2", "falcon_h1")
LENGTHS = (9, 19)  # the windows of 24 fill while tokens are generated
NUM_NEW = 10

every_case = pytest.mark.parametrize(("name", "attention"), CASES)
every_continued = pytest.mark.parametrize(("name", "attention"), CONTINUED)


@lru_cache
def model_of(name: str, attention: str) -> PreTrainedModel:
    return build(name, attention=attention)


def inputs_of(name: str) -> Inputs:
    return prompts(LENGTHS, seed=len(name))


def scrambled(cache: UnifiedCache) -> dict[str, Any]:
    """Options of generate() under which pages move between all steps."""
    return {"cache": cache, "logits_processor": LogitsProcessorList([Scramble(cache.pool)])}


def new(model: PreTrainedModel, inputs: Inputs, **options: Any) -> torch.Tensor:
    return generate(model, inputs, **{"max_new_tokens": NUM_NEW} | options)


@lru_cache
def expected(name: str, attention: str) -> torch.Tensor:
    return new(model_of(name, attention), inputs_of(name))


def check(name: str, attention: str, tokens: torch.Tensor) -> None:
    """These are the greedy tokens of the usual prompts."""
    mask = inputs_of(name)["attention_mask"]
    assert_same_tokens(model_of(name, attention), tokens, expected(name, attention), mask)


def followed(inputs: Inputs, tokens: torch.Tensor, seed: int, num_more: int = 5) -> Inputs:
    """What was generated from `inputs`, with a further turn behind it."""
    chance = torch.Generator().manual_seed(seed)
    text = torch.cat([tokens, torch.randint(0, 256, (len(tokens), num_more), generator=chance)], dim=1)
    ahead = text.shape[1] - inputs["attention_mask"].shape[1]
    return {"input_ids": text, "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (0, ahead), value=1)}


@every_case
def test_greedy_and_sampled(name: str, attention: str) -> None:
    model, inputs = model_of(name, attention), inputs_of(name)
    check(name, attention, new(model, inputs, **scrambled(poisoned(model, page_size=3))))
    sampled = [
        new(model, inputs, sample=True, num_return_sequences=2, **options)
        for options in (scrambled(poisoned(model, page_size=3)), {})
    ]
    assert torch.equal(*sampled)


@every_case
def test_beams_share_full_pages(name: str, attention: str) -> None:
    model, inputs = model_of(name, attention), inputs_of(name)
    beams: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2}
    reference = new(model, inputs, **beams)
    assert torch.equal(new(model, inputs, **beams, **scrambled(poisoned(model, page_size=3))), reference)
    cache = poisoned(model, page_size=3)
    move, subpools = cache.pool.allocator.mover, cache.pool.plan.subpools
    assert move is not None
    copied_bytes = np.zeros(len(subpools), np.int64)

    def count(k: int, sources: Any, targets: Any) -> None:
        copied_bytes[k] += len(sources) * subpools[k].page_bytes
        move(k, sources, targets)

    cache.pool.allocator.mover = count
    assert torch.equal(new(model, inputs, **beams, cache=cache), reference)
    num_rows = 3 * len(LENGTHS)
    for subpool, num_bytes in zip(subpools, copied_bytes.tolist(), strict=True):
        # A row that is taken twice has one page of its own more: its last one, if that is not full, or its state, which
        # may also be moved to the side of the others.
        most_pages = num_rows * (NUM_NEW - 1) * (2 if subpool.is_state else 1)
        assert num_bytes <= most_pages * subpool.page_bytes
        assert subpool.is_state or num_bytes < NUM_NEW * num_rows * max(LENGTHS) * subpool.entry_bytes / 6
    assert copied_bytes.any()
    cache.pool.check()


@every_continued
def test_a_prompt_in_chunks(name: str, attention: str) -> None:
    model, inputs = model_of(name, attention), inputs_of(name)
    check(name, attention, new(model, inputs, prefill_chunk_size=7, **scrambled(poisoned(model, page_size=3))))
    # Models do not look for padding in a single token.
    alone = {key: value[1:] for key, value in inputs.items()}
    tokens = new(model, alone, prefill_chunk_size=1, **scrambled(poisoned(model)), max_new_tokens=4)
    assert torch.equal(tokens, expected(name, attention)[1:, : tokens.shape[1]])


@every_continued
def test_a_chat_of_three_turns_and_its_fork(name: str, attention: str) -> None:
    model, inputs = model_of(name, attention), inputs_of(name)
    cache = poisoned(model, page_size=3)
    tokens = new(model, inputs, **scrambled(cache))
    fork = copy.deepcopy(cache)
    told = {cache: tokens, fork: tokens}
    for turn, each in enumerate((cache, fork, cache)):
        text = followed(inputs, told[each], seed=turn)
        told[each] = new(model, text, **scrambled(each))
        assert_same_tokens(model, told[each], new(model, text, use_cache=False), text["attention_mask"])
    cache.pool.check()


@every_case
def test_new_text_alone_with_the_mask_of_all(name: str, attention: str) -> None:
    model, inputs = model_of(name, attention), inputs_of(name)
    cache = poisoned(model)
    text = followed(inputs, new(model, inputs, cache=cache), seed=4)
    alone = {"input_ids": text["input_ids"][:, cache.get_seq_length() :], "attention_mask": text["attention_mask"]}
    told = new(model, alone, **scrambled(cache))[:, alone["input_ids"].shape[1] :]
    whole = torch.cat([text["input_ids"], told], dim=1)
    assert_same_tokens(model, whole, new(model, text, use_cache=False), text["attention_mask"])


@pytest.mark.parametrize("num_more", [5, 60])
def test_a_model_of_states_alone_takes_new_text_alone(num_more: int) -> None:
    model, inputs = model_of("mamba2", "eager"), prompts((12, 12))
    cache = poisoned(model)
    text = followed(inputs, new(model, inputs, cache=cache), 4, num_more)["input_ids"]
    told = new(model, {"input_ids": text[:, cache.get_seq_length() :]}, **scrambled(cache))[:, -NUM_NEW:]
    assert torch.equal(told, new(model, {"input_ids": text}, use_cache=False)[:, -NUM_NEW:])


@pytest.mark.parametrize("change", ["reorder", "select", "reset", "crop", "fork"])
def test_a_cache_of_states_alone_knows_its_text_after(change: str) -> None:
    model, inputs = model_of("mamba2", "eager"), prompts((12, 12))
    cache = poisoned(model)
    tokens = new(model, inputs, cache=cache)
    match change:
        case "reorder":
            cache.reorder_cache(torch.tensor([1, 0]))
            tokens = tokens[[1, 0]]
        case "select":
            cache.batch_select_indices(torch.tensor([1]))
            tokens = tokens[1:]
        case "fork":
            cache = copy.deepcopy(cache)
        case _:
            cache.reset() if change == "reset" else cache.crop(-cache.get_seq_length())
            tokens = prompts((15, 15), seed=3)["input_ids"]
            with torch.no_grad():  # not by generate(), so that nobody tells the text
                model(tokens[:, :-1], cache=cache)
    mask = {"attention_mask": torch.ones_like(tokens)}
    text = {"input_ids": followed(mask, tokens, seed=6)["input_ids"]}
    given = {"input_ids": text["input_ids"][:, cache.get_seq_length() :]} if IS_OLD else text
    told = new(model, given, **scrambled(cache))[:, -NUM_NEW:]
    assert torch.equal(told, new(model, text, use_cache=False)[:, -NUM_NEW:])


@pytest.mark.parametrize("name", ["mamba2", "qwen3_next"])
def test_a_fork_takes_several_tokens_wherever_its_states_lie(name: str) -> None:
    """Of which its first layer does not know when it is handed its state, as nobody asks for the sizes of a mask."""
    model = model_of(name, "eager")
    ids = torch.randint(1, 90, (6, 12), generator=torch.Generator().manual_seed(8))
    mask = torch.ones(12, 12).tril().log().expand(6, 1, 12, 12)
    masked = {} if name == "mamba2" else {"attention_mask": mask[:, :, 9:]}
    with torch.no_grad():
        expected = model(input_ids=ids).logits[:, 9:]
        for seed in range(4):
            print("seed", seed)
            cache = poisoned(model, page_size=3)
            model(input_ids=ids[:, :9], cache=cache)
            fork = copy.deepcopy(cache)
            torch_uma.testing.scramble(cache.pool, seed)
            fork.activate_past_recording()
            for each in (fork, cache):
                logits = model(input_ids=ids[:, 9:], cache=each, **masked).logits
                torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
            cache.pool.check()


@every_continued
def test_rows_are_repeated_selected_and_reordered(name: str, attention: str) -> None:
    model, inputs = model_of(name, attention), inputs_of(name)
    cache = poisoned(model, page_size=3)
    begun = new(model, inputs, cache=cache, max_new_tokens=3)
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0, 1, 4, 5]))
    torch_uma.testing.scramble(cache.pool, 5)
    cache.reorder_cache(torch.tensor([2, 0, 3, 1]))
    cache.batch_select_indices(torch.tensor([True, True, False, True]))
    assert cache.batch_size == 3
    rows = [1, 0, 0]
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1)[rows]
    rest = {"input_ids": begun[rows], "attention_mask": mask}
    tokens = new(model, rest, **scrambled(cache), max_new_tokens=NUM_NEW - 3)
    assert_same_tokens(model, tokens, expected(name, attention)[rows], mask)
    cache.pool.check()


@every_case
def test_tokens_are_taken_back_where_nothing_went(name: str, attention: str) -> None:
    model, inputs = model_of(name, attention), inputs_of(name)
    cache = poisoned(model, page_size=3)
    new(model, inputs, cache=cache, max_new_tokens=4)
    length = cache.get_seq_length()
    if name in STATEFUL:
        with pytest.raises(torch_uma.SequenceError, match="state"):
            cache.crop(-3)
        assert cache.get_seq_length() == length
        cache.crop(-length)
    else:
        cache.crop(-5)
        torch_uma.testing.scramble(cache.pool, 2)
        assert cache.get_seq_length() == length - 5 == max(LENGTHS) - 2
    check(name, attention, new(model, inputs, **scrambled(cache)))


@every_case
def test_reset_for_another_batch_and_again(name: str, attention: str) -> None:
    model, inputs = model_of(name, attention), inputs_of(name)
    cache = poisoned(model, page_size=3)
    for other in ((4, 6, 3), (30,)):
        new(model, prompts(other), cache=cache, max_new_tokens=3)
        cache.reset()
        check(name, attention, new(model, inputs, **scrambled(cache)))
        cache.reset()
        assert cache.get_seq_length() == 0 and not cache.is_initialized
        assert cache.pool.stats().live_bytes == 0


@every_case
@pytest.mark.parametrize("per_layer", [False, True])
def test_rows_are_made_early(name: str, attention: str, per_layer: bool) -> None:
    model = model_of(name, attention)
    cache = poisoned(model)
    numbers: Any = [[2] * len(cache.layers), [16] * len(cache.layers)] if per_layer else [2, 16]
    cache.early_initialization(2, *numbers, model.dtype, model.device)
    assert cache.is_initialized and cache.batch_size == 2 and cache.get_seq_length() == 0
    with pytest.raises(ValueError, match="layers"):
        cache.early_initialization(2, [2], 16, model.dtype, model.device)
    check(name, attention, new(model, inputs_of(name), **scrambled(cache)))


@every_case
def test_padding_in_front_changes_nothing(name: str, attention: str) -> None:
    model, inputs = model_of(name, attention), inputs_of(name)
    tokens = new(model, inputs, cache=poisoned(model))
    for row, length in enumerate(LENGTHS):
        alone = {"input_ids": inputs["input_ids"][row : row + 1, -length:]}
        reference = new(model, alone)
        mask = torch.ones_like(alone["input_ids"])
        assert_same_tokens(model, tokens[row : row + 1, -reference.shape[1] :], reference, mask)


@every_case
def test_padding_behind_is_as_with_the_own_cache(name: str, attention: str) -> None:
    model, inputs = model_of(name, attention), inputs_of(name)
    text = torch.stack([row.roll(-int((row == PAD).sum())) for row in inputs["input_ids"]])
    mask = (text != PAD).long()
    caches = (poisoned(model), DynamicCache(config=model.config))
    with torch.no_grad():
        ours, theirs = (model(text, attention_mask=mask, cache=cache).logits[mask.bool()] for cache in caches)
    assert torch.allclose(ours, theirs, atol=1e-4)
    behind = {"input_ids": text, "attention_mask": mask}
    assert torch.equal(new(model, behind, **scrambled(poisoned(model))), new(model, behind))


@every_case
def test_embeddings_instead_of_ids(name: str, attention: str) -> None:
    model, inputs = model_of(name, attention), inputs_of(name)
    embeddings = {
        "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]),
        "attention_mask": inputs["attention_mask"],
    }
    if name in ("bamba", "falcon_h1"):
        with pytest.raises(ValueError, match="inputs_embeds"):  # generate() refuses that for their code
            new(model, embeddings, cache=poisoned(model))
        with torch.no_grad():
            ours, theirs = (
                model(**embeddings, cache=cache).logits
                for cache in (poisoned(model), DynamicCache(config=model.config))
            )
        assert torch.allclose(ours[inputs["attention_mask"].bool()], theirs[inputs["attention_mask"].bool()], atol=1e-4)
        return
    tokens = new(model, embeddings, **scrambled(poisoned(model)))
    assert torch.equal(tokens, expected(name, attention)[:, max(LENGTHS) :])


@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gpt_oss", "qwen3_next", "bamba", "lfm2", "deepseek_v3", "falcon_h1"]
)
def test_all_that_generate_can_return(name: str) -> None:
    model, inputs = model_of(name, "eager"), inputs_of(name)
    options: dict[str, Any] = {
        "return_dict_in_generate": True,
        "output_attentions": True,
        "output_hidden_states": True,
        "output_scores": True,
        "output_logits": True,
    }
    cache = poisoned(model)
    ours, theirs = (
        model.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False, **options, **given)
        for given in (scrambled(cache), {})
    )
    assert torch.equal(ours.sequences, theirs.sequences)
    assert ours.cache is cache
    assert len(ours.attentions) == NUM_NEW
    for kind in ("attentions", "hidden_states"):
        pairs = [
            (one, other)
            for some, others in zip(getattr(ours, kind), getattr(theirs, kind), strict=True)
            for one, other in zip(some, others, strict=True)
            if other is not None
        ]
        assert pairs and all(torch.allclose(one, other, atol=1e-4) for one, other in pairs)
    for kind in ("scores", "logits"):
        pairs = list(zip(getattr(ours, kind), getattr(theirs, kind), strict=True))
        assert all(torch.allclose(one, other, atol=1e-4) for one, other in pairs)


class Collected(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.has_ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.has_ended = True


@every_case
def test_a_streamer_sees_every_token(name: str, attention: str) -> None:
    model, inputs = model_of(name, attention), prompts((19,))
    streamer = Collected()
    tokens = new(model, inputs, streamer=streamer, **scrambled(poisoned(model)))
    assert streamer.has_ended and streamer.tokens == tokens[0].tolist()
    assert_same_tokens(model, tokens, new(model, inputs), inputs["attention_mask"])


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each of 256 characters, and padding in front."""
    words = {chr(0x100 + i): i for i in range(256)} | {"<pad>": PAD}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", padding_side="left")


@pytest.mark.parametrize(("name", "attention"), PIPED)
def test_a_pipeline_takes_the_cache(name: str, attention: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, words = model_of(name, attention), tokenizer()
    generator = pipeline("text-generation", model=model, tokenizer=words)
    text = "".join(words.convert_ids_to_tokens(prompts((19,))["input_ids"][0].tolist()))
    no_words = list(range(PAD, model.config.vocab_size))
    options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "do_sample": False, "suppress_tokens": no_words}
    cache = poisoned(model)
    first = generator(text, **options, **scrambled(cache), streamer=TextStreamer(words))[0]["generated_text"]
    assert first == generator(text, **options)[0]["generated_text"] and len(first) > len(text)
    assert "".join(first.split()) in "".join(capsys.readouterr().out.split())
    longer = "".join(first.split()) + text[:4]
    second = generator(longer, **options, **scrambled(cache))[0]["generated_text"]
    assert second == generator(longer, **options, use_cache=False)[0]["generated_text"]
    assert cache.get_seq_length() == 19 + NUM_NEW + 4 + NUM_NEW - 1
    cache.reset()
    several = [text, text[:7]]
    batch = generator(several, batch_size=2, **options, **scrambled(cache))
    assert batch == generator(several, batch_size=2, **options)


@pytest.mark.parametrize(("name", "attention"), STOCK)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_states_in_full(name: str, attention: str, dtype: torch.dtype) -> None:
    model, inputs = copy.deepcopy(model_of(name, attention)).to(dtype), inputs_of(name)
    cache = poisoned(model, page_size=3)
    rows = {row.name: row.dtype for layer in cache.pool.plan.layers for memory in layer.memories for row in memory.rows}
    assert all(kept == (torch.float32 if row == "recurrent" else dtype) for row, kept in rows.items())
    assert torch.equal(new(model, inputs, **scrambled(cache)), new(model, inputs))
