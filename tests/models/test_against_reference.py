"""Every family against the reference implementation in float32, over every switch its config has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from freetoken.models import gpt_oss, llama, qwen2, qwen3, qwen3_5_moe, qwen3_moe
from tests.models import checkpoints
from tests.models.runner import Runner

FAMILIES = {
    "qwen3_5_moe": (qwen3_5_moe.FAMILY, "Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig"),
    "qwen3_moe": (qwen3_moe.FAMILY, "Qwen3MoeForCausalLM", "Qwen3MoeConfig"),
}
STACKED = {"gpt_oss": (gpt_oss.FAMILY, "GptOssForCausalLM", "GptOssConfig")}
DENSE = {
    "llama": (llama.FAMILY, "LlamaForCausalLM", "LlamaConfig"),
    "mistral": (llama.FAMILY, "MistralForCausalLM", "MistralConfig"),
    "qwen2": (qwen2.FAMILY, "Qwen2ForCausalLM", "Qwen2Config"),
    "qwen3": (qwen3.FAMILY, "Qwen3ForCausalLM", "Qwen3Config"),
}
IDS = torch.randint(3, 128, (37,), generator=torch.Generator().manual_seed(1)).tolist()
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
SCALED = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn_mscale": {
        "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.3,
        "beta_fast": 16, "beta_slow": 2, "truncate": False,
    },
    "yarn_factor": {"factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.3},
    "llama3": {
        "factor": 8.0, "original_max_position_embeddings": 32, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}  # fmt: skip


def scaled(kind: str) -> dict[str, Any]:
    return {"rope_parameters": {**ROPE, "rope_type": kind.split("_")[0], **SCALED[kind]}}


ALL: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "one kv head": {"num_key_value_heads": 1},
    "as many kv heads as heads": {"num_key_value_heads": 4},
    "tanh gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "exact gelu": {"hidden_act": "gelu"},
    "large epsilon": {"rms_norm_eps": 1e-2},
    "large theta": {"rope_parameters": {**ROPE, "rope_theta": 1e7}},
    **{f"rope {kind}": scaled(kind) for kind in SCALED},
}
BOTH = {
    **ALL,
    "biased attention": {"attention_bias": True},
    "top 1": {"num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 8},
}
WINDOWS = {
    "sliding window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
    "window above one layer": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "window above all layers": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3},
    "window written but off": {"use_sliding_window": False, "sliding_window": 7, "max_window_layers": 0},
}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "qwen3_5_moe": {
        **BOTH,
        "whole head rotated": {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
        "conv of two": {"linear_conv_kernel_dim": 2},
        "conv of three": {"linear_conv_kernel_dim": 3},
        "as many key heads as value heads": {"linear_num_key_heads": 4},
        "one key head": {"linear_num_key_heads": 1},
        "wide values": {"linear_value_head_dim": 32},
        "wide keys": {"linear_key_head_dim": 32},
        "all linear": {"layer_types": ["linear_attention"] * 4},
        "all full": {"layer_types": ["full_attention"] * 4},
        "layer types by interval": {"layer_types": None},
        "wide shared expert": {"shared_expert_intermediate_size": 48},
    },
    "gpt_oss": {
        "plain": {},
        "tied": {"tie_word_embeddings": True},
        "no attention bias": {"attention_bias": False},
        "as many kv heads as heads": {"num_key_value_heads": 4},
        "top 1": {"num_experts_per_tok": 1},
        "all experts": {"num_experts_per_tok": 8},
        "window of one": {"sliding_window": 1},
        "window of a page and one": {"sliding_window": 17},
        "window beyond the prompt": {"sliding_window": 128},
        "all sliding": {"layer_types": ["sliding_attention"] * 4, "sliding_window": 5},
        "all full": {"layer_types": ["full_attention"] * 4},
        "layer types unsaid": {"layer_types": None},
        "hard clamp": {"swiglu_limit": 0.2, "swiglu_alpha": 2.5},
        "rope unsaid": {"rope_parameters": None},
        "plain rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "llama": {
        **ALL,
        "biased attention": {"attention_bias": True},
        "biased everywhere": {"attention_bias": True, "mlp_bias": True},
        "heads of their own size": {"head_dim": 24},
    },
    "mistral": {"plain": {"sliding_window": None}, "sliding window": {"sliding_window": 7}},
    "qwen2": {"tied": ALL["tied"], **WINDOWS},
    "qwen3": {"plain": {}, **WINDOWS, "biased attention": {"attention_bias": True}},
    "qwen3_moe": {
        **BOTH,
        "weights as they are": {"norm_topk_prob": False},
        "every second layer sparse": {"decoder_sparse_step": 2, "mlp_only_layers": []},
        "all sparse": {"mlp_only_layers": []},
        "sliding window": {"use_sliding_window": True, "sliding_window": 7},
        "window written but off": {"use_sliding_window": False, "sliding_window": 7},
    },
}  # fmt: skip


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(
    ("name", "case"), [(n, c) for n, cases in CASES.items() for c in cases], ids=lambda x: x.replace(" ", "_")
)
def test_a_tiny_model_equals_the_reference_whatever_its_switches(
    name: str, case: str, tmp_path: Path
) -> None:
    family, model_class, config_class = (FAMILIES | DENSE | STACKED)[name]
    raw = {**family.TINY, **CASES[name][case]}
    if name != "qwen3_5_moe" and raw["rope_parameters"]:
        raw["rope_parameters"] = {
            k: v for k, v in raw["rope_parameters"].items() if k != "partial_rotary_factor"
        }
    model, theirs = checkpoints.settled_oracle(model_class, config_class, raw, IDS)
    model.save_pretrained(tmp_path)
    runner = Runner(family, tmp_path)
    assert distance(runner.run(IDS), theirs) <= 1e-4
    assert distance(runner.run(IDS, [1, 5, 17, 1, 1, 12]), theirs) <= 1e-4


@pytest.mark.parametrize("name", FAMILIES | DENSE | STACKED)
def test_exact_mode_equals_the_reference_too(name: str, tmp_path: Path) -> None:
    family, model_class, config_class = (FAMILIES | DENSE | STACKED)[name]
    model, theirs = checkpoints.settled_oracle(model_class, config_class, family.TINY, IDS)
    model.save_pretrained(tmp_path)
    assert distance(Runner(family, tmp_path, exact=True).run(IDS), theirs) <= 1e-4


def fuse(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Turn per-expert tensors into the two fused ones of each layer."""
    out, layers = {}, {}
    for name, tensor in tensors.items():
        head, found, rest = name.partition(".experts.")
        if found and rest[0].isdigit():
            expert, part, _ = rest.split(".")
            layers.setdefault(head, {})[int(expert), part] = tensor
        else:
            out[name] = tensor
    for head, parts in layers.items():
        count = 1 + max(expert for expert, _ in parts)
        both = [torch.cat([parts[e, "gate_proj"], parts[e, "up_proj"]]) for e in range(count)]
        out[head + ".experts.gate_up_proj"] = torch.stack(both)
        out[head + ".experts.down_proj"] = torch.stack([parts[e, "down_proj"] for e in range(count)])
    return out


def rename(tensors: Mapping[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    return {new + n[len(old) :] if n.startswith(old) else n: t for n, t in tensors.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layout_of_a_checkpoint_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    family, model_class, config_class = FAMILIES[name]
    model, _ = checkpoints.settled_oracle(model_class, config_class, family.TINY, IDS)
    model.save_pretrained(tmp_path / "saved")
    raw = json.loads((tmp_path / "saved" / "config.json").read_text())
    split = load_file(tmp_path / "saved" / "model.safetensors")
    assert any(".experts.0." in n for n in split)
    fused = fuse(split)
    vision = {"model.visual.blocks.0.weight": torch.zeros(2), "mtp.fc.weight": torch.zeros(2)}
    outer = rename(rename(split, "model.", "language_model.model."), "lm_head.", "language_model.lm_head.")
    layouts = {
        "sharded": (split, 3),
        "fused": (fused, 1),
        "fused sharded": (fused, 2),
        "prefixed": ({**rename(fused, "model.", "model.language_model."), **vision}, 1),
        "outer prefix": (outer, 1),
        "bare": (rename(split, "model.", ""), 1),
    }  # fmt: skip
    model.save_pretrained(tmp_path / "by reference", max_shard_size="200KB")
    assert len(list((tmp_path / "by reference").glob("*.safetensors"))) > 1
    want = Runner(family, tmp_path / "saved").run(IDS)
    assert torch.equal(Runner(family, tmp_path / "by reference").run(IDS), want)
    for layout, (tensors, shards) in layouts.items():
        path = checkpoints.write(tmp_path / layout, raw, tensors, shards)
        assert torch.equal(Runner(family, path).run(IDS), want), layout


def test_a_multimodal_checkpoint_is_served_as_text(tmp_path: Path) -> None:
    text = {**qwen3_5_moe.TINY, "tie_word_embeddings": False}
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
        "num_position_embeddings": 16, "patch_size": 4,
    }  # fmt: skip
    raw = {"text_config": text, "vision_config": vision, "tie_word_embeddings": False}
    model, theirs = checkpoints.settled_oracle(
        "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig", raw, IDS
    )
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3_5_moe"
    runner = Runner(qwen3_5_moe.FAMILY, tmp_path)
    assert distance(runner.run(IDS), theirs) <= 1e-4
    assert any("visual" in name for name in runner.skipped)


def test_an_ungated_attention_is_a_gated_one_with_its_gate_half_open(tmp_path: Path) -> None:
    raw = {**qwen3_5_moe.TINY, "attn_output_gate": False}
    plain = checkpoints.random_tensors(qwen3_5_moe.FAMILY, raw)
    gated = dict(plain)
    for name, tensor in plain.items():
        if name.endswith("self_attn.q_proj.weight"):
            heads = tensor.view(4, 16, 64)
            gated[name] = torch.cat([heads, torch.zeros_like(heads)], 1).reshape(128, 64)
        if name.endswith("self_attn.o_proj.weight"):
            gated[name] = tensor * 2
    one = checkpoints.write(tmp_path / "plain", raw, plain)
    two = checkpoints.write(tmp_path / "gated", {**raw, "attn_output_gate": True}, gated)
    ours = [Runner(qwen3_5_moe.FAMILY, path).run(IDS) for path in (one, two)]
    assert distance(*ours) <= 1e-5
