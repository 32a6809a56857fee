"""`ft bench bw`: what this machine's memory gives, measured once and kept.

The CPU half: read bandwidth by threads (B_H), and per weight format the rate at which experts are computed
and the fixed cost of a request (a_c). Written to the profile of this machine, which planning reads.
"""

from __future__ import annotations

import argparse
import datetime
from typing import Any

from freetoken.bench import _native
from freetoken.bench._report import Report, add_report_arguments
from freetoken.core import choices, profile
from freetoken.native.topology import default_threads

HELP = "memory bandwidths and fixed costs of this machine, kept as its profile"
FORMATS = ("bf16", "fp8_block", "mxfp4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", nargs="+", type=int, metavar="N", help="default: powers of two up to all"
    )
    parser.add_argument(
        "--format", nargs="+", default=list(FORMATS), choices=choices.names("freetoken.quant"),
        metavar="NAME", help=f"weight formats (default: {' '.join(FORMATS)})",
    )  # fmt: skip
    parser.add_argument("--size", type=float, default=1.0, metavar="GIB", help="least working set")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each measurement")
    parser.add_argument("--dry-run", action="store_true", help="measure and print, keep nothing")
    add_report_arguments(parser, svg=False)


def run(args: argparse.Namespace) -> int:
    lib = _native.require_library()
    most = default_threads()
    counts = args.threads or sorted({min(1 << n, most) for n in range(most.bit_length() + 1)})
    report = Report("bw", args)
    rows: list[dict[str, Any]] = []
    rates: dict[str, float] = {}
    fixed: dict[str, float] = {}
    best = (0.0, 1)
    for fmt in args.format:
        report.progress(f"preparing {fmt}")
        made = _native.make(fmt, 2048, 768, int(args.size * _native.GIB))
        if not rows:
            for count in counts:
                lib.start(count)
                rate = reading(made, args.seconds)
                rows.append({"what": "read", "threads": count, "gb_s": round(rate / 1e9, 2)})
                best = max(best, (rate, count))
            lib.start(best[1])
        rates[fmt], fixed[fmt] = experts(made, args.seconds)
        row = {"what": fmt, "threads": best[1], "gb_s": round(rates[fmt] / 1e9, 2)}
        rows.append({**row, "fixed_us": round(fixed[fmt] * 1e6, 2)})
        made.close()
    report.table(
        ["", "threads", "GB/s", "fixed us"],
        [[r["what"], str(r["threads"]), f"{r['gb_s']:.1f}", str(r.get("fixed_us", "-"))] for r in rows],
    )
    if not args.dry_run:
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        found = profile.Profile(profile.machine_key(), best[0], best[1], date, fixed, rates)
        report.line(f"kept in {profile.save(found)}")
    return report.finish(rows)


def reading(made: _native.Experts, seconds: float) -> float:
    read = _native.Reader(made)
    return read.bytes / _native.interleaved([read], seconds)[0]


def experts(made: _native.Experts, seconds: float) -> tuple[float, float]:
    """Bytes per second of eight experts with one row, and seconds of a request that hardly computes."""
    tiny = _native.make(made.fmt, 256, 256, least=0)
    whole, small = _native.Caller(made, "", 8, 1), _native.Caller(tiny, "", 1, 1)
    whole_s, small_s = _native.interleaved([whole, small], seconds)
    whole.close()
    small.close()
    return whole.bytes / whole_s, small_s
