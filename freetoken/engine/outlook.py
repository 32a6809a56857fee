"""What a checkpoint would be on a machine, from headers alone: plan, or why not, and what speed to expect.

Part of the composition root, for `ft plan`. Another machine is its preset: nothing is allocated, no
weight is read. Invariant: the same plan that serving would make, by the same code.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from freetoken.core.errors import CapacityError
from freetoken.core.machine import Machine
from freetoken.core.options import Options
from freetoken.core.units import format_bytes
from freetoken.engine.budget import Sizes
from freetoken.engine.expect import Expectation, expect
from freetoken.engine.plan import Facts, Plan, make_plan
from freetoken.engine.survey import Parts, gather_facts, survey
from freetoken.weights.load import open_checkpoint

HOST_SHARE = 0.9
"""Of a preset machine's memories, what is left for a model."""
SMALLER_BITS = (8.5, 4.5)
"""Bits a weight takes in common eight- and four-bit formats, scales included."""


@dataclass(frozen=True)
class Outlook:
    """One machine's answer. Either plan and expectation, or `why` the model doesn't fit."""

    machine: str
    plan: Plan | None = None
    expectation: Expectation | None = None
    why: str = ""


@dataclass(frozen=True)
class Model:
    """What the headers say. Weights are counts, sizes bytes."""

    name: str
    family: str
    num_weights: int
    num_active: int
    formats: tuple[str, ...]
    sizes: Sizes
    shape: str


def look(options: Options, directory: Path, presets: tuple[Machine, ...]) -> tuple[Model, list[Outlook]]:
    """Plan a checkpoint for this machine, or for each preset. A bad checkpoint raises as loading would."""
    checkpoint = open_checkpoint(directory)
    parts = survey(replace(options, machine=None), checkpoint, lambda phase, percent: None)
    here = gather_facts(parts, options.served_model_name or directory.name)
    try:
        facts = [_elsewhere(here, machine) for machine in presets] or [here]
        return _model(parts, here), [_outlook(parts, each, options) for each in facts]
    finally:
        parts.device.close()
        checkpoint.close()


def _elsewhere(here: Facts, machine: Machine) -> Facts:
    """The facts of a preset machine with a GPU and nothing else running."""
    return replace(
        here,
        device="cuda",
        owns_memory=True,
        in_host_memory=False,
        free_bytes=int(machine.gpu_memory * HOST_SHARE),
        host_free_bytes=int(machine.host_memory * HOST_SHARE),
        host_limited_by="RAM",
        machine=machine,
        run_ahead=True,
    )


def _outlook(parts: Parts, facts: Facts, options: Options) -> Outlook:
    name = facts.machine.name if facts.owns_memory else "this machine's CPU"
    try:
        plan = make_plan(replace(options, machine=None), facts)
    except CapacityError as error:
        return Outlook(name, why=f"{error.message}{_smaller(parts, facts)}")
    found = expect(parts.config, facts.sizes, plan, facts.machine, facts.owns_memory)
    return Outlook(name, plan, found)


def _smaller(parts: Parts, facts: Facts) -> str:
    """What size of the same experts would fit, if a common one would."""
    weights = _expert_weights(parts)
    room = facts.host_free_bytes - (0 if facts.owns_memory else facts.sizes.dense_bytes)
    for bits in SMALLER_BITS:
        size = int(weights * bits / 8)
        if size < facts.sizes.pool_bytes and size < 0.9 * room:
            return f" At {bits:g} bits a weight the experts would take {format_bytes(size)}."
    return ""


def _expert_weights(parts: Parts) -> int:
    config = parts.config
    if config.moe is None:
        return 0
    each = 3 * config.hidden_size * config.moe.expert_size
    return config.num_moe_layers * config.moe.num_experts * each


def _model(parts: Parts, facts: Facts) -> Model:
    config, experts = parts.config, _expert_weights(parts)
    dense = facts.sizes.dense_bytes // parts.numerics.dtype.itemsize
    active, shape = dense, f"{config.num_layers} layers"
    if config.moe is not None:
        active += experts * config.moe.top_k // config.moe.num_experts
        shape += f", {config.num_moe_layers} x {config.moe.num_experts} experts, {config.moe.top_k} a token"
    formats = tuple(sorted({fmt.name for fmt in parts.formats}))
    return Model(facts.model_name, config.family, dense + experts, active, formats, facts.sizes, shape)
