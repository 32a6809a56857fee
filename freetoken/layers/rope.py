"""Rotary positions: the frequencies a config asks for, as one table of angles per position.

A table, because its rows are computed once: a position's angles can't depend on who is asking.
Scaling kinds: default, linear, dynamic (plain within the trained length, which is also the limit
here), yarn, llama3, factors (what each frequency is divided by, as GGUF files state llama3).
Text positions only: the three axes of multimodal rope are equal for text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from freetoken.core.model_config import AttentionSpec

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "factors")


def scaling_kind(scaling: Mapping[str, Any] | None) -> str:
    """Return the scaling's kind; `type` is the older spelling of `rope_type`."""
    return str((scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default")


def frequencies(spec: AttentionSpec, max_position: int) -> tuple[Tensor, float]:
    """Return inverse frequencies float32 [rotary_dim / 2] and the factor on cos and sin."""
    steps = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    plain = 1.0 / (spec.rope_theta**steps)
    scaling = spec.rope_scaling or {}
    kind = scaling_kind(scaling)
    if kind == "linear":
        return plain / float(scaling["factor"]), 1.0
    if kind == "factors":
        return plain / torch.tensor(scaling["factors"], dtype=torch.float32), 1.0
    if kind == "llama3":
        return _llama3(plain, scaling), 1.0
    if kind == "yarn":
        return _yarn(plain, spec, scaling, max_position)
    return plain, 1.0


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Keep short waves, stretch long ones, blend between."""
    factor, trained = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = trained * plain / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share) * plain / factor + share * plain


def _yarn(
    plain: Tensor, spec: AttentionSpec, scaling: Mapping[str, Any], max_position: int
) -> tuple[Tensor, float]:
    """Stretch dimensions that turn rarely over the trained length, keep those that turn often."""
    trained = float(scaling.get("original_max_position_embeddings") or max_position)
    factor = float(scaling.get("factor") or max_position / trained)
    dim = spec.rotary_dim

    def turning(times: float) -> float:
        """The dimension that turns `times` times over the trained length."""
        return dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(spec.rope_theta))

    low = turning(float(scaling.get("beta_fast") or 32))
    high = turning(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    stretched = ramp.clamp(0.0, 1.0)
    return plain / factor * stretched + plain * (1 - stretched), _yarn_scale(scaling, factor)


def _yarn_scale(scaling: Mapping[str, Any], factor: float) -> float:
    given, mscale, all_dim = (scaling.get(k) for k in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)


def table_bytes(spec: AttentionSpec | None, max_position: int) -> int:
    """Bytes of Rope's two tables: 256 MiB for a million positions of 64 rotated dimensions."""
    return max_position * (spec.rotary_dim // 2) * 2 * 4 if spec else 0


class Rope:
    """cos and sin of every position up to `max_position`, float32 [max_position, rotary_dim / 2] each."""

    def __init__(self, spec: AttentionSpec, max_position: int, device: torch.device) -> None:
        inverse, scale = frequencies(spec, max_position)
        angles = torch.arange(max_position, dtype=torch.float32)[:, None] * inverse
        self.cos = (angles.cos() * scale).to(device)
        self.sin = (angles.sin() * scale).to(device)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        return self.cos, self.sin
