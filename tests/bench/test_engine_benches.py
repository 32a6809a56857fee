"""`ft bench decode`, `prefill`, `suffix`, `beside`: their rows, on a CPU and on the simulated device."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from freetoken.bench import _setups, beside, decode, elastic, prefill, suffix, synth
from freetoken.bench._engine import Asked, Driven
from freetoken.bench._hammer import hammering
from freetoken.bench._rates import Moved, Rates
from freetoken.bench._setups import Member, Prompts, Setup
from freetoken.core.errors import ConfigError
from freetoken.engine.build import build
from freetoken.engine.engine import Engine
from tests.bench.makers import last_object, run_bench

ROW = set(
    ["decode_tok_s", "pool_share", "geometry", "backend", "threads"]
    + ["limit_tok_s", "share_of_limit", "prefetch", "policy"]
)
ONCE = ("--repeats", 1, "--warm-up", 1, "--json")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("synth") / "m"
    run_bench(synth, "--out", path, "--tiny", "--layers", 2, "--no-measure")
    return path


def test_decode_rows_name_the_engine_and_its_limit(model, capsys):
    words = ("--device", "sim", "--backend", "hybrid", "fused", "--share", 0.5, "--streams", 1, 2)
    assert run_bench(decode, "--model", model, *words, "--tokens", 8, "--lead", 4, *ONCE) == 0
    body = last_object(capsys)
    assert body["bench"] == "decode" and all(set(row) >= ROW for row in body["rows"])
    rows = {(row["backend"], row["streams"]): row for row in body["rows"]}
    assert set(rows) == {("hybrid", 1), ("hybrid", 2), ("fused", 1), ("fused", 2)}
    for row in rows.values():
        assert row["geometry"] == "2x16k4" and row["right"] == 1.0 and row["interleaved"]
        assert 0 < row["share_of_limit"] < 1.02
        assert row["step_ms"] == pytest.approx(1e3 * row["streams"] / row["decode_tok_s"], rel=0.05)
    assert rows["hybrid", 1]["pool_share"] == 0.5 and rows["fused", 1]["pool_share"] == 1.0
    assert rows["hybrid", 2]["missing_mb_step"] > 0 == rows["fused", 2]["missing_mb_step"]
    assert rows["fused", 2]["distinct_experts_layer"] > rows["fused", 1]["distinct_experts_layer"] > 3.5


def test_decode_on_a_cpu_reads_everything_from_host_memory(capsys):
    words = ("--device", "cpu", "--prompt", 8, "--tokens", 4, "--lead", 2)
    assert run_bench(decode, *words, *ONCE) == 0
    row = last_object(capsys)["rows"][0]
    assert row["device"] == "cpu" and row["hit_rate"] is None and row["rates_gb_s"]["host"] > 0
    assert row["decode_tok_s"] > 0 and row["limit_tok_s"] > 0 and row["right"] is None


@pytest.mark.soak
def test_a_hammered_run_tells_the_live_split_from_a_frozen_one(model, capsys):
    words = ("--device", "sim", "--backend", "hybrid", "--share", 0.5, "--tokens", 4, "--lead", 2)
    assert run_bench(decode, "--model", model, *words, "--hammer", 1, *ONCE) == 0
    beside = [row["beside"] for row in last_object(capsys)["rows"]]
    assert beside == [decode.QUIET, decode.FROZEN, decode.LIVE]


def test_a_frozen_split_stays_as_it_was(model):
    setup = Setup(str(model), "sim", "hybrid", 0.4)
    with Driven(build(setup.options(64, 1))) as engine:
        experts = engine.built.engine.runner.experts
        words = experts.controller.split.words
        engine.run(list(range(300, 330)), 6)
        experts.freeze(True)
        before = words.copy()
        engine.run(list(range(400, 430)), 12)
        assert np.array_equal(words, before)
        experts.freeze(False)
        engine.run(list(range(500, 530)), 12)
        assert not np.array_equal(words, before)


def test_prefill_takes_its_ideas_away_one_by_one(model, capsys):
    words = ("--device", "sim", "--backend", "hybrid", "--share", 0.6, "--ablate", "--prompt", 128)
    assert run_bench(prefill, "--model", model, *words, *ONCE) == 0
    rows = {row["way"]: row for row in last_object(capsys)["rows"]}
    assert set(rows) == {prefill.FULL, prefill.SERIAL, prefill.BY_CHUNK, prefill.COLD}
    assert all(row["ms"] > 0 and row["prompt"] == 128 and row["tflop"] > 0 for row in rows.values())
    assert all(row["link_gb"] > 0 and row["over_link"] > 0.5 for row in rows.values())
    assert {way: row["passes"] for way, row in rows.items() if row["passes"] != 1} == {prefill.BY_CHUNK: 2}


def test_suffix_computes_nothing_but_the_new_tokens(model, capsys):
    words = ("--device", "cpu", "--prefix", 96, "--suffix", 1, 20)
    assert run_bench(suffix, "--model", model, *words, *ONCE) == 0
    rows = last_object(capsys)["rows"]
    assert [row["suffix"] for row in rows] == [1, 20]
    assert all(row["reused"] and row["cached"] >= 80 and row["ms"] > 0 for row in rows)


def test_suffix_fails_where_nothing_is_reused(model, capsys, monkeypatch):
    options = Setup.options
    monkeypatch.setattr(
        Setup, "options", lambda self, *sizes, **more: options(self, *sizes, prefix_cache=False, **more)
    )
    words = ("--device", "cpu", "--prefix", 64, "--suffix", 1)
    assert run_bench(suffix, "--model", model, *words, *ONCE) == 1


def test_beside_shows_the_gaps_of_a_stream_and_the_hits_behind_a_prompt(model, capsys):
    words = ("--device", "sim", "--backend", "hybrid", "--share", 0.5, "--prompt", 300)
    assert run_bench(beside, "--model", model, *words, "--prefill-gap-ms", 5, *ONCE) == 0
    row = last_object(capsys)["rows"][0]
    assert row["allowed_ms"] == pytest.approx(5 + row["step_ms"], abs=0.02)
    assert row["gaps"] >= 1 and row["gap_p50_ms"] <= row["gap_p95_ms"] <= row["gap_longest_ms"]
    assert row["gap_longest_ms"] > row["step_ms"], "the prompt took some of the stream's time"
    assert 0 < row["hits_first_4"] <= 1 and 0 < row["hits_steady"] <= 1 and row["right"] == 1.0


@pytest.mark.parametrize(
    ("bench", "words"),
    [
        (decode, ("--streams", 0)),
        (beside, ("--prompt", 0)),
        (beside, ("--prefill-gap-ms", 0)),
        (beside, ("--prefill-gap-ms", "nan")),
        (decode, ("--repeats", 0)),
        (decode, ("--device", "sim", "--share", 1.5)),
        (decode, ("--device", "cpu", "--share", 0.5)),
        (prefill, ("--device", "cpu", "--ablate")),
        (prefill, ("--prompt", 0)),
        (suffix, ("--suffix", 0)),
    ],
)
def test_wrong_wishes_are_refused(bench, words):
    with pytest.raises(ConfigError):
        run_bench(bench, *words)


def test_the_least_step_is_the_slower_of_what_runs_side_by_side():
    rates = Rates(host=10.0, link=5.0, together=12.0, gpu=100.0)
    moved = Moved(dense=50.0, resident=50.0, missing=60.0)
    assert moved.least_s(rates, "hybrid", owns_memory=True) == 5.0
    assert moved.least_s(rates, "offload", owns_memory=True) == 12.0
    assert moved.least_s(rates, "cpu", owns_memory=True) == 6.0
    assert Moved(50.0, 500.0, 6.0).least_s(rates, "hybrid", owns_memory=True) == 5.5
    assert moved.least_s(rates, "cpu", owns_memory=False) == 16.0
    assert rates.better(Rates(host=11.0, link=1.0)) == Rates(11.0, 5.0, 12.0, 100.0)


def test_prompts_of_a_walk_know_what_follows(model):
    prompts = Prompts(str(model))
    one, other = prompts.take(40), prompts.take(40)
    assert one[0] != other[0]
    whole = prompts.walk
    at = whole.index(one[-1])
    assert prompts.right(one, whole[at + 1 : at + 4]) == 1.0
    assert prompts.right(one, [whole[at + 1], whole[0] if whole[0] != whole[at + 2] else whole[1]]) == 0.5


def test_rates_are_of_the_tokens_behind_the_first():
    asked = Asked("r", 1.0, ids=[1, 2, 3], times_s=[2.0, 2.5, 3.0])
    assert (asked.first_s, asked.tok_s) == (1.0, 2.0)


def test_a_hammer_ends_with_its_block(monkeypatch):
    kept = SimpleNamespace(ended=[])
    with hammering(0):
        pass
    with hammering(1):
        kept.ended.append(True)
    assert kept.ended == [True]


@pytest.mark.soak
def test_engines_of_a_group_are_gone_when_the_next_is_opened(model, capsys, monkeypatch):
    alive = []
    real = _setups.build

    def counting(options):
        gc.collect()
        alive.append(sum(type(thing) is Engine for thing in gc.get_objects()))
        return real(options)

    monkeypatch.setattr(_setups, "build", counting)
    for bench in (decode, prefill):
        monkeypatch.setattr(bench, "groups", lambda some: [[one] for one in some])
        alive.clear()
        small = {decode: ("--tokens", 2, "--lead", 1), prefill: ("--prompt", 16)}
        words = ("--device", "sim", "--backend", "hybrid", "offload", "--share", 0.5, *small[bench])
        assert run_bench(bench, "--model", model, *words, *ONCE) == 0
        assert len(alive) == 2 and alive[0] == alive[1], bench.__name__


def test_emptied_slots_hold_hardly_anybody(model):
    setup = Setup(str(model), "sim", "offload", 0.9)
    with Driven(build(setup.options(64, 1))) as engine:
        engine.run(list(range(300, 330)), 12)
        slots = engine.built.engine.runner.experts.slots
        before, count = slots.num_resident, slots.num_slots
        prefill.empty_slots(Member(setup, engine))
        assert slots.num_slots == count and slots.num_resident <= engine.built.plan.min_slots < before
        engine.run(list(range(400, 430)), 4)


def test_moving_memory_pauses_streams_and_changes_nothing_they_say(model, capsys):
    words = ("--device", "sim", "--backend", "hybrid", "--gpu-memory", 120 << 20, "--move", "1MiB")
    assert run_bench(elastic, "--model", model, *words, "--moves", 2, "--streams", 2, "--json") == 0
    row = last_object(capsys)["rows"][0]
    assert row["equal"] and len(row["pause_ms"]) == row["moves"] == 2 and min(row["pause_ms"]) >= 0
    assert row["move_bytes"] == 1 << 20 and min(row["move_ms"]) > 0


def test_answers_are_right_through_any_number_of_random_sizes(model, capsys):
    words = ("--device", "sim", "--backend", "hybrid", "--gpu-memory", 120 << 20, "--move", "1MiB", "--json")
    assert run_bench(elastic, "--model", model, *words, "--resizes", 12, "--streams", 2) == 0
    row = last_object(capsys)["rows"][0]
    assert row["right"] is True and row["equal"] and row["moves"] == row["under_load"] == 12
    assert row["resizes"] >= 10 and 0 < row["move_bytes"] <= 1 << 20
    assert len(row["pause_ms"]) == len(row["move_ms"]) == 3 and row["pause_ms"] == sorted(row["pause_ms"])


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--move", 0), "--move"),
        (("--move", "1TiB"), "--move"),
        (("--threads", -1), "moe_cpu_threads"),
        (("--threads", 0), "moe_cpu_threads"),
        (("--prefetch", -1), "moe_prefetch"),
        (("--gpu-memory", 0), "gpu_memory"),
    ],
)
def test_what_no_engine_could_do_is_refused(model, words, named):
    with pytest.raises(ConfigError, match=named) as e:
        run_bench(elastic, "--model", model, "--device", "sim", "--backend", "hybrid", "--moves", 1, *words)
    assert e.value.code == "invalid_option"


def test_more_tokens_than_the_model_has_positions_are_refused_with_advice_that_can_be_taken(model):
    with pytest.raises(ConfigError, match="positions") as e:
        run_bench(elastic, "--model", model, "--device", "sim", "--moves", 10**9)
    assert "fewer" in e.value.hint and "--max-model-len" not in e.value.hint


def test_a_bench_may_play_a_slower_link(model, capsys):
    words = ("--device", "sim", "--backend", "offload", "--share", 0.5, "--tokens", 8, "--lead", 4)
    rows = {}
    for link in ("0.5GB/s", "5"):
        assert run_bench(decode, "--model", model, *words, "--link", link, *ONCE) == 0
        rows[link] = last_object(capsys)["rows"][0]
    assert [row["rates_gb_s"]["link"] for row in rows.values()] == [0.5, 5.0]
    assert rows["0.5GB/s"]["decode_tok_s"] < 0.5 * rows["5"]["decode_tok_s"]
    with pytest.raises(ConfigError, match="not a rate"):
        run_bench(decode, "--link", "0GB/s")
    with pytest.raises(ConfigError, match="no link"):
        run_bench(decode, "--model", model, "--device", "cpu", "--link", "5GB/s")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is used then")
def test_without_a_gpu_the_simulated_ones_memory_moves(capsys):
    assert run_bench(elastic, "--moves", 1, "--streams", 1, "--json") == 0
    row = last_object(capsys)["rows"][0]
    assert (row["device"], row["backend"], row["equal"]) == ("sim", "hybrid", True)
    with pytest.raises(ConfigError, match="no memory of its own"):
        run_bench(elastic, "--device", "cpu")
