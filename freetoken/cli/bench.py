"""`ft bench NAME`: runs a measurement; a bench is a file of freetoken/bench/ with HELP and run()."""

from __future__ import annotations

import argparse
import sys

from freetoken.bench._processes import tidy
from freetoken.cli import main
from freetoken.cli._terminal import Terminal
from freetoken.core import choices
from freetoken.core.errors import ConfigError, nearest

HELP = "measure: `ft bench` lists what there is"
PACKAGE = "freetoken.bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="NAME", help="a measurement, then its own options"
    )


def benches() -> dict[str, str]:
    """Measurements by name with what they say of themselves; files without HELP are their helpers."""
    found = {name: choices.constant(PACKAGE, name, "HELP") for name in choices.names(PACKAGE)}
    return {name: text for name, text in found.items() if text}


def run(args: argparse.Namespace) -> int:
    known = benches()
    if not args.words:
        out = Terminal(sys.stdout)
        out.table(("bench", ""), list(known.items()))
        out.line("  ft bench NAME --help shows its options")
        return 0
    name, *rest = args.words
    if name not in known:
        raise ConfigError(
            f"There is no bench {name!r}.",
            code="unknown_command",
            hint=nearest(name, known) or f"There are: {', '.join(known)}.",
        )
    bench = choices.load(PACKAGE, name)
    parsed = main.parse(f"ft bench {name}", bench, rest)
    with tidy():
        return int(bench.run(parsed))
