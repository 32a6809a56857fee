"""A checkpoint as one opened thing, a directory or a GGUF file: config, generation defaults, tensors.

Knows no family: the raw config goes to whoever reads its `model_type`. Every fault of the directory is
a WeightsError with a stable code that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from freetoken.core import hub_cache
from freetoken.core.errors import WeightsError, nearest
from freetoken.core.log import logger
from freetoken.weights import ftw_index
from freetoken.weights.files import Files
from freetoken.weights.ftw import FtwSource, is_ftw
from freetoken.weights.ftw_index import Index
from freetoken.weights.gguf_config import config_of, generation_of
from freetoken.weights.gguf_source import GgufSource
from freetoken.weights.gguf_split import GgufModel, models_in
from freetoken.weights.names import CanonicalSource
from freetoken.weights.quantised import with_plain_names
from freetoken.weights.safetensors import open_directory

GGUF = ".gguf"
_log = logger("weights")


@dataclass(frozen=True)
class Checkpoint:
    """config.json and generation_config.json as read, and the tensors under canonical names.

    path      the directory, or the first GGUF file
    metadata  a GGUF file's keys, its vocabulary and templates among them; empty for a directory
    files     where all bytes come from
    records   where the experts lie, if the container holds them as records
    skipped   stored names of parts that a text model doesn't use
    """

    path: Path
    config: Mapping[str, Any]
    source: CanonicalSource
    generation: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    files: Files = field(default_factory=Files)
    records: Index | None = None

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def skipped(self) -> list[str]:
        return self.source.skipped

    def close(self) -> None:
        self.source.close()


def open_checkpoint(path: str | Path, files: Files | None = None) -> Checkpoint:
    """Open a checkpoint directory, of Hugging Face or FTW, or a GGUF file; only headers are read yet."""
    try:
        directory = _directory(Path(path).expanduser())
        if directory.suffix == GGUF and directory.is_file():
            return _open_gguf(directory, files or Files())
    except (OSError, RuntimeError) as error:  # a name too long, no right to look, no such home
        raise WeightsError(
            f"The model can't be looked into: {error}.",
            code="unknown_path",
            hint="--model takes a directory with config.json, or a .gguf file.",
        ) from error
    config = _read_json(directory / "config.json")
    if "model_type" not in config:
        raise WeightsError(
            f"{directory / 'config.json'} has no model_type.",
            code="invalid_model_config",
            hint="Check the checkpoint's config.json.",
        )
    defaults = directory / "generation_config.json"
    generation = _read_json(defaults) if defaults.exists() else {}
    files, records = files or Files(), None
    if is_ftw(directory):
        opened = FtwSource(directory, files)
        source, records = CanonicalSource(opened), opened.index
    else:
        stored = open_directory(directory, files)
        source = CanonicalSource(with_plain_names(directory, config, stored))
    if source.skipped:
        groups = sorted({name.split(".layers.")[0].rsplit(".", 1)[0] for name in source.skipped})
        _log.info("skipped %d tensors that text doesn't need: %s", len(source.skipped), ", ".join(groups[:8]))
    return Checkpoint(directory, config, source, generation, files=files, records=records)


def _open_gguf(path: Path, files: Files) -> Checkpoint:
    model = GgufModel(path, files)
    config = config_of(model)
    source = CanonicalSource(GgufSource(model, config))
    return Checkpoint(model.path, config, source, generation_of(model), model.metadata, files)


def _directory(path: Path) -> Path:
    """The directory of a safetensors checkpoint, or a file of a GGUF model."""
    if not path.exists():
        path = hub_cache.snapshot(path.as_posix()) or path
    if path.is_file():
        if path.suffix == GGUF:
            return path
        path = path.parent
    if not path.is_dir():
        parent = next((p for p in path.parents if p.is_dir()), Path("."))
        # A name is near only where nothing but the last part of the path is wrong.
        inside = parent.iterdir() if parent == path.parent else ()
        near = nearest(path.name, (p.name for p in inside if p.is_dir() or p.suffix == GGUF))
        raise WeightsError(
            f"There is no model at {path}.",
            code="unknown_path",
            hint=near
            or _fetch_hint(path)
            or f"Look into {parent}; --model takes a directory with config.json, or a .gguf file.",
        )
    ftw_index.refuse_unreadable(path)
    if not any(path.glob("*.safetensors")) and (found := models_in(path)):
        return _only(found)
    if not (path / "config.json").is_file():
        models = sorted(p.parent.name for p in path.glob("*/config.json"))
        raise WeightsError(
            f"{path} has no config.json.",
            code="missing_config",
            hint=f"Models inside: {', '.join(models)}."
            if models
            else "Point --model at a checkpoint directory.",
        )
    return path


def _only(models: list[Path]) -> Path:
    if len(models) == 1:
        return models[0]
    raise WeightsError(
        f"{models[0].parent} holds {len(models)} GGUF models.",
        code="missing_config",
        hint=f"Name one of them: {', '.join(m.name for m in models)}.",
    )


def _fetch_hint(path: Path) -> str:
    """For a name like `owner/model` of the hub: fetched when the user says so, never by loading."""
    if path.is_absolute() or len(path.parts) != 2 or Path(path.parts[0]).exists():
        return ""
    return f"It is not on this machine. Fetch it first: ft pull {path.as_posix()}"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise WeightsError(
            f"{path} is not valid JSON: {error}.", code="invalid_json", hint="Copy or download it again."
        ) from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} is not a JSON object.", code="invalid_json", hint="Copy it again.")
    return value
