"""Tiny checkpoints in every dialect, packed by code that shares nothing with the readers.

A writer takes a matrix's name and numbers, and returns what the dialect stores and the numbers that
these tensors mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from freetoken.quant import fp8_block, mxfp4, nvfp4

Stored = dict[str, Tensor]


def nibbles(codes: Tensor) -> Tensor:
    """uint8 [.., n] -> [.., n / 2], the first of two in the low half."""
    return codes[..., 0::2] + 16 * codes[..., 1::2]


@dataclass(frozen=True)
class Writer:
    """`store(base, matrix)` -> (tensors, numbers); `settings` is the checkpoint's quantization_config."""

    settings: Mapping[str, Any]
    store: Callable[[str, Tensor], tuple[Stored, Tensor]]
    format: str
    sidecar: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


def _ct_nvfp4(base: str, matrix: Tensor) -> tuple[Stored, Tensor]:
    coded = dict(nvfp4.FORMAT.encode(matrix))
    coded["whole"] = 1.0 / (1.0 / coded["whole"])  # what is stored is the reciprocal
    stored = {
        base + ".weight_packed": nibbles(coded["codes"]),
        base + ".weight_scale": coded["scales"],
        base + ".weight_global_scale": (1.0 / coded["whole"]).reshape(1),
        base + ".input_global_scale": torch.tensor([3.0]),
    }
    coded["whole"] = 1.0 / stored[base + ".weight_global_scale"].reshape(1, 1)
    return stored, nvfp4.FORMAT.decode(coded)


def _ct_mxfp4(base: str, matrix: Tensor) -> tuple[Stored, Tensor]:
    coded = mxfp4.FORMAT.encode(matrix)
    stored = {base + ".weight_packed": nibbles(coded["codes"]), base + ".weight_scale": coded["scales"]}
    return stored, mxfp4.FORMAT.decode(coded)


def _fp8_blocks(scale: str) -> Callable[[str, Tensor], tuple[Stored, Tensor]]:
    def store(base: str, matrix: Tensor) -> tuple[Stored, Tensor]:
        coded = fp8_block.FORMAT.encode(matrix)
        weight = coded["codes"].view(torch.float8_e4m3fn)
        return {base + ".weight": weight, base + scale: coded["scales"]}, fp8_block.FORMAT.decode(coded)

    return store


def _fp8_whole(*shape: int) -> Callable[[str, Tensor], tuple[Stored, Tensor]]:
    """One scale for all, stored with `shape`; a static scale of the input beside it."""

    def store(base: str, matrix: Tensor) -> tuple[Stored, Tensor]:
        scale = matrix.abs().max() / 448
        weight = (matrix / scale).to(torch.float8_e4m3fn)
        stored = {
            base + ".weight": weight,
            base + ".weight_scale": scale.reshape(shape),
            base + ".input_scale": torch.tensor(0.5),
        }
        return stored, weight.float() * scale

    return store


def _modelopt_nvfp4(base: str, matrix: Tensor) -> tuple[Stored, Tensor]:
    coded = nvfp4.FORMAT.encode(matrix)
    stored = {
        base + ".weight": nibbles(coded["codes"]),
        base + ".weight_scale": coded["scales"],
        base + ".weight_scale_2": coded["whole"].reshape(()),
        base + ".input_scale": torch.tensor(0.25),
    }
    return stored, nvfp4.FORMAT.decode(coded)


def _fp8_rows(*last: int) -> Callable[[str, Tensor], tuple[Stored, Tensor]]:
    """One scale a row, in bfloat16."""

    def store(base: str, matrix: Tensor) -> tuple[Stored, Tensor]:
        scale = (matrix.abs().amax(-1, keepdim=True) / 448).bfloat16()
        weight = (matrix / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored = {base + ".weight": weight, base + ".weight_scale": scale.reshape(len(matrix), *last)}
        return stored, weight.float() * scale.float()

    return store


@dataclass(frozen=True)
class Ints:
    """A matrix in four-bit integers: codes [N, K], scales and zeros [N, groups], each column's group [K]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group_of: Tensor

    @property
    def numbers(self) -> Tensor:
        zeros, scales = self.zeros[:, self.group_of], self.scales.float()[:, self.group_of]
        return (self.codes - zeros).float() * scales


def ints(matrix: Tensor, group: int, dtype: torch.dtype, *, zeros: bool, scattered: bool = False) -> Ints:
    """Quantise by groups; `scattered` deals the columns out to groups as act-order does."""
    rows, columns = matrix.shape
    group_of = torch.arange(columns) // group
    if scattered:
        shuffled = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        group_of = group_of[shuffled]
    scales, middles = [], []
    for g in range(columns // group):
        part = matrix[:, group_of == g]
        low, high = part.amin(-1), part.amax(-1)
        scale = ((high - low) / 15 if zeros else part.abs().amax(-1) / 7).to(dtype)
        scales.append(scale)
        middles.append((-low / scale.float()).round().clamp(0, 15) if zeros else torch.full((rows,), 8.0))
    scale, zero = torch.stack(scales, -1), torch.stack(middles, -1)
    codes = (matrix / scale.float()[:, group_of] + zero[:, group_of]).round().clamp(0, 15)
    return Ints(codes.long(), scale, zero.long(), group_of)


def words(codes: Tensor, axis: int, order: Sequence[int] = range(8)) -> Tensor:
    """int32: eight codes along an axis in one word, field j holding neighbour order[j]."""
    codes = codes.movedim(axis, -1).unflatten(-1, (-1, 8))
    word = sum(codes[..., neighbour] << (4 * field) for field, neighbour in enumerate(order))
    assert isinstance(word, Tensor)
    signed = torch.where(word >= 1 << 31, word - (1 << 32), word)
    return signed.to(torch.int32).movedim(-1, axis).contiguous()


def _ct_int4(group: int, *, zeros: bool = False, scattered: bool = False) -> Callable[..., Any]:
    def store(base: str, matrix: Tensor) -> tuple[Stored, Tensor]:
        it = ints(matrix, min(group, matrix.shape[1]), torch.bfloat16, zeros=zeros, scattered=scattered)
        stored = {
            base + ".weight_packed": words(it.codes, 1),
            base + ".weight_scale": it.scales,
            base + ".weight_shape": torch.tensor(matrix.shape),
        }
        if zeros:
            stored[base + ".weight_zero_point"] = words(it.zeros, 0)
        if scattered:
            stored[base + ".weight_g_idx"] = it.group_of.int()
        return stored, it.numbers

    return store


def _gptq(group: int, *, zeros: bool, less_one: bool, act_order: bool = False) -> Callable[..., Any]:
    """Under act-order the experts' gate and up are left in order, which MoE exports do to be servable."""

    def store(base: str, matrix: Tensor) -> tuple[Stored, Tensor]:
        scattered = act_order and not base.endswith((".gate_proj", ".up_proj"))
        it = ints(matrix, min(group, matrix.shape[1]), torch.float16, zeros=zeros, scattered=scattered)
        it = replace(it, zeros=it.zeros.clamp(min=1)) if less_one else it
        stored = {
            base + ".qweight": words(it.codes.t(), 0),
            base + ".qzeros": words(it.zeros.t() - int(less_one), 1),
            base + ".scales": it.scales.t().contiguous(),
            base + ".g_idx": it.group_of.int(),
        }
        return stored, it.numbers

    return store


def _awq(group: int) -> Callable[..., Any]:
    def store(base: str, matrix: Tensor) -> tuple[Stored, Tensor]:
        it = ints(matrix, min(group, matrix.shape[1]), torch.float16, zeros=True)
        shuffled = (0, 2, 4, 6, 1, 3, 5, 7)
        stored = {
            base + ".qweight": words(it.codes.t(), 1, shuffled),
            base + ".qzeros": words(it.zeros.t(), 1, shuffled),
            base + ".scales": it.scales.t().contiguous(),
        }
        return stored, it.numbers

    return store


def _modelopt_mixed(base: str, matrix: Tensor) -> tuple[Stored, Tensor]:
    """Experts in nvfp4, attention in fp8."""
    return (_modelopt_nvfp4 if ".experts." in base else _fp8_whole())(base, matrix)


def _groups(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


_WIDE = {"hidden_size": 128, "moe_intermediate_size": 128, "head_dim": 32}
_BLOCKS = {"hidden_size": 256, "moe_intermediate_size": 160}

WRITERS: dict[str, Writer] = {
    "compressed-tensors nvfp4": Writer(
        _groups("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16), _ct_nvfp4, "nvfp4"
    ),
    "compressed-tensors mxfp4": Writer(
        _groups("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32), _ct_mxfp4, "mxfp4"
    ),
    "compressed-tensors fp8 blocks": Writer(
        _groups("float-quantized", num_bits=8, type="float", strategy="block"),
        _fp8_blocks(".weight_scale"),
        "fp8_block",
        extra=_BLOCKS,
    ),
    "compressed-tensors fp8 tensor": Writer(
        _groups("float-quantized", num_bits=8, type="float", strategy="tensor"), _fp8_whole(1), "fp8_tensor"
    ),
    "ModelOpt nvfp4": Writer(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, _modelopt_nvfp4, "nvfp4"
    ),
    "ModelOpt nvfp4, sidecar": Writer(
        {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}},
        _modelopt_nvfp4,
        "nvfp4",
        sidecar="hf_quant_config.json",
    ),
    "ModelOpt fp8": Writer({"quant_method": "modelopt", "quant_algo": "FP8"}, _fp8_whole(), "fp8_tensor"),
    "ModelOpt mixed": Writer(
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, _modelopt_mixed, "nvfp4"
    ),
    "DeepSeek fp8": Writer(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        _fp8_blocks(".weight_scale_inv"),
        "fp8_block",
        extra=_BLOCKS,
    ),
    "fp8, one scale": Writer(
        {"quant_method": "fp8", "activation_scheme": "static"}, _fp8_whole(), "fp8_tensor"
    ),
    "compressed-tensors fp8 rows": Writer(
        _groups("float-quantized", num_bits=8, type="float", strategy="channel"),
        _fp8_rows(1),
        "fp8_channel",
    ),
    "ModelOpt fp8 rows": Writer(
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, _fp8_rows(), "fp8_channel"
    ),
    "compressed-tensors int4": Writer(
        _groups("pack-quantized", num_bits=4, type="int", group_size=32), _ct_int4(32), "int4_g32"
    ),
    "compressed-tensors int4 with zeros": Writer(
        _groups("pack-quantized", num_bits=4, type="int", group_size=128, symmetric=False),
        _ct_int4(128, zeros=True),
        "int4_zp_g128",
        extra=_WIDE,
    ),
    "AWQ": Writer({"quant_method": "awq", "bits": 4, "version": "gemm"}, _awq(32), "int4_zp_g32"),
    "AWQ, groups of 64": Writer(
        {"quant_method": "awq", "bits": 4, "version": "gemm"},
        _awq(64),
        "int4_zp_g64",
        extra={**_WIDE, "moe_intermediate_size": 64},
    ),
    "AWQ, one group a row": Writer(
        {"quant_method": "awq", "bits": 4, "version": "gemm"},
        _awq(256),
        "int4_zp_g128",
        extra={**_WIDE, "hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 64},
    ),
    "GPTQ": Writer(
        {"quant_method": "gptq", "bits": 4, "sym": True, "desc_act": False},
        _gptq(32, zeros=False, less_one=True),
        "int4_g32",
    ),
    "GPTQ with zeros": Writer(
        {"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": False},
        _gptq(32, zeros=True, less_one=True),
        "int4_zp_g32",
    ),
    "GPTQ, second version": Writer(
        {"quant_method": "gptq", "bits": 4, "sym": False, "checkpoint_format": "gptq_v2"},
        _gptq(32, zeros=True, less_one=False),
        "int4_zp_g32",
    ),
    "GPTQ in act-order": Writer(
        {"quant_method": "gptq", "bits": 4, "sym": True, "desc_act": True},
        _gptq(32, zeros=False, less_one=True, act_order=True),
        "int4_g32",
        extra={"moe_intermediate_size": 64},
    ),
    "GPTQ, sidecar": Writer(
        {"bits": 4, "sym": True, "desc_act": False},
        _gptq(32, zeros=False, less_one=True),
        "int4_g32",
        sidecar="quantize_config.json",
    ),
}


def code(tensors: Mapping[str, Tensor], writer: Writer) -> tuple[Stored, Stored]:
    """(what the dialect stores, the same model in plain numbers): projections coded, the rest as it is."""
    stored: Stored = {}
    plain: Stored = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            some, numbers = writer.store(name.removesuffix(".weight"), tensor)
            stored |= some
            plain[name] = numbers
        else:
            stored[name] = plain[name] = tensor
    return stored, plain
