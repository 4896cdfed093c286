"""Requests that are all queued at once: which ones, and how many of them may be in memory.

Owns the inputs of `traces.py`, for whoever serves them: 512 requests of one length (128 of the longest), and the first
1,500 of the Azure conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_uma.simulate import Arrival, at_once, read_trace

MODELS = ("gpt-oss-20b", "qwen3.5-4b", "qwen3.5-4b-bf16-state")
ARENA_BYTES = 8 << 30
STEP_TOKENS = 8192


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests that are all queued at once, and how many of them may be in memory."""

    name: str
    arrivals: Sequence[Arrival]
    max_running: int

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Tokens of each prompt and of its answer, in the order in which they are queued."""
        return [(arrival.num_prompt_tokens, arrival.num_new_tokens) for arrival in self.arrivals]


def workloads(trace: Path | None) -> list[Workload]:
    """The ones of one length, and the Azure conversations if a file of them is given."""
    made = []
    for prompt, new in ((512, 128), (1024, 512), (4096, 512), (16384, 1024)):
        arrivals = [Arrival(at_s=0.0, num_prompt_tokens=prompt, num_new_tokens=new)] * (128 if prompt == 16384 else 512)
        made.append(Workload(name=f"{prompt}+{new}", arrivals=arrivals, max_running=1024))
    if trace is not None:
        made.append(Workload(name="azure", arrivals=at_once(read_trace(trace, limit=1500)), max_running=256))
    return made
