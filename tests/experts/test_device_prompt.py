"""What a prompt leaves behind where kernels decide: numbers as the policy's twin has, experts at hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from freetoken.core.errors import ConfigError
from freetoken.core.interfaces import Routing
from freetoken.experts.backends._device import DeviceBackend
from freetoken.experts.policies.decayed import Decayed
from freetoken.experts.policies.two_speed import TwoSpeed

from . import build
from .device_build import KernelCpu
from .test_device import backend, inputs, steps

MODEL = build.config(layers=3, experts=16)


def stream(made: DeviceBackend, tiny: build.Tiny, routings: list[Routing], between=None) -> None:
    build.stream(made, inputs(tiny, len(routings[0].ids), 5)[0], routings, between)


def prompt(tiny: build.Tiny, rows: int, seed: int, among: int) -> list[Routing]:
    """A routing per layer whose last rows use experts 0 .. among - 1 only."""
    found = []
    for layer in range(tiny.bank.num_layers):
        routing = inputs(tiny, rows, seed + layer)[1]
        routing.ids[-40:] = torch.tensor([[(r % (among - 1)), (r % (among - 1)) + 1] for r in range(40)])
        found.append(routing)
    return found


def consistent(made: DeviceBackend, tiny: build.Tiny) -> None:
    """Every slot holds the bytes of the expert that the table names, and each finds the other."""
    table = made.table.table
    for slot, expert in enumerate(table.expert_of.tolist()):
        if expert >= 0:
            assert int(table.slot_of[expert]) == slot
            one = tiny.bank.layouts[expert // tiny.bank.num_experts]
            end = one.tile_range(0, int(table.tiles_in[slot]))[1]
            assert torch.equal(made.table.pool.view()[slot, :end], tiny.bank.record(expert)[:end])
    named = (table.slot_of > 0).nonzero().flatten()
    assert torch.equal(table.expert_of[table.slot_of[named].long()], named.int())


def test_a_prompt_raises_the_numbers_as_the_twin_does() -> None:
    tiny, twin = build.tiny(MODEL), TwoSpeed()
    made = backend(tiny, "offload", 12)
    twin.reset(48, 12, 6)
    for round_ in range(2):
        for step in range(3):
            made.begin_step()
            for layer in range(3):
                x, routing = inputs(tiny, 2, 10 * step + layer)
                made.begin(layer, x, routing, None)
                made.finish(layer)
                twin.touch(np.unique(routing.ids.numpy()) + layer * 16, 3 * round_ + step + 1)
        routings = prompt(tiny, 80, round_, 5)
        stream(made, tiny, routings)
        for layer, routing in enumerate(routings):
            experts, counts = np.unique(routing.ids[-32:].numpy(), return_counts=True)
            twin.seed(experts + layer * 16, counts, 3 * round_ + 3)
        assert made.table.table.fast.tolist() == twin._fast.tolist()
        assert made.table.table.slow.tolist() == twin._slow.tolist()


@pytest.mark.parametrize("slots", [14, 24])
def test_what_a_prompts_last_rows_used_is_at_hand_afterwards(slots: int) -> None:
    tiny = build.tiny(MODEL)
    made, whole = backend(tiny, "offload", slots), backend(tiny, "fused")
    steps(made, tiny, 2), steps(whole, tiny, 2)
    held = prompt(tiny, 80, 7, 4)
    stream(made, tiny, held)
    consistent(made, tiny)
    assert (made.table.table.slot_of.view(3, 16)[1:, 1:3] > 0).all(), "the two most used; layer 0 had no room"
    for mine, theirs in zip(steps(made, tiny, 2), steps(whole, tiny, 2), strict=True):
        assert torch.equal(mine, theirs)


class Topic:
    """Routing of a text: some experts of each layer are asked for often, others seldom."""

    def __init__(self, tiny: build.Tiny, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._layers, moe = tiny.bank.num_layers, tiny.config.moe
        self._k, share = moe.top_k, 1.0 / np.arange(1, moe.num_experts + 1) ** 1.2
        self._share = [self._rng.permutation(share / share.sum()) for _ in range(self._layers)]

    def rows(self, count: int) -> list[Routing]:
        found = []
        for share in self._share:
            rows = [self._rng.choice(len(share), self._k, replace=False, p=share) for _ in range(count)]
            ids = torch.from_numpy(np.sort(rows).astype(np.int32))
            found.append(Routing(ids, torch.full(ids.shape, 0.25)))
        return found


def hit_rates(made: DeviceBackend, tiny: build.Tiny, topic: Topic, count: int) -> list[float]:
    """Of each of some decode steps."""
    rates, before = [], (0, 0)
    made.table.count(made.stats)
    before = made.stats.hits, made.stats.requests
    for step in range(count):
        made.begin_step()
        for layer, routing in enumerate(topic.rows(1)):
            made.begin(layer, inputs(tiny, 1, step)[0], routing, None)
            made.finish(layer)
        made.table.count(made.stats)
        now = made.stats.hits, made.stats.requests
        rates.append((now[0] - before[0]) / (now[1] - before[1]))
        before = now
    return rates


def test_the_first_steps_after_a_prompt_hit_as_often_as_later_ones() -> None:
    """37 % of the pool; the slots are full of another text's experts when the prompt comes."""
    tiny = build.tiny(build.config(layers=6, experts=32, top_k=4, hidden=8, width=8))
    first, late = [], []
    for seed in range(2):
        made = backend(tiny, "offload", 71)
        hit_rates(made, tiny, Topic(tiny, 100 + seed), 16)
        topic = Topic(tiny, seed)
        stream(made, tiny, topic.rows(80))
        rates = hit_rates(made, tiny, topic, 28)
        first += rates[:4]
        late += rates[12:]
        consistent(made, tiny)
    assert np.mean(first) > np.mean(late) - 0.08, (np.mean(first), np.mean(late))


def test_decoding_in_between_keeps_slots_and_names_together() -> None:
    tiny = build.tiny(MODEL)
    made = backend(tiny, "offload", 14)
    for seed in range(2):
        stream(made, tiny, prompt(tiny, 70, seed, 6), lambda _: steps(made, tiny, 2, 1))
        consistent(made, tiny)


def test_policies_without_a_kernel_are_refused_by_name() -> None:
    setup = backend(build.tiny(), "offload", 6).setup
    with pytest.raises(ConfigError, match="decayed") as caught:
        DeviceBackend(replace(setup, policy=Decayed()), "offload")
    assert caught.value.code == "policy_not_on_device" and "two_speed" in str(caught.value)


@pytest.mark.parametrize("sizes", [(9, 20, 14), (20, 9, 16)])
def test_slots_can_be_taken_away_and_given_back_amid_a_prompt(sizes: tuple[int, ...]) -> None:
    """Memory for more keys and values comes from slots while a prompt's ring lies in the last of them."""
    tiny = build.tiny(MODEL)
    x, routings = inputs(tiny, 80, 5)[0], prompt(tiny, 80, 3, 6)
    want = build.stream(backend(tiny, "fused"), x, routings)
    made = backend(tiny, "offload", 20)
    steps(made, tiny, 2)

    def between(count: int) -> None:
        made.resize(sizes[count % 3])
        steps(made, tiny, 1, 1)

    assert torch.equal(build.stream(made, x, routings, between), want)
    consistent(made, tiny)
    assert made.table.num_slots in sizes and int(made.table.table.usable) == made.table.num_slots + 1


class Impatient(KernelCpu):
    """Has no time to wait for all that the device was given: a long copy to the host may be among it."""

    def synchronize(self) -> None:
        raise AssertionError("somebody waited for the whole device")


def test_a_prompt_begins_and_ends_without_waiting_for_copies_of_others() -> None:
    tiny = build.tiny(MODEL)
    made = backend(tiny, "offload", 12, device=Impatient())
    stream(made, tiny, prompt(tiny, 80, 0, 5))
    steps(made, tiny, 2)
    consistent(made, tiny)
