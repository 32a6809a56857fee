"""Trace files: every layout that is read, what is refused, and recording while layers interleave."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.bench.traces import DECODE, PREFILL, RoutingRecorder, load_trace, save_trace
from freetoken.core.errors import ConfigError
from tests.bench.makers import small_trace, trace_of


def same(a, b):
    for key in ("topk", "phase", "request", "step"):
        assert (getattr(a, key) == getattr(b, key)).all()
        assert getattr(a, key).dtype == getattr(b, key).dtype
    assert a.num_experts == b.num_experts


def test_what_is_saved_is_loaded(tmp_path):
    trace = small_trace()
    save_trace(trace, tmp_path / "t.npz")
    loaded = load_trace(tmp_path / "t.npz")
    same(trace, loaded)
    assert loaded.meta == trace.meta


def test_more_than_255_experts_are_kept_in_two_bytes(tmp_path):
    recorder = RoutingRecorder(1, 256, 2)
    recorder.record(0, [[0, 255], [255, -1]], [0, 0], DECODE)
    recorder.save(tmp_path / "t.npz", {"model": "m"})
    loaded = load_trace(tmp_path / "t.npz")
    assert loaded.topk.dtype == np.uint16
    assert loaded.topk.tolist() == [[[0, 255]], [[255, 65535]]]
    assert loaded.meta["model"] == "m"


def test_public_traces_with_weights_and_gaps_are_read(tmp_path):
    topk = np.array([[[1, 2], [255, 255]], [[3, 0], [2, 1]]], dtype=np.uint8)
    np.savez(
        tmp_path / "public.npz",
        topk=topk,
        weight=np.ones(topk.shape, np.float16),
        phase=np.array([PREFILL, DECODE], np.uint8),
        step=np.array([0, 1], np.int32),
        request=np.zeros(2, np.int32),
        num_experts=4,
    )
    trace = load_trace(tmp_path / "public.npz")
    assert (trace.num_layers, trace.num_experts, trace.top_k) == (2, 4, 2)
    assert [phase for phase, _ in trace.engine_steps()] == [PREFILL, DECODE]
    assert trace.name == "public"


def test_layer_first_decode_traces_are_turned(tmp_path):
    topk = np.arange(2 * 5 * 3, dtype=np.uint8).reshape(2, 5, 3)
    np.savez(tmp_path / "demo.npz", topk=topk, num_experts=32, prompt="a", generated="b")
    trace = load_trace(tmp_path / "demo.npz")
    assert trace.topk.shape == (5, 2, 3)
    assert (trace.topk[4, 1] == topk[1, 4]).all()
    assert (trace.phase == DECODE).all()


@pytest.mark.parametrize(
    ("arrays", "word"),
    [
        ({"topk": np.zeros((2, 2, 1), np.uint8)}, "num_experts"),
        ({"topk": np.zeros((2, 2), np.uint8), "num_experts": 4}, "uint8"),
        ({"topk": np.zeros((2, 2, 1), np.float32), "num_experts": 4}, "float32"),
        ({"topk": np.full((2, 2, 1), 9, np.uint8), "num_experts": 4}, "expert 9 of 4"),
        ({"topk": np.full((2, 2, 1), 255, np.uint8), "num_experts": 4}, "no row is routed"),
        ({"topk": np.zeros((2, 2, 1), np.uint8), "num_experts": 4, "phase": np.ones(3)}, "phase"),
    ],
)
def test_a_wrong_file_is_refused_and_says_why(tmp_path, arrays, word):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ConfigError, match=word) as caught:
        load_trace(tmp_path / "bad.npz")
    assert caught.value.code == "invalid_trace" and caught.value.hint


def test_what_is_no_archive_or_not_there_is_refused(tmp_path):
    (tmp_path / "text.npz").write_text("hello")
    for name in ("text.npz", "missing.npz"):
        with pytest.raises(ConfigError, match="not a routing trace"):
            load_trace(tmp_path / name)


def test_decode_rows_of_one_step_are_one_batch_and_a_prompt_is_one_step():
    rows = [[[0]]] * 7
    trace = trace_of(
        rows, phase=[0, 0, 0, 1, 1, 1, 1], request=[0, 0, 1, 0, 1, 0, 1], step=[0, 0, 1, 2, 2, 3, 3]
    )
    assert [(p, r.start, r.stop) for p, r in trace.engine_steps()] == [
        (PREFILL, 0, 2),
        (PREFILL, 2, 3),
        (DECODE, 3, 5),
        (DECODE, 5, 7),
    ]


@given(seed=st.integers(0, 1000), prompt=st.integers(1, 6), cuts=st.lists(st.integers(0, 2), max_size=8))
@settings(max_examples=30, deadline=None)
def test_decode_steps_between_the_layers_of_a_prompt_are_told_apart(seed, prompt, cuts):
    rng = np.random.default_rng(seed)
    prefill, decode = rng.integers(0, 8, (prompt, 3, 2)), rng.integers(0, 8, (len(cuts), 3, 2))
    recorder = RoutingRecorder(3, 8, 2)
    for layer in range(3):
        recorder.record(layer, prefill[:, layer], [5] * prompt, PREFILL)
        for step, at in enumerate(cuts):
            if at == layer:
                for inner in range(3):
                    recorder.record(inner, decode[[step], inner], [9], [DECODE])
    trace = recorder.trace()
    order = sorted(range(len(cuts)), key=lambda step: cuts[step])
    assert (trace.topk[trace.request == 5] == prefill).all()
    assert (trace.topk[trace.request == 9] == decode[order]).all()
    assert set(trace.phase[trace.request == 5]) <= {PREFILL}


def test_padding_rows_and_rows_of_a_dropped_prompt_are_left_out():
    recorder = RoutingRecorder(2, 8, 1)
    recorder.record(0, [[1], [2]], [0, 0], PREFILL)
    recorder.drop(0)
    for layer in range(2):
        recorder.record(layer, [[3 + layer], [7]], [0, -1], PREFILL)
    recorder.record(0, [[6]], [0], DECODE)
    assert recorder.trace().topk.tolist() == [[[3], [4]]]


def test_a_recording_without_rows_can_be_saved(tmp_path):
    RoutingRecorder(2, 8, 1).save(tmp_path / "empty.npz")
    with pytest.raises(ConfigError, match="no row is routed"):
        load_trace(tmp_path / "empty.npz")
