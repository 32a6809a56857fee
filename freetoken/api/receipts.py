"""A receipt for each generating request: where its time went, and what the engine moved meanwhile.

Owns the latest ones, in memory. Holds counts, times and ids only, never text. The engine's figures are
the change of its counters between the request's begin and end: requests that ran at the same time
share them, and `shared` says whether there were any.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from freetoken.api.metrics import flatten
from freetoken.api.observe import Served
from freetoken.core.errors import NotFoundError, RequestError

MAX_RECEIPTS = 1000
LISTED = 100
_GROUPS = ("engine", "experts", "cache")


# Where bytes went, and the counters that say so; what this engine does not have counts as none.
_TIERS = (
    ("link", ("experts_link_bytes", "experts_prefill_link_bytes")),
    ("host", ("experts_host_bytes",)),
    ("states_to_host", ("cache_state_saved_bytes",)),
    ("states_from_host", ("cache_state_loaded_bytes",)),
    ("prefixes_to_host", ("cache_cold_saved_bytes",)),
    ("prefixes_from_host", ("cache_cold_loaded_bytes",)),
    ("disk_written", ("cache_disk_written_bytes",)),
    ("disk_read", ("cache_disk_read_bytes",)),
)


class Receipts:
    """stats: the engine's nested counters, as for /v1/stats."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]], most: int = MAX_RECEIPTS) -> None:
        self._stats = stats
        self._most = most
        self._kept: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._running: dict[str, dict[str, float]] = {}
        self._shared: set[str] = set()

    def begin(self, figures: Served) -> None:
        """Note the counters at the start of a request."""
        self._running[figures.id] = self._counters()
        if len(self._running) > 1:
            self._shared.update(self._running)

    def end(self, figures: Served, path: str, status: int) -> None:
        """Write the receipt of a request that generated; forget others."""
        if figures.finish:
            self._kept[figures.id] = self.so_far(figures, path, status)
        self._running.pop(figures.id, None)
        self._shared.discard(figures.id)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)

    def so_far(self, figures: Served, path: str, status: int) -> dict[str, Any]:
        """The receipt of a request that is about to end: its answer may carry it."""
        now_s = time.perf_counter()
        before, after = self._running.get(figures.id, {}), self._counters()
        total_s, decode_s = now_s - figures.started_s, now_s - figures.first_s if figures.first_s else 0.0
        tokens = figures.completion_tokens
        return {
            "id": figures.id,
            "object": "request.receipt",
            "path": path,
            "status": status,
            "finish": figures.finish,
            "ended": int(time.time()),
            "seconds": {
                "total": round(total_s, 6),
                "queued": round(max((t.queued_s for t in figures.timings), default=0.0), 6),
                "to_first_token": round(figures.ttft_s, 6),
                "engine_to_first_token": round(max((t.engine_s for t in figures.timings), default=0.0), 6),
                "between_tokens": round(decode_s / (tokens - 1), 6) if tokens > 1 else None,
            },
            "tokens": {
                "prompt": figures.prompt_tokens,
                "cached": figures.cached_tokens,
                "computed": figures.prompt_tokens - figures.cached_tokens,
                "completion": tokens,
            },
            "bytes": {tier: sum(_change(before, after, name) for name in names) for tier, names in _TIERS},
            "prefix": [report.to_dict() for report in figures.prefixes],
            "engine": {name: _change(before, after, name) for name in after},
            "shared": figures.id in self._shared,
        }

    def get(self, request_id: str) -> dict[str, Any]:
        """The receipt of a finished request; `request_id` as in the x-request-id header."""
        found = self._kept.get(request_id)
        if found is None:
            raise NotFoundError(
                f"There is no receipt of request {request_id!r} (any more).",
                code="request_not_found",
                hint="Use the x-request-id header of an answer that has ended; the latest ones are kept.",
            )
        return found

    def listing(self, limit: str = "") -> dict[str, Any]:
        """The latest receipts, newest first, without the engine's figures. limit: how many, as text."""
        if limit and not (limit.isascii() and limit.isdigit()):
            raise RequestError(
                f"limit is {limit[:40]!r}, it must be a whole number.",
                code="invalid_type",
                hint="Leave it out for the latest 100.",
                param="limit",
            )
        newest = list(reversed(self._kept.values()))[: min(int(limit[:9] or LISTED), self._most)]
        data = [{key: value for key, value in row.items() if key != "engine"} for row in newest]
        return {"object": "list", "data": data, "running": len(self._running)}

    def _counters(self) -> dict[str, float]:
        stats = self._stats()
        groups = {name: stats[name] for name in _GROUPS if isinstance(stats.get(name), Mapping)}
        return {name[1:]: value for name, value in flatten(groups, "")}


def _change(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)
