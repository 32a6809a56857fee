"""Which records of a bank are there already, and who waits for which.

Serving begins before the bank is full: a layer-step asks for the experts it was routed to (`require`),
waits if some are still on their way, and so tells the loader what to read next. Once all are there, asking
is one test of a plain attribute. Knows neither bytes nor files.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Arrivals:
    """Records 0 .. count - 1. `complete` never becomes False again; `error` ends every wait.

    asked   the records that were asked for before all were there, in the order of first asking
    """

    def __init__(self, count: int) -> None:
        self.complete = count == 0
        self.error: Exception | None = None
        self.num_there = 0
        self.asked: dict[int, None] = {}
        self._there = bytearray(count)
        self._wanted: dict[int, None] = {}
        self._changed = threading.Condition()

    def has(self, record: int) -> bool:
        return bool(self._there[record])

    def missing(self) -> list[int]:
        return [i for i, there in enumerate(self._there) if not there]

    def arrived(self, first: int, count: int = 1) -> None:
        """Records [first, first + count) are there, every byte of them."""
        with self._changed:
            for record in range(first, first + count):
                self.num_there += not self._there[record]
                self._there[record] = 1
                self._wanted.pop(record, None)
            self.complete = self.num_there == len(self._there)
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Nothing more will come; the first error counts."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def require(self, records: Iterable[int]) -> None:
        """Wait until all of `records` are there; raises what ended the loading, if they aren't."""
        wanted = list(records)
        with self._changed:
            self.asked.update(dict.fromkeys(wanted))
            absent = [i for i in wanted if not self._there[i]]
            self._wanted.update(dict.fromkeys(absent))
            while not all(self._there[i] for i in absent):
                if self.error is not None:
                    raise self.error
                self._changed.wait()

    def next_wanted(self) -> int | None:
        """A record that somebody waits for, taken off the list; None if nobody does."""
        if not self._wanted:
            return None
        with self._changed:
            for record in self._wanted:
                del self._wanted[record]
                return record
        return None
