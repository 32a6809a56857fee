"""What a model is, as checked facts: layers, dimensions, experts, positions, special ids.

A model family reads a checkpoint's `config.json` into this once; nothing else parses that file.
Knows no tensors. Invariant: a built ModelConfig is complete and frozen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from freetoken.core.errors import WeightsError

_MISSING = object()


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention. `rotary_dim` of `head_dim` is rotated; `gated` multiplies by sigmoid(gate).

    bias, out_bias   biases on q, k and v; on the output
    sinks            each head has a logit of its own in the softmax, without a value
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    gated: bool = False
    qk_norm: bool = True
    bias: bool = False
    out_bias: bool = False
    rope_scaling: Mapping[str, Any] | None = None
    sinks: bool = False


@dataclass(frozen=True)
class DeltaSpec:
    """Gated DeltaNet: `num_k_heads` heads of `k_dim`, `num_v_heads` of `v_dim`, a causal conv before."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    conv_kernel: int

    @property
    def conv_dim(self) -> int:
        return 2 * self.num_k_heads * self.k_dim + self.num_v_heads * self.v_dim


GATED = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "relu")
"""Names of activations that gated MLPs may have."""


@dataclass(frozen=True)
class Activation:
    """act(g) * u of a gated MLP, by the name that a config gives.

    SiLU may be clamped and shifted: g' sigmoid(alpha g') (u' + up_offset) with g' = min(g, limit) and
    u' = clamp(u, -limit, limit). The other names ignore these three.
    """

    name: str = "silu"
    alpha: float = 1.0
    limit: float = math.inf
    up_offset: float = 0.0


@dataclass(frozen=True)
class MoESpec:
    """Routed experts of one MoE layer. `shared_size` 0 means no shared expert.

    bias    gate, up and down of every expert have one; router_bias: each expert's logit has one
    """

    num_experts: int
    top_k: int
    expert_size: int
    norm_topk: bool = True
    shared_size: int = 0
    activation: Activation = Activation()
    bias: bool = False
    router_bias: bool = False


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: the mixer's kind (an attention choice) and the MLP's (`moe` or `dense`).

    window   how many last tokens softmax attention sees, itself included; None = all
    """

    mixer: str
    mlp: str
    window: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The whole model. `moe_layer_of[i]` numbers the MoE layers 0..L-1 (-1 for a dense layer)."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position: int
    norm_eps: float
    tie_embeddings: bool
    dtype: str
    eos_ids: tuple[int, ...]
    moe: MoESpec | None = None
    attention: AttentionSpec | None = None
    delta: DeltaSpec | None = None
    dense_size: int = 0
    dense_bias: bool = False
    activation: str = "silu"
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def moe_layer_of(self) -> tuple[int, ...]:
        out, n = [], 0
        for spec in self.layers:
            out.append(n if spec.mlp == "moe" else -1)
            n += spec.mlp == "moe"
        return tuple(out)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(i for i, spec in enumerate(self.layers) if spec.mlp == "moe")

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    def mixer_index(self, layer: int) -> int:
        """Return the rank of `layer` among the layers with the same mixer kind."""
        kind = self.layers[layer].mixer
        return sum(spec.mixer == kind for spec in self.layers[:layer])

    def num_mixers(self, kind: str) -> int:
        return sum(spec.mixer == kind for spec in self.layers)


class ConfigReader:
    """Read a JSON object key by key, with aliases, types and all faults reported at once.

    `read("num_experts", int, "num_local_experts")` tries the names in order. `finish()` raises one
    WeightsError that lists every missing or ill-typed key. No number in a config is negative, no whole
    one larger than `most`: sizes are multiplied, allocated and counted up to.
    """

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where
        self.faults: list[str] = []

    def read(
        self,
        key: str,
        kind: type,
        *aliases: str,
        default: Any = _MISSING,
        least: int = 0,
        most: int = (1 << 31) - 1,
    ) -> Any:
        for name in (key, *aliases):
            value = self.raw.get(name)
            if value is None:
                continue
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)
            if isinstance(value, int | float) and not least <= value < math.inf:
                self.faults.append(f"{name} is {value}, expected {least} or more")
                return kind()
            if isinstance(value, int) and value > most:
                self.faults.append(f"{name} is {value}, expected at most {most}")
                return kind()
            if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
                return value
            self.faults.append(f"{name} is {type(value).__name__} {value!r}, expected {kind.__name__}")
            return kind()
        if default is _MISSING:
            self.faults.append(f"{key} is missing")
            return kind()
        return default

    def require(self, condition: bool, fault: str) -> None:
        if not condition:
            self.faults.append(fault)

    def finish(self) -> None:
        if self.faults:
            raise WeightsError(
                f"{self.where}: {'; '.join(self.faults)}.",
                code="invalid_model_config",
                hint="Check the checkpoint's config.json.",
            )
