"""Gated DeltaNet: a matrix state per head and the last inputs of a short convolution, one per sequence.

Unit layout, all L layers of the kind: conv [L, conv_dim, K - 1] of the compute dtype, padded to 256
bytes, then delta float32 [L, Hv, Dk, Dv]; the unit is a multiple of 256 bytes. Resumes only from a
checkpoint of the unit; `Segment.saves` has the scan leave copies on its way. Invariant: `fresh` sequences
start from zero whatever the unit holds; dead rows touch the dummy state only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from freetoken.core.batch import Batch, Segment
from freetoken.core.interfaces import Numerics, Pool, StateSpec
from freetoken.core.model_config import DeltaSpec
from freetoken.core.units import align_up
from freetoken.kernels.causal_conv import causal_conv
from freetoken.kernels.delta_decode import (
    Inputs,
    Layer,
    delta_decode,
    delta_decode_exact,
    gated_norm,
    gates,
)
from freetoken.kernels.gated_delta import chunked, step

KIND = "gated_delta"
_ALIGN = 256


def _conv_bytes(spec: DeltaSpec, num_layers: int, dtype: torch.dtype) -> int:
    return int(num_layers * spec.conv_dim * (spec.conv_kernel - 1) * dtype.itemsize)


def state_spec(spec: DeltaSpec, num_layers: int, dtype: torch.dtype) -> StateSpec:
    delta_bytes = num_layers * spec.num_v_heads * spec.k_dim * spec.v_dim * 4
    unit_bytes = align_up(_conv_bytes(spec, num_layers, dtype), _ALIGN) + align_up(delta_bytes, _ALIGN)
    return StateSpec(kind=KIND, unit="state", unit_bytes=unit_bytes, resume="checkpoint")


class GatedDelta:
    """All gated DeltaNet layers of a model over one state pool. `layer` counts layers of the kind."""

    def __init__(self, spec: DeltaSpec, num_layers: int, numerics: Numerics, pool: Pool) -> None:
        self.spec = spec
        self.num_layers = num_layers
        self.numerics = numerics
        self.pool = pool
        self._generation = -1
        self._conv = self._delta = torch.empty(0)

    def states(self) -> tuple[Tensor, Tensor]:
        """conv [num_states, L, conv_dim, K - 1] and delta float32 [num_states, L, Hv, Dk, Dv]."""
        if self._generation != self.pool.generation:
            spec, units = self.spec, self.pool.view()
            conv_bytes = _conv_bytes(spec, self.num_layers, self.numerics.dtype)
            delta_at = align_up(conv_bytes, _ALIGN)
            delta_bytes = self.num_layers * spec.num_v_heads * spec.k_dim * spec.v_dim * 4
            conv = units[:, :conv_bytes].view(self.numerics.dtype)
            delta = units[:, delta_at : delta_at + delta_bytes].view(torch.float32)
            self._conv = conv.unflatten(1, (self.num_layers, spec.conv_dim, spec.conv_kernel - 1))
            self._delta = delta.unflatten(1, (self.num_layers, spec.num_v_heads, spec.k_dim, spec.v_dim))
            self._generation = self.pool.generation
        return self._conv, self._delta

    def attend(self, layer: int, inputs: Inputs, weights: Layer, batch: Batch) -> Tensor:
        """Convolve, scan, norm and gate T rows of projections; returns [T, Hv * Dv] in their dtype."""
        conv, delta = (s[:, layer] for s in self.states())
        step = delta_decode_exact if self.numerics.exact else delta_decode
        if batch.is_decode:
            out = step(inputs, weights, conv, delta, batch.state_ids, batch.fresh)
            self._save_single(conv, delta, batch.segments)
            return out
        out = torch.zeros_like(inputs.z)
        single = [i for i, s in enumerate(batch.segments) if len(s.token_ids) == 1]
        if single:
            seqs = torch.tensor(single, device=out.device)
            rows = torch.tensor([batch.query_start[i] for i in single], device=out.device)
            some = inputs.rows(rows)
            out[rows] = step(some, weights, conv, delta, batch.state_ids[seqs], batch.fresh[seqs])
            self._save_single(conv, delta, batch.segments)
        for i, segment in enumerate(batch.segments):
            if len(segment.token_ids) > 1:
                part = slice(batch.query_start[i], batch.query_start[i + 1])
                out[part] = self._mix(inputs.rows(part), weights, conv, delta, segment)
        return out

    def _mix(self, inputs: Inputs, weights: Layer, conv: Tensor, delta: Tensor, segment: Segment) -> Tensor:
        """Several tokens of one sequence: [n, Hv * Dv]."""
        unit, qkv = segment.state_id, inputs.qkv
        if segment.start == 0:
            conv[unit].zero_()
            delta[unit].zero_()
        saves = _saves_within(segment)
        width = conv.shape[-1]
        for offset, copy in saves:
            seen = qkv[max(0, offset - width) : offset]
            if offset < width:
                seen = torch.cat([conv[unit].t().to(seen.dtype), seen])[-width:]
            conv[copy].copy_(seen.t())
        mixed = causal_conv(qkv[None], conv[unit][None], weights.conv, weights.activation)[0]
        g, beta = gates(inputs, weights)
        out = self._scan(mixed, g, beta, delta, segment)
        return gated_norm(out, inputs, weights)

    def _save_single(self, conv: Tensor, delta: Tensor, segments: Sequence[Segment]) -> None:
        """Copy the states of sequences that had one token. A captured decode batch never wants any."""
        for segment in segments:
            for _, copy in _saves_within(segment) if len(segment.token_ids) == 1 else ():
                conv[copy].copy_(conv[segment.state_id])
                delta[copy].copy_(delta[segment.state_id])

    def _scan(self, mixed: Tensor, g: Tensor, beta: Tensor, delta: Tensor, segment: Segment) -> Tensor:
        """Advance one sequence's matrix state, and copy it where a copy is wanted: the scan goes on."""
        state, rows = delta[segment.state_id], len(mixed)
        saves = [(offset, delta[copy]) for offset, copy in _saves_within(segment)]
        q, k, v = self._split(mixed)
        if not self.numerics.exact:
            wanted = {a - segment.start for a in segment.anchors} | {offset for offset, _ in saves}
            cuts = [offset for offset in sorted(wanted) if 0 < offset < rows]
            return chunked(q, k, v, g, beta, state, cuts, saves)
        out = []
        for i in range(rows):
            one = slice(i, i + 1)
            out.append(step(q[one], k[one], v[one], g[one], beta[one], state[None]))
            for copy in (copy for offset, copy in saves if offset == i + 1):
                copy.copy_(state)
        return torch.cat(out)

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """float32 [n, conv_dim] -> q, k [n, Hk, Dk] and v [n, Hv, Dv]."""
        spec = self.spec
        keys = spec.num_k_heads * spec.k_dim
        q, k, v = mixed.split([keys, keys, spec.num_v_heads * spec.v_dim], dim=-1)
        return (
            q.unflatten(-1, (spec.num_k_heads, spec.k_dim)),
            k.unflatten(-1, (spec.num_k_heads, spec.k_dim)),
            v.unflatten(-1, (spec.num_v_heads, spec.v_dim)),
        )


def _saves_within(segment: Segment) -> list[tuple[int, int]]:
    """(rows of the segment before it, state slot) of each copy wanted here."""
    return [(position - segment.start, copy) for position, copy in segment.saves_within()]
