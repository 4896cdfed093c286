"""What is counted, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from server.arena import Report

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counters of one server, in a registry of their own.

    `requests` counts HTTP requests that ask for tokens: completed, cancelled (the client left, or the server shuts
    down), refused before they began, and failed.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("torch_uma_requests", "Requests by outcome", ["outcome"], registry=registry)
        for outcome in ("completed", "cancelled", "refused", "failed"):
            self.requests.labels(outcome)
        self.prompt_tokens = Counter("torch_uma_prompt_tokens", "Tokens of accepted prompts", registry=registry)
        self.new_tokens = Counter("torch_uma_new_tokens", "Tokens that clients were sent", registry=registry)
        self.first_token = Histogram(
            "torch_uma_first_token_seconds", "From arrival to a first token", buckets=SECONDS, registry=registry
        )
        self.next_token = Histogram(
            "torch_uma_next_token_seconds", "From one token to the next", buckets=SECONDS, registry=registry
        )

    def watch(self, report: Callable[[], Report]) -> None:
        """Have what `report` says of the arena and the scheduler among the metrics."""
        self.registry.register(Watched(report))

    def text(self) -> bytes:
        """All of them in Prometheus' text format."""
        return generate_latest(self.registry)


class Watched(Collector):
    """Metrics that are read off a report."""

    def __init__(self, report: Callable[[], Report]) -> None:
        self._report = report

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        report = self._report()
        yield GaugeMetricFamily("torch_uma_running", "Requests that hold memory", report.num_running)
        yield GaugeMetricFamily("torch_uma_waiting", "Requests that wait", report.num_waiting)
        retractions = CounterMetricFamily("torch_uma_retractions", "Requests retracted, by way", labels=["way"])
        for way, count in report.retractions.items():
            retractions.add_metric([way], count)
        yield retractions
        yield GaugeMetricFamily("torch_uma_host_bytes", "Of retracted requests, in host memory", report.host_bytes)
        yield GaugeMetricFamily("torch_uma_leases", "Of pages of the arena that are read or written", report.num_leases)
        stats = report.stats
        arena = GaugeMetricFamily("torch_uma_arena_bytes", "Bytes of the arena, by kind", labels=["kind"])
        for kind in ("capacity", "live", "hole", "quarantined", "gap", "slack", "sink"):
            arena.add_metric([kind], getattr(stats, f"{kind}_bytes"))
        yield arena
        subpools = GaugeMetricFamily(
            "torch_uma_subpool_bytes", "Bytes by sub-pool and kind", labels=["subpool", "kind"]
        )
        moved = CounterMetricFamily("torch_uma_moved_bytes", "Bytes moved, by sub-pool", labels=["subpool"])
        for subpool in stats.subpools:
            for kind in ("live", "hole", "quarantined"):
                subpools.add_metric([subpool.name, kind], getattr(subpool, f"{kind}_bytes"))
            subpools.add_metric([subpool.name, "peak"], subpool.peak_pages * subpool.page_bytes)
            moved.add_metric([subpool.name], subpool.moved_bytes)
        yield subpools
        yield moved
