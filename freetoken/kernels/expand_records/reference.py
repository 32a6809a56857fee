"""Records in this process's memory, weight by weight by the definition."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from freetoken.core.codes import IQ4, PLAIN

RANK = 0
_DTYPES = {"f16": torch.float16, "f32": torch.float32, "u8": torch.uint8, "i8": torch.int8}
_DTYPES |= {"e4m3": torch.float8_e4m3fn, "e8m0": torch.uint8, "bf16": torch.bfloat16}
_DTYPES |= dict.fromkeys(("low4", "high4", "u6"), torch.uint8)
_FROM_BYTE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "low4": lambda byte: byte & 15,
    "high4": lambda byte: byte >> 4,
    "u6": lambda byte: byte - 32,
}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def supports(device_type: str) -> bool:
    return True


def expand_records(records: Tensor, coded: Any, out: Tensor, dtype: torch.dtype) -> None:
    w, h = coded.tile_width, coded.hidden
    _, tile_bytes, start, bias_at = coded.plain_bytes()
    for number, address in enumerate(records.tolist()):
        size = coded.tiles_offset + coded.num_tiles * coded.tile_bytes
        raw = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
        if bias_at:
            out[number, : 4 * h] = raw[: 4 * h]
        for tile in range(coded.num_tiles):
            at = coded.tiles_offset + tile * coded.tile_bytes
            source = raw[at : at + coded.tile_bytes]
            to = out[number, start + tile * tile_bytes :][:tile_bytes]
            weights = torch.stack([matrix_of(source, m, w, h) for m in coded.matrices])
            to[: 6 * w * h] = weights.to(dtype).view(-1).view(torch.uint8)
            if bias_at:
                to[bias_at : bias_at + 8 * w] = source[coded.bias_offset : coded.bias_offset + 8 * w]


def matrix_of(tile: Tensor, matrix: Any, w: int, h: int) -> Tensor:
    """float32 [w, H] of uint8 [tile_bytes]."""
    i, k = torch.meshgrid(torch.arange(w), torch.arange(h), indexing="ij")
    code, low = torch.zeros(w, h, dtype=torch.int64), 0
    for bits, offset in matrix.planes:
        code |= _digit(tile, matrix, (bits, offset), i, k, h) << low
        low += bits
    weight = _level(matrix, code)
    if matrix.step:
        weight = weight * _product(tile, matrix.step, i, k, h)
    if matrix.least:
        weight = weight - matrix.sign * _product(tile, matrix.least, i, k, h)
    return weight


def _product(tile: Tensor, scales: tuple[Any, ...], i: Tensor, k: Tensor, h: int) -> Tensor:
    first, *others = (_numbers(tile, scale, i, k, h) for scale in scales)
    for other in others:
        first = first * other
    return first


def _digit(tile: Tensor, matrix: Any, plane: tuple[int, int], i: Tensor, k: Tensor, h: int) -> Tensor:
    bits, offset = plane
    if not matrix.words:
        size = bits // 8
        octets = tile[offset : offset + i.numel() * size].view(*i.shape, size).long()
        return (octets << 8 * torch.arange(size)).sum(-1)
    digits = 16 // bits
    if not matrix.down:
        row = -(-h // (32 * digits)) * 64
        at, shift = offset + i * row + k // (32 * digits) * 64 + k % 32 * 2, k // 32 % digits * bits
    elif digits == 2:
        at, shift = offset + (i // 2 * h + k) * 2, i % 2 * bits
    else:
        at = offset + ((i // (2 * digits) * h + k) * 2 + i % 2) * 2
        shift = i % (2 * digits) // 2 * bits
    word = tile[at].long() | tile[at + 1].long() << 8
    return word >> shift & (1 << bits) - 1


def _level(matrix: Any, code: Tensor) -> Tensor:
    if matrix.level == "e2m1":
        return torch.tensor([*_E2M1, *(-m for m in _E2M1)])[code]
    if matrix.level == "e4m3":
        return code.to(torch.uint8).view(torch.float8_e4m3fn).float()
    if matrix.level == "int8":
        return code.to(torch.uint8).view(torch.int8).float()
    if matrix.level == "iq4":
        return torch.tensor(IQ4, dtype=torch.float32)[code]
    if matrix.level in PLAIN:
        kind = _DTYPES[matrix.level]
        return code.to(torch.int32 if kind.itemsize == 4 else torch.int16).view(kind).float()
    return (code - matrix.zero).float()


def _numbers(tile: Tensor, scale: Any, i: Tensor, k: Tensor, h: int) -> Tensor:
    """float32, spread over the weights they cover."""
    dtype = _DTYPES[scale.kind]
    index = i // scale.tall * -(-h // scale.wide) + k // scale.wide if scale.tall else torch.zeros_like(i)
    used = int(index.max()) + 1
    values = tile[scale.offset : scale.offset + used * dtype.itemsize].contiguous().view(dtype)
    if scale.kind == "e8m0":
        return torch.ldexp(torch.ones(values.shape), values.int() - 127)[index]
    values = values.float() if scale.kind not in _FROM_BYTE else _FROM_BYTE[scale.kind](values.int()).float()
    return values[index]
