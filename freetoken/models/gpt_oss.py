"""gpt-oss: sliding and full attention in turns, sinks, biases everywhere, clamped experts in MXFP4.

Published checkpoints stack experts as `<name>_blocks` and `<name>_scales`, a row for each output; saved in
plain numbers the same matrices are transposed. Gate and up take turns in the rows of one matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import partial
from typing import Any

import torch

from freetoken.core.model_config import (
    Activation,
    ConfigReader,
    LayerSpec,
    ModelConfig,
    MoESpec,
)
from freetoken.core.weights import ExpertSink, WeightSource
from freetoken.models import _config, _decoder, _tensors
from freetoken.models._family import DecoderFamily
from freetoken.quant import _reading as reading

TINY: Mapping[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 20,
    "swiglu_limit": 1.5,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "eos_token_id": 2,
    "dtype": "float32",
}
ROUTER = "mlp.router"
_UNSAID: Mapping[str, Any] = {
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
"""What a config means that leaves these out."""


def _layers(read: ConfigReader) -> tuple[LayerSpec, ...]:
    count = _config.num_layers(read)
    window = read.read("sliding_window", int, default=128)
    windows = {"sliding_attention": window, "full_attention": None}
    types = _config.layer_types(read, windows, ["sliding_attention", "full_attention"] * count)[:count]
    read.require(len(types) == count, f"layer_types has {len(types)} entries for {count} layers")
    read.require(window > 0, "sliding_window must be positive")
    return tuple(_config.softmax_layer("moe", windows[t]) for t in types)


def _moe(read: ConfigReader) -> MoESpec:
    activation = Activation(
        _config.activation_name(read),
        alpha=read.read("swiglu_alpha", float, default=1.702),
        limit=read.read("swiglu_limit", float, default=7.0),
        up_offset=1.0,
    )
    moe = MoESpec(
        num_experts=_config.num_experts(read, "num_local_experts", "num_experts"),
        top_k=read.read("num_experts_per_tok", int, "experts_per_token"),
        expert_size=read.read("intermediate_size", int),
        norm_topk=True,
        activation=activation,
        bias=True,
        router_bias=True,
    )
    read.require(0 < moe.top_k <= moe.num_experts, "num_experts_per_tok must be 1..num_local_experts")
    return moe


def expected(config: ModelConfig, source: WeightSource) -> _tensors.Shapes:
    """Every tensor the model needs, as this checkpoint stores it."""
    return _tensors.expected(config, lambda layer: _expert_shapes(config, source, layer), ROUTER)


def _expert_shapes(config: ModelConfig, source: WeightSource, layer: int) -> _tensors.Shapes:
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    count, both, size = moe.num_experts, 2 * moe.expert_size, moe.expert_size
    at = "mlp.experts."
    stored = set(source.names())
    if _is_split(stored, layer):
        sizes = {"gate_proj": (size, hidden), "up_proj": (size, hidden), "down_proj": (hidden, size)}
        each = [(f"{at}{expert}.{name}", shape) for expert in range(count) for name, shape in sizes.items()]
        return {f"{name}.weight": s for name, s in each} | {f"{name}.bias": s[:1] for name, s in each}
    out: _tensors.Shapes = {
        f"{at}gate_up_proj": (count, both, hidden),
        f"{at}down_proj": (count, hidden, size),
        f"{at}gate_up_proj_bias": (count, both),
        f"{at}down_proj_bias": (count, hidden),
    }
    for name in ("gate_up_proj", "down_proj"):
        full = f"{_tensors.prefix(layer)}{at}{name}"
        if full not in stored or not source.coding(full):
            out[at + name] = (count, *reversed(out[at + name][1:]))
    return out


def _is_split(stored: Set[str], layer: int) -> bool:
    """True where each expert has tensors of its own, as in GGUF files."""
    return f"{_tensors.prefix(layer)}mlp.experts.0.gate_proj.weight" in stored


class GptOss(_decoder.Decoder):
    router = ROUTER


class GptOssFamily(DecoderFamily):
    model_types = ("gpt_oss",)
    TINY = TINY
    decoder = GptOss

    def read_config(self, raw: Mapping[str, Any]) -> ModelConfig:
        read = ConfigReader({**({} if "rope_parameters" in raw else _UNSAID), **raw}, "config.json")
        hidden = read.read("hidden_size", int)
        config = ModelConfig(
            family="gpt_oss",
            vocab_size=read.read("vocab_size", int),
            hidden_size=hidden,
            layers=_layers(read),
            max_position=_config.max_position(read, 131072),
            norm_eps=read.read("rms_norm_eps", float, default=1e-5),
            tie_embeddings=read.read("tie_word_embeddings", bool, default=False),
            dtype=_config.dtype_name(raw),
            eos_ids=_config.eos_ids(raw),
            moe=_moe(read),
            attention=_config.attention_spec(read, hidden, biased=True, qk_norm=False, sinks=True),
        )
        read.finish()
        return config

    def check(self, config: ModelConfig, source: WeightSource) -> None:
        _tensors.check(config, source, lambda layer: _expert_shapes(config, source, layer), ROUTER)

    def load_experts(self, config: ModelConfig, source: WeightSource, put: ExpertSink) -> None:
        assert config.moe is not None
        stored = set(source.names())
        for layer, moe_layer in enumerate(config.moe_layer_of):
            at = f"{_tensors.prefix(layer)}mlp.experts."
            if _is_split(stored, layer):
                for expert in range(config.moe.num_experts):
                    place = (moe_layer, expert)
                    put.defer(*place, partial(_put_split, source, f"{at}{expert}.", place))
                continue
            gate_up, down = source.read(at + "gate_up_proj_bias"), source.read(at + "down_proj_bias")
            for expert in range(config.moe.num_experts):
                biases = gate_up[expert, 0::2], gate_up[expert, 1::2], down[expert]
                place = (moe_layer, expert)
                put.defer(*place, partial(_put_expert, source, at, place, biases))


def _put_split(source: WeightSource, at: str, place: tuple[int, int], put: ExpertSink) -> None:
    """An expert whose gate, up and down are tensors of their own."""
    names = [f"{at}{part}_proj.weight" for part in ("gate", "up", "down")]
    gate_bias, up_bias, down_bias = (source.read(f"{at}{part}_proj.bias") for part in ("gate", "up", "down"))
    biases = gate_bias, up_bias, down_bias
    if (wanted := put.codes(place[0])) and reading.expert_coding(source, names) == wanted:
        if put.put_stored(*place, source, names, biases):
            return
        gate, up, down = (reading.stored(source, name) for name in names)
        put.put_coded(*place, (gate, up, down), biases)
    else:
        put.put(*place, *(reading.numbers(source, name) for name in names), biases)


def _put_expert(
    source: WeightSource,
    at: str,
    place: tuple[int, int],
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    put: ExpertSink,
) -> None:
    """One expert in its codes, or as numbers; `place`: (MoE layer, expert)."""
    layer, expert = place
    names = (at + "gate_up_proj", at + "down_proj")
    wanted = put.codes(layer)
    if wanted and all(source.coding(name) == wanted for name in names):
        if put.put_stored(layer, expert, source, names, biases, alternating=True):
            return
        both, down = (reading.stored(source, name, expert) for name in names)
        gate, up = (reading.rows(both, slice(first, None, 2)) for first in (0, 1))
        put.put_coded(layer, expert, (gate, up, down), biases)
        return
    matrices = [reading.numbers(source, name, expert) for name in names]
    product, last = (m if source.coding(n) else m.t() for n, m in zip(names, matrices, strict=True))
    put.put(layer, expert, product[0::2], product[1::2], last, biases)


FAMILY = GptOssFamily()
