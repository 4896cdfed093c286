"""What a scheduler has done so far, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class SchedulerStats:
    """What a scheduler has done so far.

    Attributes:
        rounds: that were scheduled, empty ones included.
        submitted, finished, cancelled: requests.
        dropped, offloaded: how often a request was retracted, by way; `preempted` of them for a more important one.
        resumed: how often one that was offloaded came back.
        prompt_tokens: that forwards were asked for as prompts, texts that are run again included.
        new_tokens: that forwards were asked for. Rounds that were abandoned count in both.
        recomputed_tokens: that were in memory when their request was dropped, and so have to be run again.
        host_bytes, host_bytes_peak: of host memory that offloaded requests take now, and took at most.
    """

    rounds: int = 0
    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    dropped: int = 0
    offloaded: int = 0
    preempted: int = 0
    resumed: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    recomputed_tokens: int = 0
    host_bytes: int = 0
    host_bytes_peak: int = 0
