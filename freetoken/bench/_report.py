"""How a bench reports: columns for people, one JSON object as the last line for programs.

Knows no bench. With --json the table goes to stderr, so that stdout's last line is the object
{bench, machine, date, rows}.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from freetoken.core.errors import ConfigError


def add_report_arguments(parser: argparse.ArgumentParser, *, svg: bool = True) -> None:
    parser.add_argument("--json", action="store_true", help="end stdout with one JSON object of all rows")
    if svg:
        parser.add_argument("--svg", metavar="FILE", help="write the chart")


class Report:
    """Prints a bench's tables and writes its chart and rows."""

    def __init__(self, bench: str, args: argparse.Namespace) -> None:
        self.bench = bench
        self._json: bool = args.json
        self._svg: str | None = vars(args).get("svg")
        self._out: TextIO = sys.stderr if args.json else sys.stdout
        self._live = sys.stderr.isatty()

    def line(self, text: str = "") -> None:
        print(text, file=self._out, flush=True)

    def progress(self, text: str) -> None:
        """Show a passing line on a terminal; nothing elsewhere."""
        if self._live:
            print(f"\r\x1b[2K{text}", end="\r" if text else "", file=sys.stderr, flush=True)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print columns, the first to the left, the others to the right."""
        self.progress("")
        cells = [list(header), *[list(row) for row in rows]]
        widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
        for number, row in enumerate(cells):
            first = row[0].ljust(widths[0])
            rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            self.line("  " + "  ".join([first, *rest]).rstrip())
            if number == 0:
                self.line("  " + "  ".join("-" * width for width in widths))

    def chart(self, svg: str, suffix: str = "") -> None:
        """Write a chart where --svg says; `suffix` tells several charts of one run apart."""
        if self._svg is None:
            return
        path = Path(self._svg)
        path = path.with_name(f"{path.stem}{suffix}{path.suffix or '.svg'}")
        try:
            path.write_text(svg, "utf-8")
        except OSError as error:
            raise ConfigError(
                f"The chart can't be written to {path}: {error.strerror}.", hint="Give --svg another path."
            ) from error
        self.line(f"chart: {path}")

    def finish(self, rows: Sequence[dict[str, Any]], machine: str | None = None) -> int:
        if self._json:
            body = {
                "bench": self.bench,
                "machine": machine or f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
                "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "rows": list(rows),
            }
            print(json.dumps(body), flush=True)
        return 0
