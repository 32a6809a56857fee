"""What a plan lets expect: tokens a second and time to the first token, as intervals with their reasons.

Pure arithmetic over sizes, costs and a machine's rates; runs nothing. The low end takes half of a rate
and the worst recorded misses, the high end nearly all of it and the best; a rate that was guessed, not
measured, widens both. Invariant: low <= high, and whatever bounds the speed is named.

    step     fixed work of each layer + dense bytes / memory + expert bytes / whoever brings or reads them
    prefill  the longer of arithmetic and of the pool crossing the link, at worst one after the other
"""

from __future__ import annotations

from dataclasses import dataclass

from freetoken.core import cost
from freetoken.core.machine import Machine
from freetoken.core.model_config import ModelConfig
from freetoken.core.units import ceil_div, format_bytes
from freetoken.engine.budget import Sizes
from freetoken.engine.plan import Plan

PROMPTS = (512, 4096, 32768)
CONTEXT = 2048
"""Tokens behind a decode step that is priced."""
MISSES = (
    (0.0, 1.0, 1.0), (0.05, 0.47, 0.78), (0.08, 0.37, 0.59), (0.11, 0.31, 0.46), (0.15, 0.26, 0.37),
    (0.20, 0.21, 0.30), (0.37, 0.07, 0.16), (0.60, 0.03, 0.11), (1.0, 0.0, 0.0),
)  # fmt: skip
"""Share of the pool in slots, then the least and most misses on recorded traces (notes/policy-replay.md)."""
READ = (0.5, 0.95)
"""What is reached of a memory's or link's rate."""
COMPUTE = (0.2, 0.7)
"""What is reached of a matrix rate."""
GUESSED = (0.6, 1.5)
"""How far off a rate may be that was not measured."""
LAYER_S = {True: (5e-6, 60e-6), False: (30e-6, 500e-6)}
"""Fixed work of a layer on a device with memory of its own, and on the CPU."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Expectation:
    """decode in tokens/s, ttft (prompt tokens, seconds); intervals are (low, high)."""

    decode: Interval
    ttft: tuple[tuple[int, Interval], ...]
    reasons: tuple[str, ...]


def expect(config: ModelConfig, sizes: Sizes, plan: Plan, machine: Machine, own_memory: bool) -> Expectation:
    """Price a plan on a machine."""
    rates = _Rates(machine, own_memory)
    reasons: list[str] = []
    step = _step(config, sizes, plan, rates, reasons)
    ttft = tuple(
        (n, _prefill(config, sizes, plan, rates, n, step)) for n in PROMPTS if n < plan.max_model_len
    )
    if machine.approximate:
        named = ", ".join(name for name in machine.approximate if name in rates.used)
        if named:
            reasons.append(f"not measured, guessed: {named}; `ft bench bw` narrows the interval")
    return Expectation((1.0 / step[1], 1.0 / step[0]), ttft, tuple(reasons))


class _Rates:
    """Times as (best, worst), and which of the machine's rates they took."""

    def __init__(self, machine: Machine, own_memory: bool) -> None:
        self.machine, self.own_memory = machine, own_memory
        self.used: set[str] = set()

    def read(self, name: str, num_bytes: float, rate: float = 0.0) -> Interval:
        """Seconds to move bytes at the rate called `name`."""
        return self._time(name, num_bytes, rate or getattr(self.machine, name), READ)

    def compute(self, flops: float, *, on_gpu: bool) -> Interval:
        name = "gpu_flops" if on_gpu else "cpu_flops"
        return self._time(name, flops, getattr(self.machine, name), COMPUTE)

    def _time(self, name: str, amount: float, rate: float, reached: Interval) -> Interval:
        self.used.add(name)
        low, high = reached
        if name in self.machine.approximate or name == "cpu_flops":
            low, high = low * GUESSED[0], high * GUESSED[1]
        return amount / (rate * high), amount / (rate * low)


def _step(config: ModelConfig, sizes: Sizes, plan: Plan, rates: _Rates, reasons: list[str]) -> Interval:
    """One decode step of one request."""
    memory = "gpu_bw" if rates.own_memory else "host_bw"
    dense = sum(cost.mixer(config, i, 1, CONTEXT)[0] for i in range(config.num_layers))
    dense += config.num_moe_layers * cost.shared_expert(config, 1)[0] + cost.head(config, 1)[0]
    dense += (config.num_layers - config.num_moe_layers) * cost.dense_mlp(config, 1)[0]
    layer_s = LAYER_S[rates.own_memory]
    fixed = (layer_s[0] * config.num_layers, layer_s[1] * config.num_layers)
    time = _add(fixed, rates.read(memory, dense))
    reasons.append(f"each token reads {format_bytes(dense)} of dense weights and KV")
    if config.moe is None:
        return time
    experts = config.num_moe_layers * config.moe.top_k
    return _add(time, _experts(config, experts * sizes.record_bytes, plan, rates, reasons))


def _experts(config: ModelConfig, routed: int, plan: Plan, rates: _Rates, reasons: list[str]) -> Interval:
    """Routed experts of one token: read where they lie, or brought over the link."""
    m, layers = rates.machine, config.num_moe_layers
    where = "GPU memory" if plan.backend == "fused" and rates.own_memory else "host memory"
    if plan.memory.num_slots <= 1 or plan.backend == "fused":
        name = "gpu_bw" if where == "GPU memory" else "host_bw"
        reasons.append(f"and {format_bytes(routed)} of experts from {where} at {_gb(getattr(m, name))}")
        fixed = layers * m.cpu_fixed_s if where == "host memory" else 0.0
        return _add(rates.read(name, routed), (fixed, fixed))
    assert config.moe is not None
    share = (plan.memory.num_slots - 1) / (layers * config.moe.num_experts)
    few, many = misses(share)
    rate, name, by = m.link_bw, "link_bw", f"the link at {_gb(m.link_bw)}"
    helps = plan.backend == "hybrid"
    if helps:
        rate = m.link_bw + m.host_bw_beside_link
        rates.used.add("host_bw")
        by += f" and the CPU at {_gb(m.host_bw_beside_link)} together"
    best, _ = rates.read(name, few * routed, rate)
    _, worst = rates.read(name, many * routed, rate)
    hits = rates.read("gpu_bw", (1 - many) * routed)[0], rates.read("gpu_bw", (1 - few) * routed)[1]
    reasons.append(
        f"and {format_bytes(routed)} of experts. {100 * share:.0f} % of the pool lies in slots: recorded "
        f"traces miss {100 * few:.0f}-{100 * many:.0f} % then, which {by} serve"
    )
    fixed = layers * (m.fill_fixed_s + (m.cpu_fixed_s if helps else 0.0))
    return _add(_add((best, worst), hits), (fixed / 2, fixed))


def _prefill(
    config: ModelConfig, sizes: Sizes, plan: Plan, rates: _Rates, tokens: int, step: Interval
) -> Interval:
    """Seconds until the first token of a prompt that nothing is known of."""
    flops = sum(cost.mixer(config, i, tokens, tokens // 2)[1] for i in range(config.num_layers))
    flops += (config.num_layers - config.num_moe_layers) * cost.dense_mlp(config, tokens)[1]
    routed = 0.0
    if config.moe is not None:
        flops += config.num_moe_layers * cost.shared_expert(config, tokens)[1]
        routed = config.num_moe_layers * config.moe.top_k * cost.expert_flops(config, tokens)
    streamed = rates.own_memory and plan.memory.num_slots > 1
    best, worst = _add(rates.compute(flops, on_gpu=rates.own_memory), rates.compute(routed, on_gpu=streamed))
    if streamed and config.moe is not None:
        absent = max(sizes.num_experts + 1 - plan.memory.num_slots, 0) * sizes.record_bytes
        seen = min(1.0, tokens * config.moe.top_k / config.moe.num_experts)
        passes = ceil_div(tokens, plan.macro_tokens)
        link = rates.read("link_bw", absent * seen * passes)
        best, worst = max(best, link[0]), worst + link[1]
    return best + step[0], worst + step[1]


def misses(share: float) -> Interval:
    """Least and most misses to expect with this share of the pool in slots."""
    for (a, few_a, many_a), (b, few_b, many_b) in zip(MISSES, MISSES[1:], strict=False):
        if share <= b:
            part = (share - a) / (b - a)
            return few_a + (few_b - few_a) * part, many_a + (many_b - many_a) * part
    return 0.0, 0.0


def _add(a: Interval, b: Interval) -> Interval:
    return a[0] + b[0], a[1] + b[1]


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.0f} GB/s"
