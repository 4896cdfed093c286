"""What a run has found: results as they come, one Markdown file and one JSON file at the end."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line: `outcome` is "ok", "failed", "skipped" or "figure", which has a `value` in `unit`."""

    section: str
    name: str
    outcome: str
    value: float | None = None
    unit: str = ""
    note: str = ""


class Report:
    """Results of a run that has `limit_s` seconds; what would begin later than that is skipped with a word.

    Both files are written anew with every result, so that they are there if the run is ended from outside.
    """

    def __init__(self, folder: Path, machine: dict[str, str], limit_s: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.machine = machine
        self.results: list[Result] = []
        self._end = time.monotonic() + limit_s

    @property
    def has_failed(self) -> bool:
        """Whether any check failed."""
        return any(result.outcome == "failed" for result in self.results)

    def run(self, section: str, name: str, act: Callable[[], str | None], *, needs_s: float = 0.0) -> None:
        """Run a check: what it raises is its failure, and the next one runs; what it returns is said of it.

        One that `needs_s` seconds, about, is skipped where fewer are left.
        """
        if time.monotonic() + needs_s > self._end:
            self.skip(section, name, "no time left")
            return
        start = time.monotonic()
        try:
            said = act()
        except Exception as error:
            traceback.print_exc()
            first = (str(error).strip().splitlines() or [""])[0]
            self._add(Result(section=section, name=name, outcome="failed", note=f"{type(error).__name__}: {first}"))
        else:
            seconds = f"{time.monotonic() - start:.1f} s"
            note = f"{said}; {seconds}" if said else seconds
            self._add(Result(section=section, name=name, outcome="ok", note=note))

    def skip(self, section: str, name: str, why: str) -> None:
        """Note what was not run."""
        self._add(Result(section=section, name=name, outcome="skipped", note=why))

    def figure(self, section: str, name: str, value: float, unit: str, note: str = "") -> None:
        """Note a measured number."""
        self._add(Result(section=section, name=name, outcome="figure", value=value, unit=unit, note=note))

    def _add(self, result: Result) -> None:
        self.results.append(result)
        flat = {"machine": self.machine, "results": [asdict(each) for each in self.results]}
        (self.folder / "gpu.json").write_text(json.dumps(flat, indent=1) + "\n")
        (self.folder / "gpu.md").write_text(self._markdown())
        print(f"{result.section} | {result.name} | {_outcome(result)} | {result.note}", flush=True)

    def _markdown(self) -> str:
        lines = ["# A run on a GPU", "", *(f"- {key}: {value}" for key, value in self.machine.items())]
        for section in dict.fromkeys(result.section for result in self.results):
            lines += ["", f"## {section}", "", "| what | result | note |", "| --- | --- | --- |"]
            lines += [
                f"| {result.name} | {_outcome(result)} | {result.note.replace('|', '/')} |"
                for result in self.results
                if result.section == section
            ]
        return "\n".join(lines) + "\n"


def _outcome(result: Result) -> str:
    return result.outcome if result.value is None else f"{result.value:,.4g} {result.unit}"
