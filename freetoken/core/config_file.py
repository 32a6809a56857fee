"""The user's config.toml: options under `[default]`, read with names checked, edited line by line.

Owns the file's grammar and nothing else: which value wins is `options.merge`'s business. An edit
keeps comments and order, and leaves a file that reads back as intended or changes nothing. The file may
hold the API key, so that only its owner can read one that was written here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from freetoken.core import env
from freetoken.core.errors import ConfigError, nearest
from freetoken.core.options import names, parse_value

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

TABLE = "default"


def default_path() -> Path:
    return env.home() / "config.toml"


def read(path: Path | None = None) -> dict[str, Any]:
    """Return the options of `path`, parsed; the default file may be missing, a named one may not."""
    where = path or default_path()
    if not where.exists():
        if path is None:
            return {}
        raise ConfigError(
            f"There is no config file {where}.",
            code="config_missing",
            hint="Check --config, or create the file with: ft config set NAME VALUE",
        )
    return _parse(_text(where), str(where))


def _text(where: Path) -> str:
    """Editors of Windows begin a file with a mark that is no part of its text."""
    try:
        return where.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(
            f"{where} cannot be read: {e}.",
            code="config_unreadable",
            hint="It must be a UTF-8 text file that you may read.",
        ) from e


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        body = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as e:
        raise ConfigError(
            f"{where} is not valid TOML: {e}.",
            code="config_syntax",
            hint='A line looks like: moe_backend = "hybrid"',
        ) from e
    for table in body:
        if table != TABLE:
            hint = f"Move it under [{TABLE}]." if table in names() else nearest(table, [TABLE])
            raise ConfigError(
                f"{where}: unknown entry {table!r} at the top level.",
                code="unknown_option",
                hint=hint or f"Options stand under [{TABLE}].",
            )
    options = body.get(TABLE, {})
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"{where}: {TABLE} must be a table.",
            code="config_syntax",
            hint=f"Write [{TABLE}] on its own line.",
        )
    return {name: parse_value(name, value, where) for name, value in options.items()}


def set_value(name: str, text: str, path: Path | None = None) -> Any:
    """Write `name = text` under `[default]`, creating the file; returns the parsed value."""
    where = path or default_path()
    value = parse_value(name, text, "ft config set")
    line = f"{name} = {_toml(value, text)}"
    _edit(where, name, line)
    return value


def unset(name: str, path: Path | None = None) -> bool:
    """Remove `name`; returns whether it was there."""
    where = path or default_path()
    if not where.exists() or name not in read(where):
        return False
    _edit(where, name, None)
    return True


def _toml(value: Any, text: str) -> str:
    """Write a value in TOML; a size stays as the user wrote it, so that the file reads well."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and not text.strip().lstrip("-").isdigit():
        return _quoted(text)
    return repr(value) if isinstance(value, (int, float)) else _quoted(value)


def _quoted(text: str) -> str:
    # TOML's basic strings are JSON's, but for one more character that has to be escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _edit(where: Path, name: str, line: str | None) -> None:
    old = _text(where) if where.exists() else ""
    if old:
        _parse(old, str(where))
    new = _replaced(old.removesuffix("\n").split("\n") if old else [], name, line)
    text = "\n".join(new) + "\n"
    _parse(text, str(where))
    draft = where.with_name(where.name + ".new")
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        draft.touch(mode=0o600)
        draft.write_text(text, "utf-8")
        draft.replace(where)
    except OSError as e:
        raise ConfigError(
            f"{where} cannot be written: {e.strerror}.",
            code="unwritable_file",
            hint="Set FREETOKEN_HOME to a folder that you may write to, or name a file with --config.",
        ) from e


def _replaced(lines: list[str], name: str, line: str | None) -> list[str]:
    out: list[str] = []
    table, written = "", line is None
    header = -1
    for text in lines:
        bare = text.strip()
        if bare.startswith("["):
            table = bare.split("]")[0].strip("[] ")
            header = len(out) if table == TABLE else header
        if table == TABLE and bare.split("=")[0].strip().strip("\"'") == name:
            if line is not None:
                out.append(line)
                written = True
            continue
        out.append(text)
    if written or line is None:
        return out
    if header < 0:
        return [*out, f"[{TABLE}]", line]
    return [*out[: header + 1], line, *out[header + 1 :]]
