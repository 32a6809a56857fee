"""The composition root refuses what it can't build before anything large is allocated."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from freetoken.core.errors import ConfigError, WeightsError
from freetoken.core.options import Options
from freetoken.engine.build import DEMO_MODEL, build
from freetoken.engine.survey import find_family


def demo_with(folder: Path, **changes) -> str:
    """The demo checkpoint with another config.json."""
    for file in DEMO_MODEL.iterdir():
        shutil.copy(file, folder / file.name)
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


def test_an_unknown_model_type_lists_the_families_that_read_checkpoints():
    with pytest.raises(WeightsError) as e:
        find_family("mystery_moe")
    assert e.value.code == "unknown_model_type"
    assert "qwen3_5_moe" in e.value.message and "null" not in e.value.message


def test_an_unknown_compute_dtype_is_refused_and_can_be_overruled(tmp_path):
    model = demo_with(tmp_path, dtype="fp99")
    with pytest.raises(WeightsError) as e:
        build(Options(model=model, device="cpu"))
    assert e.value.code == "unknown_dtype" and "bfloat16" in e.value.hint
    build(Options(model=model, device="cpu", dtype="bfloat16")).engine.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is used then")
def test_whoever_names_a_gpu_is_not_given_the_cpu():
    with pytest.raises(ConfigError) as e:
        build(Options(gpu="4090"))
    assert e.value.code == "no_gpu" and e.value.hint
