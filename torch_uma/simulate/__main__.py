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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from torch_uma.counts import whole
from torch_uma.errors import PlanError, TorchUmaError, TraceError
from torch_uma.plan import Plan, plan
from torch_uma.pool import CachePool
from torch_uma.scheduling import Scheduler
from torch_uma.simulate.advice import advice
from torch_uma.simulate.device import DEVICES
from torch_uma.simulate.replay import replay
from torch_uma.simulate.report import Report
from torch_uma.simulate.splits import best_split, default_split
from torch_uma.simulate.table import check_drawable, plot, table
from torch_uma.simulate.traces import Arrival, at_once, generate_trace, read_trace
from torch_uma.simulate.work import Work


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _check_outputs(options)
        planned, work = _model(options)
        reports = _reports(options, planned, work)
        print(table(reports))
        for sentence in advice(reports, max_running=options.max_running, arena_bytes=planned.arena_bytes):
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torch_uma.simulate", description=__doc__.split("\n")[0])
    model = parser.add_argument_group("model")
    model.add_argument("--config", required=True, help="a config.json, its folder, or a model type such as gpt_oss")
    model.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change the config, as --set num_hidden_layers=24",
    )
    model.add_argument("--kv-dtype", help="of keys and values: bfloat16, float8_e4m3fn or float8_e5m2")
    model.add_argument("--page-size", type=int, default=16, help="tokens of a page (default: 16)")
    traffic = parser.add_argument_group("traffic")
    source = traffic.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", help="an Azure CSV, Mooncake JSON lines, or JSON with lengths")
    source.add_argument(
        "--made", metavar="N,PROMPT,NEW,SPREAD", help="N requests of these mean lengths, log-normal with this spread"
    )
    traffic.add_argument("--limit", type=int, help="only the first so many requests")
    times = traffic.add_mutually_exclusive_group()
    times.add_argument("--rate", type=float, help="arrivals a second, instead of those of the trace")
    times.add_argument("--at-once", action="store_true", help="all requests arrive at the beginning")
    traffic.add_argument("--seed", type=int, default=0)
    machine = parser.add_argument_group("machine and scheduler")
    machine.add_argument("--memory", required=True, help='of the arena, as "8GiB"')
    machine.add_argument("--device", default="h200", choices=sorted(DEVICES))
    machine.add_argument("--max-running", type=int, default=256)
    machine.add_argument("--step-tokens", type=int, default=8192)
    machine.add_argument("--headroom-steps", type=int, default=None)
    machine.add_argument("--host-memory", default="0", help="for retracted requests (default: they are recomputed)")
    machine.add_argument(
        "--split",
        action="append",
        default=[],
        help='compare with fixed pools: "default", "best" (found by search), or shares as {"full": 0.6, "state": 0.4}',
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, help="write all of it here")
    output.add_argument(
        "--plot", type=Path, help="draw the running requests over time here; needs matplotlib (the extra plots)"
    )
    output.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _check_outputs(options: argparse.Namespace) -> None:
    """Before anything is simulated."""
    for path in (options.json, options.plot):
        if path is not None and not path.parent.is_dir():
            raise TraceError(f"there is no folder {path.parent} to write {path.name} into")
        if path is not None and path.is_dir():
            raise TraceError(f"{path} is a folder; name a file in it")
    if options.plot is not None:
        if find_spec("matplotlib") is None:
            raise TraceError("--plot needs matplotlib; pip install torch-uma[plots], or leave it out")
        check_drawable(options.plot)


def _reports(options: argparse.Namespace, planned: Plan, work: Work) -> dict[str, Report]:
    arrivals = _arrivals(options)
    splits = {asked: _split(asked, planned) for asked in options.split}

    def run(name: str, split: Mapping[str, float] | None) -> Report:
        settings: dict[str, Any] = {
            "max_running": options.max_running,
            "step_tokens": options.step_tokens,
            "host_memory": options.host_memory if options.host_memory != "0" else 0,
            "packed": not any(subpool.is_state for subpool in planned.subpools),  # as a ServingLoop does
        }
        if options.headroom_steps is not None:
            settings["headroom_steps"] = options.headroom_steps
        with tqdm(total=len(arrivals), desc=name, unit=" requests", disable=options.quiet) as bar:

            def note(num_done: int, _: int) -> None:
                bar.update(num_done - bar.n)

            return replay(
                planned,
                arrivals,
                work=work,
                device=DEVICES[options.device],
                split=split,
                progress=note,
                **settings,
            )

    reports = {"arena": run("arena", None)}
    for asked, split in splits.items():
        if split is None:
            split, _ = best_split(planned, lambda shares: run("search", shares))
        name = f"{asked if asked in ('default', 'best') else 'split'} {_shares(split, planned)}"
        if name in reports:  # others that look the same in two digits
            name += f" ({len(reports)})"
        reports[name] = run(name, split)
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
        Scheduler(pool)
    return split


def _shares(split: Mapping[str, float], planned: Plan) -> str:
    """Of every sub-pool in its order; those that are not named have what is left in equal parts."""
    left = (1 - sum(split.values())) / max(1, len(planned.subpools) - len(split))
    return "/".join(f"{split.get(subpool.name, left):.2f}" for subpool in planned.subpools)


def _model(options: argparse.Namespace) -> tuple[Plan, Work]:
    from torch_uma.integrations.transformers.counting import work_of

    try:
        config = _config(options)
        work = work_of(config, kv_dtype=options.kv_dtype)
    except (TorchUmaError, OSError):
        raise
    except Exception as error:  # a config is checked by whatever the code of its model does with it
        raise PlanError(
            f"of the config {options.config}{' and --set' if options.set else ''} no model can be made "
            f"({type(error).__name__}: {error})"
        ) from error
    planned = plan(
        config, memory=options.memory, page_size=options.page_size, dtype=torch.bfloat16, kv_dtype=options.kv_dtype
    )
    return planned, work


def _config(options: argparse.Namespace) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    changes = {}
    for change in options.set:
        name, separator, value = change.partition("=")
        if not separator or not name:
            raise TraceError(f"--set {change} is no NAME=VALUE")
        try:
            changes[name] = json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            changes[name] = value
    if options.config in CONFIG_MAPPING and not Path(options.config).exists():
        config = CONFIG_MAPPING[options.config]()
    else:
        config = AutoConfig.from_pretrained(options.config)
    text = config.get_text_config(decoder=True)
    unknown = [name for name in changes if not hasattr(text, name) or callable(getattr(text, name))]
    if unknown:
        raise TraceError(f"the config of {text.model_type} has no {', '.join(unknown)} to be set")
    if not changes:
        return config
    kept = text.to_dict()
    if "num_hidden_layers" in changes:
        # What is said layer by layer follows the model's own pattern, for as many.
        count = text.num_hidden_layers
        kept = {name: value for name, value in kept.items() if not (isinstance(value, list) and len(value) == count)}
    try:
        changed = type(text).from_dict({**kept, **changes})
    except StrictDataclassError as error:
        raise TraceError(f"the config of {text.model_type} cannot be set so: {error}") from error
    for name, value in changes.items():
        if isinstance(value, int | float) and getattr(changed, name) != value:
            raise TraceError(f"{name} of {text.model_type} follows from the rest of its config: {value} is not taken")
    config = _with_text(config, text, changed)
    return config if config.get_text_config(decoder=True) is changed else changed


def _with_text(config: Any, text: Any, changed: Any) -> Any:
    """The config with another one of its text, which may be itself or a part of a part."""
    if config is text:
        return changed
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if hasattr(part, "sub_configs"):
            setattr(config, name, _with_text(part, text, changed))
    return config


def _arrivals(options: argparse.Namespace) -> list[Arrival]:
    if options.limit is not None:
        whole(options.limit, "--limit", least=1, error=TraceError)
    if options.trace is not None:
        arrivals = read_trace(options.trace, limit=options.limit)
    else:
        try:
            count, prompt, new, spread = (float(part) for part in options.made.split(","))
            num_requests = int(count)
            if num_requests != count:
                raise ValueError
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


if __name__ == "__main__":
    sys.exit(main())
