"""Reports side by side, as a table for people and as lines over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch_uma.errors import TraceError
from torch_uma.simulate.report import Report

_GB = 1e9


def table(reports: Mapping[str, Report]) -> str:
    """One column for each named report, one line for each thing that it says."""
    lines: list[tuple[str, list[str]]] = [
        ("requests completed", [f"{r.num_completed:,}" for r in reports.values()]),
        ("refused", [f"{r.num_refused:,}" for r in reports.values()]),
        ("simulated time, s", [f"{r.seconds:,.1f}" for r in reports.values()]),
        ("requests / s", [f"{r.requests_per_s:,.2f}" for r in reports.values()]),
        ("new tokens / s", [f"{r.new_tokens_per_s:,.0f}" for r in reports.values()]),
        ("first token, s: mean, 50, 90, 99 %", [_times(r.first_token_s, 1.0) for r in reports.values()]),
        ("next token, ms: mean, 50, 90, 99 %", [_times(r.inter_token_s, 1e3) for r in reports.values()]),
        ("running, mean over rounds", [f"{r.mean_running:,.1f}" for r in reports.values()]),
        ("running, mean over time", [f"{r.time_mean_running:,.1f}" for r in reports.values()]),
        ("running, most", [f"{r.max_running:,}" for r in reports.values()]),
        ("retractions / 1,000 completed", [f"{r.retractions_per_1000:,.1f}" for r in reports.values()]),
        ("of them offloaded", [f"{r.offloaded:,}" for r in reports.values()]),
        ("tokens computed again", [f"{r.recomputed_tokens:,}" for r in reports.values()]),
        ("moved in the arena, GB", [f"{r.moved_bytes / _GB:,.2f}" for r in reports.values()]),
        ("to the host and back, GB", [f"{r.host_bytes / _GB:,.2f}" for r in reports.values()]),
    ]
    for name in dict.fromkeys(name for report in reports.values() for name in report.used_bytes):
        lines.append(
            (f"in use, mean GB: {name}", [f"{r.used_bytes.get(name, 0.0) / _GB:,.2f}" for r in reports.values()])
        )
    for name in dict.fromkeys(name for report in reports.values() for name in report.idle_bytes):
        held = [f"{r.idle_bytes[name] / _GB:,.2f}" if name in r.idle_bytes else "" for r in reports.values()]
        lines.append((f"idle, mean GB: {name}", held))
    first = max(len(label) for label, _ in lines)
    widths = [max(len(name), *(len(cells[k]) for _, cells in lines)) for k, name in enumerate(reports)]
    rows = [("", list(reports)), *lines]
    return "\n".join(
        label.ljust(first) + "".join("  " + cell.rjust(width) for cell, width in zip(cells, widths))
        for label, cells in rows
    )


def plot(reports: Mapping[str, Report], path: str | Path) -> None:
    """Draw the running requests of each report over time into a file; needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, report in reports.items():
        axes.plot(*zip(*report.running), label=name, drawstyle="steps-post")
    axes.set_xlabel("seconds")
    axes.set_ylabel("running requests")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path)


def check_drawable(path: Path) -> None:
    """Raise TraceError for a file of a kind that `plot` cannot write; needs matplotlib."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix and path.suffix[1:].lower() not in known:
        raise TraceError(f"{path} cannot be drawn into; let its name end with one of {', '.join(known)}")


def _times(times_s: Mapping[str, float], unit: float) -> str:
    return " ".join(f"{times_s[name] * unit:.4g}" for name in ("mean", "50", "90", "99"))
