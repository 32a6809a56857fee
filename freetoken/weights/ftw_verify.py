"""Every byte of an FTW directory against its checksum: what `ft checkpoint verify` does.

Nothing is left out: pieces have checksums, the first block of a shard follows from the index, what lies
between pieces is zero, and the copied files are in the index too. Names what is damaged, all of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from freetoken.core.errors import WeightsError
from freetoken.weights import ftw_index
from freetoken.weights.files import Arena, Files, crc32
from freetoken.weights.ftw_index import ALIGN, Index

PART_BYTES = 32 << 20


@dataclass(frozen=True)
class Verified:
    """damaged names pieces and their files, for people."""

    num_bytes: int
    num_pieces: int
    damaged: list[str]


def verify(
    directory: Path, progress: Callable[[int], None] = lambda percent: None, threads: int = 4
) -> Verified:
    """Read everything. WeightsError if the index or a whole shard is wrong: nothing can be told then."""
    index = ftw_index.load(directory / ftw_index.INDEX_NAME)
    ftw_index.check_shards(index, directory)
    files = Files()
    try:
        checks = list(_checks(index, directory, files))
        damaged = []
        with ThreadPoolExecutor(threads) as pool:
            for number, fault in enumerate(pool.map(_call, checks)):
                progress(100 * (number + 1) // len(checks))
                if fault:
                    damaged.append(fault)
    finally:
        files.close()
    return Verified(sum(shard.num_bytes for shard in index.shards), len(checks), damaged)


Check = Callable[[], str]
"""Returns what is wrong, or nothing."""


def _call(check: Check) -> str:
    return check()


def _checks(index: Index, directory: Path, files: Files) -> Iterator[Check]:
    for name, crc in index.files.items():
        yield partial(_check_file, directory / name, name, crc)
    for number, shard in enumerate(index.shards):
        path, end = directory / shard.file, ALIGN
        for offset, size, crc, name in sorted(index.pieces(number)):
            yield partial(_check_piece, files, path, (offset, size, crc), name)
            if end < offset:
                yield partial(_check_zeros, files, path, end, offset)
            end = offset + size
        if end < shard.num_bytes:
            yield partial(_check_zeros, files, path, end, shard.num_bytes)


def _check_file(path: Path, name: str, crc: int) -> str:
    try:
        good = zlib.crc32(path.read_bytes()) == crc
    except OSError as error:
        return f"{name}: {error.strerror}"
    return "" if good else name


def _check_piece(files: Files, path: Path, piece: tuple[int, int, int], name: str) -> str:
    offset, size, wanted = piece
    crc, arena = 0, Arena()
    try:
        for start in range(0, size, PART_BYTES):
            with files.reading(arena):
                crc = crc32(files.bytes_of(path, offset + start, min(PART_BYTES, size - start)), crc)
            arena.reset()
    except (WeightsError, OSError) as error:
        return f"{name} in {path.name}: {error}"
    return "" if crc == wanted else f"{name} in {path.name}"


def _check_zeros(files: Files, path: Path, start: int, end: int) -> str:
    if bool(files.bytes_of(path, start, end - start).any()):
        return f"the unused bytes {start} to {end} of {path.name}"
    return ""
