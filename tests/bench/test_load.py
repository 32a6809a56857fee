"""`ft bench load` writes its own model, reads it both ways and reports a row for each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freetoken.bench import load
from freetoken.cli import main as cli


def test_a_random_model_is_measured_in_both_containers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "HIDDEN", 64)
    monkeypatch.setattr(load, "WIDTH", 32)
    monkeypatch.setattr(load, "EXPERTS", 4)
    argv = ["bench", "load", "--size", "0.1", "--mode", "direct", "warm", "--repeat", "1", "--json"]
    assert cli.main([*argv, "--folder", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(r["container"], r["mode"]) for r in rows] == [
        ("safetensors", "direct"), ("safetensors", "warm"), ("ftw", "direct"), ("ftw", "warm"),
    ]  # fmt: skip
    assert all(r["load_cpu_s_per_gb"] > 0 for r in rows)
    assert all(r["ratio"] > 0 and r["ratio_fresh"] > 0 and r["load_gb_s"] > 0 for r in rows) and not list(
        tmp_path.iterdir()
    )


@pytest.mark.parametrize("words", [("--size", "nan"), ("--size", "-1"), ("--size", "1e9"), ("--repeat", "0")])
def test_sizes_and_turns_of_nothing_are_refused_before_anything_is_written(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "load", *words, "--folder", str(tmp_path)]) == 2
    assert "invalid_option" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "load", "--folder", str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert "invalid_option" in error and "none" in error
