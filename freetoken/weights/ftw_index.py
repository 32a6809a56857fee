"""The index of an FTW directory: what lies where, and the checksum of every piece. Pure; no tensors.

    ftw.json                the index: one JSON object and its own checksum
    dense-00001.ftw ...     tensors that are not routed experts, each 4096-byte aligned
    experts-00001.ftw ...   records just as the bank holds them, one after the other
    config.json, tokenizer.json, ...   as in the checkpoint that this was made from

A shard begins with one block of 4096 bytes that follows from the index, so a shard of another directory, or
another one of the same, is told at a look. Records are never cut; where a layer continues in another shard,
`runs` says so. Knows neither record layouts nor formats beyond their names.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from freetoken.core.errors import WeightsError

INDEX_NAME = "ftw.json"
FORMAT, VERSION = "ftw", 2
FIRST_INDEX = "freetoken_weight.json"
"""Version 1, of the published package: banks repacked for one GPU's kernels."""
ALIGN = 4096
SHARD_BYTES = 8 << 30
DENSE, EXPERTS = "dense", "experts"
CODES = "codes:"
JOURNAL = "ftw.journal"
"""What is written so far, while the directory isn't finished."""


@dataclass(frozen=True)
class Shard:
    """num_bytes is the size of the file, its first block included."""

    file: str
    kind: str
    num_bytes: int


@dataclass(frozen=True)
class Entry:
    """A dense tensor. dtype: torch's name, or CODES and a weight format's; offset in bytes of its file."""

    dtype: str
    shape: tuple[int, ...]
    shard: int
    offset: int
    num_bytes: int
    crc: int

    @property
    def coding(self) -> str:
        """The weight format of a matrix [rows, K] that lies as its codes are multiplied; else empty."""
        return self.dtype.removeprefix(CODES) if self.dtype.startswith(CODES) else ""


@dataclass(frozen=True)
class Run:
    """Records [first, first + count) of a layer lie one after the other at `offset` of a shard's file."""

    first: int
    count: int
    shard: int
    offset: int


@dataclass(frozen=True)
class RecordLayer:
    """The experts of one MoE layer: format's name, layout as numbers, where they lie, a checksum for each."""

    format: str
    layout: Mapping[str, int]
    record_bytes: int
    runs: tuple[Run, ...]
    crcs: tuple[int, ...]


@dataclass(frozen=True)
class Index:
    """set_id tells the shards of one conversion from any other's; origin is for people."""

    set_id: str
    num_experts: int
    shards: tuple[Shard, ...]
    tensors: Mapping[str, Entry]
    layers: tuple[RecordLayer, ...]
    files: Mapping[str, int]
    origin: Mapping[str, Any] = field(default_factory=dict)

    def head(self, number: int) -> bytes:
        """The first block of shard `number`."""
        return head(self.shards[number], number, self.set_id)

    def pieces(self, number: int) -> Iterator[tuple[int, int, int, str]]:
        """(offset, bytes, checksum, name) of everything in a shard, in any order."""
        for name, entry in self.tensors.items():
            if entry.shard == number:
                yield entry.offset, entry.num_bytes, entry.crc, f"tensor {name}"
        for layer, one in enumerate(self.layers):
            for run in one.runs:
                if run.shard == number:
                    for i in range(run.count):
                        expert, at = run.first + i, run.offset + i * one.record_bytes
                        yield at, one.record_bytes, one.crcs[expert], record_name(layer, expert)


def head(shard: Shard, number: int, set_id: str) -> bytes:
    text = f"FTW {VERSION} {shard.kind} {number} {set_id} {shard.num_bytes}\n"
    return text.encode().ljust(ALIGN, b"\0")


def record_name(layer: int, expert: int) -> str:
    return f"expert {expert} of MoE layer {layer}"


def dump(index: Index) -> bytes:
    """The index file's bytes; equal indices give equal bytes."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "set": index.set_id,
        "num_experts": index.num_experts,
        "origin": dict(index.origin),
        "files": dict(index.files),
        "shards": [[s.file, s.kind, s.num_bytes] for s in index.shards],
        "tensors": {
            n: [e.dtype, list(e.shape), e.shard, e.offset, e.num_bytes, e.crc]
            for n, e in index.tensors.items()
        },
        "layers": [
            {
                "format": one.format,
                "layout": dict(one.layout),
                "record_bytes": one.record_bytes,
                "runs": [list(asdict(run).values()) for run in one.runs],
                "crcs": "".join(f"{crc:08x}" for crc in one.crcs),
            }
            for one in index.layers
        ],
    }
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    return b'{"crc":"%08x","index":%s}\n' % (zlib.crc32(text), text)


def load(path: Path) -> Index:
    """Read and check an index; WeightsError `invalid_index` names the file."""
    raw = path.read_bytes()
    try:
        body = json.loads(raw)["index"]
        if (body["format"], body["version"]) != (FORMAT, VERSION):
            raise ValueError(
                f"it says {body['format']} version {body['version']}, this is {FORMAT} {VERSION}"
            )
        index = _parse(body)
        if dump(index) != raw:
            raise ValueError("its checksum is wrong")
        _check(index)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise damaged(str(error)) from error
    return index


def _parse(body: Mapping[str, Any]) -> Index:
    return Index(
        set_id=body["set"],
        num_experts=body["num_experts"],
        origin=body["origin"],
        files=body["files"],
        shards=tuple(Shard(*s) for s in body["shards"]),
        tensors={n: Entry(e[0], tuple(e[1]), *e[2:]) for n, e in body["tensors"].items()},
        layers=tuple(
            RecordLayer(
                format=one["format"],
                layout=one["layout"],
                record_bytes=one["record_bytes"],
                runs=tuple(Run(*run) for run in one["runs"]),
                crcs=tuple(int(one["crcs"][i : i + 8], 16) for i in range(0, len(one["crcs"]), 8)),
            )
            for one in body["layers"]
        ),
    )


def _check(index: Index) -> None:
    """A well-formed index that promises the impossible is refused before anything is allocated."""
    named = (*index.files, *(shard.file for shard in index.shards))
    outside = [f for f in named if not f or Path(f).is_absolute() or ".." in Path(f).parts]
    if outside:
        raise damaged(f"it names files outside its directory: {', '.join(outside)}")
    ends = [ALIGN] * len(index.shards)
    for entry in index.tensors.values():
        ends[entry.shard] = max(ends[entry.shard], entry.offset + entry.num_bytes)
    for one in index.layers:
        for run in one.runs:
            ends[run.shard] = max(ends[run.shard], run.offset + run.count * one.record_bytes)
    for shard, end in zip(index.shards, ends, strict=True):
        if end > shard.num_bytes:
            raise damaged(f"{shard.file} should hold {end} bytes in {shard.num_bytes}")
    for layer, one in enumerate(index.layers):
        covered = [e for run in one.runs for e in range(run.first, run.first + run.count)]
        if covered != list(range(index.num_experts)) or len(one.crcs) != index.num_experts:
            raise damaged(f"it does not place every expert of MoE layer {layer} once")


def damaged(why: str) -> WeightsError:
    return WeightsError(
        f"{INDEX_NAME} is damaged: {why}.",
        code="invalid_index",
        hint="Copy it again, or write the directory anew with ft checkpoint.",
    )


def check_shards(index: Index, directory: Path) -> None:
    """Refuse missing, truncated and foreign shards, naming what lies in them. Reads one block of each."""
    for number, shard in enumerate(index.shards):
        path = directory / shard.file
        if not path.is_file():
            raise _fault(index, number, "is missing", code="missing_shard")
        size = path.stat().st_size
        if size != shard.num_bytes:
            what = "truncated" if size < shard.num_bytes else "longer than it was written"
            text = f"is {what}: {size} bytes, {shard.num_bytes} were written"
            raise _fault(index, number, text, code="truncated_shard", beyond=size)
        with path.open("rb") as file:
            if file.read(ALIGN) != index.head(number):
                text = "belongs to another checkpoint or is another shard"
                raise _fault(index, number, text, code="foreign_shard")


def _fault(index: Index, number: int, what: str, *, code: str, beyond: int = 0) -> WeightsError:
    lost = [name for at, size, _, name in sorted(index.pieces(number)) if at + size > beyond]
    more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
    holds = f" It holds {lost[0]}{more}." if lost else ""
    return WeightsError(
        f"{index.shards[number].file} {what}.{holds}",
        code=code,
        hint="Copy the file again, or write the directory anew with ft checkpoint.",
    )


def refuse_unreadable(directory: Path) -> None:
    """WeightsError for an unfinished directory and for one of FTW version 1, with the line to run."""
    if (directory / JOURNAL).is_file() and not (directory / INDEX_NAME).is_file():
        raise WeightsError(
            f"{directory.name} is not finished: writing it was interrupted.",
            code="unfinished_checkpoint",
            hint="Run the same `ft checkpoint` line again; it continues where it stopped.",
        )
    if not (directory / FIRST_INDEX).is_file():
        return
    raise WeightsError(
        f"{directory.name} is an FTW directory of version 1: its experts are packed for the kernels of one "
        "GPU and can't be read here.",
        code="unsupported_container",
        hint="Write it anew from the original checkpoint: ft checkpoint --model ORIGINAL --out "
        f"{directory.name}-v{VERSION}",
    )
