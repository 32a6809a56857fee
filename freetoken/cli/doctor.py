"""`ft doctor`: is this machine ready, and if not, what to do. Reads, never repairs.

Each check is a row: good, warn or bad, with the next step. Exit code 1 if any row is bad. The bundle
for bug reports holds these rows, versions and options: no prompt, no answer, no key, no user name.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from freetoken.cli import _bundle, _checks, _options
from freetoken.cli._terminal import Terminal

HELP = "check this machine and installation; --bundle FILE collects a bug report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", metavar="FILE", help="write a zip for a bug report (no prompts in it)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    _options.add_option_flags(parser)


def run(args: argparse.Namespace) -> int:
    checks = _checks.all_checks(args)
    failed = any(c.state == "bad" for c in checks)
    out = Terminal(sys.stdout)
    if args.json:
        out.line(json.dumps({"ok": not failed, "checks": [asdict(c) for c in checks]}, ensure_ascii=False))
    else:
        _print(checks, out)
    if args.bundle:
        path = Path(args.bundle)
        _bundle.write(path, checks)
        print(f"Bug report written to {path}; look into it before you share it.", file=sys.stderr)
    return 1 if failed else 0


def _print(checks: list[_checks.Check], out: Terminal) -> None:
    marks = {"good": out.good("ok  "), "warn": out.warn("note"), "bad": out.bad("bad ")}
    for check in checks:
        out.line(f"{marks[check.state]}  {check.name:<12} {check.fact}")
        if check.hint:
            out.line(f"      {'':<12} {out.dim(check.hint)}")
    bad = [c.name for c in checks if c.state == "bad"]
    out.line()
    out.line(f"Not ready: {', '.join(bad)}." if bad else "Ready. Try: ft demo")
