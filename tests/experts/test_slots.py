"""Slots, operation by operation, against an independent model of what is resident."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from freetoken.core.errors import CapacityError
from freetoken.core.machine import preset
from freetoken.devices.sim import SimDevice
from freetoken.experts.fills import Fill, FillQueue
from freetoken.experts.policies.lru import POLICY as Lru
from freetoken.experts.slots import MIN_SLOTS, RING, ExpertSlots
from tests.experts.build import config, tiny

LAYERS, EXPERTS, TILES = 3, 6, 4
TOTAL = LAYERS * EXPERTS


class SlotsMachine(RuleBasedStateMachine):
    """The model: expert -> tiles that were sent, which lag behind what is in; plus lent slots."""

    def __init__(self):
        super().__init__()
        bank = tiny(config(LAYERS, EXPERTS, 2, 32, 32)).bank
        self.device = SimDevice(preset("3090"), seed=3)
        policy = Lru()
        policy.reset(TOTAL, 8, 6)
        self.slots = ExpertSlots(bank, self.device, policy, 8)
        self.queue = FillQueue(self.slots, self.device, TOTAL)
        self.sent, self.arrived, self.lent, self.step = {}, {}, [], 0

    def room(self):
        return self.slots.num_slots - len(self.lent)

    @rule(experts=st.sets(st.integers(0, TOTAL - 1), min_size=1, max_size=4))
    def look_up(self, experts):
        self.step += 1
        ids = np.array(sorted(experts), np.int64)
        self.slots.policy.touch(ids, self.step)
        slots, tiles = self.slots.lookup(ids, self.step)
        for expert, slot, have in zip(ids.tolist(), slots.tolist(), tiles.tolist(), strict=True):
            assert (slot > 0) == (expert in self.sent)
            assert have == self.arrived.get(expert, 0)
        self.slots.unpin()

    @rule(expert=st.integers(0, TOTAL - 1), tiles=st.integers(1, TILES))
    def fill(self, expert, tiles):
        if expert not in self.sent:
            before = dict(self.sent)
            free = self.slots.take(1, self.step)
            self.forget_evicted()
            if not free:
                settled = [e for e in before if before[e] == self.arrived.get(e, 0)]
                assert not settled and len(before) == self.room()
                return
            self.slots.bind(free[0], expert, self.step)
        first = self.sent.get(expert, 0)
        if first < tiles:
            self.queue.submit([Fill(expert, first, tiles)])
            self.sent[expert] = tiles
            if tiles < TILES:
                self.slots.rest.append((expert, int(self.slots.generation[self.slots.slot_of[expert]])))
        elif first == 0:
            raise AssertionError("a bound expert is always sent something")

    @rule(tiles=st.integers(1, 6))
    def follow(self, tiles):
        self.queue.follow(tiles * self.slots.bank.layouts[0].tile_bytes)
        for expert, was in self.sent.items():
            now = int(self.slots.tiles_sent[self.slots.slot_of[expert]])
            assert now >= was
            self.sent[expert] = now

    @rule(ms=st.floats(0, 0.01))
    def let_time_pass(self, ms):
        self.device.charge(ms * 1e-3 * self.device.machine.gpu_bw, 0)
        self.slots.poll()
        for expert in self.sent:
            now = int(self.slots.tiles_in[self.slots.slot_of[expert]])
            assert self.arrived.get(expert, 0) <= now <= self.sent[expert]
            self.arrived[expert] = now

    @rule()
    def wait_for_all(self):
        self.device.compute.wait(self.device.stream("fill").record())
        self.slots.arrived()
        self.arrived = dict(self.sent)

    @rule(count=st.integers(1, 3))
    def lend(self, count):
        if self.room() - count < 2:
            return
        self.lent += self.slots.lend(count, self.step)
        self.forget_evicted()

    @precondition(lambda self: self.lent)
    @rule()
    def give_back(self):
        self.slots.give_back(self.lent)
        self.lent = []

    @precondition(lambda self: self.lent)
    @rule(expert=st.integers(0, TOTAL - 1))
    def promote(self, expert):
        taken = self.slots.promote(self.lent[0], expert, self.step)
        assert taken == (expert not in self.sent)
        if taken:
            slot = self.lent.pop(0)
            self.slots.view()[slot].copy_(self.slots.bank.record(expert))
            self.sent[expert] = self.arrived[expert] = TILES

    @precondition(lambda self: not self.lent)
    @rule(num=st.integers(MIN_SLOTS, TOTAL))
    def resize(self, num):
        before = set(self.sent)
        self.slots.resize(num, self.step)
        self.forget_evicted()
        self.arrived = dict(self.sent)
        assert self.slots.num_slots == num and len(self.sent) == min(len(before), num)

    def forget_evicted(self):
        for expert in list(self.sent):
            if self.slots.slot_of[expert] < 0:
                assert self.sent.pop(expert) >= self.arrived.pop(expert, 0)

    @invariant()
    def control_arrays_agree(self):
        self.slots.check()
        assert {int(e) for e in np.flatnonzero(self.slots.slot_of >= 0)} == set(self.sent)
        assert all(self.slots.state[s] == RING for s in self.lent)

    @invariant()
    def bytes_that_are_in_are_right(self):
        one = self.slots.bank.layouts[0]
        for expert, tiles in self.arrived.items():
            end = one.tile_range(0, tiles)[1] if tiles else 0
            view = self.slots.view()[self.slots.slot_of[expert], :end]
            assert (view == self.slots.bank.record(expert)[:end]).all()


TestSlotsAgreeWithTheModel = SlotsMachine.TestCase
TestSlotsAgreeWithTheModel.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_too_few_slots_are_refused_with_the_next_step():
    bank = tiny().bank
    with pytest.raises(CapacityError, match="at least 6") as error:
        ExpertSlots(bank, SimDevice(preset("3090")), Lru(), 5)
    assert error.value.code == "too_few_slots" and error.value.hint


def test_more_slots_than_memory_shows_the_sum():
    bank = tiny(config(2, 8, 2, 256, 64)).bank
    with pytest.raises(CapacityError, match="experts .* but the device has 1.00 MiB"):
        ExpertSlots(bank, SimDevice(preset("3090"), memory_bytes=1 << 20), Lru(), 16)
