"""Writing an FTW directory: piece by piece in any order, from many threads, resumable, whole or not at all.

Everything's place follows from names, shapes and layouts (`place`), so pieces go straight to where they
belong. They lie in `OUT.partial` with a journal of what is written; a later run with the same plan reads back
what the journal claims and continues. `finish` syncs, writes the index last and gives the directory its name.
Knows neither families nor formats.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from freetoken.core.errors import CapacityError, ConfigError, WeightsError
from freetoken.core.units import align_up, format_bytes
from freetoken.weights import ftw_index
from freetoken.weights.files import Files, aligned, crc32
from freetoken.weights.ftw import dtype_name
from freetoken.weights.ftw_index import ALIGN, DENSE, EXPERTS, JOURNAL, Entry, Index, RecordLayer, Run, Shard

TensorSpec = tuple[str, str, tuple[int, ...], int]
"""Name, type as the index names it, shape, bytes."""
LayerSpec = tuple[str, Mapping[str, int], int]
"""Format's name, layout as numbers, bytes of a record."""


def place(
    tensors: Iterable[TensorSpec], layers: Sequence[LayerSpec], num_experts: int, shard_bytes: int
) -> Index:
    """Give everything its place; checksums are still zero."""
    shelf = _Shelf(shard_bytes)
    entries: dict[str, Entry] = {}
    for name, dtype, shape, size in tensors:
        shard, offset = shelf.put(DENSE, size)
        entries[name] = Entry(dtype, tuple(shape), shard, offset, size, 0)
    placed = []
    for fmt, layout, record_bytes in layers:
        runs: list[Run] = []
        for expert in range(num_experts):
            shard, offset = shelf.put(EXPERTS, record_bytes)
            last = runs[-1] if runs else None
            if last and last.shard == shard:
                runs[-1] = replace(last, count=last.count + 1)
            else:
                runs.append(Run(expert, 1, shard, offset))
        placed.append(RecordLayer(fmt, dict(layout), record_bytes, tuple(runs), (0,) * num_experts))
    return Index("", num_experts, shelf.shards(), entries, tuple(placed), {})


class _Shelf:
    """Fills shards in order; what is larger than one has one of its own."""

    def __init__(self, shard_bytes: int) -> None:
        self._limit = shard_bytes
        self._kinds: list[str] = []
        self._sizes: list[int] = []

    def put(self, kind: str, num_bytes: int) -> tuple[int, int]:
        size = align_up(num_bytes, ALIGN)
        is_full = bool(self._sizes) and self._sizes[-1] > ALIGN and self._sizes[-1] + size > self._limit
        if not self._kinds or self._kinds[-1] != kind or is_full:
            self._kinds.append(kind)
            self._sizes.append(ALIGN)
        offset = self._sizes[-1]
        self._sizes[-1] += size
        return len(self._sizes) - 1, offset

    def shards(self) -> tuple[Shard, ...]:
        numbers = {DENSE: 0, EXPERTS: 0}
        out = []
        for kind, size in zip(self._kinds, self._sizes, strict=True):
            numbers[kind] += 1
            out.append(Shard(f"{kind}-{numbers[kind]:05d}.ftw", kind, size))
        return tuple(out)


class FtwWriter:
    """Fills the pieces of `plan`; `put` and `put_record` are safe from many threads.

    source  what identifies the input: a resumed run continues only what began with the same
    """

    def __init__(self, out: Path, plan: Index, source: str) -> None:
        self.out, self.partial = out, out.with_name(out.name + ".partial")
        self.done: dict[str, int] = {}
        """Checksums of what is written, by piece."""
        _check_out(out)
        key = zlib.crc32(ftw_index.dump(plan) + source.encode())
        self.resumed = self._resume(plan, key) or self._begin(plan, key)
        self._journal = (self.partial / JOURNAL).open("a", encoding="utf-8")
        self._lock = threading.Lock()
        self._handles = [self._open(number) for number in range(len(self.plan.shards))]

    def _begin(self, plan: Index, key: int) -> bool:
        if self.partial.exists():
            if any(self.partial.iterdir()) and not (self.partial / JOURNAL).is_file():
                raise _there(self.partial)  # not ours
            shutil.rmtree(self.partial)
        try:
            self.partial.mkdir(parents=True)
        except OSError as error:
            raise _unwritable(self.partial, error) from error
        free, need = shutil.disk_usage(self.partial).free, sum(shard.num_bytes for shard in plan.shards)
        if need > free:
            self.partial.rmdir()
            raise CapacityError(
                f"{self.out} takes {format_bytes(need)}, {format_bytes(free)} are free there.",
                code="disk_full",
                hint="Choose another --out, make room, or quantise with --experts.",
            )
        self.plan = replace(plan, set_id=secrets.token_hex(8))
        (self.partial / JOURNAL).write_text(f"{key:08x} {self.plan.set_id}\n", "utf-8")
        return False

    def _resume(self, plan: Index, key: int) -> bool:
        """Take up what an earlier run left, if it had the same plan."""
        try:
            lines = (self.partial / JOURNAL).read_text("utf-8").split("\n")
        except (OSError, UnicodeDecodeError):
            return False
        head = lines[0].split()
        if len(head) != 2 or head[0] != f"{key:08x}" or len(lines) < 2:
            return False
        self.plan = replace(plan, set_id=head[1])
        for line in lines[1:-1]:  # the last one has no end if it was cut
            crc, _, piece = line.partition(" ")
            if len(crc) == 8 and piece:
                self.done[piece] = int(crc, 16)
        return True

    def check_resumed(self, progress: Callable[[int, int], None], threads: int) -> None:
        """Read back what the journal claims; what doesn't have its checksum is written again."""
        places = {}
        for number, shard in enumerate(self.plan.shards):
            for offset, size, _, name in self.plan.pieces(number):
                if name in self.done:
                    places[name] = (self.partial / shard.file, offset, size)
        total, seen = len(places), 0
        with ThreadPoolExecutor(threads) as pool:
            for name, good in zip(places, pool.map(self._holds, places.items()), strict=True):
                seen += 1
                progress(seen, total)
                if not good:
                    del self.done[name]
        for name in set(self.done) - set(places):
            del self.done[name]

    def _holds(self, piece: tuple[str, tuple[Path, int, int]]) -> bool:
        name, (path, offset, size) = piece
        files = Files()
        try:
            out = aligned(size)
            files.read_into(path, offset, out)
            return crc32(out) == self.done[name]
        except (WeightsError, OSError):
            return False
        finally:
            files.close()

    def _open(self, number: int) -> int:
        shard = self.plan.shards[number]
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
        handle = os.open(self.partial / shard.file, flags, 0o644)
        os.truncate(handle, shard.num_bytes)  # holes are zeros until they are written
        self._write(handle, self.plan.head(number), 0)
        return handle

    def put(self, name: str, parts: Iterable[Tensor]) -> None:
        """Write a dense tensor of the planned type and shape, given whole or as runs of its rows in order; a
        coded one as bytes.
        """
        entry, crc, at = self.plan.tensors[name], 0, 0
        wanted = ("uint8", ()) if entry.coding else (entry.dtype, entry.shape[1:])
        for part in parts:
            if (dtype_name(part.dtype), part.shape[1:]) != wanted:
                what = f"{part.dtype} {list(part.shape)}"
                raise WeightsError(f"Tensor {name} is {what}, not what was announced.")
            if part.numel():
                raw = part.contiguous().reshape(-1).view(torch.uint8)
                crc = crc32(raw, crc)
                self._write(self._handles[entry.shard], memoryview(raw.numpy()), entry.offset + at)
                at += raw.numel()
        if at != entry.num_bytes:
            raise WeightsError(f"Tensor {name} has {at} bytes, {entry.num_bytes} were announced.")
        self._note(f"tensor {name}", crc)

    def put_record(self, layer: int, expert: int, record: Tensor) -> None:
        """Write one record: uint8 [record_bytes]."""
        one = self.plan.layers[layer]
        run = next(run for run in one.runs if run.first <= expert < run.first + run.count)
        offset = run.offset + (expert - run.first) * one.record_bytes
        self._write(self._handles[run.shard], memoryview(record.numpy()), offset)
        self._note(ftw_index.record_name(layer, expert), crc32(record))

    def _note(self, piece: str, crc: int) -> None:
        with self._lock:
            self.done[piece] = crc
            self._journal.write(f"{crc:08x} {piece}\n")
            self._journal.flush()

    def _write(self, handle: int, data: memoryview | bytes, offset: int) -> None:
        view = memoryview(data)
        try:
            while view:
                count = self._write_at(handle, view, offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise CapacityError(
                    f"{self.out} has no room left.",
                    code="disk_full",
                    hint="Make room and run the same line again: it continues where it stopped.",
                ) from error
            raise _unwritable(self.partial, error) from error

    def _write_at(self, handle: int, view: memoryview, offset: int) -> int:
        write = getattr(os, "pwrite", None)
        if write is not None:
            return int(write(handle, view, offset))
        with self._lock:  # Windows: one position for all
            os.lseek(handle, offset, os.SEEK_SET)
            return os.write(handle, view)

    def finish(self, extra: Mapping[str, bytes], origin: Mapping[str, object]) -> Index:
        """Write the index and give the directory its name. `extra` are small files to put beside it."""
        for handle in self._handles:
            os.fsync(handle)
            os.close(handle)
        self._handles.clear()
        self._journal.close()
        for name, data in extra.items():
            (self.partial / name).parent.mkdir(exist_ok=True)
            (self.partial / name).write_bytes(data)
        sums = {name: zlib.crc32(data) for name, data in extra.items()}
        index = replace(self._with_sums(), files=sums, origin=origin)
        with (self.partial / ftw_index.INDEX_NAME).open("wb") as file:
            file.write(ftw_index.dump(index))
            file.flush()
            os.fsync(file.fileno())
        if self.out.exists():
            self.out.rmdir()  # an empty one, or _check_out would have refused
        self.partial.rename(self.out)
        (self.out / JOURNAL).unlink()
        return index

    def _with_sums(self) -> Index:
        tensors = {n: replace(e, crc=self.done[f"tensor {n}"]) for n, e in self.plan.tensors.items()}
        layers = tuple(
            replace(
                one,
                crcs=tuple(self.done[ftw_index.record_name(layer, e)] for e in range(self.plan.num_experts)),
            )
            for layer, one in enumerate(self.plan.layers)
        )
        return replace(self.plan, tensors=tensors, layers=layers)

    def abandon(self) -> None:
        """Stop without finishing; what is written stays for the next run. Idempotent."""
        for handle in self._handles:
            os.close(handle)
        self._handles.clear()
        self._journal.close()


def _check_out(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise _there(out)


def _there(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is there already.",
        code="output_exists",
        hint="Name a new directory with --out, or remove that one first.",
    )


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} can't be written: {error.strerror}.",
        code="unwritable_file",
        hint="Name a directory that you may write to with --out.",
    )


def source_key(files: Iterable[Path], wishes: Mapping[str, object]) -> str:
    """What identifies a conversion's input: names, sizes and times of its files, and what was asked for."""
    facts = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(files)]
    return json.dumps([facts, dict(wishes)], sort_keys=True, default=str)
