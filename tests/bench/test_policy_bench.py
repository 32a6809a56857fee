"""`ft bench policy`: its table, its JSON, its chart and its verdict."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from freetoken.bench import policy
from freetoken.bench._columns import COLUMNS
from freetoken.bench.traces import save_trace
from freetoken.core.errors import ConfigError
from tests.bench.makers import last_object, run_bench, small_trace, without_prefill


@pytest.fixture
def trace_file(tmp_path):
    save_trace(small_trace(), tmp_path / "small.npz")
    return tmp_path / "small.npz"


def row(policy_name, rate, *, cycles=4.0, live=True, capacity=20.0):
    return {
        "trace": "t", "policy": policy_name, "live": live, "miss_rate": rate,
        "token_cycles": cycles, "capacity_percent": capacity,
    }  # fmt: skip


def test_json_is_one_object_on_the_last_line_with_a_row_a_column_and_capacity(trace_file, capsys):
    assert run_bench(policy, trace_file, "--json") == 0
    body = last_object(capsys)
    assert set(body) == {"bench", "machine", "date", "rows"}
    assert len(body["rows"]) == len(COLUMNS) * len(policy.CAPACITIES)
    for found in body["rows"]:
        assert found["requests"] >= found["misses"] >= found["fills"]
        assert found["miss_rate"] == pytest.approx(found["misses"] / found["requests"], abs=1e-5)


def test_capacities_below_a_token_cycle_are_marked(trace_file, capsys):
    run_bench(policy, trace_file, "--capacity", 5, 60, "--policy", "lru", "decayed")
    text = capsys.readouterr().out
    assert "5 %!" in text and "60 %!" not in text and "below one token cycle" in text


def test_a_column_that_a_trace_cannot_support_says_so(tmp_path, capsys):
    save_trace(without_prefill(small_trace()), tmp_path / "decode.npz")
    run_bench(policy, tmp_path / "decode.npz", "--capacity", 37, "--json")
    rows = {r["policy"]: r for r in last_object(capsys)["rows"]}
    assert rows["lru_seeded"]["miss_rate"] is None and "prefill" in rows["lru_seeded"]["why"]
    run_bench(policy, tmp_path / "decode.npz", "--capacity", 37)
    assert "LRU seeded by prefill: the trace holds no prefill" in capsys.readouterr().out


def test_each_trace_gets_its_chart_and_every_column_its_line(trace_file, tmp_path, capsys):
    run_bench(policy, trace_file, "--svg", tmp_path / "chart.svg")
    root = ET.fromstring((tmp_path / "chart.svg").read_text())
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == len(COLUMNS)
    run_bench(policy, trace_file, trace_file, "--capacity", 20, "--svg", tmp_path / "two.svg")
    assert (tmp_path / "two-synthetic-3x16k2.svg").exists()
    capsys.readouterr()


def test_without_a_trace_the_demo_models_or_a_synthetic_one_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path))
    trace = policy.default_trace()
    assert trace.synthetic or trace.num_experts == 32


def test_plain_lru_is_never_the_best_below_one_and_a_half_token_cycles():
    rows = [row("lru", 0.1, cycles=1.4), row("two_speed", 0.9, cycles=1.4)]
    assert policy.best_live(rows) == {("t", 20.0): "two_speed"}
    rows = [row("lru", 0.1, cycles=1.6), row("two_speed", 0.9, cycles=1.6)]
    assert policy.best_live(rows) == {("t", 20.0): "lru"}


def test_the_verdict_ranks_live_policies_by_their_mean_and_ignores_oracles():
    rows = [
        row("lru", 0.4), row("lru", 0.2, capacity=37.0),
        row("decayed", 0.3), row("decayed", 0.2, capacity=37.0),
        row("belady", 0.0, live=False), row("lru_seeded", 0.1),
    ]  # fmt: skip
    assert re.match(r"Best live policy: decayed, 25\.0 % .*lru 30\.0 %", policy.verdict(rows))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--capacity", "0"], "capacity"),
        (["--capacity", "101"], "capacity"),
        (["--fill-share", "1.5"], "fill share"),
        (["--steps", "-1"], "negative"),
        (["--warm-up", "100000"], "leaves no step"),
        (["--policy", "lruu"], "no policy column"),
    ],
)
def test_wrong_options_are_refused(trace_file, words, message):
    with pytest.raises(ConfigError, match=message):
        run_bench(policy, trace_file, *words)


def test_a_trace_without_decode_steps_is_refused(tmp_path):
    trace = small_trace(answer=0)
    save_trace(trace, tmp_path / "prompt.npz")
    with pytest.raises(ConfigError, match="no decode steps"):
        run_bench(policy, tmp_path / "prompt.npz")
