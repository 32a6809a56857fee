"""Replay against a plain model of a cache, and Belady as a bound for everything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.bench._belady import belady
from freetoken.bench._columns import COLUMNS, make_policy, run_column, unsupported
from freetoken.bench.replay import Reads, read_trace, replay
from tests.bench.makers import PREFILL, small_trace, trace_of, without_prefill

seeds = st.integers(0, 10_000)


def lru_misses(reads, num_slots):
    """LRU as a list, least recent first; one layer's experts never evict each other."""
    cache, misses = [], 0
    for _, ids in reads.layer_steps():
        wanted = ids.tolist()
        missing = [e for e in wanted if e not in cache]
        misses += len(missing)
        cache = [e for e in cache if e not in wanted] + [e for e in wanted if e in cache]
        for expert in missing:
            if len(cache) >= num_slots:
                victim = next((e for e in cache if e not in wanted), None)
                if victim is None:
                    continue
                cache.remove(victim)
            cache.append(expert)
        cache = [e for e in cache if e not in wanted] + [e for e in wanted if e in cache]
    return misses


@given(seed=seeds, num_slots=st.integers(1, 48))
@settings(max_examples=40, deadline=None)
def test_lru_misses_are_those_of_a_plain_list(seed, num_slots):
    trace = small_trace(seed)
    reads = read_trace(trace)
    found = replay(trace, reads, make_policy("lru"), num_slots)
    assert found.misses == lru_misses(reads, num_slots)


@given(seed=seeds, num_slots=st.integers(1, 60), share=st.sampled_from([0.0, 0.3, 0.5, 1.0]))
@settings(max_examples=15, deadline=None)
def test_counts_add_up_for_every_column(seed, num_slots, share):
    trace = small_trace(seed)
    reads = read_trace(trace)
    requests = sum(ids.size for _, ids in reads.layer_steps())
    for column in COLUMNS:
        counts = run_column(column, trace, reads, num_slots, share=share, warm_up=0)
        assert counts.requests == requests
        assert 0 <= counts.evictions <= counts.fills <= counts.misses <= counts.requests
        if column.partial:
            assert counts.fills <= share * counts.misses + 1


@given(seed=seeds, num_slots=st.integers(1, 48))
@settings(max_examples=25, deadline=None)
def test_no_policy_beats_belady(seed, num_slots):
    trace = small_trace(seed)
    reads = read_trace(trace)
    best = {c.key: run_column(c, trace, reads, num_slots, share=0.5, warm_up=0).misses for c in COLUMNS}
    assert best["belady_placed"] == min(best.values())
    assert best["belady"] <= min(best["lru"], best["lru_part"])


@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=8), num_slots=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_belady_is_the_best_of_all_choices_on_short_traces(ids, num_slots):
    reads = Reads([[np.array([e])] for e in ids], [])

    def best(at, cache):
        if at == len(ids):
            return 0
        if ids[at] in cache:
            return best(at + 1, cache)
        grown = cache | {ids[at]}
        keep = [grown] if len(grown) <= num_slots else itertools.combinations(grown, num_slots)
        return 1 + min(best(at + 1, frozenset(c)) for c in [*keep, cache])

    assert belady(reads, num_slots).misses == best(0, frozenset())


def test_everything_resident_misses_only_what_was_never_there():
    trace = without_prefill(small_trace())
    reads = read_trace(trace)
    distinct = len({e for _, ids in reads.layer_steps() for e in ids.tolist()})
    for name in ("lru", "decayed", "two_speed"):
        assert replay(trace, reads, make_policy(name), trace.pool).misses == distinct


def test_lru_below_a_token_cycle_misses_everything_and_two_speed_does_not():
    steps = [[[0, 1], [0, 1], [0, 1]]] * 20
    trace = trace_of(steps)
    reads = read_trace(trace)
    assert replay(trace, reads, make_policy("lru"), 4).miss_rate == 1.0
    assert replay(trace, reads, make_policy("two_speed"), 4).miss_rate < 0.8


def test_a_batch_reads_each_expert_once():
    trace = trace_of([[[0, 1]], [[1, 2]], [[3, 4]]], step=[0, 0, 1], request=[0, 1, 0])
    assert [[ids.tolist() for ids in layers] for layers in read_trace(trace).decode] == [
        [[0, 1, 2]],
        [[3, 4]],
    ]


def test_gaps_are_not_reads_and_prompts_are_counted_by_rows():
    trace = trace_of([[[0, 1]], [[1, 255]], [[255, 255]]], phase=[PREFILL, PREFILL, 1])
    reads = read_trace(trace)
    assert reads.decode == [[]]
    (at, ids, counts) = reads.prefills[0]
    assert (at, ids.tolist(), counts.tolist()) == (0, [0, 1], [1, 2])


def test_columns_that_need_a_prompt_say_so_without_one():
    reads = read_trace(without_prefill(small_trace()))
    refused = {c.key for c in COLUMNS if unsupported(c, reads)}
    assert refused == {"static_prefill", "lru_seeded"}


def test_warm_up_steps_are_run_but_not_counted():
    trace = without_prefill(small_trace())
    reads = read_trace(trace)
    whole = replay(trace, reads, make_policy("lru"), 20)
    tail = replay(trace, reads, make_policy("lru"), 20, warm_up=10)
    head = replay(trace, Reads(reads.decode[:10], []), make_policy("lru"), 20)
    assert whole.misses == head.misses + tail.misses
    assert whole.requests == head.requests + tail.requests


@pytest.mark.parametrize("column", [c for c in COLUMNS if c.live], ids=lambda c: c.key)
def test_a_live_policy_knows_the_past_only(column):
    trace = small_trace(3)
    reads = read_trace(trace)
    cut = Reads(reads.decode[:20], [p for p in reads.prefills if p[0] < 20])
    whole = run_column(column, trace, reads, 20, share=1.0, warm_up=0)
    start = run_column(column, trace, cut, 20, share=1.0, warm_up=0)
    rest = run_column(column, trace, reads, 20, share=1.0, warm_up=20)
    assert whole.misses == start.misses + rest.misses
