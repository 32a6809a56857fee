"""Dense tensors read before they are asked for: several threads keep the disk busy while a model is built.

Reading goes on in the natural order of names from the one asked for last, as far as `WINDOW_BYTES` allow, so
a builder that goes layer by layer finds each tensor in memory. Every tensor gets memory of its own, which is
handed over: nothing is copied, nothing is kept. Knows no container.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from freetoken.core.weights import CodedMatrix, WeightSource
from freetoken.weights.files import Arena, Files

THREADS = 6
WINDOW_BYTES = 192 << 20


class ReadAhead(WeightSource):
    """A source whose `read` and `read_coded` hand their memory over; close it before `files`.

    names that hold ".experts." are not read ahead
    """

    owned = True

    def __init__(self, source: WeightSource, files: Files) -> None:
        self._source, self._files = source, files
        self.holds_records = source.holds_records
        self._order = sorted((n for n in source.names() if ".experts." not in n), key=natural)
        self._place = {name: i for i, name in enumerate(self._order)}
        self._bytes = [source.stored_bytes(name) for name in self._order]
        self._pool = ThreadPoolExecutor(THREADS, "freetoken-dense")
        self._coming: dict[str, Future[Tensor | CodedMatrix]] = {}
        self._given: set[str] = set()
        self._ahead = 0
        self._lock = threading.Lock()

    def read(self, name: str) -> Tensor:
        """The whole tensor, in memory that is now the caller's."""
        if name not in self._place or self._source.coding(name):
            return self._source.read(name).clone()
        found = self._taken(name)
        assert isinstance(found, Tensor)
        return found

    def read_coded(self, name: str, index: int | None = None) -> CodedMatrix:
        if name not in self._place or index is not None or not self._source.coding(name):
            return self._source.read_coded(name, index)
        found = self._taken(name)
        assert not isinstance(found, Tensor)
        return found

    def _taken(self, name: str) -> Tensor | CodedMatrix:
        """What was read ahead, or is read now; what comes next is asked for."""
        with self._lock:
            found = self._coming.pop(name, None)
            if found is not None:
                self._ahead -= self._bytes[self._place[name]]
            else:
                found = self._pool.submit(self._read, name)
            self._given.add(name)
            self._top_up(self._place[name] + 1)
        return found.result()

    def _top_up(self, start: int) -> None:
        """Ask for what comes next, until the window is full."""
        for name, size in zip(self._order[start:], self._bytes[start:], strict=True):
            if self._ahead and self._ahead + size > WINDOW_BYTES:
                return
            if name not in self._coming and name not in self._given:
                self._coming[name] = self._pool.submit(self._read, name)
                self._ahead += size

    def _read(self, name: str) -> Tensor | CodedMatrix:
        with self._files.reading(Arena()):  # never reset: the tensor keeps it
            return self._source.read_coded(name) if self._source.coding(name) else self._source.read(name)

    def close(self) -> None:
        """Drop what nobody asked for. The source stays open."""
        self._pool.shutdown(cancel_futures=True)
        self._coming.clear()

    def names(self) -> Iterable[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(name)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self._source.read_rows(name, start, stop).clone()

    def coding(self, name: str) -> str:
        return self._source.coding(name)

    def packs(self, name: str) -> bool:
        return self._source.packs(name)

    def columns(self, name: str) -> Tensor | None:
        return self._source.columns(name)

    def stored_bytes(self, name: str) -> int:
        return self._source.stored_bytes(name)


def natural(name: str) -> list[tuple[int, str]]:
    """A key that puts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
