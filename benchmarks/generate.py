"""Decode speed and memory inside `generate()`: transformers' caches and the arena, in turns over the same content.

Models of 50 to 70 million random weights, in fp32 and without compilation. The caches of a case are filled with the
same random keys, values and states through their public calls, as decoding costs the same whatever they say. In every
round each cache in turn decodes as many tokens by a call of `generate()`, and all grow by them; StaticCache and the
arena have been made for the context and the tokens of all rounds, and no more. A time is that of the whole call by its
tokens, a ratio the median of those within the rounds. The second StaticCache shows the noise. Logits must agree within
1e-4 for as long as a row's tokens do, so that tokens can only differ where two tie.

`cache_bytes` and `decode_bytes`, the most that torch allocates during a call beside what it held before, are compared
with what the sequences have to keep between two steps at their last length. 8 KV heads at 16,384 take some 13 GB.

    python benchmarks/generate.py --json generate.json
    python benchmarks/generate.py --models llama_2kv --contexts 512 4096 --policies default static arena
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from records import Record, parser, publish, record
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    StaticCache,
)

import torch_uma.integrations.transformers  # registers the attention "torch_uma"
from torch_uma import Layer, State, UnifiedCache

TOLERANCE = 1e-4
MEMORY_TOKENS = 2  # a call while memory is measured
COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama_2kv": lambda: LlamaConfig(**COMMON, intermediate_size=1376),
    "llama_8kv": lambda: LlamaConfig(**COMMON | {"num_key_value_heads": 8}, intermediate_size=1376),
    # Three layers of gated DeltaNet, then one of full attention, twice.
    "qwen3_next": lambda: Qwen3NextConfig(
        **COMMON,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=256,
    ),
    # A window of 128 tokens and full attention in turns, with sinks, and 8 query heads for each of keys, as in
    # gpt-oss-20b; its code has no sdpa.
    "gpt_oss": lambda: GptOssConfig(
        **COMMON | {"num_attention_heads": 16},
        intermediate_size=384,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}


class Policy(NamedTuple):
    """A cache for sequences of at most so many tokens, and the attention it is used with, None for the model's own."""

    make: Callable[[PreTrainedModel, int], Cache]
    attention: str | None = None


POLICIES = {
    "default": Policy(lambda model, num_tokens: DynamicCache(config=model.config)),
    "static": Policy(lambda model, num_tokens: StaticCache(config=model.config, max_cache_len=num_tokens)),
    "static_again": Policy(lambda model, num_tokens: StaticCache(config=model.config, max_cache_len=num_tokens)),
    "arena": Policy(lambda model, num_tokens: UnifiedCache(model, max_tokens=num_tokens)),
    "torch_uma": Policy(lambda model, num_tokens: UnifiedCache(model, max_tokens=num_tokens), "torch_uma"),
}


class Contestant:
    """One policy's cache in a case, and what its turns have shown."""

    def __init__(self, name: str, model: PreTrainedModel, tokens: torch.Tensor, num_tokens: int) -> None:
        policy = POLICIES[name]
        own = "sdpa" if model._supports_sdpa else "eager"
        self.name = name
        self.attention = policy.attention or own
        self.model: Any = model  # transformers adds generate() to it unseen by mypy
        self.tokens = tokens  # one more than the cache holds
        self.same = torch.ones(len(tokens), dtype=torch.bool)  # rows whose tokens have always been those of the first
        self.difference = 0.0
        self.step_ms: list[float] = []
        model.set_attn_implementation(self.attention)
        self.cache = policy.make(model, num_tokens)
        if isinstance(self.cache, UnifiedCache):
            self.cache.expect(len(tokens), num_tokens)  # makes the arena, for this attention

    def decode(self, num_new_tokens: int) -> list[torch.Tensor]:
        """Decodes greedily and times it; the logits of every step [batch, vocabulary]."""
        self.model.set_attn_implementation(self.attention)
        start = time.perf_counter()
        output: Any = self.model.generate(
            self.tokens,
            attention_mask=torch.ones_like(self.tokens),
            cache=self.cache,
            max_new_tokens=num_new_tokens,
            do_sample=False,
            disable_compile=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        self.step_ms.append((time.perf_counter() - start) * 1e3 / num_new_tokens)
        self.tokens = output.sequences
        assert output.cache is self.cache and int(self.cache.get_seq_length()) == self.tokens.shape[1] - 1
        return list(output.logits)

    def compare(self, logits: Sequence[torch.Tensor], first: Contestant, expected: Sequence[torch.Tensor]) -> None:
        """AssertionError if logits differ while a row's tokens, and so its cache, are those of the first contestant."""
        for step in range(len(expected)):
            difference = (logits[step] - expected[step]).abs().amax(-1)[self.same]
            self.difference = max([self.difference, *difference.tolist()])
            assert self.difference < TOLERANCE, f"{self.name}: logits differ by {self.difference} from {first.name}"
            at = step - len(expected)
            self.same &= self.tokens[:, at] == first.tokens[:, at]

    def cache_bytes(self) -> int:
        """Bytes of memory that the cache holds."""
        if isinstance(self.cache, UnifiedCache):
            return self.cache.pool.arena.bytes.nbytes
        tensors: list[torch.Tensor] = []
        for layer in self.cache.layers:
            tensors += [getattr(layer, name) for name in ("keys", "values") if hasattr(layer, name)]
            for name in ("conv_states", "recurrent_states"):
                tensors += getattr(layer, name, {}).values()
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors if tensor is not None)

    def decode_bytes(self) -> int:
        """The most that a call of `generate()` allocates beside what was held before it."""
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.decode(MEMORY_TOKENS)  # only what is allocated under the profiler is seen to be freed
            with record_function("measured"):
                self.decode(MEMORY_TOKENS)
        assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
        events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        start = next(index for index, event in enumerate(events) if event.name() == "measured")
        held = most = 0
        for event in events[start:]:
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        return most


@torch.no_grad()
def fill(caches: Sequence[Cache], layers: Sequence[Layer], batch: int, num_tokens: int) -> None:
    """Gives every cache the same random content, as one forward over `num_tokens` tokens would."""
    for index, layer in enumerate(layers):
        for memory in layer.memories:
            rows = {row.name: row for row in memory.rows}
            if isinstance(memory.lifetime, State):
                channels, kernel = rows["conv"].shape
                conv = torch.zeros(batch, channels, num_tokens)
                conv[..., -kernel:] = torch.randn(batch, channels, kernel)
                recurrent = torch.randn(batch, *rows["recurrent"].shape)
                for cache in caches:
                    cache.update_conv_state(conv, index, conv_kernel_size=kernel)
                    cache.update_recurrent_state(recurrent, index)
            else:
                keys, values = (torch.randn(batch, row.shape[0], num_tokens, row.shape[1]) for row in memory.rows)
                for cache in caches:
                    cache.update(keys, values, index, kwargs={})


def needed_bytes(layers: Sequence[Layer], num_tokens: int) -> int:
    """What a sequence of that length has to keep."""
    needed = 0
    for layer in layers:
        for memory in layer.memories:
            is_state = isinstance(memory.lifetime, State)
            num_entries = 1 if is_state else num_tokens - memory.lifetime.first_needed(num_tokens)
            needed += num_entries * sum(row.num_bytes for row in memory.rows)
    return needed


def measure(name: str, context: int, policies: Sequence[str], rounds: int, new_tokens: int, batch: int) -> list[Record]:
    """All policies in turns on one model and context."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.float32).eval()
    layers = torch_uma.plan(model, memory="1TiB").layers
    num_tokens = context + (1 + rounds) * new_tokens + 2 * MEMORY_TOKENS
    tokens = torch.randint(1, COMMON["vocab_size"], (batch, context + 1))
    contestants = [Contestant(policy, model, tokens, num_tokens) for policy in policies]
    model.set_attn_implementation("eager")  # with ours, keys that are stored have to be attended to
    fill([contestant.cache for contestant in contestants], layers, batch, context)
    first = contestants[0]
    for turn in range(1 + rounds):
        order = contestants[turn % len(contestants) :] + contestants[: turn % len(contestants)]
        logits = {contestant: contestant.decode(new_tokens) for contestant in order}
        for contestant in contestants:
            contestant.compare(logits[contestant], first, logits[first])
    for contestant in contestants:
        del contestant.step_ms[0]  # a warm-up
    case = f"{name}/{context}"
    records = [record(case, "parameters", model.num_parameters() / 1e6, "M")]
    for contestant in contestants:
        more: dict[str, Any] = {"policy": contestant.name, "attention": contestant.attention}
        milliseconds = statistics.median(contestant.step_ms)
        records.append(record(case, "ms_per_token", milliseconds, "ms", **more))
        for other in contestants:
            if other.name in ("default", "static") and other is not contestant:
                reference = statistics.median(other.step_ms)
                ratio = statistics.median(ours / theirs for ours, theirs in zip(contestant.step_ms, other.step_ms))
                records.append(record(case, f"ms_to_{other.name}", milliseconds, "ms", reference, ratio, **more))
        more["rows_tied"] = int((~contestant.same).sum())
        records.append(record(case, "logits_difference", contestant.difference, "", **more))
    needed = batch * needed_bytes(layers, num_tokens)
    for contestant in contestants:
        more = {"policy": contestant.name, "attention": contestant.attention}
        records.append(record(case, "decode_bytes", contestant.decode_bytes(), "B", needed, **more))
        records.append(record(case, "cache_bytes", contestant.cache_bytes(), "B", needed, **more))
    return records


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options.add_argument("--contexts", nargs="+", type=int, default=[512, 4096, 16384])
    options.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--new-tokens", type=int, default=16)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    known = AttentionInterface().valid_keys()
    policies = [name for name in arguments.policies if POLICIES[name].attention in (None, *known)]
    for name in set(arguments.policies) - set(policies):
        print(f"skipped {name}: no attention {POLICIES[name].attention!r} is registered", file=sys.stderr)
    records: list[Record] = []
    try:
        for name in arguments.models:
            for context in arguments.contexts:
                print(f"{name}/{context}", file=sys.stderr)
                records += measure(name, context, policies, arguments.rounds, arguments.new_tokens, arguments.batch)
    finally:  # what was measured is worth having, whatever came then
        publish(records, arguments.json)


if __name__ == "__main__":
    main()
