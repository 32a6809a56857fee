"""`ft bench cpu` and `ft bench bw`: rows as documented, a profile that only its own machine reads."""

from __future__ import annotations

import json

import pytest

from freetoken.bench import _native
from freetoken.bench._link import PIECE, measure
from freetoken.cli import main as cli
from freetoken.core import profile
from freetoken.devices.cpu import CpuDevice
from freetoken.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="no native library")


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path))
    monkeypatch.setattr("freetoken.bench._native.last_level_cache", lambda: 1 << 20)


def last_object(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_cpu_bench_gives_a_row_for_every_format_threads_and_batch(capsys):
    words = "bench cpu --format bf16 mxfp4 --threads 1 2 --size 0.01 --seconds 0.02 --json"
    code = cli.main(words.split())
    body = last_object(capsys)
    assert code in (0, 1) and body["bench"] == "cpu"  # a share can be anything in so short a time
    rows = [r for r in body["rows"] if r["format"]]
    assert {(r["format"], r["threads"], r["batch"]) for r in rows} == {
        (f, t, b) for f in ("bf16", "mxfp4") for t in (1, 2) for b in (1, 8)
    }
    assert all(r["gb_s"] > 0 and r["share_of_read_bw"] > 0 and r["tier"] == library().tier for r in rows)
    assert [r["threads"] for r in body["rows"] if not r["format"]] == [1, 2]


def test_rows_of_a_prompt_that_share_experts_are_measured_in_every_tier(capsys):
    tiers = library().tiers[-2:]
    words = (
        f"bench cpu --format bf16 --tier {' '.join(tiers)} --rows 8 40 --threads 2 --size 0.01 --seconds 0.02"
    )
    assert cli.main([*words.split(), "--json"]) in (0, 1)
    rows = [r for r in last_object(capsys)["rows"] if "rows" in r]
    assert [(r["rows"], r["tier"]) for r in rows] == [(n, t) for n in (8, 40) for t in tiers]
    assert all(r["us"] > 0 and r["giga_products_s"] > 0 and r["threads"] == 2 for r in rows)


def test_wrong_words_are_refused(capsys):
    assert cli.main(["bench", "cpu", "--format", "q9_9"]) == 2
    assert cli.main(["bench", "cpu", "--tier", "avx3"]) == 2
    assert cli.main(["bench", "cpu", "--cpu-time", "--threads", "1", "2"]) == 2


@pytest.mark.parametrize(
    "words",
    [
        *(f"cpu --threads={n}" for n in ("0", "-1", "100000")),
        *(f"cpu --seconds={s}" for s in ("0", "-1", "nan", "inf")),
        *(f"cpu --size={s}" for s in ("-1", "nan", "inf")),
        *(f"cpu --{name}=0" for name in ("rows", "hidden", "width")),
        "bw --threads 0",
        "bw --seconds nan",
        "bw --size inf",
    ],
)
def test_numbers_that_nothing_can_be_measured_with_are_refused(words, capsys):
    assert cli.main(["bench", *words.split(), "--json"]) == 2
    error = capsys.readouterr().err
    assert "invalid_option" in error and words.split()[1].split("=")[0] in error


def test_a_window_shorter_than_a_call_holds_one():
    assert _native.window(lambda: None, 1e-12) > 0


def test_time_of_the_cpu_counts_where_others_use_the_machine(capsys):
    words = "bench cpu --format bf16 --threads 1 --size 0.01 --seconds 0.02 --cpu-time --json"
    assert cli.main(words.split()) in (0, 1)
    assert all(r["gb_s"] > 0 for r in last_object(capsys)["rows"] if r["format"])


def test_the_bandwidth_bench_keeps_a_profile_of_this_machine_only(capsys, monkeypatch, caplog):
    words = "bench bw --format bf16 --threads 1 --size 0.01 --seconds 0.02 --json"
    assert profile.load() is None
    assert cli.main([*words.split(), "--dry-run"]) == 0 and profile.load() is None
    assert cli.main(words.split()) == 0
    assert [r["what"] for r in last_object(capsys)["rows"]] == ["read", "bf16"]
    kept = profile.load()
    assert kept is not None and kept.host_bw > 0 and kept.threads == 1 and set(kept.expert_bw) == {"bf16"}
    monkeypatch.setattr(profile, "machine_key", lambda: "another")
    with caplog.at_level("WARNING", "freetoken.profile"):
        assert profile.load() is None


@pytest.mark.parametrize("text", ["", "[]", '{"version": 0}', '{"version": 1, "machine": "x"}'])
def test_a_damaged_profile_is_ignored(text, monkeypatch):
    monkeypatch.setattr(profile, "machine_key", lambda: "x")
    profile.path().parent.mkdir(parents=True)
    profile.path().write_text(text)
    assert profile.load() is None


def test_link_and_cpu_are_measured_alone_and_together() -> None:
    made = _native.make("bf16", 256, 256, least=2 * PIECE)
    rates, locked = measure(CpuDevice(), made, 0.05)
    assert locked and min(rates.link, rates.link_beside_host, rates.host_beside_link) > 1e6
    made.close()
