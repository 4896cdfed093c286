"""What it costs in accuracy to keep keys and values in fewer bits, on tiny random models of the examples and tests.

Every model reads the same text token by token, which is what it says itself with a cache that rounds nothing. "logits"
is the mean difference of the logits over their standard deviation; "tokens" the share of steps with the same greedy
token. Random weights have flat logits, so that small differences change many tokens; a trained model is surer of its
own. What is stored is rounded to the nearest, saturated, and has no scales.

    python benchmarks/fp8_rows.py [--json PATH]
"""

from __future__ import annotations

from typing import Any

import torch
from records import Record, parser, publish, record
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen3NextConfig,
)

import torch_uma
import torch_uma.integrations.transformers  # noqa: F401 (registers its attention)

NUM_PROMPT, NUM_NEW = 64, 128
_SMALL: dict[str, Any] = {"vocab_size": 512, "hidden_size": 128, "num_attention_heads": 4, "initializer_range": 0.08}
_SHORT: dict[str, Any] = {"num_hidden_layers": 4, "intermediate_size": 256, "num_key_value_heads": 2, "head_dim": 32}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
CONFIGS = {
    "llama": LlamaConfig(**_SMALL, **_SHORT),
    "gpt-oss": GptOssConfig(**_SMALL, **_SHORT, num_local_experts=4, num_experts_per_tok=2, sliding_window=32),
    "qwen3-next": Qwen3NextConfig(
        **_SMALL,
        **_SHORT,
        **_EXPERTS,
        num_experts=4,
        shared_expert_intermediate_size=64,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
    ),
    "deepseek-v3": DeepseekV3Config(
        **_SMALL,
        **{**_SHORT, "num_key_value_heads": 4, "head_dim": 16},
        **_EXPERTS,
        q_lora_rank=48,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
    ),
}


@torch.no_grad()
def logits_of(model: PreTrainedModel, pool: torch_uma.CachePool, text: torch.Tensor, num_new: int) -> torch.Tensor:
    """Logits [num_new, vocabulary] after the prompt and each token behind it: of `text`, then the model's own."""
    sequence, logits, tokens = pool.add(), [], text[:, :NUM_PROMPT]
    for step in range(num_new):
        with pool.step({sequence: tokens.shape[1]}) as cache:
            logits.append(model(tokens, cache=cache, **cache.inputs()).logits[0, -1])
        at = NUM_PROMPT + step
        tokens = text[:, at : at + 1] if at < text.shape[1] else logits[-1].argmax()[None, None]
    sequence.free()
    return torch.stack(logits)


def figures(name: str) -> list[Record]:
    """The records of one model."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation="torch_uma").eval()
    prompt = torch.randint(0, model.config.vocab_size, (1, NUM_PROMPT))
    with torch_uma.CachePool(model, memory="16MiB") as pool:
        exact = logits_of(model, pool, prompt, NUM_NEW)
        text = torch.cat([prompt, exact.argmax(-1)[None]], dim=1)
        wide_bytes = pool.plan.bytes_per_token
    records = []
    for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        with torch_uma.CachePool(model, memory="16MiB", kv_dtype=kv_dtype) as pool:
            found = logits_of(model, pool, text, NUM_NEW)
            num_bytes = pool.plan.bytes_per_token
        case = f"{name} {str(kv_dtype).removeprefix('torch.')}"
        difference = float((found - exact).abs().mean() / exact.std())
        same = float((found.argmax(-1) == exact.argmax(-1)).float().mean())
        records.append(record(case, "logits", difference, "of their standard deviation"))
        records.append(record(case, "tokens", same, "of the steps the same"))
        records.append(record(case, "a token", num_bytes, "bytes", reference=wide_bytes))
    return records


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    publish([entry for name in CONFIGS for entry in figures(name)], options.json)


if __name__ == "__main__":
    main()
