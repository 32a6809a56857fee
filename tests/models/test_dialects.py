"""Every dialect of coded checkpoints: its logits are those of the same model in plain numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from freetoken.core.errors import WeightsError
from freetoken.experts import bank as expert_bank
from freetoken.models import qwen3_moe
from freetoken.quant import _reading as reading
from freetoken.weights.load import open_checkpoint
from tests.models import checkpoints
from tests.models.runner import Runner
from tests.weights.dialect_writers import WRITERS, Writer, code

FAMILY = qwen3_moe.FAMILY
TINY = {**FAMILY.TINY, "num_hidden_layers": 2, "mlp_only_layers": []}
IDS = list(range(5, 24))
SPARED = ("input_scale", "input_global_scale", ".weight_shape")
"""Endings of tensors that no weight depends on."""


def write(path: Path, writer: Writer, tensors: Mapping[str, Tensor]) -> Path:
    raw: dict[str, Any] = {**TINY, **writer.extra}
    if not writer.sidecar:
        raw["quantization_config"] = writer.settings
    checkpoints.write(path, raw, tensors)
    if writer.sidecar:
        (path / writer.sidecar).write_text(json.dumps(writer.settings))
    return path


def both(tmp_path: Path, name: str) -> tuple[Path, Path]:
    """The same model coded and plain."""
    writer = WRITERS[name]
    tensors = checkpoints.random_tensors(FAMILY, {**TINY, **writer.extra}, fused=False)
    stored, plain = code(tensors, writer)
    one = write(tmp_path / "coded", writer, stored)
    return one, checkpoints.write(tmp_path / "plain", {**TINY, **writer.extra}, plain)


@pytest.mark.parametrize("name", WRITERS)
def test_a_coded_checkpoint_gives_the_logits_of_its_numbers(name: str, tmp_path: Path) -> None:
    """Bit by bit where dense matrices are decoded first; bounded where products are made of codes."""
    coded, plain = both(tmp_path, name)
    ours, theirs = (Runner(FAMILY, path, exact=True).run(IDS) for path in (coded, plain))
    assert torch.equal(ours, theirs)
    for sizes in ((), (4, 15)):
        ours, theirs = (Runner(FAMILY, path).run(IDS, sizes) for path in (coded, plain))
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5


@pytest.mark.parametrize("name", WRITERS)
def test_codes_travel_to_the_bank_as_they_are(name: str, tmp_path: Path) -> None:
    coded, plain = both(tmp_path, name)
    config = FAMILY.read_config(json.loads((coded / "config.json").read_text()))
    source, numbers = (open_checkpoint(path).source for path in (coded, plain))
    formats = [reading.of_expert(source, names) for names in FAMILY.expert_tensors(config, source)]
    assert {fmt.name for fmt in formats} == {WRITERS[name].format}
    bank = expert_bank.create(config, formats)
    FAMILY.load_experts(config, source, bank)
    assert not bank.missing()
    moe = config.moe
    assert moe is not None
    assert bank.slot_bytes < 4 * 3 * moe.expert_size * config.hidden_size
    for layer, one in enumerate(bank.layouts):
        tiles = bank.layer(layer)[:, one.tiles_offset : one.used_bytes].unflatten(1, (-1, one.tile_bytes))
        gate, up, down_t = formats[layer].tile_weights(
            tiles[..., : one.code_bytes], one.tile_width, one.hidden
        )
        for expert in range(moe.num_experts):
            at = f"model.layers.{layer}.mlp.experts.{expert}."
            order = source.columns(at + "down_proj.weight")
            inner = slice(None) if order is None else order
            assert torch.equal(gate[expert].flatten(0, 1), numbers.read(at + "gate_proj.weight")[inner])
            assert torch.equal(up[expert].flatten(0, 1), numbers.read(at + "up_proj.weight")[inner])
            down = down_t[expert].flatten(0, 1).t()
            assert torch.equal(down, numbers.read(at + "down_proj.weight")[:, inner])


@pytest.mark.parametrize("name", WRITERS)
def test_a_lost_tensor_is_named_before_anything_is_read(name: str, tmp_path: Path) -> None:
    tensors = checkpoints.random_tensors(FAMILY, {**TINY, **WRITERS[name].extra}, fused=False)
    stored, _ = code(tensors, WRITERS[name])
    at = "model.layers.1.mlp.experts.3.down_proj"
    spared = SPARED if WRITERS[name].settings.get("desc_act") else (*SPARED, ".g_idx")
    for lost in [n for n in stored if n.startswith(at) and not n.endswith(spared)]:
        rest = {n: t for n, t in stored.items() if n != lost}
        path = write(tmp_path / lost, WRITERS[name], rest)
        with pytest.raises(WeightsError) as e:
            Runner(FAMILY, path)
        assert e.value.code == "missing_tensor" and at in e.value.message


@pytest.mark.parametrize("name", WRITERS)
def test_a_tensor_with_other_axes_is_refused_or_means_the_same(name: str, tmp_path: Path) -> None:
    writer = WRITERS[name]
    tensors = checkpoints.random_tensors(FAMILY, {**TINY, **writer.extra}, fused=False)
    stored, _ = code(tensors, writer)
    at, refused, want = "model.layers.1.mlp.experts.3.up_proj", 0, None
    spoil = (lambda t: t.flatten(), lambda t: t[None], lambda t: t.flatten()[0].clone(), lambda t: t)
    for part in [n for n in stored if n.startswith(at) and not n.endswith(SPARED)]:
        for i, other in enumerate(spoil):
            if i == 2 and "scale" in part:
                continue  # one scale for all is another form, that is read
            path = write(tmp_path / f"{part}{i}", writer, {**stored, part: other(stored[part])})
            try:
                source = open_checkpoint(path).source
                if source.shape(f"{at}.weight") != tensors[f"{at}.weight"].shape:
                    refused += 1  # where the model's shapes are compared
                    continue
                kept = {key: value.clone() for key, value in source.read_coded(f"{at}.weight").items()}
            except WeightsError as error:
                assert part in error.message or at in error.message
                refused += 1
                continue
            want = want or kept
            assert all(torch.equal(kept[key].float(), want[key].float()) for key in want), (part, i)
    assert refused and want


def test_all_faults_are_listed_at_once(tmp_path: Path) -> None:
    writer = WRITERS["ModelOpt nvfp4"]
    stored, _ = code(checkpoints.random_tensors(FAMILY, TINY, fused=False), writer)
    lost = [f"model.layers.0.mlp.experts.{i}.up_proj.weight_scale_2" for i in range(3)]
    with pytest.raises(WeightsError) as e:
        open_checkpoint(write(tmp_path, writer, {n: t for n, t in stored.items() if n not in lost}))
    assert all(name in e.value.message for name in lost) and "3 tensors missing" in e.value.message


@pytest.mark.parametrize("where", ["mlp.experts.2.up_proj", "self_attn.o_proj"])
def test_a_scale_that_is_no_number_is_refused_by_name(where: str, tmp_path: Path) -> None:
    writer = WRITERS["ModelOpt nvfp4"]
    stored, _ = code(checkpoints.random_tensors(FAMILY, TINY, fused=False), writer)
    stored[f"model.layers.1.{where}.weight_scale_2"] = torch.tensor(float("nan"))
    path = write(tmp_path, writer, stored)
    config = FAMILY.read_config(TINY)
    with pytest.raises(WeightsError, match=f"layers.1.{where}") as e:
        source = open_checkpoint(path).source
        FAMILY.load_experts(config, source, expert_bank.create(config, reading.find("nvfp4")))
        Runner(FAMILY, path)
    assert e.value.code == "invalid_weights"


def test_act_order_along_the_experts_input_is_refused_by_name(tmp_path: Path) -> None:
    writer = WRITERS["GPTQ in act-order"]
    tensors = checkpoints.random_tensors(FAMILY, {**TINY, **writer.extra}, fused=False)
    stored, _ = code(tensors, writer)
    name = "model.layers.0.mlp.experts.0.up_proj.g_idx"
    stored[name] = stored[name].flip(0)
    path = write(tmp_path, writer, stored)
    config = FAMILY.read_config({**TINY, **writer.extra})
    bank = expert_bank.create(config, reading.find("int4_g32"))
    with pytest.raises(WeightsError, match="layers.0.mlp.experts.0.up_proj.*act-order") as e:
        FAMILY.load_experts(config, open_checkpoint(path).source, bank)
    assert e.value.code == "unsupported_quantization"
