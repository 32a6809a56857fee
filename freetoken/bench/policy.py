"""`ft bench policy`: decode miss rates of residency policies on recorded routing.

Owns the table, its chart and the verdict on which live policy is best. Doesn't know how a policy decides
(experts/policies) nor how long a miss takes (`ft bench simulate`).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import freetoken
from freetoken.bench import figures, synthetic
from freetoken.bench._columns import COLUMNS, POLICIES, Column, run_column, unsupported
from freetoken.bench._report import Report, add_report_arguments
from freetoken.bench.replay import Reads, read_trace
from freetoken.bench.traces import Trace, load_trace
from freetoken.core import choices
from freetoken.core.errors import ConfigError, nearest

HELP = "decode miss rates of residency policies on routing traces"
CAPACITIES = (5.0, 8.0, 11.0, 15.0, 20.0, 37.0, 60.0)
MIN_LRU_CYCLES = 1.5
MAX_STEPS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", nargs="*", metavar="TRACE", help="trace files (default: the demo model's)")
    parser.add_argument(
        "--capacity", type=float, nargs="+", default=list(CAPACITIES), metavar="PERCENT",
        help="slots in percent of all experts",
    )  # fmt: skip
    parser.add_argument(
        "--policy", nargs="+", metavar="NAME", help="columns to run: " + " ".join(c.key for c in COLUMNS)
    )
    parser.add_argument(
        "--fill-share", type=float, default=0.5, help="share of misses filled in the part-filled columns"
    )
    parser.add_argument(
        "--steps", type=int, default=MAX_STEPS, help="decode steps to run at most, 0 = all of them"
    )
    parser.add_argument("--warm-up", type=int, default=0, help="first decode steps that aren't counted")
    add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    columns = _columns(args.policy)
    report = Report("policy", args)
    rows: list[dict[str, Any]] = []
    traces = [load_trace(path) for path in args.traces] or [default_trace()]
    for number, trace in enumerate(traces):
        reads = _limited(read_trace(trace), args.steps)
        if not reads.decode:
            raise ConfigError(f"The trace {trace.name} holds no decode steps.", code="invalid_trace")
        if args.warm_up >= len(reads.decode):
            raise ConfigError(
                f"--warm-up {args.warm_up} leaves no step of {trace.name} to count.",
                code="invalid_option",
                hint=f"It has {len(reads.decode)} decode steps.",
            )
        found = measure(trace, reads, columns, args, report)
        _show(report, trace, reads, columns, found)
        report.chart(chart(trace, columns, found), f"-{trace.name}" if len(traces) > 1 else "")
        report.line(verdict(found))
        if number + 1 < len(traces):
            report.line()
        rows += found
    if len(traces) > 1:
        report.line(f"\nAll traces. {verdict(rows)}")
    return report.finish(rows)


def default_trace() -> Trace:
    """The demo model's recorded trace; a synthetic one where it isn't there."""
    path = Path(freetoken.__file__).parent / "data" / "traces" / "demo.npz"
    return load_trace(path) if path.exists() else synthetic.cached(synthetic.GEOMETRIES["40x256k8"])


def measure(
    trace: Trace, reads: Reads, columns: Sequence[Column], args: argparse.Namespace, report: Report
) -> list[dict[str, Any]]:
    """Replay every column at every capacity: one row each, with counts or with why there are none."""
    rows = []
    for percent in args.capacity:
        slots = max(1, int(percent / 100 * trace.pool))
        cycles = slots / trace.token_cycle
        for column in columns:
            row: dict[str, Any] = {
                "trace": trace.name,
                "synthetic": trace.synthetic,
                "policy": column.key,
                "live": column.live,
                "capacity_percent": percent,
                "slots": slots,
                "token_cycles": round(cycles, 3),
                "below_token_cycle": cycles < 1,
                "fill_share": args.fill_share if column.partial else 1.0,
            }
            if why := unsupported(column, reads):
                rows.append({**row, "miss_rate": None, "why": why})
                continue
            report.progress(f"{trace.name}: {column.label} at {percent:g} %")
            counts = run_column(column, trace, reads, slots, share=args.fill_share, warm_up=args.warm_up)
            rows.append({**row, "miss_rate": round(counts.miss_rate, 5), **dataclasses.asdict(counts)})
    return rows


def best_live(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, float], str]:
    """The live policy with the fewest misses per (trace, capacity); no plain LRU below 1.5 token cycles."""
    best: dict[tuple[str, float], tuple[float, str]] = {}
    for row in rows:
        plain = row["policy"].startswith("lru") and row["token_cycles"] < MIN_LRU_CYCLES
        if not row["live"] or row["miss_rate"] is None or plain:
            continue
        key = (row["trace"], row["capacity_percent"])
        best[key] = min(best.get(key, (2.0, "")), (row["miss_rate"], row["policy"]))
    return {key: policy for key, (_, policy) in best.items()}


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence: the live policy with the lowest mean miss rate where LRU may be chosen at all."""
    usable = [r for r in rows if r["live"] and r["miss_rate"] is not None]
    usable = [r for r in usable if r["token_cycles"] >= MIN_LRU_CYCLES] or usable
    keys = {(r["trace"], r["capacity_percent"]) for r in usable}
    names = dict.fromkeys(r["policy"] for r in usable)
    rates = {name: [r["miss_rate"] for r in usable if r["policy"] == name] for name in names}
    means = {key: sum(found) / len(keys) for key, found in rates.items() if found and len(found) == len(keys)}
    if not means:
        return "No live policy was measured everywhere."
    order = sorted(means, key=lambda key: means[key])
    text = f"Best live policy: {order[0]}, {100 * means[order[0]]:.1f} % misses on average"
    rest = ", ".join(f"{key} {100 * means[key]:.1f} %" for key in order[1:])
    return text + (f" ({rest})" if rest else "") + f", capacities from {MIN_LRU_CYCLES} token cycles up."


def chart(trace: Trace, columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> str:
    xs = sorted({row["capacity_percent"] for row in rows})
    rates = {(r["policy"], r["capacity_percent"]): r["miss_rate"] for r in rows}
    series = [
        figures.Series(
            c.label,
            [None if (v := rates[c.key, x]) is None else 100 * v for x in xs],
            dashed=c.partial or not c.policy,
        )
        for c in columns
        if any(rates[c.key, x] is not None for x in xs)
    ]
    return figures.lines(
        figures.Chart(
            title=f"Decode misses: {trace.name}{' (synthetic)' if trace.synthetic else ''}",
            subtitle=_geometry(trace),
            y_label="misses, % of routed experts",
            x_label="slots, % of all experts",
            x=xs,
            series=series,
            x_marks=[(100 * trace.token_cycle / trace.pool, "one token cycle")],
        )
    )


def _geometry(trace: Trace) -> str:
    return (
        f"{trace.num_layers} x {trace.num_experts} experts, {trace.top_k} a token; "
        f"one token cycle = {trace.token_cycle} slots ({100 * trace.token_cycle / trace.pool:.1f} %)"
    )


def _show(
    report: Report,
    trace: Trace,
    reads: Reads,
    columns: Sequence[Column],
    rows: Sequence[dict[str, Any]],
) -> None:
    label = "synthetic, " if trace.synthetic else ""
    report.line(f"{trace.name}: {label}{_geometry(trace)}")
    report.line(f"{len(reads.decode)} decode steps, {len(reads.prefills)} prefills. Misses in %:")
    percents = list(dict.fromkeys(row["capacity_percent"] for row in rows))
    below = {r["capacity_percent"] for r in rows if r["below_token_cycle"]}
    cell = {(r["policy"], r["capacity_percent"]): r for r in rows}
    best = best_live(rows)
    body = []
    for column in columns:
        if why := unsupported(column, reads):
            body.append([f"{column.label}: {why}", *["-" for _ in percents]])
            continue
        marks = ["*" if best.get((trace.name, p)) == column.key else " " for p in percents]
        rates = [f"{100 * cell[column.key, p]['miss_rate']:.1f}" for p in percents]
        body.append([column.label, *[r + m for r, m in zip(rates, marks, strict=True)]])
    report.table(["", *[f"{p:g} %{'!' if p in below else ' '}" for p in percents]], body)
    report.line(
        "  * best live policy   ! below one token cycle of slots" if below else "  * best live policy"
    )


def _columns(names: Sequence[str] | None) -> list[Column]:
    """Columns by key; any other policy file is a column of its own."""
    known = {name: Column(name, name, name, live=True) for name in choices.names(POLICIES)}
    known |= {column.key: column for column in COLUMNS}
    for name in names or ():
        if name not in known:
            raise ConfigError(
                f"There is no policy column {name!r}; there are: {', '.join(known)}.",
                code="unknown_choice",
                hint=nearest(name, known),
            )
    return [known[name] for name in names] if names else list(COLUMNS)


def _limited(reads: Reads, steps: int) -> Reads:
    if not steps or len(reads.decode) <= steps:
        return reads
    return Reads(reads.decode[:steps], [p for p in reads.prefills if p[0] < steps])


def _check(args: argparse.Namespace) -> None:
    bad = [p for p in args.capacity if not 0 < p <= 100]
    if bad:
        raise ConfigError(f"A capacity of {bad[0]:g} % is not between 0 and 100.", hint="See --capacity.")
    if not 0 <= args.fill_share <= 1:
        raise ConfigError("The fill share is not between 0 and 1.", hint="See --fill-share.")
    if args.warm_up < 0 or args.steps < 0:
        raise ConfigError("Steps can't be negative.", hint="See --steps and --warm-up.")
