"""Every policy against a plain twin on random routing: dictionaries, sorting, nothing clever."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.core import choices
from freetoken.experts.policies import decayed, two_speed

PACKAGE = "freetoken.experts.policies"
LAYERS, EXPERTS, TOP_K = 3, 6, 2
TOTAL, CYCLE = LAYERS * EXPERTS, LAYERS * TOP_K


class Twin:
    """The coldest by (score, id), sorted anew on every call."""

    def score(self, expert: int) -> float:
        raise NotImplementedError

    def touch(self, ids, step): ...
    def seed(self, ids, counts, step): ...

    def order_victims(self, resident, count):
        return sorted(resident, key=lambda e: (self.score(e), e))[:count]


class LruTwin(Twin):
    def __init__(self):
        self.last = defaultdict(lambda: (-1, 0))

    def score(self, expert):
        return self.last[expert]

    def touch(self, ids, step):
        self.last.update((e, (step, 1 << 20)) for e in ids)


class LruSeededTwin(LruTwin):
    def seed(self, ids, counts, step):
        self.last.update((e, (step - 1, c)) for e, c in zip(ids, counts, strict=True))


class DecayedTwin(Twin):
    """The log-domain recurrence with Python integers."""

    def __init__(self):
        self.key = defaultdict(lambda: decayed.COLD)

    def score(self, expert):
        return self.key[expert]

    def raised(self, key, base):
        low, high, grain, one = -16 * decayed.ONE, 16 * decayed.ONE, 16, decayed.ONE
        distance = (min(max(key - base, low), high) - low) // grain * grain + low
        return base + round(one * math.log2(1 + 2.0 ** (distance / one)))

    def touch(self, ids, step):
        base = step * decayed.ONE // decayed.HALF_LIFE
        for e in ids:
            self.key[e] = self.raised(self.key[e], base)

    def seed(self, ids, counts, step):
        base = step * decayed.ONE // decayed.HALF_LIFE
        for e, c in zip(ids, counts, strict=True):
            self.key[e] = self.raised(self.key[e], base + round(decayed.ONE * math.log2(c)))


class TwoSpeedTwin(Twin):
    """Both averages aged one step at a time with Python integers."""

    def __init__(self):
        self.fast, self.slow, self.now, self.passed = [0] * TOTAL, [0] * TOTAL, 0, -1

    def score(self, expert):
        total = self.fast[expert] + self.slow[expert]
        return total + (total // 2 if expert > self.passed else 0)

    def age(self, step):
        while self.now < step:
            self.now += 1
            self.fast = [v - v // 2 for v in self.fast]
            self.slow = [v - v // 16 for v in self.slow]

    def touch(self, ids, step):
        self.age(step)
        for e in ids:
            self.fast[e] += two_speed.ONE // 8
            self.slow[e] += two_speed.ONE // 16
        self.passed = max(ids)

    def seed(self, ids, counts, step):
        self.age(step)
        for e, c in zip(ids, counts, strict=True):
            self.slow[e] -= self.slow[e] // 2
            self.slow[e] += min(c, 32) * two_speed.ONE // 32 // 2


TWINS = {"lru": LruTwin, "lru_seeded": LruSeededTwin, "decayed": DecayedTwin, "two_speed": TwoSpeedTwin}


def policy_of(name, slots=8):
    policy = choices.load(PACKAGE, name).POLICY()
    policy.reset(TOTAL, slots, CYCLE)
    return policy


routed = st.lists(
    st.lists(
        st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=TOP_K), min_size=LAYERS, max_size=LAYERS
    ),
    min_size=1,
    max_size=12,
)
prompts = st.dictionaries(st.integers(0, TOTAL - 1), st.integers(1, 40), min_size=1, max_size=TOTAL)


def test_every_policy_has_a_twin_or_is_static():
    assert set(choices.names(PACKAGE)) == {*TWINS, "static", "static_prefill"}


@pytest.mark.parametrize("name", sorted(TWINS))
@settings(max_examples=60, deadline=None)
@given(
    steps=routed,
    prompt=st.none() | prompts,
    resident=st.sets(st.integers(0, TOTAL - 1)),
    count=st.integers(0, 6),
)
def test_victims_are_the_twins_victims(name, steps, prompt, resident, count):
    policy, twin = policy_of(name), TWINS[name]()
    if prompt:
        ids = sorted(prompt)
        for chosen in (policy, twin):
            chosen.seed(ids, [prompt[i] for i in ids], 1)
    for step, layers in enumerate(steps, start=1):
        for layer, experts in enumerate(layers):
            ids = sorted(layer * EXPERTS + e for e in experts)
            policy.touch(ids, step)
            twin.touch(ids, step)
            found = policy.order_victims(sorted(resident), count, step)
            assert found == twin.order_victims(resident, count)


@pytest.mark.parametrize("name", choices.names(PACKAGE))
@given(steps=routed)
@settings(max_examples=20, deadline=None)
def test_a_reset_forgets_everything(name, steps):
    used, fresh = policy_of(name), policy_of(name)
    for step, layers in enumerate(steps):
        for layer, experts in enumerate(layers):
            used.touch([layer * EXPERTS + e for e in sorted(experts)], step)
    used.reset(TOTAL, 8, CYCLE)
    assert used.order_victims(range(TOTAL), TOTAL, 0) == fresh.order_victims(range(TOTAL), TOTAL, 0)


@pytest.mark.parametrize("name", choices.names(PACKAGE))
def test_lists_and_arrays_of_residents_give_the_same_victims(name):
    policy = policy_of(name)
    policy.touch([1, 4], 0)
    policy.touch([7, 9], 0)
    resident = [0, 1, 4, 5, 7, 9, 17]
    assert policy.order_victims(resident, 3, 0) == policy.order_victims(np.array(resident), 3, 0)


@given(uses=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3)), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_decayed_orders_by_the_sum_of_halved_uses(uses):
    policy = policy_of("decayed")
    worth = defaultdict(float)
    for step, expert in sorted(set(uses)):
        policy.touch([expert], step)
        worth[expert] += 2.0 ** (step / decayed.HALF_LIFE)
    order = policy.order_victims(sorted(worth), len(worth), 60)
    for colder, hotter in zip(order, order[1:], strict=False):
        assert worth[colder] <= worth[hotter] * 1.02


def test_two_speed_prefers_victims_of_layers_already_passed():
    policy = policy_of("two_speed")
    policy.touch([0], 1)
    policy.touch([12], 1)
    policy.touch([6], 2)
    assert policy.order_victims([0, 12], 1, 2) == [0]


def test_two_speed_gives_up_parts_of_experts_before_whole_ones():
    policy = policy_of("two_speed")
    policy.touch([0, 1, 2], 1)
    policy.touch([1, 2], 2)
    assert policy.order_victims([0, 1, 2], 3, 2) == [0, 1, 2]
    assert policy.order_victims([0, 1, 2], 3, 2, [0, 0, 12]) == [2, 0, 1], "a warm fragment saves little"
    assert policy.order_victims([0, 1, 2], 3, 2, [15, 1, 0]) == [0, 1, 2]


def test_two_speed_values_stay_within_int32_when_used_at_every_step():
    policy = policy_of("two_speed")
    for step in range(1, 500):
        policy.touch([3], step)
    assert 0 < int(policy._keys[3]) * 3 // 2 < 2**31


def test_a_long_pause_ages_as_many_single_steps():
    together, apart = policy_of("two_speed"), policy_of("two_speed")
    for policy in (together, apart):
        policy.touch([1, 2], 1)
    for step in range(2, 1500):
        apart.touch([], step)
    for policy in (together, apart):
        policy.touch([2], 1500)
    assert (together._keys == apart._keys).all()


def test_hotter_misses_are_filled_first():
    for name in ("decayed", "two_speed"):
        policy = policy_of(name)
        for step in range(1, 4):
            policy.touch([2], step)
        policy.touch([1, 2, 3], 4)
        assert policy.order_fills([1, 2, 3], 4) == [2, 1, 3]


@pytest.mark.parametrize("name", ["lru_seeded", "decayed", "two_speed", "static_prefill"])
def test_a_prompts_most_used_experts_are_placed_first(name):
    policy = policy_of(name)
    policy.seed([3, 8, 11, 14], [2, 9, 4, 60], 0)
    assert policy.place(3) == [14, 8, 11]


@pytest.mark.parametrize("name", choices.names(PACKAGE))
@given(prompt=prompts)
@settings(max_examples=20, deadline=None)
def test_a_prompt_may_be_seeded_layer_by_layer(name, prompt):
    whole, parts = policy_of(name), policy_of(name)
    for policy in (whole, parts):
        policy.touch([0, 2], 1)
    whole.seed(sorted(prompt), [prompt[e] for e in sorted(prompt)], 2)
    for layer in range(LAYERS):
        ids = sorted(e for e in prompt if e // EXPERTS == layer)
        parts.seed(ids, [prompt[e] for e in ids], 2)
    assert whole.place(5) == parts.place(5)
    assert whole.order_victims(range(TOTAL), TOTAL, 2) == parts.order_victims(range(TOTAL), TOTAL, 2)


def test_static_never_evicts_what_it_placed_and_fills_nothing_else():
    policy = policy_of("static", slots=2)
    policy.seed([3, 8, 11], [2, 9, 4], 0)
    assert policy.place(2) == [8, 11]
    policy.touch([3], 1)
    assert policy.order_victims([3, 8, 11], 3, 1) == [3]
    assert policy.order_fills([3, 8], 1) == [8]
    policy.seed([3], [99], 2)
    assert policy.place(2) == [8, 11]


def test_static_without_frequencies_spreads_over_the_layers():
    policy = policy_of("static", slots=6)
    assert sorted(policy.place(6)) == [0, 3, 6, 9, 12, 15]


def test_static_prefill_is_placed_anew_by_the_next_prompt():
    policy = policy_of("static_prefill", slots=2)
    policy.seed([3, 8], [2, 9], 0)
    policy.touch([1], 1)
    policy.seed([5, 6], [1, 1], 2)
    assert sorted(policy.place(2)) == [5, 6]
