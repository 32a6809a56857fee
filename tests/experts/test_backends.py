"""Every backend gives the plain answer, bit for bit, wherever its experts lie."""

import pytest
import torch

from freetoken.core import choices
from freetoken.devices.cpu import CpuDevice
from freetoken.experts.setup import ExpertSetup
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
    setup = ExpertSetup(model, made.bank, CpuDevice(), numerics)
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
    setup = ExpertSetup(model, made.bank, CpuDevice(), NUMERICS, threads=threads)
    backend = choices.load("freetoken.experts.backends", "cpu").create(setup)
    for rows in (1, 3, 17):
        x, routing = inputs(model, rows, rows)
        assert torch.equal(run(backend, 0, x, routing), made.reference(0, x, routing))
    backend.close()
