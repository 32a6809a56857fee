"""Writing GGUF files for tests: bytes by hand, and TINY models the way llama.cpp's converter lays them out.

An implementation of its own: it shares nothing with the reader but the tables of types.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from freetoken.weights.gguf_types import TYPES

ALIGN = 32
KINDS = {TYPES[i].name: i for i in TYPES}
Blob = tuple[str, tuple[int, ...], bytes]
"""Type's name, shape as torch has it, bytes."""


def value(x: Any) -> bytes:
    if isinstance(x, bool):
        return struct.pack("<I?", 7, x)
    if isinstance(x, int):
        return struct.pack("<II", 4, x)
    if isinstance(x, float):
        return struct.pack("<If", 6, x)
    if isinstance(x, str):
        return struct.pack("<I", 8) + string(x)
    items = list(x)
    if items and isinstance(items[0], str):
        return struct.pack("<IIQ", 9, 8, len(items)) + b"".join(map(string, items))
    if items and isinstance(items[0], float):
        return struct.pack(f"<IIQ{len(items)}f", 9, 6, len(items), *items)
    return struct.pack(f"<IIQ{len(items)}i", 9, 5, len(items), *items)


def string(x: str) -> bytes:
    raw = x.encode()
    return struct.pack("<Q", len(raw)) + raw


def write_file(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Blob], version: int = 3
) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(string(key) + value(x) for key, x in metadata.items())
    at, body = 0, []
    for name, (kind, shape, raw) in tensors.items():
        dims = shape[::-1]
        number = KINDS[kind] if kind in KINDS else int(kind)
        head += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, number, at)
        body.append(raw + bytes(-len(raw) % ALIGN))
        at += len(body[-1])
    path.write_bytes(head + bytes(-len(head) % ALIGN) + b"".join(body))
    return path


def write_split(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Blob], count: int
) -> list[Path]:
    """`path` names the stem; tensors go round the shards."""
    names, out = list(tensors), []
    for i in range(count):
        split = {"split.no": i, "split.count": count, "split.tensors.count": len(names)}
        own = {**metadata, **split} if i == 0 else split
        file = path.with_name(f"{path.name}-{i + 1:05}-of-{count:05}.gguf")
        out.append(write_file(file, own, {name: tensors[name] for name in names[i::count]}))
    return out


def plain(x: Tensor, kind: str = "F32") -> Blob:
    dtype = TYPES[KINDS[kind]].dtype
    assert dtype is not None
    return kind, tuple(x.shape), x.to(dtype).contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def blocks(raw: np.ndarray, kind: str, shape: Sequence[int]) -> Blob:
    return kind, tuple(shape), raw.tobytes()
