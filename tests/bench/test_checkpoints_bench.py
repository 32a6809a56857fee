"""`ft bench checkpoints`: pairs in one engine, states counted, a server's turn against its own receipt."""

from __future__ import annotations

import pytest

from freetoken.bench import checkpoints, synth
from freetoken.bench.checkpoints import Pairs
from freetoken.core.errors import ConfigError
from tests.bench.makers import last_object, run_bench

ONCE = ("--repeats", 1, "--warm-up", 0, "--json")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("synth") / "m"
    words = ("--geometry", "qwen3.6-35b-a3b", "--tiny", "--no-measure")
    run_bench(synth, "--out", path, *words)
    return path


def test_states_are_saved_in_one_way_only_and_a_turn_is_compared_with_its_receipt(model, capsys):
    words = ("--device", "cpu", "--prefix", 320, "--tokens", 40)
    assert run_bench(checkpoints, "--model", model, *words, *ONCE) == 0
    body = last_object(capsys)
    assert body["bench"] == "checkpoints"
    prefill, decode, turn = body["rows"]
    assert [row["case"] for row in body["rows"]] == ["prefill", "decode", "turn"]
    assert prefill["saved"] >= 4 and decode["saved"] >= 2 and prefill["state_mb"] > 0
    assert prefill["share"] == pytest.approx(prefill["ms_saving"] / prefill["ms_without"] - 1, abs=1e-3)
    assert turn["reused"] and turn["tokens"] < 128 < turn["cached"]
    assert 0 < turn["ms_engine"] < turn["ms_ttft"]
    assert turn["ms_added"] == pytest.approx(turn["ms_ttft"] - turn["ms_engine"], abs=0.01)


def test_a_simulated_device_pays_for_copies_on_its_own_clock(model, capsys):
    words = ("--device", "sim", "--backend", "fused", "--prefix", 320, "--tokens", 40, "--no-http")
    assert run_bench(checkpoints, "--model", model, *words, *ONCE) == 0
    prefill, decode = last_object(capsys)["rows"]
    assert prefill["saved"] >= 4 and decode["saved"] >= 2
    assert prefill["ms_without"] <= prefill["ms_saving"] and decode["ms_without"] <= decode["ms_saving"]


def test_a_model_without_states_has_the_turn_only_and_is_refused_by_name_without_it(tmp_path, capsys):
    run_bench(synth, "--out", tmp_path / "m", "--tiny", "--no-measure", "--layers", 1)
    words = ("--model", tmp_path / "m", "--device", "cpu", "--prefix", 320)
    assert run_bench(checkpoints, *words, *ONCE) == 0
    (turn,) = last_object(capsys)["rows"]
    assert turn["case"] == "turn" and turn["reused"] and turn["state_mb"] == 0
    with pytest.raises(ConfigError, match="no recurrent states"):
        run_bench(checkpoints, *words, "--no-http", *ONCE)


@pytest.mark.parametrize("words", [("--prefix", 0), ("--tokens", 0)])
def test_lengths_of_nothing_are_not_the_usual_ones(words):
    with pytest.raises(ConfigError, match="at least"):
        run_bench(checkpoints, *words)


def test_shares_are_medians_of_pairs_and_limits_are_judged():
    pairs = Pairs([1.0, 2.0, 1.0], [1.004, 2.04, 1.001], [4, 4, 4])
    row = pairs.row("decode", 10)
    assert row["share"] == 0.004 and row["within"] and row["us_a_state"] == pytest.approx(1000)
    assert not Pairs([1.0], [1.02], [1]).row("prefill", 10)["within"]
