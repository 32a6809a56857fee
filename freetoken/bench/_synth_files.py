"""Safetensors shards written from many threads, in place: sizes are known before a byte is.

Owns headers, offsets and the index. A shard is laid out first, made at its full size, and then filled by
pieces in any order. Knows no model.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freetoken.bench._synth_codes import ITEM_BYTES, Bytes
from freetoken.core.units import align_up

INDEX = "model.safetensors.index.json"
_ALIGN = 4096


@dataclass
class Shard:
    """One file: tensors by name, laid out back to back, and what fills it.

    pieces  (offset from the start of the data, its bytes) of every run, made when they are due
    """

    entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    pieces: list[Callable[[], list[tuple[int, Bytes]]]] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, name: str, dtype: str, shape: tuple[int, ...]) -> int:
        """Lay a tensor out behind the last; returns where its bytes begin."""
        size, at = ITEM_BYTES[dtype], self.num_bytes
        for n in shape:
            size *= n
        self.entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        self.num_bytes += size
        return at

    def header(self) -> bytes:
        blob = json.dumps(self.entries, separators=(",", ":")).encode()
        blob += b" " * (align_up(8 + len(blob), _ALIGN) - 8 - len(blob))
        return struct.pack("<Q", len(blob)) + blob


def shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_shards(
    out: Path, shards: list[Shard], threads: int, progress: Callable[[int], None]
) -> dict[str, str]:
    """Write all shards; returns the index's weight_map. progress(bytes written so far), in this thread."""
    names = [shard_name(i, len(shards)) for i in range(len(shards))]
    write_files([(out / name, shard) for name, shard in zip(names, shards, strict=True)], threads, progress)
    return {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard.entries}


def write_files(files: Sequence[tuple[Path, Shard]], threads: int, progress: Callable[[int], None]) -> None:
    """Write files at once. progress(bytes written so far), in this thread."""
    done = 0
    with ThreadPoolExecutor(threads) as pool:
        running = []
        for path, shard in files:
            header = shard.header()
            with path.open("wb") as file:
                file.write(header)
                file.truncate(len(header) + shard.num_bytes)
            running += [pool.submit(_fill, path, len(header), piece) for piece in shard.pieces]
        try:
            for future in running:
                done += future.result()
                progress(done)
        except BaseException:
            for future in running:
                future.cancel()
            wait(running, return_when=FIRST_EXCEPTION)
            raise


def _fill(path: Path, start: int, piece: Callable[[], list[tuple[int, Bytes]]]) -> int:
    written = 0
    with path.open("r+b", buffering=0) as file:
        for offset, data in piece():
            file.seek(start + offset)
            view = memoryview(data.data)
            while len(view):
                view = view[file.write(view) :]
            written += int(data.nbytes)
    return written


def write_index(out: Path, weight_map: dict[str, str], num_bytes: int) -> None:
    body = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (out / INDEX).write_text(json.dumps(body), "utf-8")
