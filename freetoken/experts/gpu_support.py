"""What the device's kernels can compute: weight formats and kinds of experts, told from headers alone."""

from __future__ import annotations

from collections.abc import Sequence

from freetoken.core.model_config import Activation, MoESpec

FORMATS = {"bf16", "f16"}
KINDS = {"silu", "swish", "gelu", "gelu_pytorch_tanh", "relu"}


def can_compute_here(formats: Sequence[str], moe: MoESpec) -> bool:
    """Whether the device's kernels read these weight formats and know what the experts do."""
    plain = moe.activation == Activation(moe.activation.name) and moe.activation.name in KINDS
    return set(formats) <= FORMATS and plain and not moe.bias
