"""Every GGUF type that is a weight format: blocks go in, the model computes with what they decode to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from freetoken.core import choices
from freetoken.core.interfaces import ModelFamily, WeightFormat
from freetoken.core.options import Options
from freetoken.engine.build import build
from freetoken.engine.survey import survey
from freetoken.models import gpt_oss, llama, qwen3_5_moe, qwen3_moe
from freetoken.quant import _reading as reading
from freetoken.weights.gguf_types import TYPES
from freetoken.weights.load import open_checkpoint
from tests.chat import vocabularies
from tests.chat.test_gguf_vocabulary import header
from tests.engine.served import Served
from tests.models import checkpoints
from tests.models.runner import Runner
from tests.weights import gguf_files, gguf_models

PLAIN = {"F32", "F16", "BF16"}
FORMATS = set(choices.names("freetoken.quant"))
KINDS = [t.name for t in TYPES.values() if t.format in FORMATS or t.name in PLAIN]
IDS = list(range(3, 24))
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
DENSE = {**llama.TINY, **WIDE}
EXPERTS = {**qwen3_moe.TINY, **WIDE, "moe_intermediate_size": 256, "num_experts": 4, "mlp_only_layers": []}
DELTA = {
    **qwen3_5_moe.TINY, "hidden_size": 256, "num_hidden_layers": 2, "num_experts": 4, "head_dim": 64,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_value_head_dim": 64, "linear_key_head_dim": 32,
}  # fmt: skip


def fmt_of(kind: str) -> WeightFormat:
    return reading.find(kind.lower())


class Quantiser:
    """Codes matrices in `kind` (`by_part`: part of a name -> another kind) and keeps their numbers."""

    def __init__(self, kind: str, by_part: Mapping[str, str] | None = None) -> None:
        self.kind, self.by_part = kind, by_part or {}
        self.numbers: dict[str, Tensor] = {}

    def __call__(self, name: str, x: Tensor) -> gguf_files.Blob:
        kind = next((k for part, k in self.by_part.items() if part in name), self.kind)
        if kind in PLAIN:
            blob = gguf_files.plain(x, kind)
            self.numbers[name] = x.to(TYPES[gguf_files.KINDS[kind]].dtype).float()
            return blob
        fmt = fmt_of(kind)
        coded = fmt.encode(x.reshape(-1, x.shape[-1]))
        raw = fmt.to_gguf(coded)
        self.numbers[name] = fmt.dequantise(raw).view(x.shape)
        return gguf_files.blocks(raw.numpy(), kind, x.shape)


def both_ways(
    tmp_path: Path, family: ModelFamily, raw: Mapping[str, Any], quantise: Quantiser
) -> tuple[Path, Path]:
    """The coded model, and the same one with each matrix as the numbers that it decodes to, in F32."""
    tensors = checkpoints.random_tensors(family, raw, seed=4)
    meta = header(vocabularies.byte_level()) if raw["vocab_size"] > 256 else {}
    coded = gguf_models.write(tmp_path / "coded.gguf", raw, tensors, quantise, more=meta)
    plain = gguf_models.write(
        tmp_path / "plain.gguf", raw, tensors, lambda n, x: gguf_files.plain(quantise.numbers[n]), more=meta
    )
    return coded, plain


@pytest.mark.parametrize("kind", KINDS)
def test_a_dense_model_computes_with_what_its_blocks_decode_to(kind: str, tmp_path: Path) -> None:
    coded, plain = both_ways(tmp_path, llama.FAMILY, DENSE, Quantiser(kind))
    ours, want = (Runner(llama.FAMILY, path).run(IDS) for path in (coded, plain))
    assert float((ours - want).abs().max() / want.abs().max()) < 1e-5
    assert coded.stat().st_size < plain.stat().st_size or kind == "F32"


def answers(path: Path, **options: Any) -> list[tuple[int, float]]:
    served = Served(build(Options(model=str(path), device="cpu", **options)))
    served.submit("a", torch.tensor(IDS, dtype=torch.int32).numpy(), tokens=6)
    served.run()
    trace = [
        (int(i), float(p.logprob))
        for o in served.outputs["a"]
        for i, p in zip(o.token_ids, o.logprobs, strict=True)
    ]
    served.built.engine.close()
    return trace


def alike(ours: list[tuple[int, float]], want: list[tuple[int, float]], bound: float) -> None:
    assert [i for i, _ in ours] == [i for i, _ in want]
    assert max(abs(a - b) for (_, a), (_, b) in zip(ours, want, strict=True)) < bound


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in PLAIN])
def test_experts_keep_their_blocks_in_the_bank(kind: str, tmp_path: Path) -> None:
    raw = {**EXPERTS, "vocab_size": 320}
    coded, plain = both_ways(tmp_path, qwen3_moe.FAMILY, raw, Quantiser(kind))
    parts = survey(Options(model=str(coded), device="cpu"), open_checkpoint(coded), lambda *_: None)
    assert {fmt.name for fmt in parts.formats} == {kind.lower()}
    ours = answers(coded, moe_backend="cpu", dtype="float32")
    alike(ours, answers(plain, moe_backend="fused", dtype="float32"), 1e-3)


@pytest.mark.parametrize("down", ["Q6_K", "Q8_0"])
def test_a_file_mixes_types_tensor_by_tensor(down: str, tmp_path: Path) -> None:
    """As quantisers leave them: Q4_K, with down and value in another type, in half of the layers."""
    raw = {**EXPERTS, "vocab_size": 320}
    mixed = {"blk.0.ffn_down_exps": down, "blk.1.attn_v": "Q5_K", "token_embd": "Q6_K", "attn_k": "Q8_0"}
    coded, plain = both_ways(tmp_path, qwen3_moe.FAMILY, raw, Quantiser("Q4_K", mixed))
    ours = answers(coded, moe_backend="fused", dtype="float32")
    alike(ours, answers(plain, moe_backend="fused", dtype="float32"), 1e-3)


def test_gpt_oss_comes_with_mxfp4_experts_and_biases(tmp_path: Path) -> None:
    raw = {**gpt_oss.TINY, "swiglu_limit": 7.0, "vocab_size": 320}
    quantise = Quantiser("Q8_0", {"_exps": "MXFP4", "token_embd": "BF16"})
    coded, plain = both_ways(tmp_path, gpt_oss.FAMILY, raw, quantise)
    parts = survey(Options(model=str(coded), device="cpu"), open_checkpoint(coded), lambda *_: None)
    assert {fmt.name for fmt in parts.formats} == {"mxfp4"}
    ours = answers(coded, moe_backend="cpu", dtype="float32")
    alike(ours, answers(plain, moe_backend="fused", dtype="float32"), 1e-3)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_reordered_value_heads_stay_coded(kind: str, tmp_path: Path) -> None:
    """Heads of 64 columns: blocks of 32 could move with them, blocks of 256 can't."""
    coded, plain = both_ways(tmp_path, qwen3_5_moe.FAMILY, DELTA, Quantiser(kind))
    ours, want = (Runner(qwen3_5_moe.FAMILY, path).run(IDS) for path in (coded, plain))
    assert float((ours - want).abs().max() / want.abs().max()) < 1e-4
