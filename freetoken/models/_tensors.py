"""What tensors a decoder has, by its ModelConfig, and how they are read.

Owns names and shapes of attention, DeltaNet, MLP and expert tensors in the Hugging Face spelling that
the Qwen families share. Invariant: what is not listed here is never read, and `check` reports every
missing, unknown or ill-shaped tensor at once before the first byte is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Set
from functools import partial

import torch
from torch import Tensor

from freetoken.core.errors import WeightsError
from freetoken.core.interfaces import Numerics
from freetoken.core.model_config import ModelConfig
from freetoken.core.weights import CodedMatrix, CodedWeight, ExpertSink, WeightSource
from freetoken.layers.linear import Product, stack
from freetoken.quant import _reading as reading
from freetoken.weights.names import check_tensors

Shapes = dict[str, tuple[int, ...]]
ROUTER = "mlp.gate"


def prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def is_fused(names: Set[str], layer: int) -> bool:
    """True when a layer's experts are stored as two tensors instead of three per expert."""
    return prefix(layer) + "mlp.experts.gate_up_proj" in names


def _attention(config: ModelConfig) -> Shapes:
    spec, hidden = config.attention, config.hidden_size
    assert spec is not None
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    sizes = {"q_proj": query * (2 if spec.gated else 1), "k_proj": kv, "v_proj": kv}
    out: Shapes = {f"self_attn.{name}.weight": (rows, hidden) for name, rows in sizes.items()}
    out["self_attn.o_proj.weight"] = (hidden, query)
    if spec.bias:
        out |= {f"self_attn.{name}.bias": (rows,) for name, rows in sizes.items()}
    if spec.out_bias:
        out["self_attn.o_proj.bias"] = (hidden,)
    if spec.sinks:
        out["self_attn.sinks"] = (spec.num_heads,)
    if spec.qk_norm:
        out |= {f"self_attn.{name}.weight": (spec.head_dim,) for name in ("q_norm", "k_norm")}
    return out


def _delta(config: ModelConfig) -> Shapes:
    spec, hidden = config.delta, config.hidden_size
    assert spec is not None
    value = spec.num_v_heads * spec.v_dim
    return {
        "linear_attn.in_proj_qkv.weight": (spec.conv_dim, hidden),
        "linear_attn.in_proj_z.weight": (value, hidden),
        "linear_attn.in_proj_b.weight": (spec.num_v_heads, hidden),
        "linear_attn.in_proj_a.weight": (spec.num_v_heads, hidden),
        "linear_attn.conv1d.weight": (spec.conv_dim, 1, spec.conv_kernel),
        "linear_attn.A_log": (spec.num_v_heads,),
        "linear_attn.dt_bias": (spec.num_v_heads,),
        "linear_attn.norm.weight": (spec.v_dim,),
        "linear_attn.out_proj.weight": (hidden, value),
    }


_MIXERS = {"full": _attention, "sliding": _attention, "gated_delta": _delta}


def _gated_mlp(name: str, size: int, hidden: int) -> Shapes:
    return {
        f"{name}gate_proj.weight": (size, hidden),
        f"{name}up_proj.weight": (size, hidden),
        f"{name}down_proj.weight": (hidden, size),
    }


def expert_shapes(config: ModelConfig, fused: bool) -> Shapes:
    """A layer's expert tensors: two stacks, or three matrices each."""
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    if fused:
        return {
            "mlp.experts.gate_up_proj": (moe.num_experts, 2 * moe.expert_size, hidden),
            "mlp.experts.down_proj": (moe.num_experts, hidden, moe.expert_size),
        }
    out: Shapes = {}
    for expert in range(moe.num_experts):
        out |= _gated_mlp(f"mlp.experts.{expert}.", moe.expert_size, hidden)
    return out


def _dense(config: ModelConfig) -> Shapes:
    out = _gated_mlp("mlp.", config.dense_size, config.hidden_size)
    biases = {name.replace("weight", "bias"): shape[:1] for name, shape in out.items()}
    return out | biases if config.dense_bias else out


def _router(config: ModelConfig, name: str) -> Shapes:
    """The router and the shared expert."""
    moe, hidden = config.moe, config.hidden_size
    assert moe is not None
    out: Shapes = {f"{name}.weight": (moe.num_experts, hidden)}
    if moe.router_bias:
        out[f"{name}.bias"] = (moe.num_experts,)
    if moe.shared_size:
        out |= _gated_mlp("mlp.shared_expert.", moe.shared_size, hidden)
        out["mlp.shared_expert_gate.weight"] = (1, hidden)
    return out


def expected(config: ModelConfig, experts: Callable[[int], Shapes], router: str = ROUTER) -> Shapes:
    """Every tensor the model needs, canonical name to shape.

    experts   a layer's expert tensors by their short names
    router    what the family calls the router, without `.weight`
    """
    out: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_embeddings:
        out["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for layer, spec in enumerate(config.layers):
        parts: Shapes = {
            "input_layernorm.weight": (config.hidden_size,),
            "post_attention_layernorm.weight": (config.hidden_size,),
            **_MIXERS[spec.mixer](config),
        }
        if spec.mlp == "dense":
            parts |= _dense(config)
        else:
            parts |= _router(config, router) | experts(layer)
        out |= {prefix(layer) + name: shape for name, shape in parts.items()}
    return out


def check(
    config: ModelConfig,
    source: WeightSource,
    experts: Callable[[int], Shapes] | None = None,
    router: str = ROUTER,
) -> None:
    """WeightsError with all faults unless the source holds just what the model needs."""
    names = set(source.names())
    found = experts or (lambda layer: expert_shapes(config, is_fused(names, layer)))
    check_tensors(source, expected(config, found, router), optional=("lm_head.weight",))


def load_experts(config: ModelConfig, source: WeightSource, sink: ExpertSink) -> None:
    """Hand every expert's matrices to the sink, layer by layer, in codes if the sink keeps the same."""
    moe = config.moe
    if moe is None:
        return
    names = set(source.names())
    for layer, moe_layer in enumerate(config.moe_layer_of):
        if moe_layer < 0:
            continue
        at = prefix(layer) + "mlp.experts."
        fused = is_fused(names, layer)
        for expert in range(moe.num_experts):
            parts = _fused_names(at) if fused else _split_names(at, expert)
            where = (moe_layer, expert)
            sink.defer(*where, partial(_put_expert, source, parts, where, moe.expert_size))


def _put_expert(
    source: WeightSource, parts: tuple[str, ...], where: tuple[int, int], size: int, sink: ExpertSink
) -> None:
    """Read one expert's tensors and hand them on, in codes if the sink keeps the same."""
    layer, expert = where
    wanted, fused = sink.codes(layer), len(parts) == 2
    if wanted and reading.expert_coding(source, parts) == wanted:
        if sink.put_stored(layer, expert, source, parts):
            return
        sink.put_coded(layer, expert, _coded_expert(source, parts, expert, size))
        return
    matrices = [reading.numbers(source, n, expert if fused else None) for n in parts]
    if fused:
        matrices[:1] = matrices[0][:size], matrices[0][size:]
    gate, up, down = matrices
    sink.put(layer, expert, gate, up, down)


def expert_tensors(config: ModelConfig, source: WeightSource) -> list[tuple[str, ...]]:
    """Per MoE layer, the names of its first expert's tensors."""
    names = set(source.names())
    found = []
    for layer, moe_layer in enumerate(config.moe_layer_of):
        if moe_layer >= 0:
            at = prefix(layer) + "mlp.experts."
            found.append(_fused_names(at) if is_fused(names, layer) else _split_names(at, 0))
    return found


def _fused_names(at: str) -> tuple[str, ...]:
    return at + "gate_up_proj", at + "down_proj"


def _split_names(at: str, expert: int) -> tuple[str, ...]:
    return tuple(f"{at}{expert}.{part}_proj.weight" for part in ("gate", "up", "down"))


def _coded_expert(
    source: WeightSource, parts: tuple[str, ...], expert: int, size: int
) -> tuple[CodedMatrix, CodedMatrix, CodedMatrix]:
    for name in parts[:-1]:
        if source.columns(name) is not None:
            raise WeightsError(
                f"{name} is quantised in act-order along its input, which tiles can't follow.",
                code="unsupported_quantization",
                hint="Use a copy of this model that was quantised without act-order (desc_act false).",
            )
    if len(parts) == 2:
        both, down = (reading.codes(source, n, expert) for n in parts)
        return reading.rows(both, slice(0, size)), reading.rows(both, slice(size, 2 * size)), down
    order = source.columns(parts[-1])
    if order is None:
        gate, up, down = (reading.stored(source, n) for n in parts)
        return gate, up, down
    # Down's input is what gate and up put out: their rows follow its order.
    gate, up, down = (reading.codes(source, n) for n in parts)
    return reading.rows(gate, order), reading.rows(up, order), down


class LayerReader:
    """Reads one layer's tensors by their short names, in the compute dtype on the device."""

    def __init__(self, source: WeightSource, layer: int, numerics: Numerics, device: torch.device) -> None:
        self.layer = layer
        self._source, self._prefix = source, prefix(layer) if layer >= 0 else ""
        self.dtype, self.device, self.exact = numerics.dtype, device, numerics.exact
        self._numerics = numerics

    def __call__(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Memory of its own: never a view of the file, which may go away."""
        stored = reading.numbers(self._source, self._prefix + name)
        return stored.to(self.device, dtype or self.dtype, copy=not self._source.owned)

    def finite(self, name: str) -> Tensor:
        """In float32, and numbers all: what only compares them would hide others in a wrong choice."""
        found = self(name, torch.float32)
        if not bool(found.isfinite().all()):
            raise WeightsError(
                f"{self._prefix}{name} holds values that are no finite numbers.",
                code="invalid_weights",
                hint="The file is damaged: download the checkpoint again.",
            )
        return found

    def weight(self, *names: str) -> Tensor | CodedWeight:
        """A matrix, or several of the same coding one below the other: in codes where they `stay` so."""
        full = [self._prefix + name for name in names]
        if not self._stays(full[0]):
            return torch.cat([self(name) for name in names]) if len(names) > 1 else self(names[0])
        return reading.weight(self._source, full)

    def _stays(self, full: str) -> bool:
        return reading.stays_coded(self._source, full, self.device.type, exact=self.exact)

    def product(self, *names: str, biased: bool = False) -> Product:
        """Projections of one input, `<name>.weight` each and `<name>.bias` if biased, as one product.

        Neighbours that are coded alike, or are numbers, become one matrix.
        """
        weights, biases = [], []
        for _, run in itertools.groupby(names, self._kind):
            some = list(run)
            weights.append(self.weight(*(f"{name}.weight" for name in some)))
            biases.append(torch.cat([self(f"{name}.bias") for name in some]) if biased else None)
        return stack(weights, biases, exact=self.exact, int8=self._numerics.int8)

    def _kind(self, name: str) -> str:
        """What neighbours must share to become one matrix."""
        full = f"{self._prefix}{name}.weight"
        if not self._stays(full):
            return ""
        alone = self._source.columns(full) is not None or not reading.stacks(self._source.coding(full))
        return full if alone else self._source.coding(full)
