"""`ft bench simulate`: the real control code at published shapes, the memory split and the report."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from freetoken.bench import _published, _shaped, geometries, simulate, synthetic
from freetoken.bench.traces import Trace, save_trace
from freetoken.core.errors import ConfigError
from freetoken.core.machine import PRESETS
from tests.bench.makers import last_object, run_bench

QWEN = geometries.geometry("qwen3.6-35b-a3b")
SMALL = geometries.Geometry(
    "small", 4, 32, 4, 512, 512, "bf16",
    expert_bytes=1_572_864, dense_bytes=10_000_000, dense_params=5_000_000, kv_bytes_per_token=1024,
)  # fmt: skip


@pytest.fixture(scope="module")
def small_routing():
    return synthetic.generate(synthetic.shape(SMALL.shape), requests=2, prompt_tokens=24, answer_tokens=40)


@pytest.fixture
def small_model(monkeypatch, small_routing, tmp_path):
    """The bench with a small model on the list; returns words that name it and its trace."""
    monkeypatch.setitem(geometries.GEOMETRIES, SMALL.name, SMALL)
    save_trace(small_routing, tmp_path / "small.npz")
    return ["--model", SMALL.name, "--trace", tmp_path / "small.npz"]


def opened(mode, *, machine="4090", num_slots=48, policy="two_speed", overlap=True):
    return _shaped.open_model(
        PRESETS[machine], SMALL, mode, num_slots=num_slots, policy=policy, overlap=overlap
    )


@pytest.mark.parametrize("mode", _shaped.MODES)
def test_missing_tiles_are_filled_or_computed_in_every_mode(mode, small_routing):
    found = _shaped.decode(opened(mode), small_routing, 24)
    assert found.steps == 24 and found.seconds > 0
    assert found.requests == 24 * SMALL.token_cycle
    assert found.filled_tiles + found.cpu_tiles == found.missing_tiles
    if mode == "cpu":
        assert found.misses == found.requests and not found.filled_tiles
    if mode == "offload":
        assert not found.cpu_tiles
    if mode == "static":
        assert not found.filled_tiles


def test_hybrid_is_no_slower_than_offload_or_cpu_where_both_sides_are_useful(small_routing):
    seconds = {mode: _shaped.decode(opened(mode), small_routing, 24).seconds for mode in _shaped.MODES}
    assert seconds["hybrid"] <= 1.05 * min(seconds["offload"], seconds["cpu"])


def test_more_slots_never_slow_decode_down(small_routing):
    few, many = (_shaped.decode(opened("hybrid", num_slots=n), small_routing, 24) for n in (16, 100))
    assert many.misses < few.misses
    assert many.seconds < few.seconds


def test_a_pool_that_has_slots_for_all_is_loaded_before_it_runs(small_routing):
    model = opened("hybrid", num_slots=SMALL.pool)
    assert model.stats.link_bytes >= 0.95 * SMALL.pool_bytes
    assert _shaped.decode(model, small_routing, 12).misses < 0.1 * 12 * SMALL.token_cycle


def test_prefill_without_a_second_buffer_takes_longer(small_routing):
    fast = _shaped.prefill(opened("hybrid"), small_routing, 2048)
    slow = _shaped.prefill(opened("hybrid", overlap=False), small_routing, 2048)
    assert fast < slow


def test_a_trace_shorter_than_asked_gives_what_it_has(small_routing):
    found = _shaped.decode(opened("offload"), small_routing, 10_000)
    assert found.steps == 0
    assert 0 < _shaped.decode(opened("offload"), small_routing, 70).steps <= 70


def test_batches_are_steps_with_several_rows():
    one = synthetic.generate(synthetic.shape(SMALL.shape), requests=1, prompt_tokens=0, answer_tokens=16)
    pairs = Trace(one.topk, one.phase, one.request, one.step // 2, one.num_experts)
    found = _shaped.decode(opened("offload"), pairs, 6)
    assert found.steps == 6
    assert 6 * SMALL.token_cycle < found.requests <= 12 * SMALL.token_cycle


def test_the_published_way_takes_the_published_time_and_loses_what_was_published_without_overlap():
    machine = PRESETS["5090-server"]
    assert _published.prefill_seconds(machine, QWEN, 8192, overlap=True) == pytest.approx(1.2, abs=0.05)
    for tokens, loss in ((4096, 0.19), (8192, 0.25), (16384, 0.26)):
        fast, slow = (_published.prefill_seconds(machine, QWEN, tokens, overlap=on) for on in (True, False))
        assert 1 - fast / slow == pytest.approx(loss, abs=0.07)


def test_a_pool_too_large_for_the_host_falls_back_to_the_smaller_format_or_says_why():
    assert simulate.fit_model(PRESETS["4060-laptop"], QWEN).geometry.name == "qwen3.6-35b-a3b-nvfp4"
    fit = simulate.fit_model(PRESETS["4060-laptop"], geometries.geometry("glm-5.2"))
    assert fit.num_slots == 0 and "pool 407 GB" in fit.why


def test_slots_kv_and_dense_weights_fit_the_gpu_together():
    for machine in PRESETS.values():
        for g in geometries.GEOMETRIES.values():
            fit = simulate.fit_model(machine, g)
            used = fit.num_slots * fit.geometry.expert_bytes + fit.geometry.dense_bytes
            assert fit.why or used < machine.gpu_memory


@pytest.mark.parametrize("name", sorted(geometries.GEOMETRIES))
def test_pools_are_the_published_sizes(name):
    sizes = {"qwen3.6-35b-a3b": 64.4, "qwen3.6-35b-a3b-nvfp4": 18.1, "qwen3-30b-a3b": 58, "glm-5.2": 408}
    sizes |= {"deepseek-v4-flash": 147, "gpt-oss-120b": 60.9}
    assert geometries.geometry(name).pool_bytes / 1e9 == pytest.approx(sizes[name], rel=0.01)


def test_the_report_covers_every_machine_mode_and_prompt(small_model, tmp_path, capsys):
    words = ["--machine", "5090-server", "4060-laptop", "--steps", 6, "--prompt", 256, 512, "--json"]
    assert run_bench(simulate, *small_model, *words, "--svg", tmp_path / "s.svg") == 0
    rows = last_object(capsys)["rows"]
    assert len([r for r in rows if r["kind"] == "decode"]) == 2 * len(_shaped.MODES)
    assert len([r for r in rows if r["kind"] == "prefill"]) == 2 * 2 * len(simulate.PREFILLS)
    assert all(r["tok_s"] > 0 and r["simulated"] for r in rows)
    for suffix in ("decode", "prefill"):
        ET.fromstring((tmp_path / f"s-{suffix}.svg").read_text())


def test_the_table_says_that_it_is_simulated(small_model, capsys):
    run_bench(simulate, *small_model, "--machine", "4090", "--steps", 3, "--prompt")
    text = capsys.readouterr().out
    assert text.startswith("simulated: small") and "synthetic" in text and "Prefill" not in text


def test_a_model_that_fits_nowhere_still_gives_a_report(capsys, tmp_path):
    trace = synthetic.generate(synthetic.shape("75x256k8"), requests=1, prompt_tokens=1, answer_tokens=2)
    save_trace(trace, tmp_path / "glm.npz")
    words = ["--model", "glm-5.2", "--machine", "4090", "--trace", tmp_path / "glm.npz", "--json"]
    assert run_bench(simulate, *words, "--svg", tmp_path / "s.svg") == 0
    assert all("pool 407 GB" in r["why"] for r in last_object(capsys)["rows"])


def test_a_trace_of_another_shape_is_refused(small_model):
    with pytest.raises(ConfigError, match="4x32k4"):
        run_bench(simulate, "--model", "glm-5.2", *small_model[2:])


def test_unknown_machines_models_and_policies_are_refused(small_model):
    for words in (["--machine", "6090"], ["--model", "nope"], ["--policy", "nope"], ["--steps", "0"]):
        with pytest.raises(ConfigError, match="nope|6090|at least 1"):
            run_bench(simulate, *small_model, *words)
