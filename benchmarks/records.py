"""Flat benchmark records: printed as a table, written as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def record(
    case: str,
    metric: str,
    value: float,
    unit: str,
    reference: float | None = None,
    ratio: float | None = None,
    **more: Any,
) -> Record:
    """One figure: `ratio` is value over reference unless given; there is none to a reference of 0."""
    flat: Record = {"case": case, "metric": metric, "value": value, "unit": unit}
    if reference is not None:
        flat["reference"] = reference
        if ratio is not None or reference:
            flat["ratio"] = ratio if ratio is not None else value / reference
    return flat | more


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path, metavar="PATH", help="write the records there as a JSON list")
    return options


def publish(records: Sequence[Record], path: Path | None) -> None:
    """Print the records, and write them if a path was given."""
    width = max((len(entry["case"]) for entry in records), default=0)
    for entry in records:
        ratio = f"  {entry['ratio']:.4f} of {entry['reference']:,.6g}" if "ratio" in entry else ""
        policy = f"{entry['policy']:<14}" if "policy" in entry else ""
        print(f"{entry['case']:<{width}}  {policy}{entry['metric']} {entry['value']:,.6g} {entry['unit']}{ratio}")
    if path is not None:
        path.write_text(json.dumps(list(records), indent=1) + "\n")
