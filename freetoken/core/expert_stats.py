"""What a backend of experts counts. Plain numbers; who serves them adds nothing."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ExpertStats:
    """Counters since the engine started. tiles are whole-record units times tiles per record.

    hits + misses = requests (distinct routed experts of live rows, per layer-step); missing_tiles =
    filled_tiles + cpu_tiles; ahead_tiles were prefetched, of ahead_judged the layer wanted ahead_right.
    """

    steps: int = 0
    requests: int = 0
    hits: int = 0
    misses: int = 0
    missing_tiles: int = 0
    filled_tiles: int = 0
    cpu_tiles: int = 0
    fills: int = 0
    evictions: int = 0
    promotions: int = 0
    ahead_tiles: int = 0
    ahead_judged: int = 0
    ahead_right: int = 0
    link_bytes: int = 0
    prefill_link_bytes: int = 0
    host_bytes: int = 0
    extra: dict[str, float] = field(default_factory=dict)
