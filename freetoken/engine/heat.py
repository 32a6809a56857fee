"""Which experts a start was asked for first, so that the next start reads them first.

Owns one small file for each checkpoint: expert ids in the order in which they were first asked for while the
bank was filling, the newest start's before those of older ones. It is a hint: a file that is lost, damaged or
can't be written costs time and nothing else. Knows neither bank nor disk.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from freetoken.core.log import logger

log = logger("heat")


class Heat:
    """mark: what identifies the checkpoint; num_records: its experts, 0 .. num_records - 1."""

    def __init__(self, folder: Path, mark: Iterable[str], num_records: int) -> None:
        name = hashlib.sha256("\n".join(mark).encode()).hexdigest()[:16]
        self._path = folder / f"{name}.json"
        self._num_records = num_records

    def read(self) -> list[int]:
        """Expert ids, hottest first; empty if nothing is known."""
        try:
            found = json.loads(self._path.read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            return []
        if not isinstance(found, list) or not all(
            type(i) is int and 0 <= i < self._num_records for i in found
        ):
            return []
        return list(dict.fromkeys(found))

    def write(self, asked: Iterable[int]) -> None:
        """Put what this start was asked for before what is known."""
        order = list(dict.fromkeys([*asked, *self.read()]))
        part = self._path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(order, separators=(",", ":")), "utf-8")
            os.replace(part, self._path)
        except OSError as error:
            log.debug("which experts are asked for first is not kept: %s", error)
