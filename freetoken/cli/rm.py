"""`ft rm OWNER/MODEL`: remove a downloaded model from the shared cache, after asking.

Removes what a hub's tool has put there and nothing else: a folder of the user's own is never touched.
"""

from __future__ import annotations

import argparse
import sys

from freetoken.cli._terminal import Terminal
from freetoken.core import hub_cache
from freetoken.core.errors import ConfigError, nearest
from freetoken.core.units import format_bytes

HELP = "remove a downloaded model from the shared cache"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="OWNER/MODEL", help="a name that `ft models` lists")
    parser.add_argument("--yes", action="store_true", help="don't ask")


def run(args: argparse.Namespace) -> int:
    known = {one.name: one for one in hub_cache.models()}
    if args.model not in known:
        raise ConfigError(
            f"{args.model!r} is not a downloaded model.",
            code="unknown_model",
            hint=nearest(args.model, known)
            or "`ft models` lists them. Folders of your own are yours to delete.",
        )
    size = format_bytes(known[args.model].num_bytes)
    out = Terminal(sys.stderr)
    if not args.yes and not _agreed(f"Remove {args.model}, {size}? [y/N] "):
        out.line("Nothing was removed.")
        return 1
    hub_cache.remove(args.model)
    out.line(f"Removed {args.model}, {size}.")
    return 0


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            "Nobody is there to be asked.", code="usage", hint="Say --yes to remove without asking."
        )
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
