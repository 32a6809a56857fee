"""What the operator sees of each request: one log line and the counters behind /metrics.

A protocol fills the request's `Served`; the middleware here writes it when the last byte is out.
Holds counts, times and ids only, never text that a client sent. Owns its own metrics registry.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from freetoken.api.errors import ErrorBody, error_body
from freetoken.core.log import logger

QUIET_PATHS = ("/health", "/metrics", "/v1/stats")
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_log = logger("api")


@dataclass
class Served:
    """One request's figures. Times are `time.perf_counter()` seconds, 0 = not yet.

    error_body  the shape that errors have in the protocol of the request's path
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started_s: float = field(default_factory=time.perf_counter)
    first_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish: str = ""
    error_body: ErrorBody = error_body

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.started_s if self.first_s else 0.0

    def saw_token(self) -> None:
        if not self.first_s:
            self.first_s = time.perf_counter()

    def line(self, method: str, path: str, status: int, now_s: float) -> str:
        """The log line; token figures only for requests that generated."""
        parts = [method, path, str(status)]
        if self.finish or self.completion_tokens:
            parts.append(f"in={self.prompt_tokens} out={self.completion_tokens} cached={self.cached_tokens}")
            parts.append(f"ttft={self.ttft_s:.3f}s")
            decode_s = now_s - self.first_s
            if self.first_s and self.completion_tokens > 1 and decode_s > 0:
                parts.append(f"{(self.completion_tokens - 1) / decode_s:.1f} tok/s")
            parts.append(f"finish={self.finish or 'none'}")
        parts.append(f"{now_s - self.started_s:.3f}s id={self.id}")
        return " ".join(parts)


def served(scope: Scope) -> Served:
    """The figures of the request that `scope` belongs to."""
    found = scope["freetoken.served"]
    assert isinstance(found, Served)
    return found


class Metrics:
    """Counters of one app, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "freetoken_requests", "HTTP requests answered", ["path", "status"], registry=r
        )
        self.running = Gauge("freetoken_requests_running", "HTTP requests in progress", registry=r)
        self.prompt = Counter("freetoken_prompt_tokens", "Prompt tokens of finished requests", registry=r)
        self.cached = Counter("freetoken_cached_tokens", "Prompt tokens that a cache supplied", registry=r)
        self.output = Counter("freetoken_completion_tokens", "Tokens generated", registry=r)
        self.aborted = Counter("freetoken_client_disconnects", "Requests whose client left", registry=r)
        self.ttft = Histogram(
            "freetoken_ttft_seconds", "Time to the first token", registry=r, buckets=_SECONDS
        )
        self.duration = Histogram(
            "freetoken_request_seconds", "Time of a generating request", registry=r, buckets=_SECONDS
        )

    def count(self, figures: Served, path: str, status: int, now_s: float) -> None:
        self.requests.labels(path, str(status)).inc()
        if not figures.finish:
            return
        self.prompt.inc(figures.prompt_tokens)
        self.cached.inc(figures.cached_tokens)
        self.output.inc(figures.completion_tokens)
        self.duration.observe(now_s - figures.started_s)
        if figures.first_s:
            self.ttft.observe(figures.ttft_s)
        if figures.finish == "disconnect":
            self.aborted.inc()

    def render(self, engine: Mapping[str, Any]) -> bytes:
        """Prometheus text of the counters and of the engine's nested numbers as gauges."""
        registry = CollectorRegistry()
        registry.register(_EngineGauges(engine))
        return generate_latest(self.registry) + generate_latest(registry)


class _EngineGauges:
    def __init__(self, stats: Mapping[str, Any]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, value in flatten(self._stats, "freetoken_engine"):
            yield GaugeMetricFamily(name, name.replace("_", " "), value=value)


def flatten(stats: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Walk nested dicts: {"experts": {"hits": 3}} gives ("<prefix>_experts_hits", 3.0)."""
    for key, value in stats.items():
        name = f"{prefix}_{re.sub(r'[^a-zA-Z0-9_]', '_', str(key))}"
        if isinstance(value, Mapping):
            yield from flatten(value, name)
        elif isinstance(value, (bool, int, float)):
            yield name, float(value)


class Recorder(Protocol):
    """Is told when a request that may generate begins and ends."""

    def begin(self, figures: Served) -> None: ...

    def end(self, figures: Served, path: str, status: int) -> None: ...


class Observer:
    """ASGI middleware, outermost: attaches a Served, adds x-request-id, logs and counts at the end."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        known_paths: frozenset[str],
        error_bodies: Mapping[str, ErrorBody],
        receipts: Recorder,
    ) -> None:
        self.app = app
        self._metrics = metrics
        self._known = known_paths
        self._error_bodies = error_bodies
        self._receipts = receipts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        shapes = (s for prefix, s in self._error_bodies.items() if scope["path"].startswith(prefix))
        figures = Served(error_body=next(shapes, error_body))
        scope["freetoken.served"] = figures
        status = 499

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = figures.id
            await send(message)

        self._metrics.running.inc()
        if scope["method"] == "POST":
            self._receipts.begin(figures)
        try:
            await self.app(scope, receive, note)
        finally:
            self._metrics.running.dec()
            if scope["method"] == "POST":
                self._receipts.end(figures, scope["path"], status)
            self._finish(scope, figures, status)

    def _finish(self, scope: Scope, figures: Served, status: int) -> None:
        now_s = time.perf_counter()
        path = scope["path"]
        self._metrics.count(figures, path if path in self._known else "other", status, now_s)
        level = logging.DEBUG if path in QUIET_PATHS else logging.INFO
        if _log.isEnabledFor(level):
            raw = scope.get("raw_path") or path.encode()
            shown = raw.decode("ascii", "backslashreplace")[:200]
            _log.log(level, "%s", figures.line(scope["method"], shown, status, now_s))
