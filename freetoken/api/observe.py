"""What the operator sees of each request: one log line, and what `metrics` and `receipts` are told.

A protocol fills the request's `Served`; the middleware here hands it on when the last byte is out.
Holds counts, times and ids only, never text that a client sent.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from freetoken.api.errors import ErrorBody, error_body
from freetoken.core.generate import PrefixReport, Timing
from freetoken.core.log import logger

QUIET_PATHS = ("/health", "/metrics", "/v1/stats")
_log = logger("api")


@dataclass
class Served:
    """One request's figures. Times are `time.perf_counter()` seconds, 0 = not yet.

    timings     of each generation
    prefixes    of each prompt: what was reused
    error_body  the shape that errors have in the protocol of the request's path
    """

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started_s: float = field(default_factory=time.perf_counter)
    first_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finish: str = ""
    timings: Sequence[Timing] = ()
    prefixes: Sequence[PrefixReport] = ()
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


class Meter(Protocol):
    """Counts requests; `freetoken.api.metrics.Metrics` is one."""

    def entered(self) -> None: ...

    def left(self) -> None: ...

    def count(self, figures: Served, path: str, status: int, now_s: float) -> None: ...


class Recorder(Protocol):
    """Is told when a request that may generate begins and ends."""

    def begin(self, figures: Served) -> None: ...

    def end(self, figures: Served, path: str, status: int) -> None: ...


class Observer:
    """ASGI middleware, outermost: attaches a Served, adds x-request-id, logs and counts at the end."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Meter,
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

        self._metrics.entered()
        if scope["method"] == "POST":
            self._receipts.begin(figures)
        try:
            await self.app(scope, receive, note)
        finally:
            self._metrics.left()
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
