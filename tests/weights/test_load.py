"""Opening a checkpoint directory: canonical names, skipped parts, and errors that name the next step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from freetoken.core.errors import WeightsError
from freetoken.weights.load import open_checkpoint
from freetoken.weights.names import canonical, check_tensors


def checkpoint(path: Path, *names: str, config: str = '{"model_type": "null"}') -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(config)
    save_file(
        {name: torch.full((2,), float(i)) for i, name in enumerate(names or ("model.norm.weight",))},
        path / "m.safetensors",
    )
    return path


NAMES = {
    "model.layers.0.mlp.gate.weight": "model.layers.0.mlp.gate.weight",
    "model.language_model.layers.0.mlp.gate.weight": "model.layers.0.mlp.gate.weight",
    "language_model.model.layers.0.mlp.gate.weight": "model.layers.0.mlp.gate.weight",
    "language_model.layers.0.mlp.gate.weight": "model.layers.0.mlp.gate.weight",
    "layers.0.mlp.gate.weight": "model.layers.0.mlp.gate.weight",
    "embed_tokens.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    "language_model.lm_head.weight": "lm_head.weight",
    "something.else": "something.else",
    "mtp.layers.0.weight": None,
    "model.mtp.fc.weight": None,
    "model.language_model.mtp.fc.weight": None,
    "visual.blocks.0.attn.qkv.weight": None,
    "model.visual.patch_embed.proj.weight": None,
    "vision_tower.x": None,
    "model.layers.0.self_attn.rotary_emb.inv_freq": None,
}


@pytest.mark.parametrize("stored", NAMES)
def test_every_wrapper_spells_the_same_name(stored: str) -> None:
    assert canonical(stored) == NAMES[stored]


def test_skipped_tensors_are_listed_and_the_rest_is_read_under_canonical_names(tmp_path: Path) -> None:
    names = ("model.language_model.norm.weight", "mtp.fc.weight", "model.visual.x", "lm_head.weight")
    opened = open_checkpoint(checkpoint(tmp_path, *names))
    assert sorted(opened.skipped) == ["model.visual.x", "mtp.fc.weight"]
    assert sorted(opened.source.names()) == ["lm_head.weight", "model.norm.weight"]
    assert opened.source.read("model.norm.weight").tolist() == [0, 0]
    assert opened.source.read_rows("lm_head.weight", 1, 2).tolist() == [3]
    assert opened.model_type == "null" and opened.generation == {}
    opened.close()


def test_two_spellings_of_one_tensor_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(checkpoint(tmp_path, "model.norm.weight", "language_model.norm.weight"))
    assert caught.value.code == "duplicate_tensor"


def test_generation_defaults_come_along(tmp_path: Path) -> None:
    (checkpoint(tmp_path) / "generation_config.json").write_text('{"top_k": 20}')
    assert open_checkpoint(tmp_path).generation == {"top_k": 20}


def test_a_file_inside_stands_for_its_directory(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    assert open_checkpoint(path / "config.json").path == path


def test_an_unknown_path_lists_near_names(tmp_path: Path) -> None:
    checkpoint(tmp_path / "qwen3-30b")
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(tmp_path / "qwen3-30")
    assert caught.value.code == "unknown_path" and "qwen3-30b" in caught.value.hint
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(tmp_path / "no" / "such" / "place")
    assert caught.value.code == "unknown_path" and caught.value.hint


def test_a_gguf_file_that_is_not_there_lists_near_ones(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_K_S.gguf").touch()
    with pytest.raises(WeightsError) as e:
        open_checkpoint(tmp_path / "model-Q4_K_M.gguf")
    assert e.value.code == "unknown_path" and "model-Q4_K_S.gguf" in e.value.hint


def test_a_directory_of_models_names_those_inside(tmp_path: Path) -> None:
    checkpoint(tmp_path / "inner")
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.code == "missing_config" and "inner" in caught.value.hint


@pytest.mark.parametrize(
    ("config", "code"), [("{oops", "invalid_json"), ("[1]", "invalid_json"), ("{}", "invalid_model_config")]
)
def test_a_bad_config_is_named(config: str, code: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="config.json") as caught:
        open_checkpoint(checkpoint(tmp_path, config=config))
    assert caught.value.code == code


def test_a_checkpoint_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "null"}))
    with pytest.raises(WeightsError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.code == "no_weights"


def test_the_check_lists_all_faults_and_lets_optional_names_pass(tmp_path: Path) -> None:
    source = open_checkpoint(checkpoint(tmp_path, "a", "b", "c")).source
    check_tensors(source, {"a": (2,), "b": (2,)}, optional=["c"])
    with pytest.raises(WeightsError) as caught:
        check_tensors(source, {"a": (3,), "d": (2,), "e": (2,)})
    message = caught.value.message
    assert "2 tensors missing: d, e" in message and "2 tensors unknown: b, c" in message
    assert "a has shape [2], expected [3]" in message
    for expected, code in (
        ({"a": (2,)}, "unknown_tensor"),
        ({"a": (3,), "b": (2,), "c": (2,)}, "invalid_tensor_shape"),
    ):
        with pytest.raises(WeightsError) as caught:
            check_tensors(source, expected)
        assert caught.value.code == code


@pytest.mark.parametrize("path", ["a" * 5000, "~no-such-user-here/x", "a\0b"])
def test_a_path_that_cannot_be_looked_at_is_an_error_of_ours(path: str) -> None:
    with pytest.raises(WeightsError) as e:
        open_checkpoint(path)
    assert e.value.code == "unknown_path" and e.value.hint


def test_a_hubs_name_is_told_how_to_become_a_folder() -> None:
    with pytest.raises(WeightsError) as e:
        open_checkpoint("Owner/Model-30B")
    assert "ft pull Owner/Model-30B" in e.value.hint


def test_names_far_above_a_missing_folder_are_not_called_near(tmp_path: Path) -> None:
    (tmp_path / "modem").mkdir()
    with pytest.raises(WeightsError) as e:
        open_checkpoint(tmp_path / "missing" / "model")
    assert "modem" not in e.value.hint and str(tmp_path) in e.value.hint
