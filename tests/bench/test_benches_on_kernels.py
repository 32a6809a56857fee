"""The engine benches where kernels decide residency, by the reference makers: what a GPU would run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from freetoken.bench import _setups, decode, prefill, suffix
from freetoken.core.units import MIB
from freetoken.native.library import library
from tests.bench.makers import last_object, run_bench
from tests.experts.device_build import KernelCpu

pytestmark = pytest.mark.soak
ONCE = ("--repeats", 1, "--warm-up", 1, "--json")
ON_SLOTS = ("--device", "sim", "--share", 0.4)


@pytest.fixture(autouse=True)
def _on_kernels(monkeypatch):
    real = _setups.build

    def build(options):
        return real(replace(options, device="auto"), device=KernelCpu(120 * MIB))

    monkeypatch.setattr(_setups, "build", build)


@pytest.mark.skipif(library() is None, reason="the native library is not built")
def test_decode_counts_what_the_device_counts(capsys):
    words = (*ON_SLOTS, "--backend", "hybrid", "--prompt", 8, "--tokens", 6, "--lead", 3)
    assert run_bench(decode, *words, *ONCE) == 0
    row = last_object(capsys)["rows"][0]
    assert row["backend"] == "hybrid" and 0.3 < row["pool_share"] < 0.5
    assert 0 < row["hit_rate"] < 1 and row["missing_mb_step"] > 0
    assert 3.0 < row["distinct_experts_layer"] <= 4.0
    assert set(row["rates_gb_s"]) == {"host", "link", "together", "gpu"}
    assert 0 < row["share_of_limit"] < 1


def test_prefill_goes_every_way(capsys):
    words = (*ON_SLOTS, "--backend", "offload", "--prompt", 150, "--ablate")
    assert run_bench(prefill, *words, *ONCE) == 0
    rows = {row["way"]: row for row in last_object(capsys)["rows"]}
    assert set(rows) == {prefill.FULL, prefill.SERIAL, prefill.BY_CHUNK, prefill.COLD}
    assert all(row["link_gb"] > 0 for row in rows.values())
    assert rows[prefill.BY_CHUNK]["passes"] == 2 and rows[prefill.FULL]["passes"] == 1


def test_suffixes_reuse_their_prefix(capsys):
    words = (*ON_SLOTS, "--backend", "offload", "--prefix", 64, "--suffix", 1, 20)
    assert run_bench(suffix, *words, *ONCE) == 0
    assert all(row["reused"] for row in last_object(capsys)["rows"])
