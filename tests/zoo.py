"""A tiny random model of every decoder that the installed transformers has.

Which decoders there are is asked of the package. How one becomes tiny is said once for each size that configs name, and
for a type only where that is not enough. Windows and chunks are shorter than prompts in tests, and weights so large
that the next token depends on what is remembered.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import torch_uma.integrations.transformers  # noqa: F401 (registers its attention)

VOCABULARY = 97
PAD = 0
WINDOW = 6
CHUNK = 8

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
}
DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA2: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_n_groups": 1, "mamba_d_state": 8}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "head_dim": 8,
}
# With few heads the scores of indexers tie at 0, and what is picked then depends on how keys are kept.
INDEX: dict[str, Any] = {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 4}
SIZES: dict[str, Any] = {
    **COMMON,
    **EXPERTS,
    **{name: size for name, size in DELTA_NET.items() if name != "layer_types"},
    **MAMBA2,
    **INDEX,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "ffn_dim": 40,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "num_dense_layers": 1,
    "moe_num_experts": 4,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_num_shared_experts": 1,
    "shared_intermediate_size": 24,
    "max_window_layers": 2,
}
# Of towers for images and sound, which no test uses.
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "embed_dim": 16,
    "d_model": 16,
    "intermediate_size": 16,
    "encoder_ffn_dim": 16,
    "num_hidden_layers": 1,
    "num_layers": 1,
    "encoder_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_heads": 2,
    "encoder_attention_heads": 2,
    "head_dim": 8,
    "out_hidden_size": 48,
    "vocab_size": VOCABULARY,
}

SLIDING_AND_FULL = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
_MIXED = ["linear_attention", "full_attention"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_DECODER = {"is_decoder": True}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 1}  # where a config takes no None


def _mrope(*section: int, **options: Any) -> dict[str, Any]:
    """Options of a decoder whose positions have three axes, of heads of 16 numbers."""
    rope = {**_ROPE, "mrope_section": list(section), **options}
    return {"hidden_size": 64, "head_dim": 16, "rope_parameters": rope}


# What the config of a type, or of a layout of it that is named "type+layout", has beside what SIZES says.
MODELS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": _MIXED},
    "bamba": {"attn_layer_indices": [2]},
    "bert": _DECODER,
    "bert-generation": _DECODER,
    "big_bird": {**_DECODER, "attention_type": "original_full"},
    "camembert": _DECODER,
    "codegen": {"rotary_dim": 4},
    "chameleon": {"vocabulary_map": {"<image>": VOCABULARY - 1}},
    "cohere_compass_text": {
        "layer_types": SLIDING_AND_FULL,
        "rope_parameters": {kind: {**_ROPE, "mrope_section": [2, 2, 2]} for kind in set(SLIDING_AND_FULL)},
    },
    "cpmant": {"dim_head": 12, "dim_ff": 40, "position_bias_num_buckets": 32, "position_bias_max_distance": 64},
    "cwm": {**_TOKENS, "layer_types": SLIDING_AND_FULL},
    "data2vec-text": _DECODER,
    "dbrx": {
        "d_model": 48,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 24, "moe_top_k": 2},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "dory": {"n_input_layers": 1, "n_output_layers": 1, "layer_types": SLIDING_AND_FULL},
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention", "sliding_attention"],
        "sliding_window": WINDOW,
        "shared_experts_intermediate_size": 24,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 20,
        "swa_head_dim": 20,
        "swa_qk_nope_head_dim": 12,
        "swa_v_head_dim": 16,
    },
    "electra": {**_DECODER, "embedding_size": 16},
    "emu3_text_model": _TOKENS,
    "ernie": _DECODER,
    "ernie4_5_vl_moe_text": {**_mrope(3, 3, 2), "moe_intermediate_size": [24, 24]},
    "falcon_h1": {"mamba_d_ssm": 96},
    "gemma3_text": {"layer_types": SLIDING_AND_FULL},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 6,
    },
    "gemma4_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 28,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gemma4_unified_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 28,
    },
    "glm5_next_text": {"qk_rope_head_dim": 0, "index_kpool": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "helium": {"head_dim": 12},
    "inkling2_loop_text": {"unpadded_vocab_size": VOCABULARY},
    "inkling2_text": {"unpadded_vocab_size": VOCABULARY},
    "inkling_text": {"sliding_window_size": WINDOW},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    "kimi_linear": {"layer_types": _MIXED},
    "kyutai_speech_to_text": {"codebook_vocab_size": 9, "num_codebooks": 2, "audio_pad_token_id": PAD},
    "lara_mini": {"layer_types": ["linear_attention", *SLIDING_AND_FULL[1:]]},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm3": {},
    "llama4_text": {"intermediate_size_mlp": 40, "attention_chunk_size": CHUNK},
    "longcat_flash": {"num_layers": 2, "expert_ffn_hidden_size": 24, "ffn_hidden_size": 40, "zero_expert_num": 2},
    "falcon_mamba": {"state_size": 8},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 4, "head_dim": 24, "n_groups": 1, "state_size": 8},
    "megatron-bert": _DECODER,
    "mimo_v2_flash": {"v_head_dim": 12},
    "minimax+full_first": {"layer_types": ["full_attention", "linear_attention"] * 2},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "index_n_heads": 2,  # as many as heads of keys
    },
    "mistral+full": {"sliding_window": None},
    "mistral4": {"head_dim": 20},
    "mllama_text_model": _TOKENS,
    "modernbert-decoder": {**_TOKENS, "local_attention": WINDOW},
    "nemotron_h": {
        "num_hidden_layers": None,
        "layers_block_type": ["mamba", "moe", "attention", "mamba"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 24,
        "n_groups": 1,
        "ssm_state_size": 8,
        "moe_shared_expert_intermediate_size": 24,
    },
    "olmo_hybrid": DELTA_NET,
    "phi3+window": {"sliding_window": WINDOW},
    "qwen2+window": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3_5_moe_text": DELTA_NET,
    "qwen3_5_text": DELTA_NET,
    "qwen3_next": DELTA_NET,
    "recurrent_gemma": {"lru_width": 48, "attention_window_size": WINDOW},
    "qwen4_exp_text": {
        "indexer_n_heads": 32,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 24,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 8,
    },
    "reformer": {**_DECODER, "axial_pos_embds": False, "attention_head_size": 12, "feed_forward_size": 40},
    "rembert": {**_DECODER, "input_embedding_size": 16, "output_embedding_size": 24},
    "roberta": _DECODER,
    "roberta-prelayernorm": _DECODER,
    "roc_bert": {
        **_DECODER,
        "pronunciation_vocab_size": VOCABULARY,
        "shape_vocab_size": VOCABULARY,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "roformer": _DECODER,
    "stablelm": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
    "step3p5": {"sliding_window": WINDOW},
    "trocr": {"decoder_ffn_dim": 40, "decoder_attention_heads": 4, "decoder_layers": 4},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "xlm": {"causal": True, "pad_index": PAD, "mask_token_id": VOCABULARY - 1},
    "xlm-roberta": _DECODER,
    "xlm-roberta-xl": _DECODER,
    "xlnet": {"d_head": 12, "d_inner": 40},
    "xlstm": {"hidden_size": 128, "num_heads": 4},
    "xmod": {**_DECODER, "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "n_mamba_heads": 4,
        "adapter_rank": 4,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "zaya+window": {
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        "sliding_window": WINDOW,
    },
    # positions of three axes
    "cosmos3_edge_text": _mrope(4, 2, 2),
    "glm4v_moe_text": _mrope(2, 1, 1, partial_rotary_factor=0.5),
    "glm4v_text": _mrope(2, 1, 1, partial_rotary_factor=0.5),
    "glm_ocr_text": _mrope(4, 2, 2),
    "hunyuan_vl_text": _mrope(4, 2, 2),
    "hy_v4_vl_text": {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
    "paddleocr_vl_text": _mrope(4, 2, 2),
    "qwen2_5_omni_text": _mrope(4, 2, 2),
    "qwen2_5_vl_text": _mrope(4, 2, 2),
    "qwen2_vl_text": _mrope(4, 2, 2),
    "qwen3_omni_moe_text": _mrope(4, 2, 2),
    "qwen3_vl_moe_text": _mrope(4, 2, 2),
    "qwen3_vl_text": _mrope(4, 2, 2),
}

# What configs around a text decoder have beside what TOWER says: whole ones, and towers.
OTHERS: dict[str, dict[str, Any]] = {
    "chameleon_vqgan": {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1},
    "clip_vision_model": {"hidden_size": 64},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1, 1, 1], "num_res_blocks": 1},
    "emu3": {"pad_token_id": PAD, "vocab_size": VOCABULARY, "vocabulary_map": {"<image>": VOCABULARY - 1}},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2"},
    "mimi": {"upsample_groups": 16},
    "molmo2_adapter": {"vision_feature_layer": [0]},
    "muse_spark_audio": {"num_hidden_layers": 1, "patch_sizes": [4], "hidden_sizes": [16], "depths": [1]},
    "qwen2_5_omni_thinker": {"vision_start_token_id": VOCABULARY},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": VOCABULARY},
}

_MAPPINGS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")


@cache
def decoders() -> dict[str, tuple[str, ...]]:
    """The types of text decoders that transformers has models of, and of which models: first its own, if it has one.

    A model type with an encoder is none of them.
    """
    found: dict[str, list[str]] = {}
    for mapping in _MAPPINGS:
        for model_type in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES"):
            if model_type in UNMADE:
                continue
            config = CONFIG_MAPPING[model_type]()
            if config.is_encoder_decoder:
                continue
            decoder = config.get_text_config(decoder=True).model_type
            models = found.setdefault(decoder, [])
            if model_type not in models:
                models.insert(0 if model_type == decoder else len(models), model_type)
    return {decoder: tuple(found[decoder]) for decoder in sorted(found)}


# Model types whose config has no defaults that it takes.
UNMADE: dict[str, str] = {
    "gemma4_assistant": "drafts for gemma4, whose keys it reads",
}


def tiny(name: str) -> PreTrainedConfig:
    """The config of the text decoder `name`."""
    return config_of(name).get_text_config(decoder=True)


def config_of(name: str) -> PreTrainedConfig:
    """The config of the smallest model that has the decoder `name`."""
    decoder = name.partition("+")[0]
    model_type = decoders()[decoder][0]
    whole = CONFIG_MAPPING[model_type]()
    text = whole.get_text_config(decoder=True)
    return AutoConfig.for_model(model_type, **_tiny(whole, text, MODELS.get(name, {})))


def _tiny(config: PreTrainedConfig, text: PreTrainedConfig, options: dict[str, Any]) -> dict[str, Any]:
    """What to make `config` of, whose text decoder `text` gets `options`."""
    sizes = SIZES | LATENT if "kv_lora_rank" in config.to_dict() else SIZES
    if config is not text:
        sizes, options_here = TOWER, OTHERS.get(config.model_type, {})
    else:
        options_here = options
    parts = {}
    for part in config.sub_configs:
        inner = getattr(config, part, None)
        if isinstance(inner, PreTrainedConfig):
            parts[part] = {"model_type": inner.model_type, **_tiny(inner, text, options)}
    return parts | _sizes(config, sizes) | options_here


def _sizes(config: PreTrainedConfig, sizes: dict[str, Any]) -> dict[str, Any]:
    """Of `sizes` those that this config has; but no window where it has none."""
    fields = {**config.to_dict(), **config.attribute_map}
    used = {}
    for name, size in sizes.items():
        attribute = getattr(type(config), name, None)
        is_fixed = isinstance(attribute, property) and attribute.fset is None
        if name in fields and not is_fixed and not (name == "sliding_window" and fields[name] is None):
            used[name] = size
    return used


def build(name: str, *, attention: str = "eager") -> PreTrainedModel:
    """The model `name` in fp32 with the same weights at every call, ready to generate."""
    config = config_of(name)
    is_text = config.get_text_config(decoder=True) is config
    known = [getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING") for mapping in _MAPPINGS]
    # A wrapper can be registered there with a model of its text config.
    classes = next((mapping for mapping in (known if is_text else known[::-1]) if type(config) in mapping), None)
    if classes is None:
        raise LookupError(f"{type(config).__name__!r} has no model that generates")
    with torch.random.fork_rng():
        torch.manual_seed(sum(name.encode()))
        model: PreTrainedModel = classes[type(config)]._from_config(config, attn_implementation=attention)
        for parameter_name, parameter in model.named_parameters():
            # Not all models look at `initializer_range`, and sinks are zeros.
            if parameter_name.endswith("sinks"):
                torch.nn.init.normal_(parameter)
            elif parameter.dim() > 1 and parameter.std() < 0.1:
                torch.nn.init.normal_(parameter, std=0.2)
        for module in model.modules():
            # Index scores of a token without an embedding tie; what is chosen then depends on how many keys there are.
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                torch.nn.init.normal_(module.weight[module.padding_idx], std=0.2)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return model.eval().requires_grad_(False)
