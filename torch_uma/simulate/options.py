"""The options of the command line, and what can be said of them before anything is read or run."""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path

from torch_uma.errors import PlanError, TraceError
from torch_uma.simulate.device import DEVICES, Device
from torch_uma.simulate.table import check_drawable


def command_line(description: str) -> argparse.ArgumentParser:
    """Every option, and what is taken without it."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_uma.simulate",
        description=description,
        epilog="docs/simulate.md of the repository says how to read what is printed.",
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--config",
        required=True,
        help="a config.json, its folder, a name of the Hugging Face hub, or a model type such as gpt_oss",
    )
    model.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change the config, as --set num_hidden_layers=24; may be given several times",
    )
    model.add_argument("--kv-dtype", help="of keys and values: bfloat16 (default), float8_e4m3fn or float8_e5m2")
    model.add_argument("--page-size", type=int, default=16, help="tokens of a page (default: 16)")
    traffic = parser.add_argument_group("traffic")
    source = traffic.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", help="a file: an Azure CSV, Mooncake JSON lines, or CSV or JSON with lengths")
    source.add_argument(
        "--made",
        metavar="N,PROMPT,NEW,SPREAD",
        help="N requests of these mean lengths, log-normal with this spread; all at once without --rate",
    )
    traffic.add_argument("--limit", type=int, help="only the first so many requests")
    times = traffic.add_mutually_exclusive_group()
    times.add_argument("--rate", type=float, help="arrivals a second, at random, instead of the times of the trace")
    times.add_argument("--at-once", action="store_true", help="all requests arrive at the beginning")
    traffic.add_argument("--seed", type=int, default=0, help="of --made and --rate (default: 0)")
    machine = parser.add_argument_group("machine and scheduler")
    machine.add_argument(
        "--memory", required=True, help='for the arena, as "8GiB": of the device, what weights and activations leave'
    )
    machine.add_argument(
        "--device",
        default="h200",
        help=f"{', '.join(DEVICES)} (default), or speeds as "
        '{"flops_per_s": 990e12, "bytes_per_s": 3.3e12, "host_bytes_per_s": 55e9, "forward_s": 3e-4}',
    )
    machine.add_argument("--max-running", type=int, default=256, help="requests in memory at once (default: 256)")
    machine.add_argument(
        "--step-tokens", type=int, default=8192, help="tokens of all forwards of a round (default: 8192)"
    )
    machine.add_argument(
        "--headroom-steps", type=int, help="tokens kept free for each request when others are admitted"
    )
    machine.add_argument("--host-memory", default="0", help="for retracted requests (default: they are recomputed)")
    machine.add_argument(
        "--split",
        action="append",
        default=[],
        help='compare with fixed pools: "default", "best" (found by search), or shares as {"full": 0.6, "state": 0.4}; '
        "may be given several times",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, help="write all of it here")
    output.add_argument(
        "--plot", type=Path, help="draw the running requests over time here; needs matplotlib (the extra plots)"
    )
    output.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def check_outputs(options: argparse.Namespace) -> None:
    """Raise TraceError, before anything is simulated, for files that could not be written."""
    for path in (options.json, options.plot):
        if path is not None and not path.parent.is_dir():
            raise TraceError(f"there is no folder {path.parent} to write {path.name} into")
        if path is not None and path.is_dir():
            raise TraceError(f"{path} is a folder; name a file in it")
    if options.plot is not None:
        if find_spec("matplotlib") is None:
            raise TraceError("--plot needs matplotlib; pip install torch-uma[plots], or leave it out")
        check_drawable(options.plot)


def device_of(asked: str) -> Device:
    """A device by its name, or of the speeds that an object in JSON gives; TraceError or PlanError for others."""
    if asked in DEVICES:
        return DEVICES[asked]
    try:
        speeds = {str(name): float(value) for name, value in json.loads(asked).items()}
        return Device(name="a device of these speeds", **speeds)
    except PlanError:
        raise
    except (AttributeError, TypeError, ValueError, RecursionError):
        names = "flops_per_s, bytes_per_s, host_bytes_per_s, and forward_s if it is not 0"
        raise TraceError(f"--device {asked} is not {', '.join(DEVICES)}, nor an object of {names}") from None
