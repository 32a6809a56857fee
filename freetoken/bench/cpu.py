"""`ft bench cpu`: how fast the CPU computes experts, beside how fast it reads the same memory.

One row per (format, tier, threads, batch); with `--rows` also one per rows of a prompt that share an expert,
the tiers in turns. Reading and computing are measured in turns over working sets
larger than any cache, so a share means the same on a busy machine; a share above 1.05 would mean that the
measurement is wrong, and fails it. Says nothing about a whole token (`ft bench serving`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from freetoken.bench import _native
from freetoken.bench._report import Report, add_report_arguments
from freetoken.core import choices
from freetoken.core.errors import ConfigError, nearest
from freetoken.core.options import CPU_ACTIVATIONS
from freetoken.native.topology import default_threads

HELP = "expert weights per second on the CPU, by format, tier, threads and batch"
TOP_K = 8
MOST_SHARE = 1.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", nargs="+", metavar="NAME", help="weight formats (default: all)")
    parser.add_argument("--activations", choices=CPU_ACTIVATIONS, default="16bit")
    parser.add_argument("--tier", nargs="+", metavar="NAME", help="instruction sets (default: the best one)")
    parser.add_argument(
        "--threads", nargs="+", type=int, metavar="N", help="default: one, and all that serve"
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="also N rows for each expert, as prompts have",
    )
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size")
    parser.add_argument("--width", type=int, default=768, help="width of an expert")
    parser.add_argument("--size", type=float, default=1.0, metavar="GIB", help="least working set")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each measurement")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="rates per second of CPU time, for a machine that others use; needs --threads 1",
    )
    add_report_arguments(parser, svg=False)


def run(args: argparse.Namespace) -> int:
    lib = _native.require_library()
    clock = time.thread_time if args.cpu_time else time.perf_counter
    known = choices.names("freetoken.quant")
    _check(args, known, lib.tiers)
    tiers = args.tier or [lib.tier]
    threads = args.threads or sorted({1, default_threads()})
    report = Report("cpu", args)
    rows: list[dict[str, Any]] = []
    for fmt in args.format or known:
        report.progress(f"preparing {fmt}")
        made = _native.make(fmt, args.hidden, args.width, int(args.size * _native.GIB))
        made.int8 = args.activations == "int8" and lib.has_int8(fmt)
        for count in threads:
            lib.start(count)
            for tier in tiers:
                report.progress(f"{fmt} {tier}, {count} threads")
                rows += measure(made, tier, count, args.seconds, clock)
            for number in args.rows:
                report.progress(f"{fmt}, {number} rows, {count} threads")
                rows += shared(made, tiers, number, args.seconds, clock)
        made.close()
    for count in threads:
        lib.start(count)
        rows.append(dispatch(count))
    show(report, rows)
    report.finish(rows)
    wrong = [r for r in rows if (r.get("share_of_read_bw") or 0) > MOST_SHARE]
    if wrong:
        report.line(f"FAILED: {len(wrong)} shares above {MOST_SHARE}: reading was slowed by something else.")
    return 1 if wrong else 0


def _check(args: argparse.Namespace, formats: Sequence[str], tiers: Sequence[str]) -> None:
    _native.check_arguments(args)
    if min(args.hidden, args.width, *args.rows) < 1:
        raise ConfigError("--hidden, --width and --rows are at least 1.", code="invalid_option")
    if args.cpu_time and args.threads != [1]:
        raise ConfigError("--cpu-time counts one thread.", code="invalid_option", hint="Add --threads 1.")
    named = (("weight format", args.format, formats), ("tier", args.tier, tiers))
    for what, wanted, known in named:
        for name in wanted or ():
            if name not in known:
                hint = nearest(name, known) or f"There are: {', '.join(known)}."
                raise ConfigError(f"There is no {what} {name!r} here.", code="unknown_choice", hint=hint)


def measure(
    made: _native.Experts, tier: str, threads: int, seconds: float, clock: _native.Clock
) -> list[dict[str, Any]]:
    """Batch 1, and batch 8 whose routes share half of their experts, of one (format, tier, threads)."""
    lib = _native.require_library()
    read = _native.Reader(made)
    single = _native.Caller(made, tier, TOP_K, 1)
    batch = _native.Caller(made, tier, 4 * TOP_K, 2)
    read_s, single_s, batch_s = _native.interleaved([read, single, batch], seconds, clock=clock)
    tile = made.bank.layouts[0].tile_bytes
    lib.start(1)
    cached = _native.Caller(made, tier, 1, 1, tiles=max(1, _native.CACHED_BYTES // tile))
    cached_s = _native.interleaved([cached], seconds / 4, clock=clock)[0]
    lib.start(threads)
    read_bw = read.bytes / read_s
    common = {
        "format": made.fmt,
        "activations": "int8" if made.int8 else "16bit",
        "tier": tier,
        "threads": threads,
        "read_gb_s": round(read_bw / 1e9, 2),
    }
    rows = []
    for size, call, spent in ((1, single, single_s), (8, batch, batch_s)):
        rate = call.bytes / spent
        rows.append(
            {
                **common,
                "batch": size,
                "gb_s": round(rate / 1e9, 2),
                "share_of_read_bw": round(rate / read_bw, 3),
                "cached_gb_s": round(threads * cached.bytes / cached_s / 1e9, 2),
                "us": round(spent * 1e6, 1),
                "speedup": round(8 * single_s / spent, 2) if size == 8 else None,
            }
        )
    for call in (single, batch, cached):
        call.close()
    return rows


def shared(
    made: _native.Experts, tiers: list[str], number: int, seconds: float, clock: _native.Clock
) -> list[dict[str, Any]]:
    """TOP_K experts that `number` rows each share, by every tier in turns."""
    threads, one = _native.require_library().threads, made.bank.layouts[0]
    products = 3 * TOP_K * number * one.hidden * one.num_tiles * one.tile_width
    calls = [_native.Caller(made, tier, TOP_K, number) for tier in tiers]
    rows = []
    for tier, spent in zip(tiers, _native.interleaved([*calls], seconds, clock=clock), strict=True):
        rows.append(
            {
                "format": made.fmt,
                "activations": "int8" if made.int8 else "16bit",
                "tier": tier,
                "threads": threads,
                "rows": number,
                "us": round(spent * 1e6, 1),
                "giga_products_s": round(products / spent / 1e9, 1),
            }
        )
    for call in calls:
        call.close()
    return rows


def dispatch(threads: int) -> dict[str, Any]:
    """What waking all threads for nothing costs."""
    lib = _native.require_library()
    spent = _native.interleaved([lambda: lib.ping(200)], 0.2)[0] / 200
    return {"format": None, "threads": threads, "dispatch_us": round(spent * 1e6, 2)}


def show(report: Report, rows: list[dict[str, Any]]) -> None:
    header = ["format", "tier", "threads", "batch", "GB/s", "of reading", "from cache", "us", "speed-up"]
    body = [
        [
            r["format"], r["tier"], str(r["threads"]), str(r["batch"]), f"{r['gb_s']:.1f}",
            f"{100 * r['share_of_read_bw']:.0f} %", f"{r['cached_gb_s']:.1f}", f"{r['us']:.0f}",
            f"{r['speedup']:.2f}x" if r["speedup"] else "-",
        ]
        for r in rows if "batch" in r
    ]  # fmt: skip
    report.table(header, body)
    prompts = [r for r in rows if "rows" in r]
    if prompts:
        names = ("format", "tier", "threads", "rows", "us", "giga_products_s")
        report.table([*names[:-1], "G products/s"], [[str(r[name]) for name in names] for r in prompts])
    for r in rows:
        if not r["format"]:
            report.line(f"dispatch to {r['threads']} threads: {r['dispatch_us']} us")
