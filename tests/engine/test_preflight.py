"""A model that doesn't fit is refused from its headers: at once, with the sum, whatever sets the limit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from freetoken.core.errors import CapacityError
from freetoken.core.options import Options
from freetoken.engine.build import DEMO_MODEL, build
from freetoken.engine.outlook import look
from freetoken.models import _tensors, qwen3_moe
from tests.models import checkpoints

LARGE = {
    **qwen3_moe.TINY, "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "mlp_only_layers": [], "max_position_embeddings": 262144,
    "dtype": "bfloat16",
}  # fmt: skip
MIDDLE = {**LARGE, "num_hidden_layers": 2, "hidden_size": 512, "vocab_size": 2048, "num_experts": 256}
REFUSED = """
import sys, time
from freetoken.core.errors import CapacityError
from freetoken.core.options import Options
from freetoken.engine.build import build
from freetoken.engine.outlook import look
start = time.process_time()
try:
    build(Options(model=sys.argv[1], device="cpu"))
except CapacityError as e:
    print(e.code, time.process_time() - start, e.message)
"""


def sparse(path: Path, raw: dict) -> int:
    """A checkpoint of that geometry, with the demo model's tokenizer."""
    config = qwen3_moe.FAMILY.read_config(raw)
    size = checkpoints.write_sparse(
        path, raw, _tensors.expected(config, lambda layer: _tensors.expert_shapes(config, False))
    )
    for file in DEMO_MODEL.iterdir():
        if file.suffix in (".json", ".jinja") and not (path / file.name).exists():
            shutil.copy(file, path / file.name)
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    return size


CASES = {
    "RAM": ({"device": "cpu"}, "host_memory", "experts 54.0 GiB"),
    "VRAM": (
        {"device": "sim", "gpu_memory": 1 << 30},
        "does_not_fit",
        "1.00 GiB available: dense weights 2.87",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_larger_than_memory_is_refused_before_it_is_read(case: str, tmp_path: Path) -> None:
    wishes, error, text = CASES[case]
    assert sparse(tmp_path, LARGE) > 50 << 30
    build(Options(device="cpu")).engine.close()  # imports
    start = time.process_time()
    with pytest.raises(CapacityError) as e:
        build(Options(model=str(tmp_path), **wishes))
    assert time.process_time() - start < 10.0, "reading it takes minutes"
    assert e.value.code == error and text in e.value.message


def test_a_table_of_a_million_positions_is_in_the_sum(tmp_path: Path) -> None:
    sizes = []
    for positions in (1 << 10, 1 << 20):
        path = tmp_path / str(positions)
        sparse(path, {**MIDDLE, "max_position_embeddings": positions})
        model, _ = look(Options(device="cpu"), path, ())
        sizes.append(model.sizes.activation_bytes)
    assert sizes[1] - sizes[0] == ((1 << 20) - (1 << 10)) * 128 * 4


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_a_limit_of_the_process_refuses_what_the_machine_would_hold(tmp_path: Path) -> None:
    size = sparse(tmp_path, MIDDLE)
    limit = (700 << 20) + size // 2
    code = f"import resource; resource.setrlimit(resource.RLIMIT_DATA, ({limit}, {limit}))" + REFUSED
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert done.stdout.startswith("host_memory") and "process limit" in done.stdout, done.stderr


@pytest.mark.soak
def test_a_container_of_300_mib_refuses_a_model_of_280(tmp_path: Path) -> None:
    sparse(tmp_path, {**MIDDLE, "num_hidden_layers": 1, "num_experts": 112})
    group = Path("/sys/fs/cgroup/memory/freetoken-test")
    try:
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(300 << 20))
    except OSError:
        pytest.skip("no right to make a control group")
    join = f"open('{group}/cgroup.procs', 'w').write('0')\n"
    try:
        done = subprocess.run(
            [sys.executable, "-c", join + REFUSED, str(tmp_path)], capture_output=True, text=True, timeout=100
        )
    finally:
        time.sleep(0.5)
        os.rmdir(group)
    assert "container limit" in done.stdout, (done.returncode, done.stdout, done.stderr)
    assert float(done.stdout.split()[1]) < 10.0, "reading it takes longer"
