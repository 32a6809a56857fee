"""Steps played from a recorded program: the bits of the forward, and only where nothing else computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from freetoken.core import choices
from freetoken.core.batch import Segment
from freetoken.core.interfaces import Numerics
from freetoken.devices.cpu import CpuDevice
from freetoken.engine.programs import DecodePrograms, _Watcher
from freetoken.engine.runner import Runner
from freetoken.engine.sampler import Sampler
from freetoken.experts import bank as banks
from freetoken.experts.setup import ExpertSetup
from freetoken.layers.linear import CodedLinear
from freetoken.models import qwen3_5_moe, qwen3_moe
from freetoken.native.library import library
from freetoken.native.program import Tape
from freetoken.weights.load import open_checkpoint
from tests.kernels.test_coded_linear import weight_of
from tests.models import checkpoints

from .test_convert import coded_gguf
from .test_dense_codes import TEXT

PAGE, PAGES, ROWS = 4, 48, 3
LARGE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "head_dim": 64,
    "num_attention_heads": 4,
    "moe_intermediate_size": 64,
}
SHAPES = {
    qwen3_moe: {**LARGE, "intermediate_size": 256},
    qwen3_5_moe: {**LARGE, "shared_expert_intermediate_size": 256, "linear_value_head_dim": 64},
}
pytestmark = pytest.mark.skipif(library() is None, reason="no native library")


def built(folder, module=qwen3_moe, numerics=None, backend="cpu"):
    """A runner over a small checkpoint of a family, and its programs."""
    numerics, device, family = numerics or Numerics(torch.bfloat16), CpuDevice(), module.FAMILY
    raw = {**family.TINY, **SHAPES[module]}
    source = open_checkpoint(checkpoints.write(folder, raw, checkpoints.random_tensors(family, raw)))
    config = family.read_config(source.config)
    bank = banks.create(config, choices.load("freetoken.quant", "bf16").FORMAT)
    family.load_experts(config, source.source, bank)
    counts = {"page": ("kv", PAGES), "state": ("state", 8)}
    pools = {}
    for spec in family.state_specs(config, PAGE, numerics.dtype):
        name, count = counts[spec.unit]
        pools[name] = device.pool(name, spec.unit_bytes, count, min_units=2, max_units=count)
    model = family.build(config, source.source, device, numerics, pools)
    setup = ExpertSetup(config, bank, device, numerics, threads=2, chunk_tokens=64)
    experts = choices.load("freetoken.experts.backends", backend).create(setup)
    runner = Runner(model, experts, device, Sampler(4, device.torch_device))
    runner.reserve(ROWS, 64, PAGES, PAGE)
    return runner


def step(runner, at: int, rows: int = 1, **more):
    """Token `at` of some sequences; logits [rows, V]."""
    segments = []
    for row in range(rows):
        pages = tuple(range(1 + 12 * row, 13 + 12 * row))
        segments.append(Segment(np.array([(7 * at + row) % 100], np.int32), at, pages, 1 + row, row, **more))
    return runner.launch(segments).logits.clone()


def eager(runner):
    """The same runner without programs."""
    runner._graphs = None
    return runner


@pytest.mark.parametrize("module", SHAPES, ids=lambda m: m.FAMILY.model_types[0])
def test_a_played_step_has_the_bits_of_the_forward(tmp_path, module):
    played, plain = built(tmp_path, module), eager(built(tmp_path, module))
    for at in range(20):
        rows = 1 if at < 8 else ROWS
        assert torch.equal(step(played, at, rows), step(plain, at, rows)), at
    assert isinstance(played._graphs, DecodePrograms) and not played._graphs.refusal
    assert set(played._graphs._recorded) == {1, ROWS}
    assert played.experts.stats == plain.experts.stats


def test_a_played_step_computes_nothing_in_torch(tmp_path):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Look(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    runner = built(tmp_path)
    step(runner, 0)
    with Look():
        step(runner, 1)
    free = ("clone", "copy_", "detach", "lift_fresh", "resolve_conj", "resolve_neg", "slice", "to", "view")
    assert set(seen) - {f"aten::{name}" for name in free} == {"aten::embedding"}


def test_a_step_that_wants_more_than_tokens_is_not_played(tmp_path):
    runner = built(tmp_path)
    step(runner, 0)
    seen = []
    runner.experts.on_routing = lambda layer, ids: seen.append(layer)
    step(runner, 1)
    assert seen == [0, 1, 2]
    runner.experts.on_routing = None
    assert step(runner, 2, wants_logits=False).shape[0] == 0


@pytest.mark.parametrize(
    ("numerics", "backend"),
    [(Numerics(torch.float32, True), "cpu"), (Numerics(torch.bfloat16), "fused")],
    ids=["exact", "fused"],
)
def test_what_torch_computes_goes_on_as_before(tmp_path, numerics, backend):
    runner = built(tmp_path, numerics=numerics, backend=backend)
    first = [step(runner, at) for at in range(3)]
    assert runner._graphs.refusal and not runner._graphs._recorded
    plain = eager(built(tmp_path, numerics=numerics, backend=backend))
    assert all(torch.equal(a, step(plain, at)) for at, a in enumerate(first))


def test_experts_that_still_arrive_only_put_it_off(tmp_path):
    runner = built(tmp_path)
    runner.experts.bank.arrivals.complete = False
    step(runner, 0)
    assert not runner._graphs._recorded and not runner._graphs.refusal
    runner.experts.bank.arrivals.complete = True
    step(runner, 1)
    assert set(runner._graphs._recorded) == {1}


def test_a_coded_product_and_the_sum_behind_it_are_jobs():
    weight = weight_of(choices.load("freetoken.quant", "q8_0").FORMAT, 64, 128)
    product, tape = CodedLinear(weight), Tape()
    x, h = torch.randn(2, 128).bfloat16(), torch.randn(2, 64).bfloat16()
    want = h + product(x)
    with library().recording(tape), _Watcher(tape, []):
        got = product.add_to(h, x)
    assert torch.equal(got, want) and not tape.refusal and len(tape.jobs) == 3
    many = torch.randn(40, 128).bfloat16()
    assert torch.equal(product.add_to(torch.ones(40, 64).bfloat16(), many), 1 + product(many))


def test_the_first_refusal_counts():
    tape = Tape()
    tape.refuse("later", final=False)
    tape.refuse("never")
    assert tape.refusal == "later" and not tape.final


COMPILER = """
import sys
import numpy as np
from freetoken.core.generate import GenerateParams
from freetoken.core.options import Options
from freetoken.llm import build_llm
llm = build_llm(Options(model=sys.argv[1] if sys.argv[1:] else None, device="cpu", max_model_len=256))
for _ in llm.submit_text(np.arange(3, 9), GenerateParams(max_tokens=4, ignore_eos=True), "a"):
    pass
llm.close()
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize("container", ["demo model", "blocks"])
def test_nobody_waits_for_torchs_compiler_to_be_loaded(container: str, tmp_path: Path) -> None:
    """Two seconds, at the first token of whoever comes first."""
    model = [] if container == "demo model" else [str(coded_gguf(tmp_path / "m.gguf", TEXT))]
    done = subprocess.run(
        [sys.executable, "-c", COMPILER, *model], capture_output=True, text=True, timeout=200
    )
    assert done.stdout.split()[-1:] == ["False"], done.stderr
