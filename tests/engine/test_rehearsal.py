"""Kernels compiled ahead of the first token are those that it launches: none is missing, none in vain.

The engine runs on a CPU, asks Triton for what it would ask for on the card, and the compiler is a stand-in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
import triton.compiler

from freetoken.bench import synth
from freetoken.core.batch import Segment
from freetoken.core.options import Options
from freetoken.core.units import MIB
from freetoken.engine import rehearsal
from freetoken.engine.build import Built, build
from freetoken.native.library import library
from tests.bench.makers import run_bench
from tests.experts.device_build import KernelCpu
from tests.kernels.pretend_card import Card, Unmade, plugged_in, use_both_makers

from .served import Served, text_ids

needs_native = pytest.mark.skipif(library() is None, reason="the native library is not built")
MEMORY = 192 * MIB
BACKENDS = {
    "fused": {"moe_backend": "fused"},
    "offload": {"moe_backend": "offload", "moe_cache_rate": 0.3},
    "hybrid": {"moe_backend": "hybrid", "moe_cache_rate": 0.3},
    "cpu": {"moe_backend": "cpu"},
}
SAMPLED = {
    "all": {"temperature": 0.7},
    "few": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "many": {"temperature": 0.7, "top_p": 0.8},
    "adjusted": {"logit_bias": ((5, 1.0),)},
}
LAYER_BY_LAYER = {"prefill_gap_ms": 0.0}


class CompilingCpu(KernelCpu):
    compiles = True


class CapturingCpu(CompilingCpu):
    captures = True

    def bucket(self, rows: int) -> int:
        return 1 << max(0, rows - 1).bit_length()


class Replay:
    """Stands for a captured graph on a device that has computed while it was captured."""

    def pool(self) -> tuple[int, int]:
        return 0, 0

    def replay(self) -> None: ...


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    use_both_makers(monkeypatch)
    monkeypatch.setattr(rehearsal, "LEAST_FOR_HELPERS", 1 << 20)  # they would compile
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replay)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **how: contextlib.nullcontext())
    with plugged_in() as found:
        yield found


@dataclass
class Start:
    """A self-test: kernels compiled ahead, kernels compiled when they were launched, what was told."""

    ahead: list[tuple] = field(default_factory=list)
    late: list[tuple] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    launched: set[str] = field(default_factory=set)


def serve_all_sizes(built: Built) -> None:
    """Prompts of many lengths, draws of all ways, short ones together: steps of every number of sequences."""
    served = Served(built)
    for length in (2, 5, 11, 23, 50, 70, 150, 300, 520, 1030):
        served.submit(f"alone {length}", text_ids(built, length, length), 2)
        served.run()
    for name, how in SAMPLED.items():
        served.submit(name, text_ids(built, 1, 5), 2, **how)
    served.run()
    for number in range(built.plan.max_running):
        served.submit(f"one of many {number}", text_ids(built, number, 3), 3 + number)
    served.run()


def start(
    card: Card, monkeypatch: pytest.MonkeyPatch, device: KernelCpu, *, busy: bool = False, **wishes
) -> Start:
    compiler, found = Unmade(card), Start()
    monkeypatch.setattr(triton.compiler, "compile", compiler)
    built = build(Options(**wishes), device=device)
    prepare = rehearsal.prepare_kernels

    def watched(*args):
        before = len(compiler.made)
        done = prepare(*args)
        found.ahead = compiler.made[before:]
        compiler.made.clear()
        card.launched.clear()
        return done

    monkeypatch.setattr("freetoken.engine.engine.prepare_kernels", watched)
    try:
        built.engine.self_test(found.told.append)
        if busy:
            serve_all_sizes(built)
    finally:
        built.close()
        compiler.forget()
    found.late, found.launched = list(compiler.made), set(card.launched)
    return found


@pytest.mark.parametrize("rows", [2, 5])
def test_the_first_step_of_more_requests_compiles_its_kernels_beside_each_other(
    rows, card, monkeypatch
) -> None:
    compiler = Unmade(card)
    monkeypatch.setattr(triton.compiler, "compile", compiler)
    built = build(Options(**BACKENDS["offload"]), device=CapturingCpu(MEMORY))
    built.engine.self_test(ahead=False)  # as after a start that was cut short
    before = len(compiler.made)
    compiler.waited.clear()
    token = np.ones(1, np.int32)
    built.engine.runner.launch([Segment(token, 40, (1 + row,) * 8, 1 + row, row) for row in range(rows)])
    built.close()
    compiler.forget()
    new = [name.rpartition(".")[2] for name, *_ in compiler.made[before:]]
    assert {"look_up", "look_ahead", "narrow"} <= set(new) and len(new) >= 6, new
    assert not compiler.waited


def check(found: Start) -> None:
    assert found.ahead and not found.late, [name for name, *_ in found.late]
    twice = [one for one in found.ahead if found.ahead.count(one) > 1]
    assert not twice
    total = len(found.ahead)
    assert found.told == [f"{rehearsal.PREPARING} ({done} of {total})" for done in range(1, total + 1)]


@needs_native
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("device", [CompilingCpu, CapturingCpu])
def test_the_demo_model_compiles_nothing_after_its_rehearsal(device, backend, card, monkeypatch) -> None:
    check(start(card, monkeypatch, device(MEMORY), **BACKENDS[backend], **LAYER_BY_LAYER))


@needs_native
@pytest.mark.parametrize("backend", ["hybrid", "fused"])
def test_requests_of_all_sizes_compile_nothing_either(backend, card, monkeypatch) -> None:
    wishes = {**BACKENDS[backend], **LAYER_BY_LAYER, "max_running_requests": 9}
    found = start(card, monkeypatch, CapturingCpu(MEMORY), busy=True, **wishes)
    check(found)
    assert found.launched == {name for name, *_ in found.ahead}, "asked for in vain"


@pytest.mark.parametrize("chunk", [64, 2048])
def test_a_prompt_that_goes_in_steps_compiles_nothing_after_its_rehearsal(chunk, card, monkeypatch) -> None:
    check(start(card, monkeypatch, CapturingCpu(MEMORY), moe_backend="fused", max_prefill_length=chunk))


@pytest.mark.parametrize(
    ("geometry", "fmt"),
    [
        ("qwen3-30b-a3b", "bf16"),
        ("qwen3-30b-a3b", "fp8"),
        ("qwen3.6-35b-a3b", "nvfp4"),
        ("gpt-oss-120b", "mxfp4"),
    ],
)
def test_other_models_compile_nothing_after_their_rehearsal(
    geometry, fmt, card, monkeypatch, tmp_path
) -> None:
    model, words = tmp_path / "m", ("--geometry", geometry, "--format", fmt, "--tiny", "--no-measure")
    run_bench(synth, "--out", model, "--layers", 4, *words)
    wishes = {"model": str(model), **BACKENDS["offload"], **LAYER_BY_LAYER}
    check(start(card, monkeypatch, CapturingCpu(MEMORY), **wishes))
