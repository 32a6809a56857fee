"""What an expert backend is made from: one frozen record that the composition root fills.

Knows no backend. `None` and 0 mean: decide from the model and the device.
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.core.interfaces import Device, Numerics, Policy
from freetoken.core.model_config import ModelConfig
from freetoken.experts.bank import ExpertBank
from freetoken.experts.math import ExpertMath, TileMath


@dataclass(frozen=True)
class ExpertSetup:
    """num_slots     usable expert slots on the device (offload, hybrid); max_slots bounds resize
    policy        what stays resident
    threads       workers of the host executor
    steady        exactly so many, whatever else the machine runs
    cpu_layers    the first N MoE layers are always computed on the CPU (hybrid)
    static        residency never changes while decoding: misses are the CPU's (hybrid)
    max_fetch     most experts filled per layer-step in hybrid, 0 = no cap
    prefetch      tiles of a layer's experts brought before it asks; None = what the idle link has time for
    overlap       False: prefill without a second buffer, for measuring
    max_rows      rows of the largest decode or riding-prefill batch
    chunk_tokens  rows of a prefill sub-chunk
    ring_group    experts of one ring group, 0 = the smallest that hides the link
    math          arithmetic strategy; None = real tiles of the bank
    native        use the native library where it can compute; False: torch, the oracle
    """

    config: ModelConfig
    bank: ExpertBank
    device: Device
    numerics: Numerics
    policy: Policy | None = None
    num_slots: int = 0
    max_slots: int = 0
    threads: int = 1
    steady: bool = False
    cpu_layers: int = 0
    static: bool = False
    max_fetch: int = 0
    prefetch: int | None = None
    overlap: bool = True
    max_rows: int = 64
    chunk_tokens: int = 2048
    ring_group: int = 0
    math: ExpertMath | None = None
    native: bool = True

    def arithmetic(self) -> ExpertMath:
        assert self.config.moe is not None
        return self.math or TileMath(self.bank, self.config.moe.activation, self.numerics)

    @property
    def num_records(self) -> int:
        return self.bank.num_layers * self.bank.num_experts
