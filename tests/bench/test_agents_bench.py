"""Scripted agents compute little more than their edits force; the bench says so and why not less."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from freetoken.bench import _agent_times, _bound, _sessions, agents, geometries
from freetoken.bench._agent_runs import Turn
from freetoken.cli import main
from freetoken.core.errors import ConfigError
from freetoken.core.generate import PrefixReport


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict]:
    assert main.main(["bench", "agents", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]


def test_the_four_agents_compute_little_more_than_the_bound(capsys, tmp_path):
    lists, chart = tmp_path / "lists.jsonl", tmp_path / "chart.svg"
    sizes = ("--mode", "anchors", "--base", "400", "--turns", "4", "--counts")
    rows = bench(capsys, *sizes, "--tokens", str(lists), "--svg", str(chart))
    assert [row["agent"] for row in rows] == list(_sessions.AGENTS)
    script = [sys.executable, "-m", "freetoken.bench._bound", str(lists)]
    said = json.loads(subprocess.run(script, capture_output=True, check=True, text=True).stdout)
    for row, (agent, sums) in zip(rows, said.items(), strict=True):
        assert (row["agent"], row["asked"], row["bound"]) == (agent, sums["asked"], sums["bound"])
        assert 1.0 <= row["ratio_to_bound"] <= 1.10, row
        assert row["computed"] == sum(turn["computed"] for turn in row["turns"][1:])
        assert "ttft_s" not in row
        assert sum(row["over_bound"].values()) == row["computed"] - row["bound"]
    assert chart.read_text().startswith("<svg")


def test_times_follow_what_is_computed():
    small = replace(geometries.geometry(_agent_times.GEOMETRY), layers=2, experts=32)
    times = _agent_times.Times("4090", small)
    computed = (64, 128, 512, 4096, 8192)
    turns = [Turn(np.zeros(1), np.zeros(1), n, 0.0, 0.0, PrefixReport(n)) for n in computed]
    first, rates = zip(*times.of(turns), strict=True)
    assert 0 < first[0] <= first[1] <= first[2] <= first[3] == pytest.approx(first[4] / 2)
    row = {"turns": [{} for _ in turns]}
    agents._add_times(row, turns, times)
    assert row["simulated"] is True and first[2] < row["ttft_s"] < first[3]
    assert row["decode_tok_s"] > 0 and 0 <= row["decode_spread"] < 1 and times.single_tok_s > 0
    assert [turn["ttft_s"] for turn in row["turns"]] == [round(value, 4) for value in first]
    assert min(rates) > 0


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_times_are_simulated_and_say_so(capsys):
    (row,) = bench(capsys, "--agent", "openclaw", "--mode", "anchors", "--base", "60", "--turns", "2")
    assert row["ttft_s"] > 0 and row["decode_tok_s"] > 0 and row["simulated"] is True
    assert all(turn["ttft_s"] > 0 and turn["decode_tok_s"] > 0 for turn in row["turns"])
    assert row["decode_spread"] < 1


def test_anchors_beat_their_absence(capsys):
    rows = bench(capsys, "--agent", "openclaw", "--base", "500", "--turns", "4", "--counts")
    computed = {(row["agent"], row["mode"]): row["computed"] for row in rows}
    assert computed["openclaw", "anchors"] < computed["openclaw", "fixed"]
    assert computed["openclaw", "anchors"] < computed["openclaw", "none"]
    saved = {row["mode"]: row["checkpoints_saved"] for row in rows}
    assert abs(saved["fixed"] - saved["anchors"]) <= 0.1 * saved["anchors"], saved


def test_a_harder_edit_says_what_was_lost(capsys):
    words = ["--agent", "inside-edit", "--mode", "anchors", "--base", "60", "--turns", "3", "--counts"]
    assert main.main(["bench", "agents", "--json", *words]) == 0
    said = capsys.readouterr()
    (row,), text = json.loads(said.out.splitlines()[-1])["rows"], said.err.splitlines()
    assert row["over_bound"]["no_state"] > 20, row["over_bound"]
    assert any("81 no_state" in line and "1 x text_changed" in line for line in text), text
    assert any(line.strip().startswith("no_state: ") for line in text), "the reason in words"
    edits = [(turn["edit"], turn["where"]) for turn in row["turns"]]
    assert any(edit == "text_changed" and where.endswith("(tool)") for edit, where in edits), edits


@pytest.mark.soak
def test_the_demo_model_computes_tokens_for_real(capsys):
    words = ("--model", "demo", "--agent", "openclaw", "--mode", "anchors", "--base", "60", "--turns", "2")
    (row,) = bench(capsys, *words)
    assert row["simulated"] is False and row["ratio_to_bound"] >= 1.0 and row["decode_tok_s"] > 0


@pytest.mark.parametrize("words", [["--agent", "opnclaw"], ["--turns", "1"], ["--base", "0"]])
def test_wrong_wishes_are_refused(words):
    assert main.main(["bench", "agents", *words]) == ConfigError.exit_code


def test_the_bound_is_the_longest_known_beginning():
    known = [np.arange(10), np.array([0, 1, 9])]
    assert _bound.least(np.arange(12), known) == 2
    assert _bound.least(np.arange(5), known) == 1  # the last token is always computed
    assert _bound.least(np.array([7]), []) == 1
    assert len(Path(_bound.__file__).read_text().splitlines()) <= 60


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("agent", _sessions.AGENTS)
def test_an_agent_at_full_length(capsys, agent):
    (row,) = bench(capsys, "--agent", agent, "--mode", "anchors")
    assert row["ratio_to_bound"] <= 1.10, row
