"""Seconds of a start by named parts, for people who wonder what it waits for.

`part` times what runs one after the other; `add` notes what ran beside it, in whatever thread. Knows no
start. Invariant: a part that is entered twice is the sum of both.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """`seconds` by part, in the order of first noting. Safe from many threads."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the block, also when it raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @property
    def seconds(self) -> dict[str, float]:
        """A copy."""
        with self._lock:
            return dict(self._seconds)
