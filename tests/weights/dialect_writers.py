"""Tiny checkpoints in every dialect, packed by code that shares nothing with the readers.

A writer takes a matrix's name and numbers, and returns what the dialect stores and the numbers that
these tensors mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
    ),
    "compressed-tensors fp8 tensor": Writer(
        _groups("float-quantized", num_bits=8, type="float", strategy="tensor"), _fp8_whole(1), "fp8_block"
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
    "ModelOpt fp8": Writer({"quant_method": "modelopt", "quant_algo": "FP8"}, _fp8_whole(), "fp8_block"),
    "ModelOpt mixed": Writer(
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, _modelopt_mixed, "nvfp4"
    ),
    "DeepSeek fp8": Writer(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        _fp8_blocks(".weight_scale_inv"),
        "fp8_block",
    ),
    "fp8, one scale": Writer(
        {"quant_method": "fp8", "activation_scheme": "static"}, _fp8_whole(), "fp8_block"
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
