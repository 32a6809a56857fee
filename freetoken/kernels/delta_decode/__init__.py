"""One token of B sequences through gated DeltaNet: convolution, gates, state step, gated norm.

    delta_decode(inputs, layer, conv, delta, state_ids, fresh)
        inputs     Inputs: the joined projections of B rows
        layer      Layer: a layer's small weights
        conv       [S, conv_dim, K - 1] 16-bit or float32, delta float32 [S, Hv, Dk, Dv]    (both mutated)
        state_ids  int64 [B], distinct but for the dummy 0; fresh bool [B]: the state begins at zero
        Returns    [B, Hv * Dv] in the inputs' dtype

beta = sigmoid(b), g = decay * softplus(a + dt_bias), then `kernels.causal_conv`, `kernels.gated_delta.step`
and rms_norm(out) * silu(z); float32 throughout, rounded once at the end.
    gates(inputs, layer) -> g, beta float32 [B, Hv]
    gated_norm(out, inputs, layer) -> [B, Hv * Dv]      out float32 [B, Hv, Dv]
are its first and last part, for those who scan many tokens between.
    delta_decode_exact(..)  the same by the steps of exact mode
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from freetoken.kernels._choose import choose
from freetoken.kernels.delta_decode import native, reference, triton

MAKERS = (reference, native, triton)


@dataclass(frozen=True)
class Inputs:
    """qkv [B, conv_dim], z [B, Hv * Dv], b and a [B, Hv]; views of one projection, so strided."""

    qkv: Tensor
    z: Tensor
    b: Tensor
    a: Tensor

    def rows(self, some: Tensor | slice) -> Inputs:
        """Some of the rows."""
        return Inputs(self.qkv[some], self.z[some], self.b[some], self.a[some])


@dataclass(frozen=True)
class Layer:
    """conv float32 [K, conv_dim], decay, dt_bias float32 [Hv], norm float32 [Dv]; heads (Hk, Dk, Hv, Dv)."""

    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    activation: str
    heads: tuple[int, int, int, int]


def delta_decode(
    inputs: Inputs, layer: Layer, conv: Tensor, delta: Tensor, state_ids: Tensor, fresh: Tensor
) -> Tensor:
    maker = choose(MAKERS, delta.device.type)
    out: Tensor = maker.delta_decode(inputs, layer, conv, delta, state_ids, fresh)
    return out


def delta_decode_exact(
    inputs: Inputs, layer: Layer, conv: Tensor, delta: Tensor, state_ids: Tensor, fresh: Tensor
) -> Tensor:
    return reference.delta_decode(inputs, layer, conv, delta, state_ids, fresh)


def gates(inputs: Inputs, layer: Layer) -> tuple[Tensor, Tensor]:
    maker = choose(MAKERS, layer.decay.device.type)
    out: tuple[Tensor, Tensor] = maker.gates(inputs, layer)
    return out


def gated_norm(out: Tensor, inputs: Inputs, layer: Layer) -> Tensor:
    normed: Tensor = choose(MAKERS, out.device.type).gated_norm(out, inputs, layer)
    return normed
