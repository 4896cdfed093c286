"""How a replay went, as one value: counts, times and bytes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What came of a replay.

    Attributes:
        num_requests, num_completed, num_refused: refused are those that could never be held.
        seconds: of the simulated time, from the first arrival to the last token.
        num_rounds: of the scheduler.
        requests_per_s, new_tokens_per_s: completed, over those seconds.
        first_token_s, inter_token_s: percentiles, by their names "50", "90", "99", and "mean".
        mean_running, time_mean_running, max_running: requests in memory, over rounds and over time.
        dropped, offloaded, preempted, recomputed_tokens: as the scheduler counts them.
        retractions_per_1000: dropped and offloaded ones, for each 1,000 completed requests.
        moved_bytes: within the arena. host_bytes: to the host and back.
        used_bytes, idle_bytes: means over time by sub-pool; what is idle belongs to a sub-pool only where pools are
            fixed, and is that of "arena" otherwise.
        running: over time, as [seconds, requests]: from then on so many are in memory; a thousand points at most.
    """

    num_requests: int
    num_completed: int
    num_refused: int
    seconds: float
    num_rounds: int
    requests_per_s: float
    new_tokens_per_s: float
    first_token_s: dict[str, float]
    inter_token_s: dict[str, float]
    mean_running: float
    time_mean_running: float
    max_running: int
    dropped: int
    offloaded: int
    preempted: int
    recomputed_tokens: int
    retractions_per_1000: float
    moved_bytes: int
    host_bytes: int
    used_bytes: dict[str, float]
    idle_bytes: dict[str, float]
    running: list[tuple[float, int]]

    def to_json(self) -> str:
        """All of it as one JSON object."""
        return json.dumps(asdict(self))
