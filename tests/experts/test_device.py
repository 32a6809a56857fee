"""Residency decided by kernels: any number of slots, any split and any interruption give the same answer."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freetoken.core.interfaces import Numerics, Routing
from freetoken.experts.backends._device import DeviceBackend
from freetoken.experts.device_table import HOST_ONLY
from freetoken.experts.poller import row_factor
from freetoken.experts.setup import ExpertSetup
from freetoken.experts.split import BUCKETS
from freetoken.native.library import library

from . import build
from .device_build import KernelCpu

needs_native = pytest.mark.skipif(library() is None, reason="the native library is not built")


def backend(
    tiny: build.Tiny,
    name: str,
    slots: int = 0,
    chunk: int = 2048,
    prefetch: int | None = None,
    device: KernelCpu | None = None,
) -> DeviceBackend:
    setup = ExpertSetup(
        config=tiny.config,
        bank=tiny.bank,
        device=device or KernelCpu(),
        numerics=Numerics(),
        num_slots=slots,
        max_slots=tiny.bank.num_layers * tiny.bank.num_experts,
        threads=2,
        chunk_tokens=chunk,
        prefetch=prefetch,
    )
    return DeviceBackend(setup, name)


def inputs(tiny: build.Tiny, rows: int, seed: int, dead: int = 0) -> tuple[torch.Tensor, Routing]:
    rng = np.random.default_rng(seed)
    moe = tiny.config.moe
    ids = np.stack([np.sort(rng.choice(moe.num_experts, moe.top_k, replace=False)) for _ in range(rows)])
    if dead:
        ids[-dead:] = -1
    weights = torch.from_numpy(rng.random((rows, moe.top_k), dtype=np.float32))
    x = torch.randn(rows, tiny.config.hidden_size, generator=torch.Generator().manual_seed(seed))
    return x.bfloat16(), Routing(torch.from_numpy(ids.astype(np.int32)), weights)


def steps(made: DeviceBackend, tiny: build.Tiny, rows: int, count: int = 6) -> list[torch.Tensor]:
    outs = []
    for step in range(count):
        made.wake()
        made.begin_step()
        for layer in range(tiny.bank.num_layers):
            x, routing = inputs(tiny, rows, 10 * step + layer, dead=int(rows > 2))
            made.begin(layer, x, routing, None)
            outs.append(made.finish(layer))
        made.end_step(0.0)
    return outs


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 65])
def test_slots_never_change_a_bit(rows: int) -> None:
    tiny = build.tiny()
    whole = steps(backend(tiny, "fused"), tiny, rows)
    for slots in (6, 9):
        made = backend(tiny, "offload", slots)
        for mine, theirs in zip(steps(made, tiny, rows), whole, strict=True):
            assert torch.equal(mine, theirs)
        made.table.count(made.stats)
        assert made.stats.misses and made.stats.filled_tiles == made.stats.missing_tiles


@needs_native
@pytest.mark.parametrize("name", ["hybrid", "cpu"])
@pytest.mark.parametrize("rows", [1, 2, 5, 64, 65])
def test_the_host_answers_what_is_left_to_it(name: str, rows: int) -> None:
    tiny = build.tiny()
    whole = steps(backend(tiny, "fused"), tiny, rows)
    made = backend(tiny, name, 6)
    if name == "hybrid":
        made.table.set_splits([(0.5, 0.0)] * BUCKETS)
    try:
        for mine, theirs in zip(steps(made, tiny, rows), whole, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    finally:
        made.close()
    made.table.count(made.stats)
    assert made.stats.cpu_tiles
    assert (made.stats.filled_tiles == 0) == (name == "cpu")


@needs_native
def test_a_tile_of_many_rows_counts_for_more_of_the_hosts_time() -> None:
    tiny = build.tiny()
    made = backend(tiny, "hybrid", 6)
    made.table.set_splits([(0.5, 0.0)] * BUCKETS)
    told = []
    try:
        for rows in (1, 40):
            before, tiles = made._poller.totals(), made.stats.cpu_tiles
            steps(made, tiny, rows)
            made.table.count(made.stats)
            told.append(made._poller.totals().since(before).tiles / (made.stats.cpu_tiles - tiles))
    finally:
        made.close()
    experts, top_k = tiny.bank.num_experts, made.top_k
    assert told[0] == pytest.approx(1.0)
    assert told[1] > row_factor(40 * top_k / experts) * 0.8 > 1


@needs_native
def test_the_more_rows_an_expert_has_the_more_is_left_to_the_link() -> None:
    tiny = build.tiny()
    made = backend(tiny, "hybrid", 6)
    made.close()
    shares = made.table.table.split[:HOST_ONLY, 0].tolist()
    assert shares == sorted(shares) and shares[0] < shares[6]


class Stingy(KernelCpu):
    """Locks every other buffer, or shows the device zeros instead."""

    def __init__(self, *, zeros: bool) -> None:
        super().__init__()
        self.zeros, self.asked, self.kept = zeros, 0, []

    def pin(self, buffer: torch.Tensor) -> int:
        self.asked += 1
        if self.asked % 2:
            return buffer.data_ptr()
        self.kept.append(torch.zeros_like(buffer))
        return self.kept[-1].data_ptr() if self.zeros else 0


@needs_native
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("name", ["offload", "hybrid"])
@pytest.mark.parametrize("rows", [1, 16, 40])
def test_the_host_computes_what_the_device_cant_see(name: str, rows: int, zeros: bool) -> None:
    tiny = build.tiny(build.config(layers=4))
    whole = steps(backend(tiny, "fused"), tiny, rows)
    tiny.bank._addresses.clear()
    made = backend(tiny, name, 9, device=Stingy(zeros=zeros))
    seen = [bool(place.address) for place in made.table.places]
    assert seen == [True, False, True, False]
    try:
        for mine, theirs in zip(steps(made, tiny, rows), whole, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    finally:
        made.close()
    made.table.count(made.stats)
    assert made.stats.cpu_tiles and made.stats.filled_tiles


@pytest.mark.parametrize("chunk", [40, 2048])
def test_a_prompt_streams_to_the_same_bits_whatever_is_resident(chunk: int) -> None:
    tiny = build.tiny()
    x, routing = inputs(tiny, 100, 1)
    routings = [routing] * tiny.bank.num_layers
    want = build.stream(backend(tiny, "fused", chunk=chunk), x, routings)
    for slots in (6, 12):
        made = backend(tiny, "offload", slots, chunk)
        steps(made, tiny, 1)
        assert torch.equal(build.stream(made, x, routings), want)
        steps(made, tiny, 1)
        interrupted = build.stream(made, x, routings, lambda _, made=made: steps(made, tiny, 2, count=1))
        assert torch.equal(interrupted, want)


def test_what_a_prompts_last_tokens_wanted_stays_and_nothing_planned_goes() -> None:
    tiny = build.tiny(build.config(layers=4))
    made = backend(tiny, "offload", 20)
    steps(made, tiny, 2)
    x, routing = inputs(tiny, 100, 1)
    wanted = torch.tensor([[5, 6]] * 40, dtype=torch.int32)  # the last tokens know what they want
    routing = Routing(torch.cat([routing.ids[:60], wanted]), routing.weights)
    made.begin_job(100)
    for layer in range(4):
        before = [row[:] for row in made.table.resident()]
        for _ in made.stream_layer(layer, x, routing):
            after = made.table.resident()
            assert after[layer + 1 :] == before[layer + 1 :], "copies of later layers are planned already"
    made.end_job()
    here = made.table.resident()
    assert all(here[layer][5] and here[layer][6] for layer in range(1, 4))
    made.table.count(made.stats)
    assert made.stats.promotions
    for layer, row in enumerate(here):
        for expert, slot in enumerate(row):
            size = tiny.bank.layouts[layer].used_bytes
            assert not slot or torch.equal(
                made.table.pool.view()[slot][:size], made.table.places[layer].records[expert][:size]
            )


def test_slots_can_be_taken_away_and_given_back_between_steps() -> None:
    tiny = build.tiny()
    whole = steps(backend(tiny, "fused"), tiny, 2, 12)
    made = backend(tiny, "offload", 12)
    outs = []
    for round_, slots in enumerate((12, 7, 9)):
        made.resize(slots)
        for step in range(4 * round_, 4 * round_ + 4):
            made.begin_step()
            for layer in range(tiny.bank.num_layers):
                x, routing = inputs(tiny, 2, 10 * step + layer, dead=0)
                made.begin(layer, x, routing, None)
                outs.append(made.finish(layer))
        table = made.table.table
        owner = table.expert_of
        assert (owner[slots + 1 :] == -1).all()
        held = owner >= 0
        assert torch.equal(table.slot_of[owner[held].long()], held.nonzero().flatten().int())
    for mine, theirs in zip(outs, whole, strict=True):
        assert torch.equal(mine, theirs)


@needs_native
def test_a_slow_host_gets_fewer_tiles() -> None:
    tiny = build.tiny()
    made = backend(tiny, "hybrid", 6)
    made.device.machine = made.device.machine.with_rates(link_bw=2e7)  # so slow that the host is asked at all
    made.table.set_splits([(0.5, 0.0)] * BUCKETS)
    lib = library()
    try:
        steps(made, tiny, 1, count=64)
        usual = int(made.table.table.split[0, 0])
        for worker in range(2):
            lib.fault(worker, slow=200.0)
        steps(made, tiny, 1, count=128)
        assert int(made.table.table.split[0, 0]) > usual, "the link's share rises"
    finally:
        for worker in range(2):
            lib.fault(worker)
        made.close()
