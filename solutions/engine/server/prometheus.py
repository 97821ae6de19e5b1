"""The engine's numbers in the form that Prometheus collects."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..engine import Engine
from ..metrics import Metrics, Served

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

_COUNTERS = {
    "num_steps": "Steps computed",
    "num_computed_tokens": "Tokens computed, prompts and drafts included",
    "num_generated_tokens": "Tokens generated",
    "num_prompt_tokens": "Tokens of the prompts of finished requests",
    "num_cached_tokens": "Those of them that the prefix cache had",
    "num_preemptions": "Requests that lost their blocks to others",
    "num_drafted_tokens": "Drafts verified",
    "num_accepted_tokens": "Drafts kept",
    "num_finished": "Requests finished",
}


class EngineCollector(Collector):
    """Reads counters and gauges when they are asked for.

    Args:
        engine: whose numbers they are; reading plain numbers needs no lock.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """All of them."""
        metrics: Metrics = self._engine.metrics
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"engine_{name.removeprefix('num_')}", text, value=getattr(metrics, name))
        gauges = {
            "engine_requests_running": ("Requests that hold blocks", self._engine.num_running),
            "engine_requests_waiting": ("Requests that wait for blocks", self._engine.num_waiting),
            "engine_cache_hit_rate": ("Share of prompt tokens that the prefix cache had", metrics.cache_hit_rate),
            "engine_acceptance_rate": ("Share of drafts that were kept", metrics.acceptance_rate),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)


class Latencies:
    """Histograms of what requests waited for, in seconds.

    Args:
        registry: where they are collected.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ttft = Histogram("engine_ttft_seconds", "Time to the first token", registry=registry, buckets=_SECONDS)
        self.tpot = Histogram("engine_tpot_seconds", "Time of each further token", registry=registry, buckets=_SECONDS)
        self.e2e = Histogram("engine_e2e_seconds", "Time of a whole answer", registry=registry, buckets=_SECONDS)

    def observe(self, served: Served) -> None:
        """Takes in an answer that has ended."""
        self.ttft.observe(served.ttft)
        self.e2e.observe(served.e2e)
        if served.num_tokens > 1:
            self.tpot.observe(served.tpot)
