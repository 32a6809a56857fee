"""A tiny model with sliding and full layers that speaks the demo model's tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freetoken.engine.build import DEMO_MODEL
from freetoken.models import gpt_oss
from tests.models import checkpoints


def write(path: Path, overrides: Mapping[str, Any] | None = None) -> str:
    """A gpt_oss checkpoint of random weights with the demo's tokenizer and template; returns its folder."""
    vocab = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
    sizes = {"vocab_size": vocab, "max_position_embeddings": 4096, "sliding_window": 24}
    checkpoints.write_tiny(path, gpt_oss.FAMILY, {**sizes, **(overrides or {})})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_MODEL / name, path / name)
    return str(path)
