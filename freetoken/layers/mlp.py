"""The gated MLP: dense layers and shared experts.

Rounding points: products in the compute dtype, `act(gate) * up` in float32 and rounded once.
"""

from __future__ import annotations

from torch import Tensor

from freetoken.kernels.gating import act_mul
from freetoken.layers.linear import Product
from freetoken.layers.norm import RMSNorm


class GatedMLP:
    """down(act(gate x) * up x). gate_up holds gate rows, then up rows, then `extra` more outputs."""

    def __init__(self, gate_up: Product, down: Product, activation: str) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self.width = down.shape[1]

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self.finish(self.gate_up(x))

    def add_to(self, h: Tensor, norm: RMSNorm) -> Tensor:
        """h + the MLP of the normed h, [T, H]."""
        return self.down.add_to(h, self._middle(self.gate_up.after(norm, h)))

    def finish(self, products: Tensor) -> Tensor:
        return self.down(self._middle(products))

    def _middle(self, products: Tensor) -> Tensor:
        gate, up = products[:, : self.width], products[:, self.width : 2 * self.width]
        return act_mul(self.activation, gate, up)
