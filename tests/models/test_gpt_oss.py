"""gpt-oss as published: MXFP4 blocks in stacks, the real tensor names, sliding layers in either store."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from freetoken.attention import sliding
from freetoken.core.errors import WeightsError
from freetoken.core.weights import WeightSource
from freetoken.experts import bank as expert_bank
from freetoken.models import gpt_oss
from freetoken.quant import _reading as reading
from freetoken.quant import mxfp4
from freetoken.weights.load import open_checkpoint
from freetoken.weights.names import CanonicalSource
from freetoken.weights.quantised import with_plain_names
from tests.models import checkpoints
from tests.models.runner import Runner
from tests.weights.dialect_writers import nibbles

FAMILY = gpt_oss.FAMILY
QUANTISED = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
IDS = torch.randint(3, 128, (45,), generator=torch.Generator().manual_seed(4)).tolist()
PUBLISHED: dict[str, Any] = {
    "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "attention_bias": True, "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "num_experts_per_tok": 4, "experts_per_token": 4, "eos_token_id": 200002, "torch_dtype": "bfloat16",
    "initial_context_length": 4096, "router_aux_loss_coef": 0.9,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
}  # fmt: skip


def coded(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(as published, the same numbers plainly): stacks [E, K, N] become blocks of rows [E, N, K / 32, 16]."""
    blocks, plain = {}, dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks[name] = tensor
            continue
        codes = mxfp4.FORMAT.encode(tensor.transpose(1, 2).contiguous())
        blocks[name + "_blocks"] = nibbles(codes["codes"]).unflatten(-1, (-1, 16))
        blocks[name + "_scales"] = codes["scales"]
        plain[name] = mxfp4.FORMAT.decode(codes).transpose(1, 2).contiguous()
    return blocks, plain


def write_both(path: Path) -> tuple[Path, Path]:
    blocks, plain = coded(checkpoints.random_tensors(FAMILY, FAMILY.TINY))
    one = checkpoints.write(path / "blocks", {**FAMILY.TINY, **QUANTISED}, blocks)
    return one, checkpoints.write(path / "plain", FAMILY.TINY, plain)


def test_blocks_give_the_logits_of_their_numbers(tmp_path: Path) -> None:
    blocks, plain = write_both(tmp_path)
    assert torch.equal(Runner(FAMILY, blocks).run(IDS), Runner(FAMILY, plain).run(IDS))


def test_blocks_travel_to_the_records_as_they_are(tmp_path: Path) -> None:
    blocks, plain = write_both(tmp_path)
    source, numbers = open_checkpoint(blocks).source, open_checkpoint(plain).source
    config = FAMILY.read_config(FAMILY.TINY)
    formats = [reading.of_expert(source, names) for names in FAMILY.expert_tensors(config, source)]
    assert {fmt.name for fmt in formats} == {"mxfp4"}
    bank = expert_bank.create(config, formats)
    FAMILY.load_experts(config, source, bank)
    assert not bank.missing()
    for layer, one in enumerate(bank.layouts):
        at = f"model.layers.{layer}.mlp.experts."
        tiles = bank.layer(layer)[:, one.tiles_offset : one.used_bytes].unflatten(1, (-1, one.tile_bytes))
        parts = formats[layer].tile_weights(tiles[..., : one.code_bytes], one.tile_width, one.hidden)
        gate, up, down_t = (part.flatten(1, 2) for part in parts)
        both = numbers.read(at + "gate_up_proj").transpose(1, 2)
        assert torch.equal(gate, both[:, 0::2]) and torch.equal(up, both[:, 1::2])
        assert torch.equal(down_t, numbers.read(at + "down_proj"))


def test_both_stores_of_a_window_give_the_same_bits_in_exact_mode(tmp_path: Path) -> None:
    path = checkpoints.write_tiny(tmp_path, FAMILY)
    ring, pages = (Runner(FAMILY, path, exact=True, in_pages=p, page_size=16) for p in (False, True))
    want = ring.run(IDS[:30])
    assert torch.equal(pages.run(IDS[:30], [22, 8]), want)
    assert torch.equal(ring.run(IDS[:30], [7, 1, 22]), want)


def test_a_state_is_as_large_as_its_window_and_no_larger_than_a_page_more() -> None:
    config = FAMILY.read_config({**PUBLISHED, "num_hidden_layers": 36, "num_local_experts": 128})
    pages, ring = FAMILY.state_specs(config, 16, torch.bfloat16)
    token = 18 * 2 * 8 * 64 * 2
    assert (pages.unit, pages.unit_bytes) == ("page", 16 * token)
    assert (ring.unit, ring.unit_bytes, ring.window) == ("state", 144 * token, 128)
    (only,) = FAMILY.state_specs(sliding.in_pages(config), 16, torch.bfloat16)
    assert only.unit_bytes == 2 * 16 * token


class Headers(WeightSource):
    """A checkpoint's headers without its bytes."""

    def __init__(self, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name][1]

    def dtype(self, name: str) -> torch.dtype:
        return self._tensors[name][0]

    def read(self, name: str) -> Tensor:
        raise AssertionError(f"{name} was read")

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        raise AssertionError(f"{name} was read")

    def close(self) -> None:
        """Nothing is open."""


def published(layers: int, experts: int) -> Headers:
    """Names and shapes of the published gpt-oss checkpoints."""
    bf16, u8 = torch.bfloat16, torch.uint8
    out = {
        "model.embed_tokens.weight": (bf16, (201088, 2880)),
        "model.norm.weight": (bf16, (2880,)),
        "lm_head.weight": (bf16, (201088, 2880)),
    }
    sizes = {"q": (4096, 2880), "k": (512, 2880), "v": (512, 2880), "o": (2880, 4096)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        out[at + "input_layernorm.weight"] = out[at + "post_attention_layernorm.weight"] = (bf16, (2880,))
        out[at + "self_attn.sinks"] = (bf16, (64,))
        for name, shape in sizes.items():
            out[f"{at}self_attn.{name}_proj.weight"] = (bf16, shape)
            out[f"{at}self_attn.{name}_proj.bias"] = (bf16, shape[:1])
        out[at + "mlp.router.weight"], out[at + "mlp.router.bias"] = (
            (bf16, (experts, 2880)),
            (bf16, (experts,)),
        )
        for name, rows in (("gate_up_proj", 5760), ("down_proj", 2880)):
            out[f"{at}mlp.experts.{name}_blocks"] = (u8, (experts, rows, 90, 16))
            out[f"{at}mlp.experts.{name}_scales"] = (u8, (experts, rows, 90))
            out[f"{at}mlp.experts.{name}_bias"] = (bf16, (experts, rows))
    return Headers(out)


@pytest.mark.parametrize(("layers", "experts", "least_gb"), [(24, 32, 10.1), (36, 128, 60.9)])
def test_the_published_checkpoints_fit_their_config(
    layers: int, experts: int, least_gb: float, tmp_path: Path
) -> None:
    raw = {**PUBLISHED, "num_hidden_layers": layers, "num_local_experts": experts}
    config = FAMILY.read_config(raw)
    assert [layer.window for layer in config.layers[:3]] == [128, None, 128]
    assert config.attention is not None and config.attention.rope_theta == 150000.0
    source = CanonicalSource(with_plain_names(tmp_path, raw, published(layers, experts)))
    FAMILY.check(config, source)
    formats = [reading.of_expert(source, names) for names in FAMILY.expert_tensors(config, source)]
    bank = expert_bank.create(config, formats, phantom=True)
    assert least_gb < bank.total_bytes / 1e9 < 1.04 * least_gb, "four bits and a quarter a weight"
    assert bank.layouts[0].tile_width == 64 and bank.layouts[0].num_tiles == 45


def test_faults_of_config_and_tensors_come_at_once(tmp_path: Path) -> None:
    raw = {**FAMILY.TINY, "layer_types": ["sliding_attention", "chunked", "full_attention"]}
    with pytest.raises(WeightsError) as caught:
        FAMILY.read_config({**raw, "sliding_window": 0, "num_key_value_heads": 3, "swiglu_limit": "high"})
    for word in ("3 entries for 4", "chunked", "sliding_window", "num_key_value_heads", "swiglu_limit"):
        assert word in caught.value.message
    blocks, _ = coded(checkpoints.random_tensors(FAMILY, FAMILY.TINY))
    lost = ["model.layers.1.self_attn.sinks", "model.layers.2.mlp.router.bias"]
    for name in lost:
        del blocks[name]
    del blocks["model.layers.3.mlp.experts.down_proj_bias"]
    with pytest.raises(WeightsError) as caught:
        Runner(FAMILY, checkpoints.write(tmp_path, {**FAMILY.TINY, **QUANTISED}, blocks))
    for name in (*lost, "down_proj_bias"):
        assert name in caught.value.message
