"""`ft config`: what the options are, where each came from, and editing config.toml.

Knows no engine: what the planner makes of the options is shown by `ft serve`.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path

from freetoken.cli import _options, _options_page
from freetoken.cli._terminal import Terminal
from freetoken.core import config_file
from freetoken.core.errors import ConfigError, nearest
from freetoken.core.options import Options, names

HELP = "show the options in effect and where each came from; get, set and unset them"
USAGE = """show the options in effect and where each came from; get, set and unset them

  ft config                    options that differ from their default (--all: every one)
  ft config get NAME           one value
  ft config set NAME VALUE     write it to config.toml
  ft config unset NAME         remove it from config.toml
  ft config path               where config.toml lies
  ft config page               the options page of the documentation, as Markdown
"""
SECRET = ("api_key",)
ACTIONS = {"show": 0, "get": 1, "set": 2, "unset": 1, "path": 0, "page": 0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = USAGE
    parser.add_argument("action", nargs="?", default="show", metavar="ACTION", help=", ".join(ACTIONS))
    parser.add_argument("words", nargs="*", metavar="NAME", help="option name, and its value for set")
    parser.add_argument("--all", action="store_true", help="show every option")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    _options.add_option_flags(parser, positional_model=False)


def run(args: argparse.Namespace) -> int:
    action, words = args.action, args.words
    if action not in ACTIONS:
        raise ConfigError(
            f"ft config does not know {action!r}.",
            code="usage",
            hint=nearest(action, ACTIONS) or f"There are: {', '.join(ACTIONS)}.",
        )
    if len(words) != ACTIONS[action]:
        raise ConfigError(
            f"ft config {action} takes {ACTIONS[action]} words, got {len(words)}.",
            code="usage",
            hint="See: ft config --help",
        )
    path = Path(args.config) if args.config else None
    out = Terminal(sys.stdout)
    if action == "path":
        out.line(str(path or config_file.default_path()))
    elif action == "page":
        out.write(_options_page.render())
    elif action == "set":
        name = _known(words[0])
        value = config_file.set_value(name, words[1], path)
        out.line(f"{name} = {_options.shown(name, value)}  in {path or config_file.default_path()}")
    elif action == "unset":
        name = _known(words[0])
        there = config_file.unset(name, path)
        out.line(f"{name} removed" if there else f"{name} was not set in config.toml")
    else:
        return _show(args, out, _known(words[0]) if words else None)
    return 0


def _known(word: str) -> str:
    name = word.lstrip("-").replace("-", "_")
    if name not in names():
        raise ConfigError(
            f"There is no option {word!r}.",
            code="unknown_option",
            hint=nearest(name, names()) or "See: ft config --all",
        )
    return name


def _show(args: argparse.Namespace, out: Terminal, only: str | None) -> int:
    resolved = _options.resolve(args)
    values = {f.name: getattr(resolved.options, f.name) for f in fields(Options)}
    for name in SECRET:
        if values.get(name):
            values[name] = "(set)"
    if only:
        values = {only: values[only]}
    elif not args.all and not args.json:
        values = {n: v for n, v in values.items() if resolved.origin[n] != "default"}
    if args.json:
        body = {n: {"value": v, "from": resolved.origin[n]} for n, v in values.items()}
        out.line(json.dumps(body, ensure_ascii=False))
        return 0
    if only:
        out.line(f"{_options.shown(only, values[only])}  ({resolved.origin[only]})")
        return 0
    if not values:
        out.line("Every option has its default. See them with: ft config --all")
        return 0
    out.table(
        ("option", "value", "from"),
        [(n, _options.shown(n, v), resolved.origin[n]) for n, v in values.items()],
    )
    _options.say_notes(resolved, out)
    return 0
