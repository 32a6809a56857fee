"""Experts laid by one call from tensors as they lie: the bytes of matrix by matrix, and its refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from freetoken.core.errors import WeightsError
from freetoken.core.interfaces import ModelFamily
from freetoken.core.weights import Biases, WeightSource
from freetoken.experts.bank import ExpertBank
from freetoken.experts.record import layout
from freetoken.models import gpt_oss, qwen3_moe
from freetoken.native import unblock
from freetoken.quant import _reading as reading
from freetoken.quant import mxfp4
from freetoken.weights.files import Arena
from freetoken.weights.load import open_checkpoint
from tests.models import checkpoints
from tests.models.test_dialects import TINY, both, write
from tests.models.test_gpt_oss import write_both as gpt_oss_both
from tests.weights.dialect_writers import WRITERS, code, nibbles

pytestmark = pytest.mark.skipif(not unblock.available(), reason="the native library is not built")
FAMILY = qwen3_moe.FAMILY
ELSEWHERE = ("AWQ, one group a row", "GPTQ in act-order")
"""Groups wider than any format's, and columns that are sorted first: taken apart before they are packed."""
EXPERT = "model.layers.1.mlp.experts.2."


class Telling(ExpertBank):
    """A bank that counts what is laid at once."""

    laid = 0

    def put_stored(
        self,
        layer: int,
        expert: int,
        source: WeightSource,
        names: Sequence[str],
        biases: Biases | None = None,
        *,
        alternating: bool = False,
    ) -> bool:
        done = super().put_stored(layer, expert, source, names, biases, alternating=alternating)
        self.laid += done
        return done


def bank_of(path: Path, *, at_once: bool, family: ModelFamily = FAMILY) -> Telling:
    """The experts of a checkpoint, in memory that held something else before."""
    checkpoint = open_checkpoint(path)
    config = family.read_config(checkpoint.config)
    names = family.expert_tensors(config, checkpoint.source)
    formats = [reading.of_expert(checkpoint.source, some) for some in names]
    assert config.moe is not None
    shape, biased = (config.hidden_size, config.moe.expert_size), config.moe.bias
    layouts = [layout(*shape, fmt, biased=biased) for fmt in formats]
    bank = Telling(layouts, formats, config.moe.num_experts)
    bank.buffer.zero_()
    for i, one in enumerate(layouts):
        for record in bank.layer(i):
            one.tiles(record)[:, : one.code_bytes].fill_(0xAA)
    if at_once:
        with checkpoint.files.reading(Arena()):
            family.load_experts(config, checkpoint.source, bank)
    else:
        family.load_experts(config, checkpoint.source, bank)
    assert not bank.missing()
    checkpoint.close()
    return bank


def poisoned(tmp_path: Path, name: str, ending: str, spoil: Tensor) -> Path:
    """A checkpoint of which the first number of one tensor of EXPERT is `spoil`, of the same type."""
    stored, _ = code(
        checkpoints.random_tensors(FAMILY, {**TINY, **WRITERS[name].extra}, fused=False), WRITERS[name]
    )
    tensor = stored[EXPERT + ending].clone()
    tensor.view(-1)[:1] = spoil.to(tensor.dtype)
    return write(tmp_path / "spoilt", WRITERS[name], {**stored, EXPERT + ending: tensor})


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_laid_at_once_has_the_bytes_of_matrix_by_matrix(name: str, tmp_path: Path) -> None:
    path, _ = both(tmp_path, name)
    one, other = bank_of(path, at_once=True), bank_of(path, at_once=False)
    assert torch.equal(one.buffer, other.buffer)
    count = one.num_layers * one.num_experts
    assert (one.laid, other.laid) == (0 if name in ELSEWHERE else count, 0)


@pytest.mark.parametrize("name", ["ModelOpt fp8", "ModelOpt nvfp4", "compressed-tensors int4"])
def test_lines_that_a_row_does_not_fill_end_in_zeros(name: str, tmp_path: Path) -> None:
    writer = replace(WRITERS[name], extra={"hidden_size": 96})
    stored, _ = code(checkpoints.random_tensors(FAMILY, {**TINY, **writer.extra}, fused=False), writer)
    path = write(tmp_path, writer, stored)
    one, other = bank_of(path, at_once=True), bank_of(path, at_once=False)
    assert torch.equal(one.buffer, other.buffer) and one.laid


def test_alternating_rows_of_a_stack_and_biases_are_laid_at_once(tmp_path: Path) -> None:
    path, _ = gpt_oss_both(tmp_path)
    one = bank_of(path, at_once=True, family=gpt_oss.FAMILY)
    other = bank_of(path, at_once=False, family=gpt_oss.FAMILY)
    assert torch.equal(one.buffer, other.buffer)
    assert (one.laid, other.laid) == (one.num_layers * one.num_experts, 0)


def test_a_stack_of_gate_below_up_is_laid_at_once(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {}
    for name, tensor in checkpoints.random_tensors(FAMILY, TINY).items():
        if ".experts." in name:
            codes = mxfp4.FORMAT.encode(tensor)
            tensors[name + "_blocks"] = nibbles(codes["codes"]).unflatten(-1, (-1, 16))
            tensors[name + "_scales"] = codes["scales"]
        else:
            tensors[name] = tensor
    raw = {**TINY, "quantization_config": {"quant_method": "mxfp4"}}
    path = checkpoints.write(tmp_path, raw, tensors)
    one, other = bank_of(path, at_once=True), bank_of(path, at_once=False)
    assert torch.equal(one.buffer, other.buffer)
    assert (one.laid, other.laid) == (one.num_layers * one.num_experts, 0)


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("ModelOpt nvfp4", "up_proj.weight_scale"),
        ("ModelOpt nvfp4", "down_proj.weight_scale_2"),
        ("compressed-tensors nvfp4", "gate_proj.weight_global_scale"),
        ("compressed-tensors fp8 blocks", "down_proj.weight_scale"),
        ("compressed-tensors fp8 rows", "down_proj.weight_scale"),
        ("DeepSeek fp8", "gate_proj.weight"),
        ("fp8, one scale", "up_proj.weight_scale"),
        ("compressed-tensors int4", "down_proj.weight_scale"),
    ],
)
def test_what_is_no_number_is_refused_by_name(name: str, ending: str, tmp_path: Path) -> None:
    path = poisoned(tmp_path, name, ending, torch.tensor(float("nan")))
    matrix = EXPERT + ending.partition(".")[0]
    for at_once in (True, False):
        with pytest.raises(WeightsError, match=matrix) as e:
            bank_of(path, at_once=at_once)
        assert e.value.code == "invalid_weights"


def test_a_power_of_two_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    path = poisoned(tmp_path, "compressed-tensors mxfp4", "up_proj.weight_scale", torch.tensor(255))
    with pytest.raises(WeightsError, match=EXPERT + "up_proj"):
        bank_of(path, at_once=True)


@pytest.mark.parametrize("scale", [3e-7, 70000.0, 2.0**-30, 1.0])
def test_scales_beyond_float16_keep_a_power_of_two(scale: float, tmp_path: Path) -> None:
    """bfloat16 has exponents that float16 lacks; -0 and subnormal numbers are among them."""
    name = "compressed-tensors int4"
    stored, _ = code(checkpoints.random_tensors(FAMILY, TINY, fused=False), WRITERS[name])
    for key, tensor in stored.items():
        if key.endswith(".weight_scale") and ".experts." in key:
            tensor.mul_(scale / float(tensor.abs().max()))
            tensor.view(-1)[0] = -0.0
    path = write(tmp_path, WRITERS[name], stored)
    one, other = bank_of(path, at_once=True), bank_of(path, at_once=False)
    assert torch.equal(one.buffer, other.buffer) and one.laid


def test_zeros_that_are_not_what_the_config_says_are_refused_by_name(tmp_path: Path) -> None:
    stored, _ = code(checkpoints.random_tensors(FAMILY, TINY, fused=False), WRITERS["GPTQ"])
    stored[EXPERT + "up_proj.qzeros"][0, 0] += 1
    with pytest.raises(WeightsError, match=EXPERT + "up_proj.*zeros other than 8"):
        bank_of(write(tmp_path, WRITERS["GPTQ"], stored), at_once=True)


def test_a_file_that_was_cut_after_opening_is_refused_by_name(tmp_path: Path) -> None:
    path, _ = both(tmp_path, "ModelOpt nvfp4")
    checkpoint = open_checkpoint(path)
    config = FAMILY.read_config(checkpoint.config)
    file = path / "model.safetensors"
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size // 4)
    bank = Telling([layout(64, 32, reading.find("nvfp4"))] * 2, [reading.find("nvfp4")] * 2, 8)
    with (
        pytest.raises(WeightsError, match=r"model\.safetensors ends at") as e,
        checkpoint.files.reading(Arena()),
    ):
        FAMILY.load_experts(config, checkpoint.source, bank)
    assert e.value.code == "truncated_shard"
