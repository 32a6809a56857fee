"""What dialects refuse: methods and forms by name, everything incomplete at once, before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from freetoken.core.errors import WeightsError
from freetoken.weights.load import Checkpoint, open_checkpoint

U8, F8, I32 = torch.uint8, torch.float8_e4m3fn, torch.int32


def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8 if dtype == F8 else dtype).view(dtype)


def opened(
    path: Path, settings: dict[str, Any] | None, tensors: dict[str, Tensor], **files: Any
) -> Checkpoint:
    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"model_type": "any"}
    if settings is not None:
        config["quantization_config"] = settings
    (path / "config.json").write_text(json.dumps(config))
    for name, body in files.items():
        (path / f"{name}.json").write_text(json.dumps(body))
    save_file({f"model.layers.0.{name}": tensor for name, tensor in tensors.items()}, path / "m.safetensors")
    return open_checkpoint(path)


def refused(path: Path, settings: dict[str, Any], tensors: dict[str, Tensor]) -> WeightsError:
    with pytest.raises(WeightsError) as e:
        opened(path, settings, tensors)
    assert e.value.hint
    return e.value


NVFP4 = {
    "a.weight": zeros(U8, 8, 16),
    "a.weight_scale": zeros(F8, 8, 2),
    "a.weight_scale_2": torch.tensor(1.0),
}
GPTQ = {
    "a.qweight": zeros(I32, 8, 16),
    "a.qzeros": zeros(I32, 2, 2),
    "a.scales": zeros(torch.float16, 2, 16),
}
MODELOPT, BLOCKS = {"quant_method": "modelopt"}, {"quant_method": "fp8", "weight_block_size": [128, 128]}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Tensor], str]] = {
    "blocks of another size": ({**BLOCKS, "weight_block_size": [64, 64]}, {}, "weight_block_size"),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, {}, "e5m2"),
    "another AWQ": ({"quant_method": "awq", "version": "gemv"}, {}, "gemv"),
    "another GPTQ": ({"quant_method": "gptq", "checkpoint_format": "marlin"}, {}, "marlin"),
    "eight bits": (
        {"quant_method": "gptq"},
        {**GPTQ, "a.qweight": zeros(I32, 16, 16), "a.qzeros": zeros(I32, 2, 4)},
        "8 bits",
    ),
    "odd groups": (
        {"quant_method": "gptq"},
        {**GPTQ, "a.qzeros": zeros(I32, 4, 2), "a.scales": zeros(torch.float16, 4, 16)},
        "groups are 16 wide",
    ),
    "scales of another shape": (MODELOPT, {**NVFP4, "a.weight_scale": zeros(F8, 8, 3)}, r"\[8, 3\]"),
    "scales of no known shape": (
        BLOCKS, {"a.weight": zeros(F8, 8, 300), "a.weight_scale_inv": torch.ones(8, 2)}, r"\[8, 2\]",
    ),
    "many whole scales": (MODELOPT, {**NVFP4, "a.weight_scale_2": torch.ones(8)}, "one number"),
    "rescaled inputs": (MODELOPT, {**NVFP4, "a.pre_quant_scale": torch.ones(32)}, "pre_quant_scale.*AWQ"),
    "int8": (
        {"quant_method": "compressed-tensors",
         "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}}}},
        {"a.weight_packed": zeros(I32, 8, 16), "a.weight_scale": zeros(torch.float16, 8, 2)},
        "8 bits",
    ),
    "flat blocks": (
        {"quant_method": "mxfp4"}, {"a_blocks": zeros(U8, 8, 16), "a_scales": zeros(U8, 8)}, "K / 32, 16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FORMS)
def test_a_form_that_is_not_read_is_refused_by_name(case: str, tmp_path: Path) -> None:
    settings, tensors, text = FORMS[case]
    error = refused(tmp_path, settings, tensors or NVFP4)
    assert error.code == "unsupported_quantization"
    with pytest.raises(WeightsError, match=text):
        raise error


def test_a_method_that_nobody_reads_lists_those_that_are(tmp_path: Path) -> None:
    error = refused(tmp_path, {"quant_method": "bitsandbytes"}, NVFP4)
    assert error.code == "unsupported_quantization"
    assert "bitsandbytes" in error.message and "gptq" in error.message and "modelopt" in error.message


LACKING: dict[str, tuple[dict[str, Any], dict[str, Tensor], tuple[str, ...]]] = {
    "no scale at all": (MODELOPT, {"a.weight": NVFP4["a.weight"]}, ("a.weight_scale", "a.weight_scale_2")),
    "scales without codes": (
        {"quant_method": "compressed-tensors"}, {"a.weight_scale": torch.ones(8, 1)}, ("a.weight_scale",),
    ),
    "codes of another type": (
        BLOCKS, {"a.weight": zeros(torch.bfloat16, 8, 8), "a.weight_scale_inv": torch.ones(1, 1)},
        ("a.weight_scale_inv",),
    ),
    "no groups under act-order": ({"quant_method": "gptq", "desc_act": True}, GPTQ, ("a.g_idx",)),
    "no zeros": (
        {"quant_method": "compressed-tensors",
         "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int", "symmetric": False}}}},
        {"a.weight_packed": zeros(I32, 8, 16), "a.weight_scale": zeros(torch.float16, 8, 2)},
        ("a.weight_zero_point",),
    ),
    "no codes": (
        {"quant_method": "awq"}, {n: t for n, t in GPTQ.items() if n != "a.qweight"},
        ("a.qzeros", "a.scales"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LACKING)
def test_what_is_incomplete_is_named_whole(case: str, tmp_path: Path) -> None:
    settings, tensors, names = LACKING[case]
    error = refused(tmp_path, settings, tensors)
    assert error.code == "missing_tensor"
    assert all(f"model.layers.0.{name}" in error.message for name in names)


def test_plain_modules_stay_plain_and_scales_of_activations_are_dropped(tmp_path: Path) -> None:
    plain = {"b.weight": torch.ones(4, 4), "b.bias": torch.ones(4), "b.k_scale": torch.tensor(1.0)}
    inputs = {"a.input_scale": torch.tensor(2.0)}
    source = opened(tmp_path, MODELOPT, {**NVFP4, **plain, **inputs}).source
    names = sorted(name.removeprefix("model.layers.0.") for name in source.names())
    assert names == ["a.weight", "b.bias", "b.weight"]
    assert source.coding("model.layers.0.a.weight") == "nvfp4" and not source.coding(
        "model.layers.0.b.weight"
    )
    assert source.shape("model.layers.0.a.weight") == (8, 32)
    assert source.stored_bytes("model.layers.0.a.weight") == 8 * 16 + 16 + 4
    assert torch.equal(source.read("model.layers.0.b.weight"), torch.ones(4, 4))


@pytest.mark.parametrize("part", ["mtp.layers.0.fc", "visual.blocks.0.mlp"])
def test_parts_that_text_does_not_need_are_not_judged(part: str, tmp_path: Path) -> None:
    tensors = {f"model.layers.0.{name}": tensor for name, tensor in NVFP4.items()}
    tensors[f"{part}.weight"] = zeros(U8, 8, 16)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "any", "quantization_config": MODELOPT}))
    save_file(tensors, tmp_path / "m.safetensors")
    assert sorted(open_checkpoint(tmp_path).source.names()) == ["model.layers.0.a.weight"]


def test_settings_of_the_text_part_and_beside_the_config_are_found(tmp_path: Path) -> None:
    source = opened(
        tmp_path / "beside", None, NVFP4, hf_quant_config={"quantization": {"quant_algo": "NVFP4"}}
    )
    assert source.source.coding("model.layers.0.a.weight") == "nvfp4"
    config = {"model_type": "any", "text_config": {"quantization_config": MODELOPT}}
    (tmp_path / "beside" / "hf_quant_config.json").unlink()
    (tmp_path / "beside" / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(tmp_path / "beside").source.coding("model.layers.0.a.weight") == "nvfp4"
    (tmp_path / "beside" / "config.json").write_text(json.dumps({"model_type": "any"}))
    (tmp_path / "beside" / "hf_quant_config.json").write_text("{oops")
    with pytest.raises(WeightsError) as e:
        open_checkpoint(tmp_path / "beside")
    assert e.value.code == "invalid_json"


def test_symmetric_codes_with_other_zeros_are_refused_where_they_are_read(tmp_path: Path) -> None:
    source = opened(tmp_path, {"quant_method": "gptq", "sym": True}, GPTQ).source
    with pytest.raises(WeightsError, match=r"model.layers.0.a.weight.*zeros") as e:
        source.read_coded("model.layers.0.a.weight")
    assert e.value.code == "unsupported_quantization"
