"""`ft bench suffix`: what a few new tokens cost behind a long prompt that the prefix cache holds.

Engine time to the first token of 1, 16, 64 and 256 new tokens. Every round sends other tokens, and a row
whose prefix was not reused fails the bench: it would have measured something else. Rounds go through all
lengths in turn; medians are shown.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from freetoken.bench._report import Report, add_report_arguments
from freetoken.bench._setups import (
    Member,
    Prompts,
    add_repeat_arguments,
    add_setup_arguments,
    check_repeats,
    groups,
    is_small,
    opened,
    setups,
)
from freetoken.core.errors import ConfigError

HELP = "time to the first token of 1 to 256 new tokens behind a cached prompt"
SUFFIXES = (1, 16, 64, 256)
PREFIX, SMALL_PREFIX = 16384, 1024
WARM, SMALL_WARM = (64, 64), (16, 16)
"""Tokens of a prompt and an answer that fill the slots before anything is measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_setup_arguments(parser)
    add = parser.add_argument
    add(
        "--prefix",
        type=int,
        metavar="N",
        help=f"cached tokens (default {PREFIX} on cuda, else {SMALL_PREFIX})",
    )
    add("--suffix", nargs="+", type=int, default=list(SUFFIXES), metavar="TOKENS", help="new tokens")
    add_repeat_arguments(parser)
    add_report_arguments(parser, svg=False)


def run(args: argparse.Namespace) -> int:
    check_repeats(args)
    prefix = args.prefix or (SMALL_PREFIX if is_small(args) else PREFIX)
    if prefix < 1 or min(args.suffix) < 1:
        raise ConfigError("--prefix and --suffix are at least 1.", code="invalid_option")
    report, prompts = Report("suffix", args), Prompts(args.model)
    rows: list[dict[str, Any]] = []
    for group in groups(setups(args)):
        with opened(group, max(prefix + max(args.suffix), sum(WARM)) + 16, 2) as members:
            for member in members:
                prompts.learn(member.engine)
                warm = SMALL_WARM if is_small(args) else WARM
                member.engine.run(prompts.take(warm[0]), warm[1])
            rows += _measure(members, prefix, args, (prompts, report))
            members.clear()
            del member
    _show(report, rows)
    report.finish(rows)
    if missed := [row for row in rows if not row["reused"]]:
        report.line(f"FAILED: {len(missed)} rows computed their prefix again.")
    return 1 if missed else 0


def _measure(
    members: list[Member], prefix: int, args: argparse.Namespace, using: tuple[Prompts, Report]
) -> list[dict[str, Any]]:
    prompts, report = using
    base = prompts.take(prefix)
    first = [member.engine.run(base, 1).first_s for member in members]
    times: dict[tuple[int, int], list[float]] = {}
    cached: dict[tuple[int, int], int] = {}
    for number in range(args.warm_up + args.repeats):
        for length in args.suffix:
            for at, member in enumerate(members):
                report.progress(f"round {number + 1}: {length} new tokens")
                asked = member.engine.run([*base, *prompts.take(length)], 1)
                if number >= args.warm_up:
                    times.setdefault((at, length), []).append(asked.first_s)
                    cached[at, length] = min(cached.get((at, length), prefix), asked.cached)
    page = max(member.engine.built.plan.page_size for member in members)
    return [
        {
            **members[at].facts,
            "prefix": prefix,
            "suffix": length,
            "ms": round(1e3 * statistics.median(some), 3),
            "spread_ms": [round(1e3 * min(some), 3), round(1e3 * max(some), 3)],
            "cached": cached[at, length],
            "reused": cached[at, length] >= min(prefix - page, prefix - 1),
            "cold_ms": round(1e3 * first[at], 1),
            "repeats": args.repeats,
        }
        for (at, length), some in times.items()
    ]


def _show(report: Report, rows: list[dict[str, Any]]) -> None:
    report.line(f"{rows[0]['model']} ({rows[0]['geometry']}) on {rows[0]['device']}, medians")
    body = [
        [
            str(r["suffix"]), r["backend"], f"{100 * r['pool_share']:.0f} %", f"{r['ms']:.1f}",
            str(r["cached"]), f"{r['cold_ms']:.0f}",
        ]
        for r in rows
    ]  # fmt: skip
    report.table(["new tokens", "backend", "pool", "ms", "reused", "cold ms"], body)
