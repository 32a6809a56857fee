"""`ft bench simulate`: the timing's arithmetic against brute force, and the report."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.bench import _plant, geometries, simulate, synthetic
from freetoken.bench._columns import make_policy
from freetoken.bench.replay import read_trace
from freetoken.bench.traces import save_trace
from freetoken.core.errors import ConfigError
from freetoken.core.machine import PRESETS
from tests.bench.makers import last_object, run_bench

PUBLISHED_FILL = {
    "3090": 0.44,
    "4090": 0.38,
    "5090-server": 0.68,
    "5090-desktop": 0.98,
    "4060-laptop": 0.25,
    "pro-6000": 0.30,
}
QWEN = geometries.geometry("qwen3.6-35b-a3b")


@pytest.fixture(scope="module")
def qwen_trace(tmp_path_factory):
    shape = synthetic.shape(QWEN.shape)
    trace = synthetic.generate(shape, requests=1, prompt_tokens=64, answer_tokens=48)
    path = tmp_path_factory.mktemp("trace") / "q.npz"
    save_trace(trace, path)
    return path, read_trace(trace)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_large_fills_balance_at_the_published_share(name):
    tiles, _ = _plant.best_fill(PRESETS[name], 13.4e6, 6)
    assert tiles / (6 * _plant.TILES) == pytest.approx(PUBLISHED_FILL[name], abs=0.06)


@given(name=st.sampled_from(sorted(PRESETS)), misses=st.integers(1, 8), size=st.floats(1e6, 3e7))
@settings(max_examples=60, deadline=None)
def test_no_split_is_much_faster_than_the_chosen_one(name, misses, size):
    machine, total = PRESETS[name], misses * _plant.TILES
    tile = size / _plant.TILES
    _, seconds = _plant.best_fill(machine, size, misses)
    for filled in range(total + 1):
        link = machine.fill_fixed_s * (filled > 0) + filled * tile / machine.link_bw
        work, now = (total - filled) * tile, 0.0
        if work > link * machine.host_bw_beside_link:
            now = link + (work - link * machine.host_bw_beside_link) / machine.host_bw
        else:
            now = work / machine.host_bw_beside_link
        cpu = machine.cpu_fixed_s + now if work else 0.0
        assert seconds <= 1.051 * max(link + filled * tile / machine.gpu_bw, cpu)


def test_hybrid_is_no_slower_than_its_parts_alone(qwen_trace):
    _, reads = qwen_trace
    for name in ("3090", "5090-server", "4060-laptop"):
        fit = simulate.fit_model(PRESETS[name], QWEN)
        seconds = {}
        for mode in _plant.MODES:
            steps = simulate.simulate_decode(PRESETS[name], fit, mode, reads, policy="two_speed", steps=30)
            seconds[mode] = sum(s.seconds for s in steps) / len(steps)
        assert seconds["hybrid"] <= 1.05 * min(seconds.values())


def test_tiles_of_misses_are_filled_or_computed(qwen_trace):
    _, reads = qwen_trace
    fit = simulate.fit_model(PRESETS["4090"], QWEN)
    for mode in _plant.MODES:
        for step in simulate.simulate_decode(PRESETS["4090"], fit, mode, reads, policy="lru", steps=8):
            assert step.filled_tiles + step.cpu_tiles == step.misses * _plant.TILES
            assert step.requests == QWEN.token_cycle
            assert (mode != "cpu") or step.misses == step.requests


def test_hybrid_hits_nearly_as_often_as_offload(qwen_trace):
    _, reads = qwen_trace
    rates = {}
    for mode in ("hybrid", "offload"):
        fit = simulate.fit_model(PRESETS["5090-server"], QWEN)
        steps = simulate.simulate_decode(
            PRESETS["5090-server"], fit, mode, reads, policy="two_speed", steps=36
        )
        rates[mode] = sum(s.misses for s in steps) / sum(s.requests for s in steps)
    assert rates["hybrid"] == pytest.approx(rates["offload"], abs=0.03)


def test_prefill_overlap_hides_the_shorter_side_and_without_it_both_are_paid():
    machine = PRESETS["5090-server"]
    for tokens in (4096, 32768):
        fast = _plant.prefill_seconds(machine, QWEN, tokens, 0.3, overlap=True)
        slow = _plant.prefill_seconds(machine, QWEN, tokens, 0.3, overlap=False)
        link = QWEN.pool_bytes * 0.7 / machine.link_bw
        assert link < slow and fast < slow
        compute = slow - link
        assert max(link, compute) <= fast <= max(link, compute) + slow / QWEN.layers


def test_the_published_way_takes_the_published_time():
    fit = simulate.fit_model(PRESETS["5090-server"], QWEN)
    assert simulate._prefill(PRESETS["5090-server"], fit, 8192, "chunked") == pytest.approx(1.2, abs=0.05)


def test_a_pool_too_large_for_the_host_falls_back_to_the_smaller_format_or_says_why():
    assert simulate.fit_model(PRESETS["4060-laptop"], QWEN).geometry.name == "qwen3.6-35b-a3b-nvfp4"
    fit = simulate.fit_model(PRESETS["4060-laptop"], geometries.geometry("glm-5.2"))
    assert fit.num_slots == 0 and "pool 407 GB" in fit.why


@pytest.mark.parametrize("name", sorted(geometries.GEOMETRIES))
def test_pools_are_the_published_sizes(name):
    sizes = {"qwen3.6-35b-a3b": 64.4, "qwen3.6-35b-a3b-nvfp4": 18.1, "qwen3-30b-a3b": 58, "glm-5.2": 408}
    sizes |= {"deepseek-v4-flash": 147, "gpt-oss-120b": 60.9}
    assert geometries.geometry(name).pool_bytes / 1e9 == pytest.approx(sizes[name], rel=0.01)


def test_the_report_covers_every_machine_mode_and_prompt(qwen_trace, tmp_path, capsys):
    path, _ = qwen_trace
    words = ["--trace", path, "--machine", "5090-server", "4060-laptop", "--steps", 6, "--json"]
    assert run_bench(simulate, *words, "--svg", tmp_path / "s.svg") == 0
    rows = last_object(capsys)["rows"]
    assert len([r for r in rows if r["kind"] == "decode"]) == 2 * len(_plant.MODES)
    assert len([r for r in rows if r["kind"] == "prefill"]) == 2 * len(simulate.PROMPTS) * len(
        simulate.PREFILLS
    )
    assert all(r["tok_s"] > 0 and r["simulated"] for r in rows)
    for suffix in ("decode", "prefill"):
        ET.fromstring((tmp_path / f"s-{suffix}.svg").read_text())


def test_a_model_that_fits_nowhere_still_gives_a_report(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path))
    monkeypatch.setattr(synthetic, "ANSWER_TOKENS", 2)
    trace = synthetic.generate(synthetic.shape("75x256k8"), requests=1, prompt_tokens=1, answer_tokens=2)
    save_trace(trace, tmp_path / "glm.npz")
    words = ["--model", "glm-5.2", "--machine", "4090", "--trace", tmp_path / "glm.npz", "--json"]
    assert run_bench(simulate, *words, "--steps", 1, "--svg", tmp_path / "s.svg") == 0
    assert all("pool 407 GB" in r["why"] for r in last_object(capsys)["rows"])


def test_a_trace_of_another_shape_is_refused(qwen_trace):
    with pytest.raises(ConfigError, match="40x256k8"):
        run_bench(simulate, "--model", "glm-5.2", "--trace", qwen_trace[0])


def test_unknown_machines_models_and_policies_are_refused(qwen_trace):
    for words in (["--machine", "6090"], ["--model", "nope"], ["--policy", "nope"]):
        with pytest.raises(ConfigError, match="nope|6090"):
            run_bench(simulate, "--trace", qwen_trace[0], *words)


def test_free_slots_are_filled_up_and_stay_within_the_slots():
    plant = _plant.Plant(PRESETS["4090"], QWEN, "hybrid", make_policy("two_speed"), 100)
    plant.residency.fill_up()
    held = plant.residency.expert_of.tolist()
    assert plant.residency.used == 100 and len(set(held)) == 100
    assert all(plant.residency.slot_of[e] == slot for slot, e in enumerate(held))
