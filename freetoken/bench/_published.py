"""The published system's prefill as a recurrence, for the column that ours is compared with.

Owns its arithmetic: every chunk of 8k tokens streams the whole pool once, layer by layer, and with a second
buffer the next layer's copy runs while this layer computes. No control code takes part.
"""

from __future__ import annotations

from freetoken.bench.geometries import Geometry
from freetoken.core.machine import Machine

CHUNK_TOKENS = 8192
GEMM_EFFICIENCY = 0.6
"""Share of the 16-bit peak that grouped GEMMs reach."""


def prefill_seconds(machine: Machine, geometry: Geometry, tokens: int, *, overlap: bool) -> float:
    """Seconds of a prompt: whole chunks, then the rest."""
    whole, rest = divmod(tokens, CHUNK_TOKENS)
    sizes = [CHUNK_TOKENS] * whole + [rest] * (rest > 0)
    return sum(_chunk_seconds(machine, geometry, size, overlap) for size in sizes)


def _chunk_seconds(machine: Machine, g: Geometry, tokens: int, overlap: bool) -> float:
    link_s = g.experts * g.expert_bytes / machine.link_bw
    routed = 6.0 * g.hidden * g.width * g.top_k * tokens
    dense = 2.0 * g.dense_params / g.layers * tokens
    read_s = (g.experts * g.expert_bytes + g.dense_bytes / g.layers) / machine.gpu_bw
    compute_s = max((routed + dense) / (machine.gpu_flops * GEMM_EFFICIENCY), read_s)
    if not overlap:
        return g.layers * (link_s + compute_s)
    arrived = done = 0.0
    for _ in range(g.layers):
        arrived += link_s
        done = max(done, arrived) + compute_s
    return done
