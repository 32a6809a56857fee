"""Bytes by name in files of one folder, with a limit, checksums, and a mark of what they belong to.

Owns the folder; knows no page, state or token. An entry is written whole or not at all, and read whole or not
at all: a damaged file is a miss. A disk that refuses is used no more, and whoever writes goes on.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path

from torch import Tensor

from freetoken.core.log import logger

log = logger("disk")
_MAGIC = b"FTCOLD1\n"
_HEAD = struct.Struct("<8sQI")
"""Magic, bytes of the payload, their CRC-32."""


def fingerprint(path: Path) -> list[str]:
    """Names, sizes and times of a model's files: another checkpoint gives another list."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = [(file.name, file.stat()) for file in files if file.is_file()]
    return [str(path.resolve()), *(f"{name} {info.st_size} {info.st_mtime_ns}" for name, info in found)]


class DiskTier:
    """At most `max_bytes` of payload in a folder of its own. `mark`: what must be equal to reuse it."""

    def __init__(self, folder: Path, mark: str, max_bytes: int) -> None:
        self._folder = folder / hashlib.sha256(mark.encode()).hexdigest()[:16]
        self.max_bytes, self.num_bytes = max_bytes, 0
        self.num_written = self.num_read = self.num_damaged = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self.is_on = max_bytes > 0
        if self.is_on:
            self._guard(self._open)

    def names(self) -> list[str]:
        """All entries, the oldest first."""
        return list(self._sizes)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def write(self, name: str, *pieces: Tensor) -> None:
        """Add an entry, whole or not at all; the oldest make room. Bytes of the pieces one after another."""
        size = sum(piece.numel() for piece in pieces)
        if not self.is_on or name in self._sizes or size > self.max_bytes:
            return
        self._guard(lambda: self._write(name, pieces, size))

    def read(self, name: str, *pieces: Tensor) -> bool:
        """Fill the pieces; False, the pieces zero and the entry gone, if it is damaged or can't be read."""
        if not self.is_on or name not in self._sizes:
            return False
        if not self._read(self._folder / name, pieces):
            self.num_damaged += 1
            for piece in pieces:
                piece.zero_()
            self._guard(lambda: self._remove(name))
            return False
        self._sizes.move_to_end(name)
        self.num_read += sum(piece.numel() for piece in pieces)
        return True

    def discard(self, name: str) -> None:
        """Drop an entry, if it is there."""
        if name in self._sizes:
            self._guard(lambda: self._remove(name))

    def _read(self, path: Path, pieces: Sequence[Tensor]) -> bool:
        """Straight into the pieces, which hold anything after a False."""
        crc, size = 0, 0
        try:
            with path.open("rb", buffering=0) as file:
                head = file.read(_HEAD.size)
                for piece in pieces:
                    view = memoryview(piece.numpy())
                    if not _read_into(file, view):
                        return False
                    crc, size = zlib.crc32(view, crc), size + len(view)
                return not file.read(1) and head == _HEAD.pack(_MAGIC, size, crc)
        except OSError:
            return False

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        found = []
        for entry in os.scandir(self._folder):
            if entry.name.endswith(".tmp"):
                Path(entry.path).unlink(missing_ok=True)
                continue
            try:
                info = entry.stat()
            except FileNotFoundError:
                continue  # another server's file, finished or dropped this moment
            found.append((info.st_mtime_ns, entry.name, max(info.st_size - _HEAD.size, 0)))
        for _, name, size in sorted(found):
            self._sizes[name] = size
            self.num_bytes += size
        while self.num_bytes > self.max_bytes:
            self._remove(next(iter(self._sizes)))

    def _write(self, name: str, pieces: Sequence[Tensor], size: int) -> None:
        while self.num_bytes + size > self.max_bytes:
            self._remove(next(iter(self._sizes)))
        views, crc = [memoryview(piece.numpy()) for piece in pieces], 0
        for view in views:
            crc = zlib.crc32(view, crc)
        path = self._folder / name
        part = path.with_name(name + ".tmp")
        self._folder.mkdir(parents=True, exist_ok=True)  # somebody may have emptied the place meanwhile
        try:
            with part.open("wb") as file:
                file.write(_HEAD.pack(_MAGIC, size, crc))
                for view in views:
                    file.write(view)
            os.replace(part, path)
        except FileNotFoundError:
            return  # another server of this checkpoint has started and tidied up
        except OSError:
            part.unlink(missing_ok=True)  # a full disk needs every byte
            raise
        self._sizes[name] = size
        self.num_bytes += size
        self.num_written += size

    def _remove(self, name: str) -> None:
        self.num_bytes -= self._sizes.pop(name)
        (self._folder / name).unlink(missing_ok=True)

    def _guard(self, action: Callable[[], None]) -> None:
        """Do it; a system that refuses ends the tier, not the engine."""
        try:
            action()
        except OSError as error:
            log.warning("the disk tier of the prefix cache is off: %s", error)
            self.is_on, self.num_bytes = False, 0
            self._sizes.clear()


def _read_into(file: FileIO, view: memoryview) -> bool:
    """Fill all of `view`; False at the file's end."""
    while len(view):
        count = file.readinto(view)
        if not count:
            return False
        view = view[count:]
    return True
