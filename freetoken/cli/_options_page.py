"""docs/options.md, written from core/options.py so that the page cannot lag behind the code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from freetoken.cli._options import GROUPS, WITHOUT_MEANING, flag
from freetoken.core.options import Options, choices_of

_HEAD = """# Options

Every option is a flag of `ft serve`, `ft chat` and `ft generate`, an environment variable and a line of
`config.toml`. The strongest wins:

    flag > FREETOKEN_* > config.toml > the model's generation_config.json (sampling only) > default

`--moe-backend hybrid`, `FREETOKEN_MOE_BACKEND=hybrid` and this file say the same:

    [default]
    moe_backend = "hybrid"

The file is `~/.freetoken/config.toml`; `FREETOKEN_HOME` moves the folder, `--config FILE` names another file.
`ft config` shows what is in effect and where it came from; `ft config set NAME VALUE` edits the file.
An unknown name is an error that tells the nearest one, everywhere.

Sizes are written like `8GiB` or `512MiB` (powers of 1024), shares as 0 to 1, switches as `true` or
`false`; a switch on the command line takes no value, and `--no-NAME` turns it off. *auto* means that the
planner decides and says why (see [plan.md](plan.md)).

This page is written by `ft config page > docs/options.md`.
"""
_KINDS = {"bytes": "size", "rate": "share", "flag": "switch", int: "number", float: "number", str: "text"}


def render() -> str:
    parts = [_HEAD]
    for group, title in GROUPS.items():
        rows = [_row(f.name, f.metadata, f.default) for f in fields(Options) if f.metadata["group"] == group]
        parts += [
            f"\n## {title[0].upper()}{title[1:]}\n",
            "| flag | value | default | meaning |\n|---|---|---|---|",
            "\n".join(rows) + "\n",
        ]
    parts.append("\n## Accepted without effect\n")
    parts += [f"- `{flag(n)}`: {why}." for n, why in WITHOUT_MEANING.items()]
    return "\n".join(parts) + "\n"


def _row(name: str, meta: Mapping[str, Any], default: Any) -> str:
    value = ", ".join(f"`{c}`" for c in choices_of(meta)) or _KINDS[meta["kind"]]
    if default is None:
        shown = "auto"
    elif isinstance(default, bool):
        shown = "on" if default else "off"
    else:
        shown = f"`{default}`"
    return f"| `{flag(name)}` | {value} | {shown} | {meta['help'].replace('|', '/')} |"
