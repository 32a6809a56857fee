"""The split words, the controller's fits and the guard's choice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.core.machine import preset
from freetoken.experts.controller import PROBE_EVERY, Branch, Controller, Guard
from freetoken.experts.split import ONE, Split, balance, bucket_of, pack, unpack

RATE = st.floats(1e-7, 1e-3)
FIXED = st.floats(0, 1e-3)


@given(st.floats(0, 1), st.floats(-1000, 1000))
def test_a_word_keeps_both_numbers(alpha, beta):
    low, high = unpack(pack(alpha, beta))
    assert abs(low / ONE - alpha) <= 1 / ONE and abs(high / ONE - beta) <= 1 / ONE
    assert -(1 << 63) <= pack(alpha, beta) < 1 << 63


@given(FIXED, RATE, FIXED, RATE, st.integers(1, 512))
def test_the_balance_is_the_minimum_over_every_whole_split(a_p, tau_p, a_c, tau_c, missing):
    alpha, beta = balance((a_p, tau_p), (a_c, tau_c))
    best = max(0.0, min(float(missing), alpha * missing + beta))

    def took(q):
        return max(a_p + q * tau_p, a_c + (missing - q) * tau_c)

    assert took(best) <= min(took(q) for q in range(missing + 1)) * (1 + 1e-9)


@given(st.floats(0, 1), st.lists(st.integers(0, 300), min_size=1, max_size=200))
def test_shares_add_up_however_the_misses_come(alpha, misses):
    split = Split.uniform(pack(alpha, 0.0))
    filled = [split.tiles_to_fill(m, 0) for m in misses]
    assert all(0 <= q <= m for q, m in zip(filled, misses, strict=True))
    wanted = sum(m if alpha >= 1 else max(round(alpha * ONE) / ONE * m, m / 16) for m in misses)
    assert abs(sum(filled) - wanted) <= 1.0 + 1e-6


def test_at_least_a_sixteenth_is_filled_so_that_the_cache_warms():
    split = Split.uniform(pack(0.0, -50.0))
    assert sum(split.tiles_to_fill(4, 0) for _ in range(64)) == 16


def test_buckets_double():
    assert [bucket_of(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 1 << 20)] == [0, 1, 2, 2, 3, 3, 4, 4, 15]


@given(
    FIXED, RATE, st.lists(st.integers(1, 200), min_size=8, max_size=60).filter(lambda x: max(x) > 2 * min(x))
)
def test_a_branch_learns_fixed_and_tile_cost(fixed, tile, counts):
    branch = Branch(5e-6, 1e-6)
    for _ in range(6):
        for n in counts:
            branch.observe(n, fixed + n * tile)
        branch.fit()
    for n in (min(counts), max(counts)):
        assert branch.fixed_s + n * branch.tile_s == pytest.approx(fixed + n * tile, rel=0.02)


def test_a_branch_forgets():
    branch = Branch(0.0, 1e-6)
    for tile in (1e-6, 9e-6):
        for _ in range(20):
            branch.observe(32, 32 * tile)
            branch.fit()
    assert branch.tile_s == pytest.approx(9e-6, rel=0.01)


def test_the_guard_leaves_when_the_link_alone_is_faster():
    guard = Guard()
    for _ in range(9):
        guard.step(1.0, actual_s=2.0, alone_s=1.0)
    assert guard.left and guard.link_only


def test_the_guard_probes_the_other_mode_and_keeps_the_faster():
    for faster in (True, False):
        guard = Guard()
        seen = []
        for _ in range(PROBE_EVERY + 5):
            seen.append(guard.link_only)
            guard.step(0.5 if guard.link_only == faster else 1.0, 1.0, 1.0)
        assert seen.count(True) >= 8 and guard.left == faster


def test_the_first_guess_comes_from_measured_rates():
    machine = preset("5090-server").with_rates(fill_fixed_s=0.0, cpu_fixed_s=0.0)
    controller = Controller(machine, 1 << 18)
    alpha, beta = unpack(int(controller.split.words[0, 0]))
    assert alpha / ONE == pytest.approx(machine.link_bw / machine.host_bw, abs=1e-3) and abs(beta) <= 1
