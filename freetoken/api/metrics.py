"""What Prometheus reads at /metrics: names as other servers have them, then the engine's own figures.

Owns its registry. Counts, times and sizes only. Latencies are counted when an answer has ended, from
the times that the engine's side noted; the engine's counters are read when somebody asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from freetoken.api.observe import Served
from freetoken.core.generate import GAP_BOUNDS_S, Timing

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_TOKENS = (1, 10, 100, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
_PREFIX = "freetoken"
_Row = tuple[str, str, dict[str, str], str]
# Where a figure stands in the engine's statistics, its name, its labels, what it means.
_COUNTERS: tuple[_Row, ...] = (
    ("cache.lookups", "prefix_cache_lookups", {}, "Requests that asked the prefix cache"),
    ("cache.hits", "prefix_cache_lookups_hit", {}, "Requests of which the prefix cache held a part"),
    ("engine.prompt_tokens", "prefix_cache_queries", {}, "Prompt tokens looked up in the prefix cache"),
    ("engine.cached_tokens", "prefix_cache_hits", {}, "Prompt tokens that the prefix cache supplied"),
    ("cache.evicted_pages", "prefix_cache_evicted_pages", {}, "Pages that the prefix cache gave up"),
    ("engine.preemptions", "num_preemptions", {}, "Requests put back for want of room"),
    ("engine.steps", "engine_steps", {}, "Steps of the engine"),
    ("experts.hits", "expert_hits", {}, "Routed experts found on the device"),
    ("experts.misses", "expert_misses", {}, "Routed experts not on the device"),
    ("experts.fills", "expert_fills", {}, "Experts copied to the device"),
    ("experts.evictions", "expert_evictions", {}, "Experts that made room on the device"),
    ("experts.missing_tiles", "expert_missing_tiles", {}, "Tiles of missing experts"),
    ("experts.filled_tiles", "expert_filled_tiles", {}, "Tiles of missing experts that were copied"),
    ("experts.cpu_tiles", "expert_cpu_tiles", {}, "Tiles of missing experts computed on the CPU"),
    ("experts.ahead_tiles", "expert_prefetched_tiles", {}, "Tiles of experts brought early"),
    ("experts.ahead_right", "expert_prefetched_wanted", {}, "Of them, those asked for"),
    ("experts.link_bytes", "expert_bytes", {"tier": "link"}, "Bytes of experts read, by tier"),
    ("experts.prefill_link_bytes", "expert_bytes", {"tier": "prefill_link"}, ""),
    ("experts.host_bytes", "expert_bytes", {"tier": "host"}, ""),
)
_GAUGES: tuple[_Row, ...] = (
    ("engine.running", "num_requests_running", {}, "Requests that the engine computes"),
    ("engine.waiting", "num_requests_waiting", {}, "Requests that wait for room"),
    ("memory.budget_bytes", "device_memory_budget_bytes", {}, "Device memory that the server may use"),
    ("memory.taken_bytes", "device_memory_taken_bytes", {}, "Device memory that the driver sees taken"),
    ("memory.kv_pages_used", "pool_units_used", {"pool": "kv"}, "Units of a memory pool in use"),
    ("cache.checkpoints_on_device", "pool_units_used", {"pool": "checkpoints"}, ""),
    ("memory.kv_pages", "pool_units", {"pool": "kv"}, "Units of a memory pool"),
    ("memory.slots", "pool_units", {"pool": "expert_slots"}, ""),
    ("cache.tokens", "prefix_cache_tokens", {}, "Tokens that the prefix cache holds"),
    ("cache.bytes", "prefix_cache_checkpoint_bytes", {}, "Bytes of states kept for the prefix cache"),
)


class Metrics:
    """Counters of one app, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        self.requests = Counter(
            "freetoken_requests", "HTTP requests answered", ["path", "status"], registry=r
        )
        self.running = Gauge("freetoken_requests_running", "HTTP requests in progress", registry=r)
        self.prompt = Counter("freetoken_prompt_tokens", "Prompt tokens of ended requests", registry=r)
        self.cached = Counter("freetoken_cached_tokens", "Prompt tokens that a cache supplied", registry=r)
        self.output = Counter("freetoken_generation_tokens", "Tokens generated", registry=r)
        self.aborted = Counter("freetoken_client_disconnects", "Requests whose client left", registry=r)
        self.ended = Counter(
            "freetoken_request_success", "Answers that ended, by reason", ["finished_reason"], registry=r
        )
        self.ttft = self._histogram("time_to_first_token_seconds", "From request to first token")
        self.queue = self._histogram("request_queue_time_seconds", "Wait for the first computation")
        self.per_token = self._histogram(
            "time_per_output_token_seconds", "Mean time of a token after the first, an answer"
        )
        self.duration = self._histogram("e2e_request_latency_seconds", "Time of a generating request")
        self.prompt_size = self._histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self.output_size = self._histogram("request_generation_tokens", "Tokens of an answer", _TOKENS)
        self._gaps = _Gaps()
        r.register(self._gaps)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(f"{_PREFIX}_{name}", text, registry=self.registry, buckets=buckets)

    def entered(self) -> None:
        self.running.inc()

    def left(self) -> None:
        self.running.dec()

    def count(self, figures: Served, path: str, status: int, now_s: float) -> None:
        """Take in an ended request; times are seconds of `time.perf_counter()`."""
        self.requests.labels(path, str(status)).inc()
        if not figures.finish:
            return
        self.prompt.inc(figures.prompt_tokens)
        self.cached.inc(figures.cached_tokens)
        self.output.inc(figures.completion_tokens)
        self.prompt_size.observe(figures.prompt_tokens)
        self.output_size.observe(figures.completion_tokens)
        self.duration.observe(now_s - figures.started_s)
        self.ended.labels(figures.finish).inc()
        if figures.first_s:
            self.ttft.observe(figures.ttft_s)
        if figures.finish == "disconnect":
            self.aborted.inc()
        for timing in figures.timings:
            if timing.tokens:
                self.queue.observe(timing.queued_s)
            if timing.tokens > 1:
                self.per_token.observe(timing.gap_sum_s / (timing.tokens - 1))
            self._gaps.add(timing)

    def render(self, engine: Mapping[str, Any]) -> bytes:
        """Prometheus text of the counters and of the engine's nested numbers."""
        registry = CollectorRegistry()
        registry.register(_EngineFigures(engine))
        return generate_latest(self.registry) + generate_latest(registry)


class _Gaps:
    """The histogram of inter_token_latency_seconds, summed from counts that answers bring along."""

    def __init__(self) -> None:
        self._counts = [0] * (len(GAP_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, timing: Timing) -> None:
        self._counts = [a + b for a, b in zip(self._counts, timing.gap_counts, strict=True)]
        self._sum_s += timing.gap_sum_s

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(str, GAP_BOUNDS_S), "+Inf"]
        yield HistogramMetricFamily(
            f"{_PREFIX}_inter_token_latency_seconds",
            "Between two tokens of an answer, as the engine gave them",
            buckets=list(zip(bounds, accumulate(self._counts), strict=True)),
            sum_value=self._sum_s,
        )


class _EngineFigures:
    """The figures with names of their own, then every other number of the statistics as a gauge."""

    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        numbers = dict(flatten(self._stats, ""))
        yield from _families(CounterMetricFamily, _COUNTERS, numbers)
        yield from _families(GaugeMetricFamily, _GAUGES, numbers)
        missing, filled = (
            numbers.get("_experts_missing_tiles", 0.0),
            numbers.get("_experts_filled_tiles", 0.0),
        )
        if missing:
            share = GaugeMetricFamily(
                f"{_PREFIX}_expert_split_alpha", "Share of missing tiles that is copied, not computed"
            )
            share.add_metric([], filled / missing)
            yield share
        pages = numbers.get("_memory_kv_pages", 0.0)
        if pages:
            used = numbers.get("_memory_kv_pages_used", 0.0)
            yield GaugeMetricFamily(f"{_PREFIX}_kv_cache_usage_perc", "Used part, 0..1", value=used / pages)
        named = {_key(row[0]) for row in (*_COUNTERS, *_GAUGES)}
        for key, value in numbers.items():
            if key not in named:
                name = f"{_PREFIX}_engine{key}"
                yield GaugeMetricFamily(name, name.replace("_", " "), value=value)


def _key(place: str) -> str:
    return "_" + place.replace(".", "_")


def _families(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
    rows: Iterable[_Row],
    numbers: Mapping[str, float],
) -> Iterator[Metric]:
    """One family a name; rows of the same name differ in their labels."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for place, name, labels, text in rows:
        value = numbers.get(_key(place))
        if value is not None:
            family = families.setdefault(name, kind(f"{_PREFIX}_{name}", text or name, labels=list(labels)))
            family.add_metric(list(labels.values()), value)
    yield from families.values()


def flatten(stats: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Walk nested dicts: {"experts": {"hits": 3}} gives ("<prefix>_experts_hits", 3.0)."""
    for key, value in stats.items():
        name = f"{prefix}_{re.sub(r'[^a-zA-Z0-9_]', '_', str(key))}"
        if isinstance(value, Mapping):
            yield from flatten(value, name)
        elif isinstance(value, (bool, int, float)):
            yield name, float(value)
