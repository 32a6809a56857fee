"""What the device's kernels can compute, told from headers alone, and how they see a layer's records."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from freetoken.core.codes import Coded
from freetoken.core.errors import ConfigError
from freetoken.core.model_config import GATED, MoESpec
from freetoken.core.units import align_up
from freetoken.core.weights import WeightFormat
from freetoken.experts.record import RecordLayout

POLICIES = ("two_speed", "lru")
"""Policies whose kernels there are; the first is taken where nobody chooses."""
EXPANDED_BYTES = 128 << 20
"""Uncoded records of coded experts that a prompt's products read at a time; one at least."""
_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
_ALIGN = 256


def can_compute_here(formats: Sequence[WeightFormat], moe: MoESpec) -> bool:
    """Whether the device's kernels read these weight formats and know what the experts do."""
    known = all(fmt.device_code(math.lcm(fmt.block, 32), 512) for fmt in formats)
    return known and moe.activation.name in GATED


def check_policy(name: str) -> None:
    """ConfigError for a policy that the device's kernels don't know."""
    if name not in POLICIES:
        raise ConfigError(
            f"Policy {name!r} has no kernel: on a GPU residency is decided there, by one of "
            f"{', '.join(POLICIES)}.",
            code="policy_not_on_device",
            hint="Leave --moe-policy out, choose one of these, or use --device sim, which has all.",
            param="moe_policy",
        )


def device_record(one: RecordLayout, fmt: WeightFormat) -> Coded:
    """A layer's record as kernels read it."""
    gate, up, down = fmt.device_code(one.tile_width, one.hidden)
    return Coded(
        hidden=one.hidden,
        tile_width=one.tile_width,
        num_tiles=one.num_tiles,
        tile_bytes=one.tile_bytes,
        tiles_offset=one.tiles_offset,
        matrices=(gate, up, down),
        bias_offset=one.bias_offset if one.biased else 0,
    )


def is_plain(coded: Coded, dtype: torch.dtype) -> bool:
    """Whether a record's numbers are of dtype, so that products read them as they are."""
    return coded.plain == _NAMES[dtype]


def expanded(coded: Coded, num_experts: int) -> tuple[int, int]:
    """(experts, bytes of each) of the place where a prompt's coded experts are expanded."""
    each = align_up(coded.plain_bytes()[0], _ALIGN)
    return max(1, min(num_experts, EXPANDED_BYTES // each)), each


def expanded_bytes(
    layouts: Sequence[RecordLayout], formats: Sequence[WeightFormat], num_experts: int, dtype: torch.dtype
) -> int:
    """Device memory that prompts need to expand coded experts; 0 if there are none."""
    most = 0
    for one, fmt in dict.fromkeys(zip(layouts, formats, strict=True)):
        coded = device_record(one, fmt)
        if not is_plain(coded, dtype):
            most = max(most, math.prod(expanded(coded, num_experts)))
    return most
