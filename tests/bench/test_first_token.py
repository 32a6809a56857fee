"""`benchmarks.first_token`: which starts count, and the whole of it on a small model."""

from __future__ import annotations

import json

import pytest

from benchmarks import first_token


def one(container, seconds, *, compiled=0, warm_up=False):
    row = {"container": container, "first_token_s": seconds}
    return {**row, "kernels_compiled": compiled, "warm_up": warm_up}


def test_starts_that_compile_or_warm_up_do_not_count():
    rows = [one("ftw", 40, warm_up=True), one("safetensors", 30, compiled=2), one("ftw", 9), one("ftw", 13)]
    assert first_token.summary(rows, 26 * 10**9) == {
        "ftw": {"first_token_s": 11, "starts": 2, "bar_s": 12.0, "met": True}
    }


def test_a_small_model_is_held_to_no_bar():
    assert first_token.summary([one("ftw", 9)], 10**9) == {"ftw": {"first_token_s": 9, "starts": 1}}


@pytest.mark.soak
def test_both_containers_start_and_answer_with_the_walk(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["first_token", "--dir", str(tmp_path), "--tiny", "--device", "cpu"])
    monkeypatch.setattr(first_token, "RESERVE_S", 0.0)
    code = first_token.main()
    body = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0, body
    assert {row["container"] for row in body["starts"]} == {"ftw", "safetensors"}
    for row in body["starts"]:
        assert row["listening_s"] < row["ready_s"] < row["first_token_s"]
        assert {"imports", "headers", "dense", "fill", "self_test"} <= row["parts"].keys()
