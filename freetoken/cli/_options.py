"""Option flags: every field of core/options.py as a flag of serve, chat and generate, by group.

Owns the merge of flags, environment and config file, and remembers where each value came from.
Knows no meaning of an option, except the published flags that change nothing here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from freetoken.cli._terminal import Terminal
from freetoken.core import config_file, env
from freetoken.core.options import Options, choices_of, merge, parse_value
from freetoken.core.units import format_bytes

GROUPS = {
    "model": "model",
    "device": "device",
    "experts": "expert memory",
    "memory": "memory and batching",
    "chat": "chat",
    "server": "server and log",
}
_METAVAR = {"bytes": "SIZE", "rate": "SHARE", int: "N", float: "X", str: "TEXT"}
_PREFIX = "opt_"

# Published flags that other engines' scripts carry along; accepted, explained, without effect.
WITHOUT_MEANING = {
    "moe_prefill_hit_d2d": "resident experts are always used in place during prefill",
    "moe_cache_auto": "expert slots are sized from free memory unless you give a size or a share",
}


@dataclass(frozen=True)
class Resolved:
    """Options after the merge; `origin[name]` is `flag`, `environment`, `config.toml` or `default`."""

    options: Options
    origin: dict[str, str]

    def notes(self) -> list[str]:
        """One line for each accepted option that changes nothing."""
        given = [n for n in WITHOUT_MEANING if self.origin[n] != "default"]
        return [f"{flag(n)} changes nothing: {WITHOUT_MEANING[n]}." for n in given]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_option_flags(parser: argparse.ArgumentParser, *, positional_model: bool = True) -> None:
    """Add one flag per option, grouped, and `--config`. Values stay text until `resolve`."""
    if positional_model:
        parser.add_argument("model_path", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    parser.add_argument("--config", metavar="FILE", help="read this config.toml instead of the default one")
    groups = {key: parser.add_argument_group(title) for key, title in GROUPS.items()}
    for f in fields(Options):
        _add(groups[f.metadata["group"]], f.name, f.metadata, f.default)


def _add(group: Any, name: str, meta: Any, default: Any) -> None:
    text = meta["help"].replace("%", "%%")
    dest = _PREFIX + name
    if meta["kind"] == "flag":
        group.add_argument(flag(name), dest=dest, action="store_const", const="true", help=text)
        group.add_argument(
            "--no-" + name.replace("_", "-"),
            dest=dest,
            action="store_const",
            const="false",
            help=argparse.SUPPRESS,
        )
        return
    if default not in (None, "", False) and not isinstance(default, bool):
        text += f" (default {default})"
    known = choices_of(meta)
    metavar = "{" + ",".join(known) + "}" if known else _METAVAR[meta["kind"]]
    group.add_argument(flag(name), dest=dest, metavar=metavar, help=text)


def names_in(groups: Sequence[str]) -> list[str]:
    """Names of the options of some groups."""
    return [f.name for f in fields(Options) if f.metadata["group"] in groups]


def flag_values(args: argparse.Namespace) -> dict[str, Any]:
    """Options given on the command line, parsed."""
    out = {}
    for f in fields(Options):
        text = getattr(args, _PREFIX + f.name, None)
        if text is not None:
            out[f.name] = parse_value(f.name, text, flag(f.name))
    if getattr(args, "model_path", None) and "model" not in out:
        out["model"] = args.model_path
    return out


def resolve(args: argparse.Namespace) -> Resolved:
    """Merge flags > environment > config file > defaults."""
    path = Path(args.config) if getattr(args, "config", None) else None
    layers = {
        "flag": flag_values(args),
        "environment": env.option_values(),
        "config.toml": config_file.read(path),
    }
    origin = {}
    for f in fields(Options):
        origin[f.name] = next((where for where, values in layers.items() if f.name in values), "default")
    return Resolved(merge(*layers.values()), origin)


def say_notes(resolved: Resolved, out: Terminal) -> None:
    for note in resolved.notes():
        out.line(out.dim(f"note: {note}"))


def shown(name: str, value: Any) -> str:
    """Write an option's value for people: sizes with units, None as `auto`."""
    kind = next(f.metadata["kind"] for f in fields(Options) if f.name == name)
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    return format_bytes(value) if kind == "bytes" else str(value)
