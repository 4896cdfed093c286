"""What would my traffic gain from one arena, and what should I set? A trace replayed, from the command line.

python -m torch_uma.simulate --config config.json --memory 8GiB --trace AzureLLMInferenceTrace_conv.csv --split default
python -m torch_uma.simulate --config gpt_oss --memory 40GiB --made 2000,1024,256,0.5 --rate 20 --split best
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from difflib import get_close_matches
from itertools import count
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from torch_uma.counts import whole
from torch_uma.errors import TorchUmaError, TraceError
from torch_uma.plan import Plan, plan
from torch_uma.pool import CachePool
from torch_uma.simulate.advice import advice
from torch_uma.simulate.device import Device
from torch_uma.simulate.options import check_outputs, command_line, device_of
from torch_uma.simulate.replay import replay
from torch_uma.simulate.report import Report
from torch_uma.simulate.splits import best_split, default_split
from torch_uma.simulate.table import plot, table
from torch_uma.simulate.traces import Arrival, at_once, generate_trace, read_trace
from torch_uma.simulate.work import Work

_NUM_TRIES = 12  # of the search for the best split, for each kind of memory but one


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = command_line(__doc__.split("\n")[0])
    options = parser.parse_args(arguments)
    try:
        check_outputs(options)
        device, arrivals, config = device_of(options.device), _arrivals(options), _config(options)
        with _quiet():
            planned = plan(
                config,
                memory=options.memory,
                page_size=options.page_size,
                dtype=torch.bfloat16,
                kv_dtype=options.kv_dtype,
            )
            work = _work(config)
        reports = _reports(options, planned, arrivals, work, device)
        print(_heading(options, config.model_type, planned, arrivals, work, device))
        print(table(reports))
        for sentence in advice(reports, max_running=options.max_running, arena_bytes=planned.arena_bytes):
            print(sentence)
        if options.json:
            options.json.write_text(json.dumps({name: asdict(report) for name, report in reports.items()}))
        if options.plot:
            plot(reports, options.plot)
    except (TorchUmaError, ValueError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    return 0


def _heading(
    options: argparse.Namespace,
    model_type: str,
    planned: Plan,
    arrivals: Sequence[Arrival],
    work: Work,
    device: Device,
) -> str:
    """What was asked, as it was understood."""
    num_requests, seconds = len(arrivals), arrivals[-1].at_s
    when = f"in {seconds:,.0f} s, {num_requests / seconds:,.3g} a second" if seconds else "at once"
    prompt = sum(arrival.num_prompt_tokens for arrival in arrivals) / num_requests
    new = sum(arrival.num_new_tokens for arrival in arrivals) / num_requests
    lines = [
        f"requests: {num_requests:,} {when}; on the mean {prompt:,.0f} tokens of a prompt and {new:,.0f} new ones",
        f"model: {model_type}, weights of {(work.weight_bytes + work.expert_bytes) / 1e9:,.1f} GB in bf16 without the "
        "embedding",
        f"machine: {device.name}, simulated; {planned.arena_bytes / 1e9:,.2f} GB for the arena, "
        f"{options.max_running:,} requests running at most",
    ]
    if options.split:
        lines.append(f"fixed pools: called by their shares of {'/'.join(subpool.name for subpool in planned.subpools)}")
    return "\n".join(lines)


def _reports(
    options: argparse.Namespace, planned: Plan, arrivals: Sequence[Arrival], work: Work, device: Device
) -> dict[str, Report]:
    asked = [_split(text, planned) for text in options.split]
    settings: dict[str, Any] = {
        "max_running": options.max_running,
        "step_tokens": options.step_tokens,
        "host_memory": options.host_memory if options.host_memory != "0" else 0,
        "packed": not any(subpool.is_state for subpool in planned.subpools),  # as a ServingLoop does
    }
    if options.headroom_steps is not None:
        settings["headroom_steps"] = options.headroom_steps

    def run(name: str, split: Mapping[str, float] | None) -> Report:
        with tqdm(total=len(arrivals), desc=name, unit=" requests", disable=options.quiet) as bar:

            def note(num_done: int, _: int) -> None:
                bar.update(num_done - bar.n)

            return replay(planned, arrivals, work=work, device=device, split=split, progress=note, **settings)

    def search() -> tuple[Mapping[str, float], Report]:
        tries, most = count(1), 1 + _NUM_TRIES * (len(planned.subpools) - 1)
        return best_split(planned, lambda shares: run(f"search {next(tries)}/{most}", shares), num_tries=_NUM_TRIES)

    reports = {"arena": run("arena", None)}
    for kind, split in asked:
        if split is None:
            split, report = search()
        else:
            report = run(f"{kind} {_shares(split)}", split)
        reports[f"{kind} {_shares(split)}"] = report
    return reports


def _split(asked: str, planned: Plan) -> tuple[str, Mapping[str, float] | None]:
    """What a split is called, and its shares; those of the best are None, as they have to be searched for."""
    if asked == "default":
        return asked, default_split(planned)
    if asked == "best":
        return asked, None
    try:
        split = {str(name): float(share) for name, share in json.loads(asked).items()}
    except (AttributeError, TypeError, ValueError):
        names = ", ".join(f'"{subpool.name}": SHARE' for subpool in planned.subpools)
        raise TraceError(f'--split {asked} is not "default", "best" or shares such as {{{names}}}') from None
    CachePool(planned, device="meta", max_sequences=1, split=split).close()  # raises, before anything is run
    return "split", split


def _shares(split: Mapping[str, float]) -> str:
    return "/".join(f"{share:.2f}" for share in split.values())


def _config(options: argparse.Namespace) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    changes = {}
    for change in options.set:
        name, separator, value = change.partition("=")
        if not separator:
            raise TraceError(f"--set {change} is no NAME=VALUE")
        try:
            changes[name] = json.loads(value)
        except json.JSONDecodeError:
            changes[name] = value
    if options.config in CONFIG_MAPPING:
        config = CONFIG_MAPPING[options.config]()
    else:
        try:
            config = AutoConfig.from_pretrained(options.config)
        except (OSError, ValueError) as error:
            close = get_close_matches(options.config, CONFIG_MAPPING, n=1)
            meant = f" (such as {close[0]})" if close else ""
            raise TraceError(
                f"--config {options.config} is no model type{meant}, and no config could be read from a file, a folder "
                f"or the hub of that name: {str(error).splitlines()[0]}"
            ) from error
    text = config.get_text_config(decoder=True)
    unknown = [name for name in changes if not hasattr(text, name)]
    if unknown:
        raise TraceError(f"the config of {text.model_type} has no {', '.join(unknown)} to be set")
    if not changes:
        return text
    kept = text.to_dict()
    if "num_hidden_layers" in changes:
        kept.pop("layer_types", None)  # the model's own pattern, for as many
    try:
        return type(text).from_dict({**kept, **changes})
    except StrictDataclassError as error:
        raise TraceError(f"the config of {text.model_type} cannot be set so: {error}") from error


def _arrivals(options: argparse.Namespace) -> list[Arrival]:
    if options.limit is not None:
        whole(options.limit, "--limit", least=1, error=TraceError)
    if options.trace is not None:
        arrivals = read_trace(options.trace, limit=options.limit)
    else:
        try:
            count, prompt, new, spread = (float(part) for part in options.made.split(","))
            num_requests = int(count)
        except (ValueError, OverflowError):
            raise TraceError(f"--made {options.made} is not four numbers, N,PROMPT,NEW,SPREAD") from None
        arrivals = generate_trace(
            num_requests,
            prompt_tokens=prompt,
            new_tokens=new,
            spread=spread,
            rate_per_s=options.rate,
            seed=options.seed,
        )[: options.limit]
    if options.rate is not None and options.trace is not None:
        made = generate_trace(len(arrivals), prompt_tokens=1, new_tokens=1, rate_per_s=options.rate, seed=options.seed)
        arrivals = [replace(arrival, at_s=other.at_s) for arrival, other in zip(arrivals, made)]
    return at_once(arrivals) if options.at_once else arrivals


def _work(config: Any) -> Work:
    from torch_uma.integrations.transformers.counting import work_of

    return work_of(config)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers says of kernels that a model would run by: none is run."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


if __name__ == "__main__":
    sys.exit(main())
