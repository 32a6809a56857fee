"""Every backend gives the plain answer, bit for bit, wherever its experts lie."""

import pytest
import torch

from freetoken.core import choices
from freetoken.core.interfaces import Routing
from freetoken.core.machine import preset
from freetoken.devices.cpu import CpuDevice
from freetoken.devices.sim import SimDevice
from freetoken.experts.bank import ExpertBank
from freetoken.experts.policies.lru import POLICY as Lru
from freetoken.experts.record import layout
from freetoken.experts.setup import ExpertSetup
from freetoken.quant.bf16 import FORMAT
from tests.experts.build import EXACT, NUMERICS, config, inputs, tiny

GEOMETRIES = [config(), config(3, 6, 3, 48, 64), config(1, 5, 1, 64, 8), config(2, 16, 4, 96, 80)]


def run(backend, layer, x, routing):
    backend.begin(layer, x, routing, None)
    return backend.finish(layer)


@pytest.mark.parametrize("numerics", [NUMERICS, EXACT], ids=["normal", "exact"])
@pytest.mark.parametrize("name", ["fused", "cpu"])
@pytest.mark.parametrize("model", GEOMETRIES, ids=str)
def test_a_backend_without_slots_gives_the_plain_answer(model, name, numerics):
    made = tiny(model)
    setup = ExpertSetup(model, made.bank, CpuDevice(), numerics, native=False)
    backend = choices.load("freetoken.experts.backends", name).create(setup)
    for seed, (rows, dead) in enumerate([(1, 0), (2, 1), (5, 0), (40, 3), (200, 0), (1, 1)]):
        x, routing = inputs(model, rows, seed, dead)
        for layer in range(model.num_moe_layers):
            want = made.reference(layer, x, routing, numerics.exact)
            assert torch.equal(run(backend, layer, x, routing), want)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_never_change_a_bit(threads):
    model = config(1, 12, 4)
    made = tiny(model)
    setup = ExpertSetup(model, made.bank, CpuDevice(), NUMERICS, threads=threads, native=False)
    backend = choices.load("freetoken.experts.backends", "cpu").create(setup)
    for rows in (1, 3, 17):
        x, routing = inputs(model, rows, rows)
        assert torch.equal(run(backend, 0, x, routing), made.reference(0, x, routing))
    backend.close()


@pytest.mark.parametrize("name", ["fused", "cpu"])
def test_in_exact_mode_a_row_depends_on_itself_alone(name):
    model = config(1, 8, 3, 64, 64)
    made = tiny(model)
    backend = choices.load("freetoken.experts.backends", name).create(
        ExpertSetup(model, made.bank, CpuDevice(), EXACT)
    )
    x, routing = inputs(model, 37, 1)
    together = run(backend, 0, x.float(), routing)
    for row in (0, 5, 36):
        cut = slice(row, row + 1)
        alone = run(backend, 0, x[cut].float(), Routing(routing.ids[cut], routing.weights[cut]))
        assert torch.equal(alone[0], together[row])


def test_layers_of_different_layouts_share_one_pool():
    model = config(2, 8, 2, 32, 64)
    made = tiny(model)
    narrow = layout(32, 64, FORMAT, 8)
    bank = ExpertBank([made.bank.layouts[0], narrow], [FORMAT, FORMAT], 8)
    for (layer, expert), matrices in made.weights.items():
        bank.put(layer, expert, *matrices)
    made.bank = bank
    setup = ExpertSetup(model, bank, SimDevice(preset("3090")), NUMERICS, policy=Lru(), num_slots=9)
    backend = choices.load("freetoken.experts.backends", "hybrid").create(setup)
    for step in range(6):
        for layer in range(2):
            x, routing = inputs(model, 3, 10 * step + layer)
            assert torch.equal(run(backend, layer, x, routing), made.reference(layer, x, routing))


@pytest.mark.parametrize("limit", [1, 3000, 20000])
@pytest.mark.parametrize("name", ["fused", "cpu", "hybrid"])
def test_small_temporaries_never_change_a_bit(name, limit, monkeypatch):
    monkeypatch.setattr("freetoken.experts.math._MAX_ELEMENTS", limit)
    model = config(1, 8, 3, 48, 64)
    made = tiny(model)
    setup = ExpertSetup(model, made.bank, SimDevice(preset("3090")), NUMERICS, policy=Lru(), num_slots=8)
    backend = choices.load("freetoken.experts.backends", name).create(setup)
    for rows in (1, 9, 150):
        x, routing = inputs(model, rows, rows)
        assert torch.equal(run(backend, 0, x, routing), made.reference(0, x, routing))
