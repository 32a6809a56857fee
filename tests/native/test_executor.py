"""Schedule, threads and faults never change an answer; a stuck worker is an error in time."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from freetoken.core import choices
from freetoken.core.errors import DeviceError
from freetoken.core.machine import preset
from freetoken.core.model_config import ModelConfig
from freetoken.devices.cpu import CpuDevice
from freetoken.devices.sim import SimDevice
from freetoken.experts.abi import FAILED, OK, POISONED
from freetoken.experts.cpu_executor import CpuExecutor
from freetoken.experts.host_branch import HostBranch
from freetoken.experts.native_executor import NativeExecutor, describe
from freetoken.experts.setup import ExpertSetup
from tests.experts.build import EXACT, NUMERICS, config, tiny
from tests.experts.build import inputs as routed
from tests.native.build import Item, answer, inputs, lib, one, request


@pytest.fixture(autouse=True)
def _two_threads():
    yield
    lib().start(2)


def work():
    """Items of many chunks: several tiles, batches, a cut expert."""
    made = one("bf16", 512, 512, 32, 6)
    x = inputs(48, 512, torch.bfloat16)
    items = [Item(i, list(range(i, i + m))) for i, m in enumerate([1, 2, 7, 33, 40])] + [Item(5, [3, 9], 11)]
    return made, x, items


def test_the_thread_count_never_changes_a_bit():
    made, x, items = work()
    io = request(made, x, items)
    lib().start(1)
    want = answer(made, io)
    for threads in (2, 3, 5, 2):
        lib().start(threads)
        assert lib().threads == threads
        for _ in range(8):
            assert torch.equal(answer(made, io), want)


def test_an_item_has_the_same_bits_whatever_is_asked_beside_it():
    made, x, items = work()
    whole = answer(made, request(made, x, items))
    at = 0
    for item in items:
        alone = answer(made, request(made, x, [item]))
        assert torch.equal(alone, whole[at : at + len(alone)])
        at += len(alone)


def test_a_slow_worker_changes_no_bit():
    made, x, items = work()
    io = request(made, x, items)
    want = answer(made, io)
    for worker in (0, 1):
        lib().fault(worker, slow=3.0)
        assert torch.equal(answer(made, io), want)
        lib().fault(worker)


def test_a_limit_leaves_workers_out_and_changes_no_bit():
    made, x, items = work()
    io = request(made, x, items)
    lib().start(4)
    want = answer(made, io)
    for worker in (1, 2, 3):
        lib().fault(worker, stall_s=5.0)
    lib().limit(1)
    began = time.monotonic()
    for _ in range(50):
        assert torch.equal(answer(made, io), want)
    assert time.monotonic() - began < 4.0, "whoever would stall has no part in it"
    for worker in (1, 2, 3):
        lib().fault(worker)
    for threads in (3, 2, 4, 1, 99):
        lib().limit(threads)
        assert all(torch.equal(answer(made, io), want) for _ in range(20))
    lib().limit(1)
    lib().start(2)  # stops those that sleep, too


def test_a_stuck_worker_is_an_error_in_time_and_the_next_request_is_fine():
    made, x, items = work()
    io = request(made, x, items)
    want = answer(made, io)
    executor = NativeExecutor(made.bank, [describe(made.bank, 0)], 2)
    executor.deadline_s = 0.1
    lib().fault(1, stall_s=0.6)
    out = torch.empty_like(io.out)
    began = time.monotonic()
    with pytest.raises(DeviceError) as caught:
        for n in range(2, 50):  # the worker may sleep through short requests
            io.request[0] = n
            executor.serve(io, out)
    assert caught.value.code == "device_deadline" and time.monotonic() - began < 30
    assert int(io.reply[1]) == FAILED and int(io.poison[0]) == 1
    io.poison[0] = 0
    executor.deadline_s = 20.0
    io.request[0] = 100
    assert executor.serve(io, out) and torch.equal(out, want) and int(io.reply[0]) == 100
    executor.close()


def test_a_limit_amid_a_start_keeps_no_thread_from_ending():
    with ThreadPoolExecutor(1) as beside:
        starts = beside.submit(lambda: [lib().start(2 + n % 2) for n in range(200)])
        until = time.monotonic() + 30
        while not starts.done() and time.monotonic() < until:
            lib().limit(1)
        ended = starts.done()
        while not starts.done():
            lib().limit(3)
    assert ended


def test_a_poisoned_block_is_left_alone_and_a_request_is_answered_once():
    made, x, items = work()
    io = request(made, x, items)
    executor = NativeExecutor(made.bank, [describe(made.bank, 0)], 2)
    out = torch.full_like(io.out, 7.0)
    io.poison[0] = 1
    assert not executor.serve(io, out) and bool((out == 7).all()) and int(io.reply[1]) == POISONED
    io.poison[0], io.request[0] = 0, 2
    assert executor.serve(io, out) and int(io.reply[1]) == OK and not bool((out == 7).any())
    assert not executor.serve(io, out)
    executor.close()


def test_a_page_of_another_version_is_refused():
    made, x, items = work()
    io = request(made, x, items)
    io.header.layout.version = 99
    executor = NativeExecutor(made.bank, [describe(made.bank, 0)], 1)
    with pytest.raises(DeviceError):
        executor.serve(io, io.out)
    executor.close()


def test_items_without_a_source_are_found_by_their_id():
    made, x, items = work()
    io = request(made, x, items)
    want = answer(made, io)
    io.items[:, 6:] = 0
    assert torch.equal(answer(made, io), want)


def test_workers_sleep_soon_after_the_last_request():
    made, x, items = work()
    io = request(made, x, items)
    for _ in range(20):
        answer(made, io)
    time.sleep(0.2)
    began = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - began < 0.15


def executor_of(device, numerics=NUMERICS, model: ModelConfig | None = None):
    made = tiny(model or config())
    return HostBranch(ExpertSetup(made.config, made.bank, device, numerics))._executor


def test_real_devices_use_the_library_and_the_simulated_one_computes_alike_on_both_sides():
    assert isinstance(executor_of(CpuDevice()), NativeExecutor)
    assert isinstance(executor_of(SimDevice(preset("4060-laptop"))), CpuExecutor)
    assert isinstance(executor_of(CpuDevice(), EXACT), CpuExecutor)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_the_cpu_backend_is_near_the_torch_answer(rows):
    model = config(2, 8, 3, 96, 64)
    made = tiny(model)
    backend = choices.load("freetoken.experts.backends", "cpu").create(
        ExpertSetup(model, made.bank, CpuDevice(), NUMERICS, threads=2)
    )
    x, routing = routed(model, rows, rows, dead=rows > 2)
    for layer in range(2):
        want = made.reference(layer, x, routing)
        backend.begin(layer, x, routing, None)
        out = backend.finish(layer)
        assert float((out - want).abs().max()) <= 2.0**-8 * float(want.abs().max())
    backend.close()
