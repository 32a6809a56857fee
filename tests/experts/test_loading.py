"""A bank that fills while it is used: who waits gets what it needs first; errors reach everyone who waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from freetoken.core.errors import BusyError, WeightsError
from freetoken.experts.bank import ExpertBank
from freetoken.experts.loading import Job, Loading
from freetoken.experts.record import layout
from freetoken.quant.bf16 import FORMAT
from freetoken.weights.files import Files

LAYERS, EXPERTS = 3, 8


def empty() -> ExpertBank:
    bank = ExpertBank([layout(16, 8, FORMAT)] * LAYERS, [FORMAT] * LAYERS, EXPERTS)
    bank.buffer.zero_()
    bank.fills = True
    return bank


def jobs(bank: ExpertBank, run: Callable[[int], None] = lambda first: None, count: int = 2) -> list[Job]:
    def write(first: int) -> None:
        run(first)
        for record in range(first, first + count):
            bank.place(record // EXPERTS, record % EXPERTS).fill_(record + 1)

    return [Job(i, count, lambda i=i: write(i)) for i in range(0, LAYERS * EXPERTS, count)]


def test_everything_arrives_and_every_layer_is_pinned_once() -> None:
    bank, pinned, ended = empty(), [], []

    def pin(memory: torch.Tensor) -> int:
        pinned.append(memory.data_ptr())
        return memory.data_ptr() + 5

    loading = Loading(bank, jobs(bank), Files(), pin=pin, done=ended.append)
    loading.start(3)
    loading.wait()
    assert loading.percent == 100 and bank.arrivals.complete and not bank.missing()
    assert sorted(pinned) == [bank.layer(i).data_ptr() for i in range(LAYERS)] and ended == [None]
    assert bank.address(1, pin) == bank.layer(1).data_ptr() + 5 and len(pinned) == LAYERS
    assert [int(bank.record(i)[0]) for i in range(24)] == list(range(1, 25))


def test_what_somebody_waits_for_is_read_next() -> None:
    bank, order, gate = empty(), [], threading.Event()

    def run(first: int) -> None:
        order.append(first)
        gate.wait(10)

    loading = Loading(bank, jobs(bank, run), Files())
    loading.start(1)
    waiting = threading.Thread(target=lambda: bank.require([20, 11]))
    waiting.start()
    while not bank.arrivals._wanted:
        time.sleep(0.001)
    gate.set()
    waiting.join(10)
    assert int(bank.record(20)[0]) == 21 and int(bank.record(11)[0]) == 12
    loading.wait()
    assert order[:3] == [0, 20, 10] and sorted(order) == list(range(0, 24, 2))


def test_a_record_is_never_seen_before_all_its_bytes() -> None:
    bank = empty()
    loading = Loading(bank, jobs(bank, lambda first: time.sleep(0.002)), Files())
    loading.start(4)
    for record in (23, 0, 12, 7, 18):
        assert bool((bank.record(record) == record + 1).all())
    loading.wait()


def test_an_error_ends_every_wait_and_is_told_once() -> None:
    bank, ended, gate = empty(), [], threading.Event()

    def run(first: int) -> None:
        gate.wait(10)
        if first == 4:
            raise WeightsError("expert 4 is broken")

    loading = Loading(bank, jobs(bank, run), Files(), done=ended.append)
    loading.start(2)
    caught: list[BaseException] = []

    def wait_for(record: int) -> None:
        try:
            bank.require([record])
        except WeightsError as error:
            caught.append(error)

    threads = [threading.Thread(target=wait_for, args=(5,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    gate.set()
    for thread in threads:
        thread.join(10)
    assert [str(e) for e in caught] == ["expert 4 is broken"] * 3
    with pytest.raises(WeightsError):
        loading.wait()
    assert [str(e) for e in ended] == ["expert 4 is broken"]


def test_stopping_releases_who_waits() -> None:
    bank, gate = empty(), threading.Event()
    loading = Loading(bank, jobs(bank, lambda first: gate.wait(10)), Files())
    loading.start(1)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            bank.require([23])
        except BusyError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    threading.Timer(0.05, gate.set).start()
    loading.stop()
    thread.join(10)
    assert caught and not bank.arrivals.complete


def test_a_bank_that_nobody_fills_waits_for_nothing() -> None:
    bank = empty()
    bank.fills = False
    assert torch.equal(bank.record(3), torch.zeros_like(bank.record(3)))
    bank.require([1, 2])
