"""config.json to ModelConfig: spellings, defaults, and faults reported all at once."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken.core import choices
from freetoken.core.batch import BatchBuffers, Segment
from freetoken.core.errors import ConfigError, WeightsError
from freetoken.core.interfaces import ModelFamily, Numerics
from freetoken.devices.cpu import CpuDevice
from freetoken.layers import rope as rope_layer
from freetoken.layers.linear import Linear
from freetoken.models import gpt_oss, llama, null, qwen2, qwen3, qwen3_5_moe, qwen3_moe
from freetoken.models._decoder import Decoder
from freetoken.weights.load import open_checkpoint
from tests.models import checkpoints
from tests.models.reference_experts import ReferenceExperts
from tests.models.runner import Runner

WITH_WEIGHTS = [qwen3_5_moe.FAMILY, qwen3_moe.FAMILY]
DENSE = [llama.FAMILY, qwen2.FAMILY, qwen3.FAMILY]


def test_every_family_reads_its_specimen_and_claims_model_types_alone() -> None:
    claimed: list[str] = []
    for name in choices.names("freetoken.models"):
        family: ModelFamily = choices.load("freetoken.models", name).FAMILY
        config = family.read_config(family.TINY)
        assert config.family == name
        claimed += family.model_types
        if config.moe:
            assert config.moe.expert_size // 8 >= 4, "at least four tiles of the smallest width"
    assert len(claimed) == len(set(claimed))


def test_old_and_new_spellings_mean_the_same() -> None:
    new = {**qwen3_moe.TINY}
    old = {k: v for k, v in new.items() if k not in ("rope_parameters", "num_experts", "dtype")}
    old |= {"rope_theta": 10000.0, "num_local_experts": 8, "torch_dtype": "float32"}
    assert qwen3_moe.FAMILY.read_config(old) == qwen3_moe.FAMILY.read_config(new)
    scaled = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    spec = qwen3_moe.FAMILY.read_config({**old, "rope_scaling": scaled}).attention
    assert spec is not None and spec.rope_scaling == scaled


def test_text_config_is_read_and_the_wrapper_decides_on_tying() -> None:
    text = {**qwen3_5_moe.TINY, "tie_word_embeddings": True}
    config = qwen3_5_moe.FAMILY.read_config(
        {"model_type": "qwen3_5_moe", "tie_word_embeddings": False, "text_config": text}
    )
    plain = qwen3_5_moe.FAMILY.read_config(qwen3_5_moe.TINY)
    assert config == plain
    assert qwen3_5_moe.FAMILY.read_config(text) == dataclasses.replace(plain, tie_embeddings=True)


def test_end_tokens_may_be_absent_one_or_many() -> None:
    for given, want in ((None, ()), (7, (7,)), ([7, 9], (7, 9))):
        assert qwen3_moe.FAMILY.read_config({**qwen3_moe.TINY, "eos_token_id": given}).eos_ids == want


@pytest.mark.parametrize("family", WITH_WEIGHTS, ids=lambda f: f.model_types[0])
def test_all_faults_of_a_config_come_at_once(family: ModelFamily) -> None:
    raw: dict[str, Any] = {
        **family.TINY,
        "num_key_value_heads": 3,
        "hidden_act": "magic",
        "vocab_size": "many",
    }
    del raw["hidden_size"], raw["moe_intermediate_size"]
    raw["rope_parameters"] = {"rope_type": "spiral"}
    with pytest.raises(WeightsError) as caught:
        family.read_config(raw)
    assert caught.value.code == "invalid_model_config"
    for word in (
        "hidden_size",
        "moe_intermediate_size",
        "magic",
        "spiral",
        "vocab_size",
        "num_key_value_heads",
    ):
        assert word in caught.value.message


@pytest.mark.parametrize("family", DENSE, ids=lambda f: f.model_types[0])
def test_faults_and_surprises_of_a_dense_checkpoint_come_at_once(family: ModelFamily, tmp_path: Path) -> None:
    tensors = checkpoints.random_tensors(family, family.TINY)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(64)
    with pytest.raises(WeightsError) as caught:
        Runner(family, checkpoints.write(tmp_path, family.TINY, tensors))
    assert "layers.1.mlp.up_proj.weight" in caught.value.message and "o_proj.bias" in caught.value.message
    raw = {**family.TINY, "num_key_value_heads": 3, "intermediate_size": "wide"}
    with pytest.raises(WeightsError, match=r"num_key_value_heads.*intermediate|intermediate.*num_key_value"):
        family.read_config(raw)


def test_a_dense_config_says_what_it_leaves_out() -> None:
    """Absent keys mean what the family's published configs mean by them."""
    assert qwen3.FAMILY.read_config(_without(qwen3.TINY, "head_dim")).attention.head_dim == 128  # type: ignore[union-attr]
    for family, biases in ((llama.FAMILY, (False, False)), (qwen2.FAMILY, (True, False))):
        spec = family.read_config(family.TINY).attention
        assert spec is not None and (spec.bias, spec.out_bias, spec.head_dim) == (*biases, 16)
    raw = {**qwen2.TINY, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
    assert [layer.window for layer in qwen2.FAMILY.read_config(raw).layers] == [None, 9, 9]


def _without(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k != key}


def test_an_unknown_layer_type_is_refused_by_name() -> None:
    with pytest.raises(WeightsError, match="mamba"):
        qwen3_5_moe.FAMILY.read_config({**qwen3_5_moe.TINY, "layer_types": ["mamba"] * 4})


@pytest.mark.parametrize("family", WITH_WEIGHTS, ids=lambda f: f.model_types[0])
def test_missing_unknown_and_ill_shaped_tensors_are_listed_together(
    family: ModelFamily, tmp_path: Path
) -> None:
    tensors = checkpoints.random_tensors(family, family.TINY)
    missing = ["model.norm.weight", "model.layers.2.mlp.gate.weight", "model.layers.3.mlp.experts.down_proj"]
    for name in missing:
        del tensors[name]
    tensors["model.layers.0.surprise.weight"] = torch.zeros(1)
    tensors["lm_head.weight"] = torch.zeros(7, 64)
    with pytest.raises(WeightsError) as caught:
        Runner(family, checkpoints.write(tmp_path, family.TINY, tensors))
    assert caught.value.code == "missing_tensor"
    for name in (*missing, "model.layers.0.surprise.weight", "lm_head.weight has shape [7, 64]"):
        assert name in caught.value.message


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_router_that_is_no_number_is_refused_by_name(name: str, tmp_path: Path) -> None:
    """Choosing only compares: a lost row would send tokens elsewhere and show in nothing."""
    tensors = checkpoints.random_tensors(gpt_oss.FAMILY, gpt_oss.FAMILY.TINY)
    at = f"model.layers.1.mlp.router.{name}"
    tensors[at][2] = float("nan")
    with pytest.raises(WeightsError) as caught:
        Runner(gpt_oss.FAMILY, checkpoints.write(tmp_path, gpt_oss.FAMILY.TINY, tensors))
    assert caught.value.code == "invalid_weights" and at in caught.value.message


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool], ids=str)
def test_integers_without_a_scale_are_refused_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    family = qwen3_moe.FAMILY
    tensors = checkpoints.random_tensors(family, family.TINY)
    at = "model.layers.0.self_attn.q_proj.weight"
    tensors[at] = tensors[at].to(dtype)
    with pytest.raises(WeightsError) as caught:
        Runner(family, checkpoints.write(tmp_path, family.TINY, tensors))
    assert caught.value.code == "unknown_weight_format" and at in caught.value.message


def test_a_tied_checkpoint_may_still_carry_its_head(tmp_path: Path) -> None:
    raw = {**qwen3_moe.TINY, "tie_word_embeddings": True}
    tensors = checkpoints.random_tensors(qwen3_moe.FAMILY, raw)
    want = Runner(qwen3_moe.FAMILY, checkpoints.write(tmp_path / "a", raw, tensors)).run([5, 6, 7])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    path = checkpoints.write(tmp_path / "b", raw, tensors)
    assert torch.equal(Runner(qwen3_moe.FAMILY, path).run([5, 6, 7]), want)


def test_a_tied_head_is_the_embedding_and_no_copy_of_it(tmp_path: Path) -> None:
    raw = {**qwen3_moe.TINY, "tie_word_embeddings": True, "vocab_size": 1 << 14}
    model = Runner(
        qwen3_moe.FAMILY, checkpoints.write(tmp_path, raw, checkpoints.random_tensors(qwen3_moe.FAMILY, raw))
    ).model
    assert isinstance(model, Decoder) and isinstance(model._head, Linear)
    table = model._embedding.weight
    assert isinstance(table, torch.Tensor) and table.numel() * 4 > 2 << 20, "large enough to be placed"
    assert model._head.weight.data_ptr() == table.data_ptr()


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_sixteen_bit_sources_compute_in_any_dtype(stored: torch.dtype, tmp_path: Path) -> None:
    family = qwen3_5_moe.FAMILY
    tensors = {n: t.to(stored) for n, t in checkpoints.random_tensors(family, family.TINY).items()}
    path = checkpoints.write(tmp_path, family.TINY, tensors)
    want = Runner(family, path).run(list(range(3, 20)))
    for dtype in (torch.bfloat16, torch.float16):
        logits = Runner(family, path, dtype=dtype).run(list(range(3, 20)))
        assert logits.dtype == torch.float32
        assert float((logits - want).abs().mean() / want.abs().mean()) < 0.4


def test_dense_weights_do_not_look_into_the_files(tmp_path: Path) -> None:
    path = checkpoints.write_tiny(tmp_path, qwen3_5_moe.FAMILY)
    runner = Runner(qwen3_5_moe.FAMILY, path)
    want = runner.run([5, 6, 7])
    file = path / "model.safetensors"
    file.write_bytes(b"\0" * file.stat().st_size)
    assert torch.equal(runner.run([5, 6, 7]), want)


def test_units_are_as_large_as_their_layout_says() -> None:
    config = qwen3_5_moe.FAMILY.read_config(qwen3_5_moe.TINY)
    pages, states = qwen3_5_moe.FAMILY.state_specs(config, 16, torch.bfloat16)
    assert (pages.unit, pages.unit_bytes) == ("page", 1 * 2 * 16 * 2 * 16 * 2)
    conv, delta = 3 * (2 * 2 * 16 + 4 * 16) * 3 * 2, 3 * 4 * 16 * 16 * 4
    assert (states.unit, states.resume) == ("state", "checkpoint")
    assert states.unit_bytes == -(-conv // 256) * 256 + delta and states.unit_bytes % 256 == 0
    (only,) = qwen3_moe.FAMILY.state_specs(qwen3_moe.FAMILY.read_config(qwen3_moe.TINY), 16, torch.bfloat16)
    assert only.unit == "page"


def test_the_null_model_needs_no_checkpoint_and_always_says_its_token() -> None:
    family = null.FAMILY
    config = family.read_config(family.TINY)
    (spec,) = family.state_specs(config, 16, torch.float32)
    device = CpuDevice()
    pool = device.pool("kv", spec.unit_bytes, 4, min_units=1, max_units=4)
    empty: Any = None
    model = family.build(config, empty, device, Numerics(), {"kv": pool})
    buffers = BatchBuffers(8, 4, 4, 16, torch.device("cpu"), torch.zeros(4, dtype=torch.int64))
    ids = torch.arange(3, dtype=torch.int32).numpy()
    batch = buffers.fill([Segment(ids, 0, [1], 0, 0), Segment(ids[:1], 4, [2], 0, 1)])
    logits = model.forward(batch, ReferenceExperts())
    assert logits.shape == (2, 128) and logits.argmax(-1).tolist() == [5, 5]


def test_a_simulated_device_is_told_what_every_part_costs(tmp_path: Path) -> None:
    path = checkpoints.write_tiny(tmp_path, qwen3_moe.FAMILY)
    checkpoint = open_checkpoint(path)
    config = qwen3_moe.FAMILY.read_config(checkpoint.config)

    class Counting(CpuDevice):
        charges: list[tuple[float, float]] = []

        def charge(self, num_bytes: float, flops: float) -> None:
            self.charges.append((num_bytes, flops))

    device = Counting()
    (spec,) = qwen3_moe.FAMILY.state_specs(config, 4, torch.float32)
    pool = device.pool("kv", spec.unit_bytes, 4, min_units=1, max_units=4)
    model = qwen3_moe.FAMILY.build(config, checkpoint.source, device, Numerics(torch.float32), {"kv": pool})
    experts = ReferenceExperts()
    qwen3_moe.FAMILY.load_experts(config, checkpoint.source, experts)
    buffers = BatchBuffers(8, 4, 4, 4, torch.device("cpu"), torch.zeros(4, dtype=torch.int64))
    ids = torch.arange(3, dtype=torch.int32).numpy()
    model.forward(buffers.fill([Segment(ids, 0, [1], 0, 0)]), experts)
    assert len(device.charges) == 4 + 4 + 1
    assert all(num_bytes > 0 and flops > 0 for num_bytes, flops in device.charges)


def test_exact_mode_insists_on_float32(tmp_path: Path) -> None:
    path = checkpoints.write_tiny(tmp_path, qwen3_moe.FAMILY)
    with pytest.raises(ConfigError) as caught:
        Runner(qwen3_moe.FAMILY, path, dtype=torch.bfloat16, exact=True)
    assert caught.value.code == "invalid_config"


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["hidden_size", "max_position_embeddings", "rms_norm_eps"])
def test_no_number_of_a_config_is_negative_or_endless(key: str, value: float) -> None:
    with pytest.raises(WeightsError, match=key):
        qwen3_moe.FAMILY.read_config({**qwen3_moe.TINY, key: value})


HOSTILE = (
    None,
    -1,
    0,
    1 << 40,
    1 << 70,
    0.5,
    7,
    float("nan"),
    float("inf"),
    "x",
    [],
    [[]],
    {},
    {"a": 1},
    True,
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Ways to everything in a config, dicts and the heads of lists."""
    items = (
        value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    )
    return [p for key, one in items for p in [(*at, key), *paths(one, (*at, key))]]


@pytest.mark.parametrize("family", [*WITH_WEIGHTS, *DENSE, gpt_oss.FAMILY], ids=lambda f: type(f).__module__)
def test_no_value_in_a_config_does_more_than_be_refused(family: ModelFamily) -> None:
    """Whatever is accepted has sizes that kernels may index by."""
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled["original_max_position_embeddings"] = 64
    for rope in ({}, {"rope_parameters": scaled}):
        raw = {**family.TINY, **rope}
        for path in paths(raw):
            for value in HOSTILE:
                changed = copy.deepcopy(raw)
                inside = changed
                for key in path[:-1]:
                    inside = inside[key]
                inside[path[-1]] = value
                try:
                    config = family.read_config(changed)
                except WeightsError as error:
                    assert error.code == "invalid_model_config"
                    continue
                spec = config.attention
                assert spec is not None and 0 < spec.rotary_dim <= spec.head_dim and spec.num_kv_heads > 0
                inverse, scale = rope_layer.frequencies(spec, config.max_position)
                assert inverse.isfinite().all() and 0 < scale < 1e30 and config.max_position <= 1 << 24
                assert all(0 <= i < 1 << 31 for i in config.eos_ids)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"partial_rotary_factor": 7, "rope_parameters": {}}, "partial_rotary_factor is 7"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta is 'x'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": []}}, "rope's factor is"),
        ({"rope_parameters": {"rope_type": "factors", "factors": [1.0]}}, "rope has 1 factors for"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers is 1099511627776, expected at most 4096"),
        ({"num_experts": 1 << 40}, "num_experts is 1099511627776, expected at most 65536"),
        ({"max_position_embeddings": 1}, "max_position_embeddings is 1, expected 2 or more"),
    ],
)
def test_a_hostile_value_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(WeightsError) as caught:
        qwen3_moe.FAMILY.read_config({**qwen3_moe.TINY, **change})
    assert said in caught.value.message
