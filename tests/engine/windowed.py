"""A tiny model with sliding and full layers that speaks the demo model's tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freetoken.engine.build import DEMO_MODEL
from freetoken.models import gpt_oss
from tests.chat import vocabularies
from tests.models import checkpoints

SIZES = {"max_position_embeddings": 4096, "sliding_window": 24}
TEMPLATES = Path(__file__).parents[1] / "chat" / "templates"


def write_harmony(path: Path) -> str:
    """The same with the tokens and a template of harmony."""
    backend = vocabularies.harmony()
    checkpoints.write_tiny(path, gpt_oss.FAMILY, {"vocab_size": backend.get_vocab_size(), **SIZES})
    backend.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text((TEMPLATES / "harmony.jinja").read_text())
    return str(path)


def write(path: Path, overrides: Mapping[str, Any] | None = None) -> str:
    """A gpt_oss checkpoint of random weights with the demo's tokenizer and template; returns its folder."""
    vocab = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
    checkpoints.write_tiny(path, gpt_oss.FAMILY, {"vocab_size": vocab, **SIZES, **(overrides or {})})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_MODEL / name, path / name)
    return str(path)
