"""Synthetic routing: reproducible, labelled, and within tolerance of the published statistics."""

from __future__ import annotations

import numpy as np
import pytest

from freetoken.bench import _locality, synthetic
from freetoken.bench._columns import COLUMNS, run_column
from freetoken.bench.replay import read_trace
from freetoken.core.errors import ConfigError
from tests.bench.makers import SMALL, last_object, run_bench, small_trace, trace_of

COLUMN = {c.key: c for c in COLUMNS}
PUBLISHED = {
    "40x256k8": (0.37, {"lru": 0.16, "static_prefill": 0.41, "static_blind": 0.62}),
    "43x256k6": (0.11, {"lru": 0.39, "static_prefill": 0.59, "static_blind": 0.89}),
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_calibrated_geometries_reproduce_the_published_miss_rates(name):
    trace = synthetic.generate(synthetic.shape(name), requests=2)
    share, targets = PUBLISHED[name]
    found = _locality.measure(trace)
    assert found["lag1_share"] == pytest.approx(0.38, abs=0.03)
    assert found["lag8_share"] == pytest.approx(0.27, abs=0.03)
    assert 0.27 <= found["hottest_share"] <= 0.40
    assert found["layer0_hottest_share"] < 0.4 * found["hottest_share"]
    reads = read_trace(trace)
    for key, rate in targets.items():
        counts = run_column(COLUMN[key], trace, reads, int(share * trace.pool), share=1.0, warm_up=0)
        assert counts.miss_rate == pytest.approx(rate, abs=0.025), key


def test_one_seed_gives_one_trace_and_another_gives_another():
    assert (small_trace(4).topk == small_trace(4).topk).all()
    assert (small_trace(4).topk != small_trace(5).topk).any()


def test_a_token_chooses_k_different_experts():
    for row in small_trace().topk.reshape(-1, SMALL.top_k):
        assert len(set(row.tolist())) == SMALL.top_k


def test_synthetic_traces_say_that_they_are():
    trace = small_trace()
    assert trace.synthetic and trace.name.startswith("synthetic")


def test_a_geometry_is_made_once_and_kept_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path))
    first = synthetic.cached(SMALL)
    (file,) = (tmp_path / "traces").iterdir()
    before = file.stat().st_mtime_ns
    assert (synthetic.cached(SMALL).topk == first.topk).all()
    assert file.stat().st_mtime_ns == before


def test_a_home_folder_that_cannot_be_written_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path / "file"))
    assert synthetic.cached(SMALL).num_experts == SMALL.experts


def test_any_geometry_can_be_named_and_nonsense_is_refused():
    assert synthetic.shape("48x128k8").experts == 128
    assert not synthetic.shape("48x128k8").calibrated
    for name in ("nonsense", "4x4k5", "0x4k1", "4x4k0"):
        with pytest.raises(ConfigError, match="not a geometry"):
            synthetic.shape(name)
    with pytest.raises(ConfigError, match="--seed"):
        run_bench(synthetic, "--seed", -1)


def test_shares_are_right_on_a_trace_counted_by_hand():
    trace = trace_of([[[0, 1]], [[1, 2]], [[1, 2]], [[4, 5]]], request=[0, 0, 0, 1])
    found = _locality.measure(trace)
    assert found["lag1_share"] == pytest.approx(3 / 4)
    assert found["lag8_share"] == 0.0
    assert found["hottest_share"] == pytest.approx(5 / 8)


def test_the_bench_writes_a_trace_that_can_be_read(tmp_path, capsys):
    out = tmp_path / "t.npz"
    assert run_bench(synthetic, "--geometry", "2x8k2", "--requests", 1, "--out", out, "--json") == 0
    body = last_object(capsys)
    assert body["bench"] == "synthetic" and 0 < body["rows"][0]["lag1_share"] < 1
    assert np.load(out)["topk"].shape[1:] == (2, 2)
