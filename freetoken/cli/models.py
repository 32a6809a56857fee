"""`ft models`: models on this machine, as --model takes them. Reads nothing larger than config.json."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freetoken.cli._terminal import Terminal
from freetoken.core import env, hub_cache
from freetoken.core.units import format_bytes

HELP = "list the models on this machine"


@dataclass(frozen=True)
class Row:
    """One model. `kind` is its model type and how its weights are coded, as far as config.json tells."""

    name: str
    kind: str
    num_bytes: int
    used_s: float
    state: str
    path: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", metavar="DIR", help="list the checkpoints in this folder too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    rows = [*_cached(), *_in_folder(args.folder)]
    out = Terminal(sys.stdout)
    if args.json:
        out.line(json.dumps({"models": [_json(row) for row in rows]}))
        return 0
    if rows:
        out.table(("model", "kind", "size", "last used", ""), [_cells(row) for row in rows])
    else:
        out.line(f"No models in {env.hub_cache()}.")
    out.line()
    out.line("  The demo model is always there: ft chat. Fetch another with: ft pull OWNER/MODEL")
    return 0


def _cached() -> list[Row]:
    return [
        Row(one.name, _kind(one.path), one.num_bytes, one.used_s, "partial" if one.partial else "", one.path)
        for one in hub_cache.models()
        if _kind(one.path)
    ]


def _in_folder(folder: str | None) -> list[Row]:
    if folder is None:
        return []
    root = Path(folder).expanduser()
    found = []
    for path in sorted([root, *root.iterdir()] if root.is_dir() else [root]):
        if not (kind := _kind(path)):
            continue
        files = [f.stat() for f in ([path] if path.is_file() else path.iterdir()) if f.is_file()]
        used = max((f.st_atime for f in files), default=0.0)
        found.append(Row(str(path), kind, sum(f.st_size for f in files), used, "", path))
    return found


def _kind(path: Path) -> str:
    """Empty for what is no model of ours."""
    if path.is_file():
        return "gguf" if path.suffix == ".gguf" else ""
    try:
        config: dict[str, Any] = json.loads((path / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return "gguf" if any(path.glob("*.gguf")) else ""
    quantised = config.get("quantization_config") if isinstance(config, dict) else None
    method = quantised.get("quant_method", "") if isinstance(quantised, dict) else ""
    kind = str(config.get("model_type", "")) if isinstance(config, dict) else ""
    has_weights = any(path.glob("*.safetensors")) or any(path.glob("*.gguf"))
    return f"{kind} {method}".strip() if kind and has_weights else ""


def _cells(row: Row) -> tuple[str, ...]:
    used = time.strftime("%Y-%m-%d", time.localtime(row.used_s)) if row.used_s else "-"
    return row.name, row.kind, format_bytes(row.num_bytes), used, row.state


def _json(row: Row) -> dict[str, Any]:
    return {
        "model": row.name,
        "kind": row.kind,
        "bytes": row.num_bytes,
        "last_used": int(row.used_s),
        "partial": bool(row.state),
        "path": str(row.path),
    }
