"""Scripted agents compute little more than their edits force; the bench says so and why not less."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from freetoken.bench import _bound, _sessions
from freetoken.cli import main
from freetoken.core.errors import ConfigError


def bench(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict]:
    assert main.main(["bench", "agents", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]


def test_the_four_agents_compute_little_more_than_the_bound(capsys, tmp_path):
    lists, chart = tmp_path / "lists.jsonl", tmp_path / "chart.svg"
    sizes = ("--mode", "anchors", "--base", "700", "--turns", "4")
    rows = bench(capsys, *sizes, "--tokens", str(lists), "--svg", str(chart))
    assert [row["agent"] for row in rows] == list(_sessions.AGENTS)
    script = [sys.executable, "-m", "freetoken.bench._bound", str(lists)]
    said = json.loads(subprocess.run(script, capture_output=True, check=True, text=True).stdout)
    for row, (agent, sums) in zip(rows, said.items(), strict=True):
        assert (row["agent"], row["asked"], row["bound"]) == (agent, sums["asked"], sums["bound"])
        assert 1.0 <= row["ratio_to_bound"] <= 1.10, row
        assert row["computed"] == sum(turn["computed"] for turn in row["turns"][1:])
        assert row["ttft_s"] > 0 and row["decode_tok_s"] > 0 and row["simulated"] is True
        assert sum(row["over_bound"].values()) == row["computed"] - row["bound"]
    assert chart.read_text().startswith("<svg")


def test_anchors_beat_their_absence_and_a_harder_edit_says_what_was_lost(capsys):
    rows = bench(capsys, "--agent", "openclaw", "inside-edit", "--base", "500", "--turns", "4")
    computed = {(row["agent"], row["mode"]): row["computed"] for row in rows}
    assert computed["openclaw", "anchors"] < computed["openclaw", "fixed"]
    assert computed["openclaw", "anchors"] < computed["openclaw", "none"]
    turns = [turn for row in rows if row["agent"] == "inside-edit" for turn in row["turns"]]
    assert any(turn["edit"] == "text_changed" and turn["where"].endswith("(tool)") for turn in turns)


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
