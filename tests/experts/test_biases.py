"""Biases and clamped activations: whoever computes an expert, the answer is the plain formula's."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from freetoken.core import choices
from freetoken.core.errors import WeightsError
from freetoken.core.interfaces import Numerics
from freetoken.core.machine import preset
from freetoken.core.model_config import Activation
from freetoken.devices.cpu import CpuDevice
from freetoken.devices.sim import SimDevice
from freetoken.experts.bank import create
from freetoken.experts.policies.lru import POLICY
from freetoken.experts.setup import ExpertSetup
from freetoken.quant.bf16 import FORMAT
from tests.experts.build import EXACT, NUMERICS, config, inputs, tiny

SHIFTED = Activation("silu", alpha=1.702, limit=1.0, up_offset=1.0)
CLAMPED = Activation("silu", limit=1.0)
GELU = Activation("gelu")


def model(act: Activation, *, bias: bool = True):
    made = config(1, 8, 2, 64, 64)
    return dataclasses.replace(made, moe=dataclasses.replace(made.moe, activation=act, bias=bias))


def formula(act: Activation, g, u):
    if act.name == "gelu":
        return torch.nn.functional.gelu(g) * u
    g, u = g.clamp(max=act.limit), u.clamp(-act.limit, act.limit)
    return g * torch.sigmoid(act.alpha * g) * (u + act.up_offset)


def plain(made, x, routing):
    y = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(len(x)):
        for expert, weight in zip(routing.ids[row].tolist(), routing.weights[row].tolist(), strict=True):
            gate, up, down = (w.double() for w in made.weights[0, expert])
            a, b, c = (v.double() for v in made.biases.get((0, expert), (torch.zeros(1),) * 3))
            g, u = gate @ x[row].double() + a, up @ x[row].double() + b
            y[row] += weight * (down @ formula(made.config.moe.activation, g, u) + c)
    return y


def run(name, device, made, x, routing, numerics: Numerics):
    setup = ExpertSetup(
        made.config, made.bank, device, numerics, POLICY(), num_slots=6, max_slots=6, threads=2
    )
    backend = choices.load("freetoken.experts.backends", name).create(setup)
    backend.begin(0, x, routing, None)
    out = backend.finish(0)
    backend.close()
    return out


@pytest.mark.parametrize("act", [SHIFTED, CLAMPED, GELU], ids=["shifted", "clamped", "gelu"])
@pytest.mark.parametrize("bias", [True, False], ids=["biased", "plain"])
@pytest.mark.parametrize("name", ["fused", "offload", "cpu", "hybrid"])
def test_every_backend_computes_the_formula(name, bias, act):
    made = tiny(model(act, bias=bias))
    for rows in (1, 5):
        x, routing = inputs(made.config, rows, rows)
        want = plain(made, x, routing)
        near = 2.0**-7 * float(want.abs().max())
        places = [SimDevice(preset("4060-laptop"))]
        if name in ("fused", "cpu"):
            places.append(CpuDevice())
        for place in places:
            out = run(name, place, made, x, routing, NUMERICS)
            assert float((out.double() - want).abs().max()) <= near, type(place)
        exact = run(name, places[0], made, x.float(), routing, EXACT)
        assert float((exact.double() - want).abs().max()) <= 1e-5 * float(want.abs().max())


def test_a_bias_of_another_shape_is_refused():
    bank = create(model(SHIFTED), FORMAT)
    wide, tall = torch.zeros(64, 64), torch.zeros(64)
    with pytest.raises(WeightsError, match="bias of up"):
        bank.put(0, 0, wide, wide, wide, (tall, tall[:3], tall))
    bare = create(model(SHIFTED, bias=False), FORMAT)
    with pytest.raises(WeightsError, match="bias of down"):
        bare.put(0, 0, wide, wide, wide, (tall, tall, tall))
