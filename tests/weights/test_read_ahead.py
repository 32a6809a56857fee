"""Tensors that are read ahead are the same ones, in memory of their own, whatever the order of asking."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from freetoken.core.errors import WeightsError
from freetoken.weights import read_ahead
from freetoken.weights.files import Files
from freetoken.weights.load import open_checkpoint
from freetoken.weights.read_ahead import ReadAhead, natural
from freetoken.weights.safetensors import SafetensorsSource
from tests.engine.test_convert import coded_gguf, dialect

NAMES = [f"layers.{i}.{part}" for i in range(12) for part in ("a", "b", "experts.0.w")]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ahead") / "m.safetensors"
    save_file({name: torch.full((37, 5), i, dtype=torch.bfloat16) for i, name in enumerate(NAMES)}, path)
    return path


@settings(max_examples=25, deadline=None, database=None, derandomize=True)
@given(order=st.lists(st.sampled_from(NAMES), max_size=30), window=st.sampled_from([0, 800, 1 << 20]))
def test_any_order_and_window_gives_the_tensors(path: Path, order: list[str], window: int) -> None:
    files = Files()
    stored = SafetensorsSource([path], files)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_ahead, "WINDOW_BYTES", window)
        ahead = ReadAhead(stored, files)
        kept = [(name, ahead.read(name)) for name in order]
        ahead.close()
    files.close()
    for name, tensor in kept:
        assert tensor.shape == (37, 5) and bool((tensor == NAMES.index(name)).all())
        tensor.zero_()  # ours: the next one with the same name is another memory
    assert len({t.data_ptr() for _, t in kept}) == len(kept)


@pytest.mark.parametrize("writer", ["compressed-tensors nvfp4", "gguf"])
def test_coded_matrices_come_in_the_same_codes(writer: str, tmp_path: Path) -> None:
    made = coded_gguf(tmp_path / "m.gguf") if writer == "gguf" else dialect(tmp_path / "m", writer)
    checkpoint = open_checkpoint(made)
    source, ahead = checkpoint.source, ReadAhead(checkpoint.source, checkpoint.files)
    coded = [name for name in source.names() if source.coding(name) and ".experts." not in name]
    kept = [ahead.read_coded(name) for name in coded]
    ahead.close()
    assert len(coded) >= 8
    for name, one in zip(coded, kept, strict=True):
        wanted = source.read_coded(name)
        assert one.keys() == wanted.keys()
        assert all(one[k].is_meta or torch.equal(one[k], wanted[k]) for k in wanted)
    checkpoint.close()


def test_a_fault_is_raised_where_the_tensor_is_asked_for(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "m.safetensors"
    copy.write_bytes(path.read_bytes())
    source = SafetensorsSource([copy], files := Files())
    copy.write_bytes(path.read_bytes()[:-3000])
    ahead, got = ReadAhead(source, files), 0
    with pytest.raises(WeightsError, match="m.safetensors ends at byte"):
        for name in NAMES:
            ahead.read(name)
            got += 1
    assert 0 < got < len(NAMES)
    ahead.close()


def test_layers_come_in_their_natural_order() -> None:
    names = ["model.layers.10.a", "model.layers.2.b", "lm_head.weight", "model.layers.2.a", "model.norm"]
    assert sorted(names, key=natural)[1:4] == ["model.layers.2.a", "model.layers.2.b", "model.layers.10.a"]
