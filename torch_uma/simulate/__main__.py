"""What would my traffic gain from one arena, and what should I set? A trace replayed, from the command line.

python -m torch_uma.simulate --config config.json --memory 8GiB --trace AzureLLMInferenceTrace_conv.csv --split default
python -m torch_uma.simulate --config gpt_oss --memory 40GiB --made 2000,1024,256,0.5 --rate 20 --split best
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

from torch_uma.counts import whole
from torch_uma.errors import TorchUmaError, TraceError
from torch_uma.plan import Plan
from torch_uma.pool import CachePool
from torch_uma.scheduling import Scheduler
from torch_uma.simulate.advice import advice
from torch_uma.simulate.device import Device
from torch_uma.simulate.model import Model, model_of
from torch_uma.simulate.options import check_outputs, command_line, device_of
from torch_uma.simulate.replay import replay
from torch_uma.simulate.report import Report
from torch_uma.simulate.splits import best_split, default_split
from torch_uma.simulate.table import plot, table
from torch_uma.simulate.traces import Arrival, at_once, generate_trace, read_trace

_NUM_TRIES = 12  # of the search for the best split, for each kind of memory but one


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = command_line(__doc__.split("\n")[0])
    options = parser.parse_args(arguments)
    try:
        check_outputs(options)
        device, arrivals, model = device_of(options.device), _arrivals(options), model_of(options)
        reports = _reports(options, model, arrivals, device)
        print(_heading(options, model, arrivals, device))
        print(table(reports))
        for sentence in advice(reports, max_running=options.max_running, arena_bytes=model.plan.arena_bytes):
            print(sentence)
        if options.json:
            options.json.write_text(json.dumps({name: asdict(report) for name, report in reports.items()}))
        if options.plot:
            plot(reports, options.plot)
    except (TorchUmaError, ValueError, OverflowError, MemoryError, OSError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: interrupted\n")
    return 0


def _heading(options: argparse.Namespace, model: Model, arrivals: Sequence[Arrival], device: Device) -> str:
    """What was asked, as it was understood."""
    num_requests, seconds = len(arrivals), arrivals[-1].at_s - arrivals[0].at_s
    when = f"in {seconds:,.0f} s, {num_requests / seconds:,.3g} a second" if seconds else "at once"
    prompt = sum(arrival.num_prompt_tokens for arrival in arrivals) / num_requests
    new = sum(arrival.num_new_tokens for arrival in arrivals) / num_requests
    weight_bytes = model.work.weight_bytes + model.work.expert_bytes
    lines = [
        f"requests: {num_requests:,} {when}; on the mean {prompt:,.0f} tokens of a prompt and {new:,.0f} new ones",
        f"model: {model.name}, weights of {weight_bytes / 1e9:,.1f} GB in bf16 without the embedding",
        f"machine: {device.name}, simulated; {model.plan.arena_bytes / 1e9:,.2f} GB for the arena, "
        f"{options.max_running:,} requests running at most",
    ]
    if options.split:
        names = "/".join(subpool.name for subpool in model.plan.subpools)
        lines.append(f"fixed pools: called by their shares of {names}")
    return "\n".join(lines)


def _reports(
    options: argparse.Namespace, model: Model, arrivals: Sequence[Arrival], device: Device
) -> dict[str, Report]:
    planned = model.plan
    splits = {asked: _split(asked, planned) for asked in options.split}
    settings: dict[str, Any] = {
        "max_running": options.max_running,
        "step_tokens": options.step_tokens,
        "host_memory": options.host_memory if options.host_memory != "0" else 0,
        "packed": not any(subpool.is_state for subpool in planned.subpools),  # as a ServingLoop does
    }
    if options.headroom_steps is not None:
        settings["headroom_steps"] = options.headroom_steps

    known: dict[frozenset[tuple[str, float]], Report] = {}  # the search begins with the default split

    def run(name: str, split: Mapping[str, float]) -> Report:
        if (shares := frozenset(split.items())) not in known:
            known[shares] = simulate(name, split)
        return known[shares]

    def simulate(name: str, split: Mapping[str, float] | None) -> Report:
        with tqdm(total=len(arrivals), desc=name, unit=" requests", disable=options.quiet) as bar:

            def note(num_done: int, _: int) -> None:
                bar.update(num_done - bar.n)

            return replay(planned, arrivals, work=model.work, device=device, split=split, progress=note, **settings)

    def search() -> tuple[Mapping[str, float], Report]:
        tries, most = count(1), 1 + _NUM_TRIES * (len(planned.subpools) - 1)
        return best_split(planned, lambda shares: run(f"search {next(tries)}/{most}", shares), num_tries=_NUM_TRIES)

    reports = {"arena": simulate("arena", None)}
    for asked, split in splits.items():
        if split is None:
            split, report = search()
        else:
            report = run(_called(asked, split, planned), split)
        name = _called(asked, split, planned)
        if name in reports:  # others that look the same in two digits
            name += f" ({len(reports)})"
        reports[name] = report
    return reports


def _split(asked: str, planned: Plan) -> Mapping[str, float] | None:
    """The shares that were asked for, in which every pool can hold a request; None for those that are to be found."""
    if asked == "best":
        return None
    if asked == "default":
        split = default_split(planned)
    else:
        try:
            split = {str(name): float(share) for name, share in json.loads(asked).items()}
        except (AttributeError, TypeError, ValueError, RecursionError):
            split = {}
        if not split:
            names = ", ".join(f'"{subpool.name}": SHARE' for subpool in planned.subpools)
            raise TraceError(f'--split {asked} is not "default", "best" or shares such as {{{names}}}')
    with CachePool(planned, device="meta", max_sequences=1, max_tokens=1, split=split) as pool:
        Scheduler(pool)  # raises, before anything is run
    return split


def _called(asked: str, split: Mapping[str, float], planned: Plan) -> str:
    """By the shares of every sub-pool in its order; those that are not named have what is left in equal parts."""
    left = (1 - sum(split.values())) / max(1, len(planned.subpools) - len(split))
    shares = "/".join(f"{split.get(subpool.name, left):.2f}" for subpool in planned.subpools)
    return f"{asked if asked in ('default', 'best') else 'split'} {shares}"


def _arrivals(options: argparse.Namespace) -> list[Arrival]:
    if options.limit is not None:
        whole(options.limit, "--limit", least=1, error=TraceError)
    if options.trace is not None:
        arrivals = read_trace(options.trace, limit=options.limit)
    else:
        try:
            num_requests, prompt, new, spread = (float(part) for part in options.made.split(","))
            if int(num_requests) != num_requests:
                raise ValueError
        except (ValueError, OverflowError):
            raise TraceError(f"--made {options.made} is not four numbers, N,PROMPT,NEW,SPREAD") from None
        arrivals = generate_trace(
            int(num_requests),
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


if __name__ == "__main__":
    sys.exit(main())
