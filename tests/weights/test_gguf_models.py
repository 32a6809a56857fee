"""TINY models of every architecture from GGUF files: the same logits as from their safetensors folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from freetoken.core import choices
from freetoken.core.interfaces import ModelFamily
from freetoken.models import gpt_oss, llama, qwen2, qwen3, qwen3_5_moe, qwen3_moe
from freetoken.weights.load import open_checkpoint
from tests.models import checkpoints
from tests.models.runner import Runner
from tests.weights import gguf_models

IDS = torch.randint(3, 128, (21,), generator=torch.Generator().manual_seed(5)).tolist()
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CASES: dict[str, tuple[ModelFamily, dict[str, Any]]] = {
    "llama": (llama.FAMILY, {}),
    "llama tied": (llama.FAMILY, {"tie_word_embeddings": True}),
    "llama biased": (llama.FAMILY, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama of wide heads": (llama.FAMILY, {"head_dim": 24}),
    "qwen2": (qwen2.FAMILY, {}),
    "qwen2 linear": (qwen2.FAMILY, {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}}),
    "qwen3": (qwen3.FAMILY, {}),
    "qwen3 yarn": (
        qwen3.FAMILY,
        {
            "rope_parameters": {
                **ROPE,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen3_moe": (qwen3_moe.FAMILY, {"mlp_only_layers": []}),
    "qwen3_moe some dense": (qwen3_moe.FAMILY, {}),
    "qwen3_5_moe": (qwen3_5_moe.FAMILY, {}),
    "qwen3_5_moe one value a key": (qwen3_5_moe.FAMILY, {"linear_num_key_heads": 4}),
    "qwen3_5_moe four values a key": (qwen3_5_moe.FAMILY, {"linear_num_key_heads": 1}),
    "gpt_oss": (gpt_oss.FAMILY, {"swiglu_limit": 7.0}),
    "qwen3_5_moe ungated": (qwen3_5_moe.FAMILY, {"attn_output_gate": False}),
}


def far(ours: Tensor, want: Tensor) -> float:
    return float((ours - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_a_gguf_model_answers_as_its_safetensors_folder(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    raw: Mapping[str, Any] = {**family.TINY, **overrides}
    tensors = checkpoints.random_tensors(family, raw)
    want = Runner(family, checkpoints.write(tmp_path / "folder", raw, tensors)).run(IDS)
    for shards in (1, 3):
        path = gguf_models.write(tmp_path / f"m{shards}", raw, tensors, shards=shards)
        ours = Runner(family, path.rename(path.with_suffix(".gguf")) if shards == 1 else path).run(IDS)
        assert far(ours, want) < 2e-6


@pytest.mark.parametrize("case", CASES)
def test_a_header_says_what_config_json_said(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    raw = {**family.TINY, **overrides}
    path = gguf_models.write(tmp_path / "m.gguf", raw, checkpoints.random_tensors(family, raw))
    opened = open_checkpoint(path)
    assert opened.model_type in family.model_types
    ours, want = family.read_config(opened.config), family.read_config(raw)
    same = (
        "vocab_size",
        "hidden_size",
        "layers",
        "max_position",
        "tie_embeddings",
        "eos_ids",
        "delta",
        "moe",
    )
    assert all(getattr(ours, key) == getattr(want, key) for key in same)
    assert ours.attention is not None and want.attention is not None
    for key in (
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "rotary_dim",
        "rope_theta",
        "gated",
        "bias",
        "qk_norm",
    ):
        assert getattr(ours.attention, key) == getattr(want.attention, key)


def test_factors_of_frequencies_are_llama3_scaling(tmp_path: Path) -> None:
    """The converter turns the scaling's four numbers into a tensor that divides the frequencies."""
    scaling = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    }  # fmt: skip
    raw = {**llama.TINY, "rope_parameters": scaling}
    tensors = checkpoints.random_tensors(llama.FAMILY, raw)
    want = Runner(llama.FAMILY, checkpoints.write(tmp_path / "folder", raw, tensors)).run(IDS)
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    turns = 32 * plain / (2 * torch.pi)
    share = ((turns - 1.0) / 3.0).clamp(0, 1)
    factors = plain / ((1 - share) * plain / 8.0 + share * plain)
    blobs = {n: gguf_models.f32(n, x) for n, x in gguf_models.stored(raw, tensors).items()}
    blobs["rope_freqs.weight"] = gguf_models.f32("", factors)
    path = gguf_models.files.write_file(tmp_path / "m.gguf", gguf_models.metadata(raw), blobs)
    assert far(Runner(llama.FAMILY, path).run(IDS), want) < 2e-6


def test_every_architecture_has_a_case() -> None:
    found = {choices.load("freetoken.models", n).FAMILY for n in choices.names("freetoken.models")}
    covered = {family for family, _ in CASES.values()}
    assert {f.model_types[0] for f in found - covered} <= {"null"}
