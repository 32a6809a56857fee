"""Layer-major prefill: the plain answer in every placement, and each expert over the link once."""

import numpy as np
import pytest
import torch

from freetoken.core.interfaces import Routing
from freetoken.devices.cpu import CpuDevice
from freetoken.devices.sim import SimDevice
from freetoken.experts.slots import RING
from tests.experts.build import EXACT, NUMERICS, config, drain, inputs, tiny
from tests.experts.test_resident import MACHINE, make, walk

MODEL = config(3, 12, 3, 48, 64)


def chunked(made, layer, x, routing, cut, exact=False):
    """The plain answer of each sub-chunk, one after the other."""
    parts = [
        made.reference(
            layer, x[a : a + cut], Routing(routing.ids[a : a + cut], routing.weights[a : a + cut]), exact
        )
        for a in range(0, len(x), cut)
    ]
    return torch.cat(parts)


def prefill(backend, made, rows, seed=0, exact=False, between=None):
    backend.begin_job(rows)
    for layer in range(made.bank.num_layers):
        x, routing = inputs(made.config, rows, seed + layer, skew=0.3)
        got, _ = drain(backend.stream_layer(layer, x, routing), between)
        want = chunked(made, layer, x, routing, backend.setup.chunk_tokens, exact)
        assert torch.equal(got, want), layer
    backend.end_job()
    if hasattr(backend, "slots"):
        backend.slots.check()


@pytest.mark.parametrize("numerics", [NUMERICS, EXACT], ids=["normal", "exact"])
@pytest.mark.parametrize("name", ["fused", "cpu", "offload", "hybrid"])
def test_a_prefill_gives_the_plain_answer_in_every_backend(name, numerics):
    made = tiny(MODEL)
    for device in (CpuDevice(), SimDevice(MACHINE, seed=2)):
        backend = make(name, made, slots=14, device=device, numerics=numerics, chunk_tokens=40)
        prefill(backend, made, 100, exact=numerics.exact)


@pytest.mark.parametrize("slots", [6, 7, 20, 36])
@pytest.mark.parametrize("group", [0, 2, 12])
@pytest.mark.parametrize("overlap", [True, False])
def test_ring_size_and_slots_never_change_a_bit(slots, group, overlap):
    made = tiny(MODEL)
    device = SimDevice(MACHINE, seed=slots)
    backend = make(
        "hybrid", made, slots=slots, device=device, ring_group=group, overlap=overlap, chunk_tokens=32
    )
    walk(backend, made, 2)
    prefill(backend, made, 64)
    walk(backend, made, 2, seed=500)
    prefill(backend, made, 5, seed=9)


def test_the_pool_crosses_the_link_once_and_later_layers_use_what_is_there():
    made = tiny(MODEL)
    backend = make("offload", made, slots=24, chunk_tokens=50)
    rows = 200
    prefill(backend, made, rows)
    pool = 36 * made.bank.layouts[0].used_bytes
    assert backend.stats.prefill_link_bytes == pool
    assert backend.stats.promotions > 0
    assert backend.slots.num_resident > 8
    prefill(backend, made, rows)
    assert pool // 2 < backend.stats.prefill_link_bytes - pool < pool


def test_a_short_suffix_moves_only_routed_absent_experts():
    made = tiny(config(2, 64, 2, 32, 32))
    backend = make("offload", made, slots=100)
    walk(backend, made, 4)
    before, expected = backend.stats.prefill_link_bytes, 0
    backend.begin_job(10)
    for layer in range(2):
        x, routing = inputs(made.config, 10, 7 + layer)
        routed = np.unique(routing.ids.numpy()) + layer * 64
        expected += sum(backend.slots.slot_of[e] < 0 for e in routed)
        drain(backend.stream_layer(layer, x, routing))
    assert backend.stats.prefill_link_bytes - before == expected * made.bank.layouts[0].used_bytes


@pytest.mark.parametrize("slots", [6, 9, 20])
def test_decode_steps_and_resizes_between_yields_never_change_a_bit(slots):
    made = tiny(MODEL)
    backend = make("hybrid", made, slots=slots, chunk_tokens=16)
    draw = np.random.default_rng(slots)

    def interpose(count):
        if count % 4:
            return
        walk(backend, made, 1, seed=1000 + count)
        if draw.random() < 0.4:
            backend.resize(int(draw.integers(6, 30)))

    walk(backend, made, 2)
    prefill(backend, made, 48, between=interpose)
    assert backend.stats.missing_tiles == backend.stats.filled_tiles + backend.stats.cpu_tiles


def test_dropping_any_single_wait_of_a_prefill_changes_the_result():
    made = tiny(config(2, 8, 3, 32, 64))

    def run(drop):
        backend = make("offload", made, slots=9, device=SimDevice(MACHINE))
        backend.slots.verify_every = 0
        backend.device.faults.drop_wait = drop
        out = []
        for round in range(2):
            for layer in range(2):
                x, routing = inputs(made.config, 1, round)
                backend.begin(layer, x, routing, None)
                out.append(backend.finish(layer))
            backend.begin_job(24)
            for layer in range(2):
                x, routing = inputs(made.config, 24, 3 * round + layer)
                out.append(drain(backend.stream_layer(layer, x, routing))[0])
            backend.end_job()
        return torch.cat(out), backend.device.num_waits

    want, waits = run(0)
    assert waits > 20 and not want.isnan().any()
    same = [k for k in range(1, waits + 1) if torch.equal(run(k)[0], want)]
    assert not same, f"waits {same} of {waits} can be dropped"


@pytest.mark.parametrize("stop_after", [1, 2, 5, 9])
def test_a_dropped_prefill_leaves_nothing_behind(stop_after):
    made = tiny(MODEL)
    backend = make("offload", made, slots=12, chunk_tokens=16)
    walk(backend, made, 2)
    for round in range(3):
        backend.begin_job(32)
        x, routing = inputs(made.config, 32, round)
        stream = backend.stream_layer(round, x, routing)
        for _ in range(stop_after):
            next(stream)
        stream.close()
        backend.end_job()
        assert not (backend.slots.state == RING).any()
        walk(backend, made, 2, seed=100 * round)
        prefill(backend, made, 20, seed=round)
