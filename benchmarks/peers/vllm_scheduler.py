"""vLLM's own scheduler and cache manager on the requests of `traces.py`, without a GPU and without weights.

Owns the driver. Groups, blocks, prefix caching, scheduling and preemption are the code of an installed vLLM, called as
its engine core calls it; what is not vLLM's are the fields of `vllm_inputs.py` and the tokens that a model would have
sampled. Where vLLM is not installed, a sentence says so.

    pip install vllm==0.33.0
    PYTHONPATH=.:benchmarks python -m peers.vllm_scheduler --trace AzureLLMInferenceTrace_conv.csv --json vllm.json
    PYTHONPATH=.:benchmarks python -m peers.vllm_scheduler --models gpt-oss-20b --workloads 512+128

Of each model and workload: mean requests in memory over rounds, preemptions, rounds, and thread CPU time of
`schedule()` and `update_from_output()` in a round, as a median and as a mean.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from first_come import Lengths, Served
from geometries import GEOMETRIES, Layers
from records import Record, parser, publish, record
from workloads import ARENA_BYTES, MODELS, Workload, workloads

from peers.vllm_inputs import config_of, specs_of, why_not


@dataclass(frozen=True, kw_only=True)
class Driven(Served):
    """How vLLM served them, and thread CPU time of its scheduler in each round, in microseconds."""

    round_us: Sequence[float]


class Engine:
    """vLLM's scheduler over so many bytes, and a model that samples nothing but zeros."""

    def __init__(
        self, layers: Layers, *, max_running: int, arena_bytes: int = ARENA_BYTES, prefix_caching: bool = True
    ) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
        from vllm.v1.core.kv_cache_utils import (
            generate_scheduler_kv_cache_config,
            get_request_block_hasher,
            init_none_hash,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
        from vllm.v1.structured_output import StructuredOutputManager

        config = config_of(layers, max_running, prefix_caching)
        register_all_kvcache_specs(config)
        specs = [specs_of(layers, prefix_caching)]
        groups = get_global_kv_cache_groups(config, specs)
        plans = get_kv_cache_configs(config, specs, [arena_bytes], groups)
        self.plan: Any = generate_scheduler_kv_cache_config(plans)
        config.cache_config.num_gpu_blocks = self.plan.num_blocks
        block_tokens, hash_tokens = resolve_kv_cache_block_sizes(self.plan, config)
        self.scheduler: Any = Scheduler(
            vllm_config=config,
            kv_cache_config=self.plan,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_tokens,
            hash_block_size=hash_tokens,
        )
        self.hasher: Any = None
        if prefix_caching:
            hash_of = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
            init_none_hash(hash_of)
            self.hasher = get_request_block_hasher(hash_tokens, hash_of)
        self.requests: list[Any] = []
        self.round_us: list[float] = []

    def submit(self, lengths: Iterable[Lengths]) -> None:
        """Queue requests, no two of which begin alike."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        for num_prompt_tokens, num_new_tokens in lengths:
            number = len(self.requests)
            request = Request(
                request_id=str(number),
                prompt_token_ids=[number] * num_prompt_tokens,
                sampling_params=SamplingParams(max_tokens=num_new_tokens, ignore_eos=True),
                pooling_params=None,
                block_hasher=self.hasher,
            )
            self.requests.append(request)
            self.scheduler.add_request(request)

    def round(self) -> int:
        """One step of the engine; how many requests were in memory."""
        from vllm.v1.outputs import ModelRunnerOutput

        start = time.thread_time_ns()
        asked = self.scheduler.schedule()
        scheduled = time.thread_time_ns()
        num_running, names = len(self.scheduler.running), list(asked.num_scheduled_tokens)
        requests = [self.scheduler.requests[name] for name in names]
        ran = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[0] if one.num_computed_tokens >= one.num_tokens else [] for one in requests],
        )
        sampled = time.thread_time_ns()
        self.scheduler.update_from_output(asked, ran)
        self.round_us.append((time.thread_time_ns() - sampled + scheduled - start) / 1e3)
        return num_running


def drive(layers: Layers, workload: Workload, *, prefix_caching: bool = True) -> Driven:
    """Serve a workload to its end."""
    engine = Engine(layers, max_running=workload.max_running, prefix_caching=prefix_caching)
    engine.submit(workload.lengths)
    running = []
    while engine.scheduler.has_unfinished_requests():
        running.append(engine.round())
    return Driven(
        mean_running=statistics.fmean(running),
        preemptions=sum(request.num_preemptions for request in engine.requests),
        num_rounds=len(running),
        round_us=engine.round_us,
    )


def measure(model: str, workload: Workload, prefix_caching: bool) -> Record:
    driven = drive(GEOMETRIES[model](), workload, prefix_caching=prefix_caching)
    return record(
        f"{model}/{workload.name}",
        "mean_running",
        driven.mean_running,
        "requests",
        preemptions=driven.preemptions,
        num_rounds=driven.num_rounds,
        round_us=statistics.median(driven.round_us),
        round_mean_us=statistics.fmean(driven.round_us),
        prefix_caching=prefix_caching,
    )


def describe(entry: Record) -> str:
    """What stands beside a figure."""
    return (
        f"{entry['case']}: {entry['preemptions']} preemptions, {entry['num_rounds']} rounds, "
        f"{entry['round_us']:,.0f} us a round, {entry['round_mean_us']:,.0f} as a mean"
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--trace", type=Path, metavar="PATH", help="AzureLLMInferenceTrace_conv.csv")
    options.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options.add_argument("--workloads", nargs="+", metavar="NAME", help="only these, as 512+128 or azure")
    options.add_argument("--no-prefix-caching", action="store_true")
    arguments = options.parse_args()
    if (sentence := why_not()) is not None:
        sys.exit(sentence)
    asked = [one for one in workloads(arguments.trace) if one.name in (arguments.workloads or [one.name])]
    records = [measure(model, one, not arguments.no_prefix_caching) for model in arguments.models for one in asked]
    publish(records, arguments.json)
    for entry in records:
        print(describe(entry))


if __name__ == "__main__":
    main()
