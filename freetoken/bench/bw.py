"""`ft bench bw`: what this machine's memory gives, measured once and kept.

Read bandwidth by threads (B_H), and per weight format the rate at which experts are computed and the fixed
cost of a request (a_c). With a GPU: the link alone, and link and CPU at once, which is what hybrid decoding
divides. Written to the profile of this machine, which planning reads.
"""

from __future__ import annotations

import argparse
import datetime
from typing import Any

from freetoken.bench import _native
from freetoken.bench._link import Rates, measure
from freetoken.bench._report import Report, add_report_arguments
from freetoken.core import choices, profile
from freetoken.core.options import Options
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
    _native.check_arguments(args)
    most = default_threads()
    counts = args.threads or sorted({min(1 << n, most) for n in range(most.bit_length() + 1)})
    report = Report("bw", args)
    rows: list[dict[str, Any]] = []
    rates: dict[str, float] = {}
    fixed: dict[str, float] = {}
    best, link = (0.0, 1), None
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
            link = together(made, args.seconds, rows, report)
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
        key, beside = profile.machine_key(), link or Rates(0.0, 0.0, 0.0)
        found = profile.Profile(
            key,
            best[0],
            best[1],
            date,
            fixed,
            rates,
            beside.link,
            beside.link_beside_host,
            beside.host_beside_link,
        )
        report.line(f"kept in {profile.save(found)}")
    return report.finish(rows)


def together(
    made: _native.Experts, seconds: float, rows: list[dict[str, Any]], report: Report
) -> Rates | None:
    """The link's rates, if there is a GPU; adds their rows."""
    cuda = choices.load("freetoken.devices", "cuda")
    if not cuda.usable():
        report.line("no GPU here: the link was not measured")
        return None
    device = cuda.create(Options())
    found, locked = measure(device, made, seconds)
    device.close()
    if not locked:
        report.line("the system locks no memory for the GPU: copies go through the driver's own buffer")
    for what in ("link", "link_beside_host", "host_beside_link"):
        rows.append(
            {"what": what, "threads": default_threads(), "gb_s": round(getattr(found, what) / 1e9, 2)}
        )
    return found


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
