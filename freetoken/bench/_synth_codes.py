"""Random experts in a weight format's codes, made at the speed of memory.

Owns, per format, the tensors that stand for one matrix (as a published dialect names them) and their bytes.
Magnitudes are not normal but spread over two powers of two (plain numbers) or over all codes; `RMS` says what
that makes. `lift` int [rows] are powers of two by which rows are larger. Knows no routing and no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Lift = NDArray[np.int64]
ITEM_BYTES = {"BF16": 2, "F8_E4M3": 1, "U8": 1, "F32": 4, "I32": 4, "I64": 8}
_RMS_BF16, _RMS_E4M3, _RMS_E2M1, _RMS_INT4 = 2.4152, 2.3172, 2.9262, 4.6368
_POOL_BYTES = 24 << 20


class Noise:
    """Random bytes: two windows of one pool, xor-ed; a window pair never comes twice in practice."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng([seed, 1])
        self._pool: Bytes = np.frombuffer(self._rng.bytes(_POOL_BYTES), np.uint8)

    def window(self, seed: Sequence[int]) -> Window:
        return Window(self._pool, np.random.default_rng(seed))


class Window:
    """A stream of random bytes of one expert; for one thread."""

    def __init__(self, pool: Bytes, rng: np.random.Generator) -> None:
        self._pool, self._rng = pool, rng

    def take(self, count: int) -> Bytes:
        """uint8 [count], of which the caller owns every byte."""
        out: Bytes = np.empty(count, np.uint8)
        half = len(self._pool) // 2
        for at in range(0, count, half):
            size = min(half, count - at)
            first, second = (int(i) & ~63 for i in self._rng.integers(0, len(self._pool) - size, 2))
            np.bitwise_xor(
                self._pool[first : first + size],
                self._pool[second : second + size][::-1],
                out=out[at : at + size],
            )
        return out


@dataclass(frozen=True)
class Tensor:
    """One tensor of a matrix: what its name ends in, its type and shape, and how its bytes come."""

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[Window], Bytes]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Coding:
    """A format of random experts.

    matrix        (rows, columns, std wished, lift) -> tensors of a matrix [rows, columns] and the std it has
    quantization  `quantization_config` of config.json
    """

    matrix: Callable[[int, int, float, Lift], tuple[list[Tensor], float]]
    quantization: Mapping[str, Any] | None = None


def _nearest_power(ratio: float) -> int:
    return round(math.log2(ratio))


def _flat(array: NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def bf16(rows: int, columns: int, std: float, lift: Lift, *, transposed: bool = False) -> list[Tensor]:
    """Plain numbers; `transposed`: stored [columns, rows]."""
    power = _nearest_power(std / _RMS_BF16)
    shape = (columns, rows) if transposed else (rows, columns)

    def make(noise: Window) -> Bytes:
        bits = noise.take(2 * rows * columns).view(np.uint16).reshape(shape)
        bits &= 0x80FF
        bits += ((lift + 127 + power) << 7).astype(np.uint16)[(None, ...) if transposed else (..., None)]
        return _flat(bits)

    return [Tensor("" if transposed else ".weight", "BF16", shape, make)]


def _bf16(rows: int, columns: int, std: float, lift: Lift) -> tuple[list[Tensor], float]:
    return bf16(rows, columns, std, lift), bf16_std(std)


def bf16_std(std: float) -> float:
    """What a wish becomes."""
    return _RMS_BF16 * 2.0 ** _nearest_power(std / _RMS_BF16)


def _fp8(rows: int, columns: int, std: float, lift: Lift) -> tuple[list[Tensor], float]:
    scale = std / _RMS_E4M3

    def codes(noise: Window) -> Bytes:
        bits = noise.take(rows * columns).reshape(rows, columns)
        bits &= 0x8F
        bits += ((lift + 8) << 3).astype(np.uint8)[:, None]
        return _flat(bits)

    blocks = (math.ceil(rows / 128), math.ceil(columns / 128))
    scales = _flat(np.full(blocks, scale / 2, np.float32))
    return [
        Tensor(".weight", "F8_E4M3", (rows, columns), codes),
        Tensor(".weight_scale_inv", "F32", blocks, lambda noise: scales),
    ], std


def _nibbles(rows: int, columns: int, suffix: str, dtype: str = "U8") -> Tensor:
    width = columns // 2 // ITEM_BYTES[dtype]
    return Tensor(suffix, dtype, (rows, width), lambda noise: noise.take(rows * columns // 2))


def _mxfp4(rows: int, columns: int, std: float, lift: Lift) -> tuple[list[Tensor], float]:
    power = _nearest_power(std / _RMS_E2M1)
    scales = np.repeat((lift + 127 + power).astype(np.uint8)[:, None], columns // 32, 1)
    return [
        _nibbles(rows, columns, ".weight_packed"),
        Tensor(".weight_scale", "U8", scales.shape, lambda noise: _flat(scales)),
    ], _RMS_E2M1 * 2.0**power


def mxfp4_stacked(
    rows: int, columns: int, std: float, lift: Lift
) -> tuple[list[Tensor], float]:  # the layout of gpt-oss: blocks of 16 bytes
    tensors, real = _mxfp4(rows, columns, std, lift)
    codes, scales = tensors
    blocks = Tensor("_blocks", "U8", (rows, columns // 32, 16), codes.make)
    return [blocks, Tensor("_scales", "U8", scales.shape, scales.make)], real


def _nvfp4(rows: int, columns: int, std: float, lift: Lift) -> tuple[list[Tensor], float]:
    scales = np.repeat(((lift + 7) << 3).astype(np.uint8)[:, None], columns // 16, 1)
    whole = _flat(np.array(std / _RMS_E2M1, np.float32))
    return [
        _nibbles(rows, columns, ".weight"),
        Tensor(".weight_scale", "F8_E4M3", scales.shape, lambda noise: _flat(scales)),
        Tensor(".weight_scale_2", "F32", (), lambda noise: whole),
    ], std


def _int4(rows: int, columns: int, std: float, lift: Lift) -> tuple[list[Tensor], float]:
    power = _nearest_power(std / _RMS_INT4)
    bits = ((lift + 127 + power) << 7).astype(np.uint16)
    scales = np.repeat(bits[:, None], columns // 32, 1)
    shape = _flat(np.array([rows, columns], np.int64))
    return [
        _nibbles(rows, columns, ".weight_packed", "I32"),
        Tensor(".weight_scale", "BF16", scales.shape, lambda noise: _flat(scales)),
        Tensor(".weight_shape", "I64", (2,), lambda noise: shape),
    ], _RMS_INT4 * 2.0**power


def _compressed(format_name: str, kind: str, group: int) -> dict[str, Any]:
    weights = {"num_bits": 4, "type": kind, "group_size": group, "symmetric": True, "strategy": "group"}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": {"targets": ["re:.*mlp.experts.*"], "weights": weights}},
        "ignore": ["lm_head"],
    }


CODINGS: Mapping[str, Coding] = {
    "bf16": Coding(_bf16),
    "fp8": Coding(_fp8, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
    "mxfp4": Coding(_mxfp4, _compressed("mxfp4-pack-quantized", "float", 32)),
    "nvfp4": Coding(_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}),
    "int4": Coding(_int4, _compressed("pack-quantized", "int", 32)),
}
STACKED: Mapping[str, Coding] = {
    "bf16": Coding(
        lambda rows, columns, std, lift: (bf16(rows, columns, std, lift, transposed=True), bf16_std(std))
    ),
    "mxfp4": Coding(
        mxfp4_stacked, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    ),
}
