"""Many sessions at once on tiny real models, exact mode: every answer has the bits of its cold run.

All-attention, hybrid and sliding-window families on the simulated device, 64 sessions open at once: edits,
aborts, preemption in a pool that is too small, pages and expert slots traded while requests run, prefixes in
host memory. 300 requests by default, 100 a family.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freetoken.core.units import KIB, MIB
from freetoken.engine.build import DEMO_MODEL
from freetoken.models import gpt_oss, qwen3_5_moe, qwen3_moe
from tests.models import checkpoints

from .crowd import Asked, Crowd, Habits
from .served import Served, serve

TOKENS = 12
IDS = range(3, 128)
EXACT = dict(exact=True, max_model_len=160)
COLD = dict(EXACT, device="cpu", moe_backend="fused", num_tokens=8192, prefix_cache=False)
TIGHT = dict(
    EXACT, device="sim", machine="4060-laptop", gpu_memory=16 * MIB, num_tokens=544,
    max_prefill_length=64, max_running_requests=24, kv_reserve_tokens=16, checkpoint_memory=MIB,
)  # fmt: skip
KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "all_attention": (
        qwen3_moe.FAMILY,
        {"num_hidden_layers": 2, "mlp_only_layers": []},
        {"cold_memory": 128 * KIB},
    ),
    "hybrid": (
        qwen3_5_moe.FAMILY,
        {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        {},
    ),
    "sliding_window": (
        gpt_oss.FAMILY,
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        {},
    ),
}


class RealCrowd(Crowd):
    """Answers are compared with cold ones in batches; exact mode makes company irrelevant to bits.

    One in sixteen is run cold and alone, so that this is not merely believed.
    """

    def __init__(self, *args: Any, oracle: Served) -> None:
        super().__init__(*args)
        self.oracle = oracle
        self.waiting: list[Asked] = []
        self.compared = 0

    def verify(self, asked: Asked) -> None:
        self.waiting.append(asked)
        if len(self.waiting) >= 32:
            self.compare()

    def compare(self) -> None:
        waiting, self.waiting = self.waiting, []
        self.oracle.outputs.clear()
        for asked in waiting:
            self.oracle.submit(asked.name, np.array(asked.ids, np.int32), TOKENS)
            self.compared += 1
            if self.compared % 16 == 0:
                self.oracle.run()
        self.oracle.run()
        for asked in waiting:
            want = self.oracle.trace(asked.name)
            assert len(want) == TOKENS
            assert asked.trace == (want[: len(asked.trace)] if asked.is_aborted else want), asked.name


def budgets(served: Served) -> tuple[int, int, int, int]:
    """All experts or a few fewer, and pages from too few to plenty."""
    sizes, memory = served.engine.memory._sizes, served.engine.plan.memory
    fixed = memory.dense_bytes + memory.activation_bytes + memory.num_states * memory.state_bytes
    fixed += (sizes.num_experts + 1) * sizes.record_bytes
    return fixed, sizes.page_bytes, 26, 44


def write_model(kind: str, folder: Path, **sizes: int) -> str:
    """A tiny checkpoint of a kind with the demo model's text side; returns its folder."""
    family, overrides, _ = KINDS[kind]
    checkpoints.write_tiny(folder, family, {**overrides, **sizes})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    return str(folder)


def real_crowd(kind: str, folder: Path, seed: int, resizing: float) -> RealCrowd:
    model = write_model(kind, folder)
    wishes = KINDS[kind][2] | {
        "moe_backend": ("offload", "hybrid")[seed // 2 % 2],
        "run_ahead": bool(seed % 2),
    }
    served = serve(**TIGHT, **wishes, sim_seed=seed, model=model)
    habits = Habits(
        IDS, (34, 6), longest=96, tokens=TOKENS, budgets=budgets(served), resizing=resizing, ebbing=0.05,
        aborting=0.15,
    )  # fmt: skip
    return RealCrowd(served.engine, habits, seed, oracle=serve(**COLD, model=model))


LONG = [pytest.param(2500, s, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]) for s in range(4)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("requests", "seed"), [(100, 1), *LONG])
def test_a_crowd_on_a_real_model_gets_the_cold_bits(kind, requests, seed, tmp_path):
    crowd = real_crowd(kind, tmp_path, seed, resizing=0.2 if requests > 100 else 0.5)
    counts = crowd.run(requests)
    crowd.compare()
    print(kind, seed, counts)
    crowd.engine.scheduler.reuse.cache.check()
    assert crowd.compared == requests and counts["reusing"] >= 0.7 * requests, counts
    assert counts["hits_after_preemption"] >= requests // 50, counts
    assert counts["restores_from_host" if kind != "all_attention" else "revived"] >= requests // 20, counts
    assert counts["across_a_resize"] >= requests // 50 and counts["resizes"] >= 2, counts
    assert counts["aborted"] > 0, counts
    crowd.engine.close()
    crowd.oracle.close()
