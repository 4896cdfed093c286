"""Index keys: models that choose the keys they attend to give the tokens of the default cache, and read no others."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
from test_compile import Graphs
from test_fixed import MAX_TOKENS, compile_config
from test_generate import MEMORY, Scramble, generate
from test_loop import Loop, alone, prompt_of
from tiny_models import PAD, VOCABULARY, assert_same_tokens, prompts
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    LogitsProcessorList,
    PreTrainedModel,
)

import torch_uma
import torch_uma.integrations.transformers  # noqa: F401 (registers its attention)
from torch_uma import CachePool, UnifiedCache
from torch_uma.integrations.transformers.declare import declare
from torch_uma.integrations.transformers.layers import make_layers
from torch_uma.integrations.transformers.reading import Reading
from torch_uma.integrations.transformers.tokens import IndexedLayer
from torch_uma.layout import Full, Layer, Lifetime, Memory, Row, State, Window

torch.set_num_threads(1)

LENGTHS = (5, 37, 20)
NUM_NEW = 20
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
SPARSE: dict[str, Any] = {
    **COMMON,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "index_n_heads": 32,  # with few of them scores tie at 0
    "index_head_dim": 16,
    "index_topk": 8,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v32": SPARSE,
    "glm_moe_dsa": {**SPARSE, "indexer_types": ["full", "shared", "full"]},
    "axk2": SPARSE,
    "hy_v4": {**SPARSE, "indexer_types": ["full", "full", "shared"]},
    # Index keys in fp32, beside windows.
    "dots3_note_text": {
        **SPARSE,
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
        "sliding_window": 12,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    # Latents of layers 0 and 1, the second without a rotary part, are shared by one with index keys and one without.
    "mistral_large4": {
        **SPARSE,
        "num_hidden_layers": 5,
        "no_rope_layers": [1, 0, 1, 0, 1],
        "kv_source_layers": [0, 1, 0, 1, 4],
        "indexer_types": ["full", "full", "full", "shared", "full"],
    },
    # Values of zero width, beside states; an index row is a key, a gate and whether the token counts.
    "glm5_next": {
        **SPARSE,
        "qk_rope_head_dim": 0,
        "index_kpool": 2,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
        "indexer_types": ["full", "full", "shared"],
        "linear_head_dim": 8,
        "linear_num_heads": 2,
        "hc_mult": 2,
    },
    # Positions beside index keys, and three convolutions in a layer.
    "qwen4_exp_text": {
        **COMMON,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "indexer_n_heads": 32,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "ple_embed_dim": 16,
        "ngram_vocab_size_base": 64,
        "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
        "eos_token_id": PAD + 1,
    },
    # Blocks of keys, which each head chooses.
    "minimax_m3_vl_text": {
        **COMMON,
        "num_key_value_heads": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        "dense_intermediate_size": 40,
        "rotary_dim": 8,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 3,
    },
}
VISION: dict[str, dict[str, Any]] = {
    "mistral_large4": {"model_type": "pixtral", "num_attention_heads": 2, "head_dim": 8, "intermediate_size": 16},
    "glm5_next": {"num_heads": 2, "out_hidden_size": 48, "projection_intermediate_size": 16, "intermediate_size": 16},
}
IN_PLACE = [name for name in CONFIGS if name not in VISION]
CASES = [(name, "eager") for name in CONFIGS] + [(name, "torch_uma") for name in IN_PLACE] + [("axk2", "sdpa")]
PAGED = [(*case, 7) for case in CASES] + [(*case, size) for case in CASES[::3] for size in (1, 16)]


@lru_cache
def model_of(name: str, attention: str = "eager") -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(sum(name.encode()))
        if name in VISION:
            vision = {"hidden_size": 16, "num_hidden_layers": 1, "depth": 1, **VISION[name]}
            config = AutoConfig.for_model(name, text_config=CONFIGS[name], vision_config=vision, image_token_id=1)
            model = AutoModelForImageTextToText.from_config(config, attn_implementation=attention)
        else:
            config = AutoConfig.for_model(name, **CONFIGS[name])
            model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        # That of the padding is 0, and so would be its index keys: scores tie, and what is chosen depends on buffers.
        model.get_input_embeddings().weight.data[PAD].normal_(std=0.2)
    model.eval().requires_grad_(False)
    return model


def inputs_of(name: str, attention: str) -> dict[str, torch.Tensor]:
    """Prompts padded in front, but for blocks in the arena, which padding shifts."""
    is_shifted = name == "minimax_m3_vl_text" and attention == "torch_uma"
    return prompts((20, 20, 20) if is_shifted else LENGTHS)


@lru_cache
def expected(name: str, attention: str, num_beams: int = 1) -> torch.Tensor:
    return generate(model_of(name), inputs_of(name, attention), max_new_tokens=NUM_NEW, num_beams=num_beams)


def poisoned_pool(model: PreTrainedModel, page_size: int = 7) -> CachePool:
    pool = CachePool(model, memory=MEMORY, page_size=page_size, max_sequences=24)
    torch_uma.testing.poison(pool)
    return pool


@pytest.mark.parametrize(("name", "attention", "page_size"), PAGED)
def test_tokens_are_those_of_the_default_cache_while_pages_move(name: str, attention: str, page_size: int) -> None:
    model, inputs = model_of(name, attention), inputs_of(name, attention)
    cache = UnifiedCache(model, pool=poisoned_pool(model, page_size))
    hook = Scramble(cache.pool)
    tokens = generate(model, inputs, max_new_tokens=NUM_NEW, cache=cache, logits_processor=LogitsProcessorList([hook]))
    assert_same_tokens(model_of(name), tokens, expected(name, attention), inputs["attention_mask"])
    assert ("in place" in cache.paths()) == (attention == "torch_uma")
    assert hook.num_calls == NUM_NEW and cache.pool.allocator.layout_version > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_in_one_run_are_handed_over_as_views(name: str) -> None:
    model, inputs = model_of(name), inputs_of(name, "eager")
    cache = UnifiedCache(model, memory=MEMORY, max_tokens=MAX_TOKENS)
    torch_uma.testing.poison(cache.pool)
    tokens = generate(model, inputs, max_new_tokens=NUM_NEW, cache=cache)
    assert_same_tokens(model, tokens, expected(name, "eager"), inputs["attention_mask"])
    assert "view" in cache.paths() and not {"gather", "state copy"} & set(cache.paths())


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_beams_share_pages(name: str, attention: str) -> None:
    model, inputs = model_of(name, attention), inputs_of(name, attention)
    cache = UnifiedCache(model, pool=poisoned_pool(model))
    tokens = generate(model, inputs, max_new_tokens=NUM_NEW, num_beams=3, cache=cache)
    assert torch.equal(tokens, expected(name, attention, 3))
    cache.pool.check()


@pytest.mark.parametrize(
    ("name", "attention", "uneven"), [(*case, True) for case in CASES] + [(*case, False) for case in CASES[::4]]
)
def test_sequences_of_a_loop_fork_and_are_cropped(name: str, attention: str, uneven: bool) -> None:
    model = model_of(name, attention)
    pool = poisoned_pool(model)
    loop = Loop(model, pool)
    lengths = {loop.add(prompt_of(length), chunk=13): length for length in ((7, 33, 18) if uneven else (18, 19, 18))}
    if not uneven:
        loop.decode([sequence for sequence, length in lengths.items() if length == 18])
    sequences = list(lengths)
    if uneven and (name, attention) == ("minimax_m3_vl_text", "eager"):
        with pytest.raises(
            torch_uma.SequenceError, match=r"blocks of tokens that begin with a sequence.*\[7, 33, 18\]"
        ):
            loop.decode(sequences)
        pool.check()
        return
    has_states = any(subpool.is_state for subpool in pool.plan.subpools)
    for step in range(12):
        loop.decode(sequences)
        torch_uma.testing.scramble(pool, step)
        pool.check()
        if step == 3:
            fork = loop.fork(sequences[1])
            lengths[fork] = lengths[sequences[1]]
            if not has_states:
                fork.crop(fork.length - 2)
                loop.tokens[fork] = loop.tokens[fork][:, :-2]
                while fork.length < sequences[1].length:
                    loop.decode([fork])
            sequences.append(fork)
    for sequence, length in lengths.items():
        tokens, prompt = loop.tokens[sequence], prompt_of(length)
        stock = alone(model_of(name), prompt, tokens.shape[1] - length)
        assert_same_tokens(model_of(name), tokens, stock, torch.ones_like(prompt))


@pytest.mark.parametrize(("name", "attention"), [("glm_moe_dsa", "eager"), ("dots3_note_text", "torch_uma")])
def test_a_prompt_in_pieces_and_a_continued_chat(name: str, attention: str) -> None:
    model, inputs = model_of(name, attention), inputs_of(name, attention)
    cache = UnifiedCache(model, pool=poisoned_pool(model))
    for _ in range(2):
        tokens = generate(model, inputs, max_new_tokens=8, cache=cache, prefill_chunk_size=7)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 8), value=1)
        fork = copy.deepcopy(cache)
        for each in (cache, fork):
            longer = generate(
                model, {"input_ids": tokens, "attention_mask": mask}, max_new_tokens=NUM_NEW - 8, cache=each
            )
            assert_same_tokens(model_of(name), longer, expected(name, attention), inputs["attention_mask"])
        cache.reset()


@pytest.mark.parametrize(
    ("name", "attention"), [("axk2", "eager"), ("axk2", "torch_uma"), ("minimax_m3_vl_text", "eager")]
)
def test_guessed_tokens_are_cropped_and_rows_selected(name: str, attention: str) -> None:
    model = model_of(name, attention)
    inputs = {key: tensor[1:2] for key, tensor in inputs_of(name, attention).items()}
    inputs["input_ids"] = inputs["input_ids"][:, :18].repeat(1, 2)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    stock = generate(model_of(name), inputs, max_new_tokens=NUM_NEW)
    cache = UnifiedCache(model, pool=poisoned_pool(model))
    tokens = generate(model, inputs, max_new_tokens=NUM_NEW, cache=cache, prompt_lookup_num_tokens=4)
    assert_same_tokens(model_of(name), tokens, stock, inputs["attention_mask"])
    cache.crop(-(int(cache.get_seq_length()) - 40))
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([2, 0]))
    rows = {"input_ids": tokens[:, :41].repeat(2, 1), "attention_mask": torch.ones(2, 41, dtype=torch.int64)}
    longer = generate(model, rows, max_new_tokens=NUM_NEW - 5, cache=cache)
    for row in longer:
        assert_same_tokens(model_of(name), row[None], stock, inputs["attention_mask"])


def test_positions_are_kept_with_the_index_keys() -> None:
    model, inputs = model_of("qwen4_exp_text"), prompts(LENGTHS)
    stock = DynamicCache(config=model.config)
    generate(model, inputs, max_new_tokens=9, cache=stock)
    cache = UnifiedCache(model, pool=poisoned_pool(model))
    layer = cache.layers[1]
    assert isinstance(layer, IndexedLayer) and layer.indexer_position_ids is None and layer.keys is None
    generate(model, inputs, max_new_tokens=9, cache=cache)
    positions = layer.indexer_position_ids
    assert positions is not None and positions.shape == (3, 3, 45)
    assert torch.equal(positions, stock.layers[1].indexer_position_ids)
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert torch.equal(layer.indexer_position_ids, positions[:, [2, 0]])
    assert cache.layers[3].indexer_position_ids is None
    assert layer.keys.shape[-2] == layer.get_seq_length() == 45
    cache.reset()
    assert layer.indexer_position_ids is None and layer.keys is None


@pytest.mark.parametrize("name", ["deepseek_v32", "qwen4_exp_text", "minimax_m3_vl_text"])
def test_keys_that_are_not_chosen_are_not_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they hold is made NaN, in the layer that has chosen first: a second forward gives the same."""
    model = model_of(name, "torch_uma")
    pool = poisoned_pool(model)
    prompt = prompt_of(50)
    first = pool.add()
    with torch.no_grad(), pool.step({first: 50}) as cache:
        model(prompt, cache=cache, **cache.inputs())
    again = first.fork()
    chosen: dict[int, list[torch.Tensor]] = {}
    attend = Reading._attend

    def spy(reading: Reading, *args: Any) -> torch.Tensor:
        if args[-1].indices is not None:
            chosen.setdefault(reading.store.rows[0].layer, []).append(args[-1].indices)
        return attend(reading, *args)

    monkeypatch.setattr(Reading, "_attend", spy)
    logits = []
    for sequence in (first, again):
        with torch.no_grad(), pool.step({sequence: 1}) as cache:
            logits.append(model(prompt[:, :1], cache=cache, **cache.inputs()).logits)
            subpool = cache._steps.places.stores[min(chosen)].tokens.subpool
        layer = min(chosen)
        read = torch.cat([indices.flatten() for indices in chosen[layer]]).unique()
        others = sorted(set(range(50)) - set(read.tolist()))
        assert 0 < len(read) < 30 and len(others) > 20
        ids = sequence.pages[subpool.index]
        for row in subpool.layout.rows:
            if row.layer == layer and row.row.name in ("k", "v", "latent", "rope_key"):
                view = pool.arena.view(subpool, layer, row.row.name)
                for position in others:
                    page, within = divmod(position, subpool.page_size)
                    view[int(pool.allocator.v2p[ids[page]]), within] = torch.nan
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=0)


@pytest.mark.parametrize(("num_choices", "num_kv_heads"), [(4, 2), (1, 2)])
def test_blocks_may_be_chosen_by_more_heads_or_fewer_than_keys_have(num_choices: int, num_kv_heads: int) -> None:
    options = {**CONFIGS["minimax_m3_vl_text"], "index_n_heads": num_choices, "num_key_value_heads": num_kv_heads}
    with torch.random.fork_rng():
        torch.manual_seed(num_choices)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("minimax_m3_vl_text", **options))
    model.eval().requires_grad_(False)
    inputs = prompts((30, 30))
    stock = generate(model, inputs, max_new_tokens=12)
    model.set_attn_implementation("torch_uma")
    tokens = generate(model, inputs, max_new_tokens=12, cache=UnifiedCache(model, pool=poisoned_pool(model)))
    assert_same_tokens(model, tokens, stock, inputs["attention_mask"])


@pytest.mark.parametrize("name", ["hy_v4", "qwen4_exp_text", "minimax_m3_vl_text"])
def test_without_its_cache_attention_hides_what_was_not_chosen(name: str) -> None:
    inputs = prompts((37, 37))
    stock, model = model_of(name), model_of(name, "torch_uma")
    plain = stock(**inputs, use_cache=False).logits
    torch.testing.assert_close(model(**inputs, use_cache=False).logits, plain, rtol=1e-4, atol=1e-4)
    tokens = generate(model, inputs, max_new_tokens=9, cache=DynamicCache(config=model.config))
    assert torch.equal(tokens, generate(stock, inputs, max_new_tokens=9))


def test_a_decode_step_is_one_graph() -> None:
    graphs = Graphs(aot_eager)
    model, inputs = model_of("deepseek_v32", "sdpa"), prompts((5, 20))
    stock = generate(model_of("deepseek_v32"), inputs, max_new_tokens=NUM_NEW)
    cache = UnifiedCache(model, max_tokens=MAX_TOKENS)
    for _ in range(2):
        cache.reset()
        tokens = generate(model, inputs, max_new_tokens=NUM_NEW, cache=cache, compile_config=compile_config(graphs))
        assert_same_tokens(model, tokens, stock, inputs["attention_mask"])
        cache.pool.check()
    assert graphs.count == 1 and not counters["graph_break"]


@pytest.mark.parametrize(
    ("name", "attention"), [("deepseek_v32", "torch_uma"), ("glm5_next", "sdpa"), ("qwen4_exp_text", "sdpa")]
)
def test_what_cannot_be_one_graph_is_not_compiled(name: str, attention: str) -> None:
    graphs = Graphs(aot_eager)
    model, inputs = model_of(name, attention), prompts(LENGTHS)
    cache = UnifiedCache(model, memory=MEMORY)
    tokens = generate(model, inputs, max_new_tokens=NUM_NEW, cache=cache, compile_config=compile_config(graphs))
    assert_same_tokens(model_of(name), tokens, expected(name, "eager"), inputs["attention_mask"])
    assert graphs.count == 0


def test_compiling_it_all_the_same_is_refused() -> None:
    for name, attention, words in (
        ("deepseek_v32", "torch_uma", "compile with 'sdpa' or 'eager'"),
        ("glm5_next", "eager", "asked how many keys it has"),
    ):
        model = model_of(name, attention)
        pool = CachePool(model, memory=MEMORY)
        compiled = torch.compile(model, backend=Graphs(aot_eager).backend, fullgraph=True, dynamic=False)
        with (
            pytest.raises(torch._dynamo.exc.Unsupported, match=words),
            torch.no_grad(),
            pool.step({pool.add(): 1}) as cache,
        ):
            compiled(torch.tensor([[3]]), cache=cache, **cache.inputs())
        pool.check()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("glm5_next", r"layer 1 chooses among 37 keys by a mask, torch.float32 .* use attn_implementation='sdpa'"),
        ("mistral_large4", "layer 0 shares its keys"),
        ("minimax_m3_vl_text", "blocks of 4 tokens, which padding in front of the rows shifts"),
    ],
)
def test_attention_in_place_refuses_what_it_would_get_wrong(name: str, words: str) -> None:
    model = model_of(name, "torch_uma")
    cache = UnifiedCache(model, memory=MEMORY)
    with pytest.raises(torch_uma.SequenceError, match=words):
        generate(model, prompts(LENGTHS), max_new_tokens=2, cache=cache)
    model.set_attn_implementation("eager")
    try:
        tokens = generate(model, prompts(LENGTHS), max_new_tokens=NUM_NEW, cache=cache)
    finally:
        model.set_attn_implementation("torch_uma")
    assert_same_tokens(model_of(name), tokens, expected(name, "eager"), prompts(LENGTHS)["attention_mask"])


def test_neither_packed_rows_nor_several_steps_at_once() -> None:
    model = model_of("deepseek_v32", "torch_uma")
    pool = CachePool(model, memory=MEMORY)
    with (
        pytest.raises(torch_uma.SequenceError, match=r"\[1, 3\].*choose among the keys of all"),
        pool.step({pool.add(): 1, pool.add(): 3}),
    ):
        pass
    with (
        pool.begin_steps(pool.batch([pool.add()]), 2) as multi,
        pytest.raises(torch_uma.SequenceError, match="during a multi-step"),
    ):
        multi.cache()
    pool.check()


def test_what_is_declared() -> None:
    def rows(name: str) -> list[dict[str, tuple[int, ...]]]:
        layers = declare(model_of(name))
        return [{row.name: row.shape for memory in layer.memories for row in memory.rows} for layer in layers]

    assert rows("minimax_m3_vl_text")[1] == {"k": (2, 16), "v": (2, 16), "index_key": (1, 16)}
    assert rows("qwen4_exp_text")[1] == {"k": (2, 16), "v": (2, 16), "index_key": (16,), "index_position": (3,)}
    assert rows("qwen4_exp_text")[3] == {"k": (2, 16), "v": (2, 16), "index_key": (16,)}
    assert rows("glm5_next")[1] == {"latent": (1, 24), "rope_key": (1, 0), "index_key": (33,)}
    assert rows("glm5_next")[2] == {"latent": (1, 24), "rope_key": (1, 0)}
    assert rows("mistral_large4")[2:4] == [{"index_key": (16,)}, {}]
    index_key = declare(model_of("dots3_note_text"), dtype=torch.bfloat16)[0].memories[0].rows[2]
    assert index_key.name == "index_key" and index_key.dtype == torch.float32


def test_rows_that_no_layer_serves_are_refused() -> None:
    def row(name: str, *shape: int) -> Row:
        return Row(name=name, shape=shape, dtype=torch.float32)

    pair, index, state = (row("k", 1, 4), row("v", 1, 4)), row("index_key", 4), row("recurrent", 4)
    cases: list[tuple[Lifetime, tuple[Row, ...]]] = [
        (Full(), pair[:1]),
        (Full(), (pair[0], index)),
        (Full(), (*pair, row("index_position", 3))),
        (Window(8), (*pair, index)),
        (Full(), (*pair, row("more", 1))),
    ]
    for lifetime, rows in cases:
        layer = Layer(memories=(Memory(lifetime=lifetime, rows=rows),))
        with pytest.raises(torch_uma.PlanError, match="one key and one value for each token, and an index key with"):
            make_layers([layer], None)  # type: ignore[arg-type]
    memories = (Memory(lifetime=State(), rows=(state,)), Memory(lifetime=Full(), rows=(*pair, index)))
    with pytest.raises(torch_uma.PlanError, match="index keys beside states"):
        make_layers([Layer(memories=memories)], None)  # type: ignore[arg-type]


def test_index_keys_of_another_model_are_refused() -> None:
    model = model_of("deepseek_v32")
    cache = UnifiedCache(model, memory=MEMORY)
    with pytest.raises(
        torch_uma.SequenceError, match=r"'index_key' of \(16,\) for a token, but the model gives \(1, 8\)"
    ):
        cache.update_indexer(torch.zeros(1, 2, 8), 0)
    with pytest.raises(torch_uma.GradientError):
        cache.update_indexer(torch.zeros(1, 2, 16, requires_grad=True), 0)
    plain = UnifiedCache(model_of("dots3_note_text"), memory=MEMORY)
    with pytest.raises(
        torch_uma.PlanError, match="layer 1 stores latent, rope_key; this forward wants index keys there"
    ):
        plain.update_indexer(torch.zeros(1, 2, 16), 1)
    layer = cache.layers[0]
    assert isinstance(layer, IndexedLayer)
    layer.indexer_position_ids = torch.zeros(3, 1, 2, dtype=torch.int64)
    with pytest.raises(torch_uma.SequenceError, match="layer 0 gives positions with its index keys"):
        layer.update_indexer(torch.zeros(1, 2, 16))
