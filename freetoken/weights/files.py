"""Bytes of files in memory: mapped when someone may look, read in large aligned blocks when all is wanted.

A mapping is paged in: right for headers and single tensors. `read_into` goes past the page cache where the
file system allows it (aligned blocks, no second copy), but takes what lies in the cache from there: a model
that was just used is read at memory speed. Safe from many threads. Knows no container.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from freetoken.core.errors import WeightsError
from freetoken.core.units import align_up
from freetoken.core.weights import Fetched, Stored
from freetoken.native import stored as read
from freetoken.native.library import library

ALIGN = 4096


@dataclass
class Arena:
    """A thread's memory for what it is just reading: grows to the largest job, is reused by the next one.

    What `take` and `claim` gave is valid until `reset`.
    """

    _memory: Tensor | None = None
    _address: int = 0
    _size: int = 0
    _used: int = 0
    _wanted: int = 0

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], 4096-byte aligned, not initialised."""
        size = align_up(max(num_bytes, 1), ALIGN)
        self._wanted += size
        if self._memory is None or self._used + size > self._size:
            return aligned(size)[:num_bytes]
        self._used += size
        return self._memory[self._used - size : self._used - size + num_bytes]

    def claim(self, num_bytes: int) -> tuple[int, Tensor]:
        """Likewise as an address, and what holds it: among large copies an operation of torch takes long."""
        size = align_up(max(num_bytes, 1), ALIGN)
        if self._memory is None or self._used + size > self._size:
            fresh = self.take(num_bytes)
            return fresh.data_ptr(), fresh
        self._wanted += size
        self._used += size
        return self._address + self._used - size, self._memory

    def reset(self) -> None:
        """Forget what was taken; the next job of the same size finds room."""
        if self._wanted > self._size:
            self._memory = None  # let the old one go first
            self._memory = aligned(self._wanted)
            self._address, self._size = self._memory.data_ptr(), self._wanted
        self._used = self._wanted = 0


class Files:
    """Open files of one checkpoint.

    cached   take what lies in the page cache from there; False: always read the disk, for measuring
    direct   read past the page cache where possible; False: through it
    """

    def __init__(self, *, cached: bool = True, direct: bool = True) -> None:
        self._cached = cached
        self._direct = direct
        self._open: dict[Path, _Handles] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self._lock = threading.Lock()
        self._thread = threading.local()

    @contextlib.contextmanager
    def reading(self, arena: Arena) -> Iterator[None]:
        """Inside the block, `bytes_of` of this thread reads into `arena` instead of mapping."""
        self._thread.arena = arena
        try:
            yield
        finally:
            self._thread.arena = None

    def bytes_of(self, path: Path, offset: int, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of a file: a view of a private mapping, or of this thread's arena."""
        arena: Arena | None = getattr(self._thread, "arena", None)
        if arena is None:
            return torch.frombuffer(self._map(path), dtype=torch.uint8, count=num_bytes, offset=offset)
        # Blocks round the wanted bytes: what is read too much is less than two of them.
        start = offset // ALIGN * ALIGN
        whole = arena.take(align_up(offset + num_bytes, ALIGN) - start)
        self.read_into(path, start, whole, least=offset + num_bytes - start)
        return whole[offset - start : offset - start + num_bytes]

    def read_into(self, path: Path, offset: int, out: Tensor, least: int | None = None) -> None:
        """Fill uint8 `out`; WeightsError if the file ends before `least` bytes of it (default: all)."""
        wanted = out.numel() if least is None else least
        done = self._handles(path).read(out, offset, cached=self._cached)
        if done < wanted:
            raise WeightsError(
                f"{path.name} ends at byte {offset + done}, {offset + wanted} were expected.",
                code="truncated_shard",
                hint="Copy or download this file again.",
            )

    def fetch(self, some: Sequence[Stored]) -> Fetched | None:
        """Read stored tensors into this thread's arena by one call, neighbours of a file as one span.

        None where there is no arena, or a file ends early: reading one by one says which.
        """
        arena: Arena | None = getattr(self._thread, "arena", None)
        if arena is None or library() is None:
            return None
        spans, of = _spans(some)
        at, memory = arena.claim(sum(span.num_bytes for span in spans))
        calls = []
        for span in spans:
            span.address = at
            at += span.num_bytes
            calls.append((*self._handles(span.path).both, *span.place))
        if not read.read_spans(calls, first_cached=self._cached):
            return None
        return Fetched([s.address + one.offset - s.start for s, one in zip(of, some, strict=True)], memory)

    def release(self) -> None:
        """Let mapped pages go; they come back when they are looked at."""
        if os.name == "posix":
            for mapping in self._maps.values():
                mapping.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Let go of what is open. Tensors hold a mapping without locking it, so it is never closed under
        them: the last one frees it.
        """
        with self._lock:
            for handles in self._open.values():
                handles.close()
            self._open.clear()
            self._maps.clear()

    def _map(self, path: Path) -> mmap.mmap:
        with self._lock:
            if path not in self._maps:
                with path.open("rb") as file:
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            return self._maps[path]

    def _handles(self, path: Path) -> _Handles:
        if (found := self._open.get(path)) is not None:
            return found
        with self._lock:
            if path not in self._open:
                self._open[path] = _Handles(path, self._direct)
            return self._open[path]


class _Handles:
    """One file, opened through the page cache and, where that works, past it."""

    def __init__(self, path: Path, direct: bool) -> None:
        self._path = path
        self._buffered = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self._direct = self._open_direct() if direct else -1
        self._nowait = getattr(os, "RWF_NOWAIT", 0)
        self._seek = threading.Lock()

    @property
    def both(self) -> tuple[int, int]:
        """Through the page cache, and past it or -1."""
        return self._buffered, self._direct

    def _open_direct(self) -> int:
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            return -1
        try:
            return os.open(self._path, os.O_RDONLY | flag)
        except OSError:  # some network and memory file systems
            return -1

    def read(self, out: Tensor, offset: int, *, cached: bool) -> int:
        """Fill `out`; returns the bytes read, fewer only at the end of the file."""
        view, is_aligned = memoryview(out.numpy()), out.data_ptr() % ALIGN == 0
        done = self._from_cache(view, offset) if cached and self._direct >= 0 else 0
        while done < len(view):
            rest = view[done:]
            whole = (offset + done) % ALIGN == 0 and done % ALIGN == 0 and len(rest) % ALIGN == 0
            direct = self._direct >= 0 and is_aligned and whole
            got = self._at(self._direct if direct else self._buffered, rest, offset + done)
            done += got
            # A direct read stops inside a block at the end of the file only.
            if not got or (direct and got % ALIGN):
                break
        return done

    def _from_cache(self, view: memoryview, offset: int) -> int:
        """Read what the page cache has, in whole blocks; 0 if it hasn't the first one."""
        done = 0
        try:
            while self._nowait and done < len(view):
                size = ALIGN if not done else len(view) - done
                got = os.preadv(self._buffered, [view[done : done + size]], offset + done, self._nowait)
                done += got
                if got < ALIGN:
                    break
        except BlockingIOError:
            pass
        except OSError:  # this file system can't say
            self._nowait = 0
        return done if done == len(view) else done // ALIGN * ALIGN

    def _at(self, handle: int, view: memoryview, offset: int) -> int:
        read = getattr(os, "preadv", None)
        if read is not None:
            return int(read(handle, [view], offset))
        with self._seek:  # Windows: one position for all
            os.lseek(handle, offset, os.SEEK_SET)
            data = os.read(handle, min(len(view), 1 << 20))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        for handle in (self._buffered, self._direct):
            if handle >= 0:
                os.close(handle)


@dataclass
class _Span:
    """Whole blocks of a file around what is wanted, which ends at `end`; `address` is where they come."""

    path: Path
    start: int
    end: int
    address: int = 0

    @property
    def num_bytes(self) -> int:
        return align_up(self.end, ALIGN) - self.start

    @property
    def place(self) -> tuple[int, int, int, int]:
        return self.start, self.num_bytes, self.end - self.start, self.address


def _spans(some: Sequence[Stored]) -> tuple[list[_Span], list[_Span]]:
    """What to read, neighbours together, and the span of each."""
    spans: list[_Span] = []
    last: dict[Path, _Span] = {}
    of: dict[int, _Span] = {}
    for i, one in sorted(enumerate(some), key=lambda pair: pair[1].offset):
        start, end = one.offset // ALIGN * ALIGN, one.offset + one.num_bytes
        span = last.get(one.path)
        if span is None or start > align_up(span.end, ALIGN):
            span = last[one.path] = _Span(one.path, start, end)
            spans.append(span)
        span.end = max(span.end, end)
        of[i] = span
    return spans, [of[i] for i in range(len(some))]


def aligned(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], 4096-byte aligned, not initialised."""
    raw = torch.empty(num_bytes + ALIGN, dtype=torch.uint8)
    start = -raw.data_ptr() % ALIGN
    return raw[start : start + num_bytes]


def crc32(data: Tensor, before: int = 0) -> int:
    """zlib's CRC-32 of a contiguous uint8 tensor, continued from `before`."""
    lib = library()
    if lib is None:
        return zlib.crc32(memoryview(data.numpy()), before)
    return lib.crc32(data.data_ptr(), data.numel(), before)
