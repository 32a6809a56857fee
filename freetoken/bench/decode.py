"""`ft bench decode`: tokens a second of one and more streams, beside what the machine's memories allow.

Engines that differ in backend, share of the pool, policy or threads take turns: every round asks each for the
same number of tokens behind a prompt of its own, and medians of the rounds are shown. `limit_tok_s` is a step
in which all bytes that this run moved had moved at the best rates that any probe of the run saw, and nothing
else had cost anything. In process and without text; `ft bench serve` goes over HTTP.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from typing import Any

from freetoken.bench._engine import Window
from freetoken.bench._hammer import hammering
from freetoken.bench._rates import Moved, dense_bytes
from freetoken.bench._report import Report, add_report_arguments
from freetoken.bench._setups import (
    Member,
    Probed,
    Prompts,
    add_repeat_arguments,
    add_setup_arguments,
    check_repeats,
    groups,
    opened,
    setups,
)
from freetoken.core.errors import ConfigError

HELP = "decode speed by backend, share of the pool, policy and streams, against the memories' limit"
PROMPT, TOKENS, LEAD = 64, 96, 32
TAIL = 2
"""Tokens behind the window: its last step has a successor in flight, as its first had."""
QUIET, LIVE, FROZEN = "quiet", "hammered, live split", "hammered, frozen split"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = f"{HELP}. Try: ft bench decode --device sim --backend hybrid offload --share 0.4 0.1"
    add_setup_arguments(parser)
    add = parser.add_argument
    add("--streams", nargs="+", type=int, default=[1], metavar="N", help="requests at once (default 1)")
    add("--prompt", type=int, default=PROMPT, help=f"tokens of a prompt (default {PROMPT})")
    add("--tokens", type=int, default=TOKENS, help=f"measured tokens a stream (default {TOKENS})")
    add("--lead", type=int, default=LEAD, help=f"tokens before them, which warm slots (default {LEAD})")
    add_repeat_arguments(parser)
    add(
        "--hammer", type=int, default=0, metavar="N",
        help="also beside a process of N threads that eats host bandwidth: live split, then a frozen one",
    )  # fmt: skip
    add_report_arguments(parser, svg=False)


@dataclass
class Found:
    """What the measured rounds of a case gave."""

    windows: list[Window] = field(default_factory=list)
    right: list[float] = field(default_factory=list)

    def per_step(self, name: str, steps: float) -> float:
        return sum(window.used(name) for window in self.windows) / steps


@dataclass
class Case:
    """One engine with one number of streams in one surrounding."""

    member: Member
    streams: int
    beside: str = QUIET
    found: Found = field(default_factory=Found)


def run(args: argparse.Namespace) -> int:
    check_repeats(args)
    if min(args.streams) < 1 or min(args.prompt, args.tokens, args.lead) < 1 or args.hammer < 0:
        raise ConfigError("--streams, --prompt, --tokens and --lead are at least 1.", code="invalid_option")
    report, prompts, probed = Report("decode", args), Prompts(args.model), Probed()
    context, most = args.prompt + args.lead + args.tokens + TAIL + 8, max(args.streams)
    done: list[tuple[Found, dict[str, Any]]] = []
    wanted = setups(args)
    for group in groups(wanted):
        report.progress(f"loading {len(group)} of {len(wanted)}")
        with opened(group, context, most) as members:
            done += _group(members, args, (prompts, probed, report))
            members.clear()  # a row must not keep an engine alive
    rows = [_row(found, facts, probed, args) for found, facts in done]
    _show(report, rows)
    return report.finish(rows)


def _group(
    members: list[Member], args: argparse.Namespace, using: tuple[Prompts, Probed, Report]
) -> list[tuple[Found, dict[str, Any]]]:
    """Measure engines that live side by side, between two probes of the memories."""
    prompts, probed, report = using
    for member in members:
        prompts.learn(member.engine)
        probed.look(member)
    cases = [Case(member, n) for member in members for n in args.streams]
    _rounds(cases, args, prompts, report)
    if args.hammer:
        cases += _hammered(members, args, prompts, report)
    for member in members:
        probed.look(member)
    return [(case.found, _facts(case, len(members) > 1, args.prompt)) for case in cases]


def _rounds(cases: list[Case], args: argparse.Namespace, prompts: Prompts, report: Report) -> None:
    for number in range(args.warm_up + args.repeats):
        for case in cases:
            facts = case.member.facts
            report.progress(f"round {number + 1}: {facts['backend']} {case.streams} streams, {case.beside}")
            window = _ask(case, args, prompts)
            if number >= args.warm_up:
                case.found.windows.append(window)


def _ask(case: Case, args: argparse.Namespace, prompts: Prompts) -> Window:
    texts = [prompts.take(args.prompt) for _ in range(case.streams)]
    engine, length = case.member.engine, args.lead + args.tokens
    asked = [engine.submit(text, length + TAIL) for text in texts]
    window = engine.window(asked, args.lead, length)
    for text, one in zip(texts, asked, strict=True):
        if (right := prompts.right(text, one.ids)) is not None:
            case.found.right.append(right)
    return window


def _hammered(
    members: list[Member], args: argparse.Namespace, prompts: Prompts, report: Report
) -> list[Case]:
    """The same beside a busy neighbour: with the split that quiet times taught, then as it learns."""
    found = []
    for beside in (FROZEN, LIVE):
        cases = [Case(member, n, beside) for member in members for n in args.streams]
        for case in cases:
            case.member.engine.built.engine.runner.experts.freeze(beside == FROZEN)
        with hammering(args.hammer):
            _rounds(cases, args, prompts, report)
        found += cases
    return found


def _facts(case: Case, interleaved: bool, prompt: int) -> dict[str, Any]:
    """What has to be asked while the engine lives."""
    built = case.member.engine.built
    bank = built.filling.bank if built.filling else None
    return {
        **case.member.facts,
        "interleaved": interleaved,
        "streams": case.streams,
        "beside": case.beside,
        "prefetch": "auto" if case.member.setup.prefetch is None else case.member.setup.prefetch,
        "owns_memory": built.device.owns_memory,
        "tile_bytes": max(one.tile_bytes for one in bank.layouts) if bank else 0,
        "num_tiles": max(one.num_tiles for one in bank.layouts) if bank else 0,
        "dense_bytes": dense_bytes(built.config, prompt, built.plan.memory.dense_bytes),
        "num_layers": max(built.config.num_moe_layers, 1),
    }


def _row(found: Found, facts: dict[str, Any], probed: Probed, args: argparse.Namespace) -> dict[str, Any]:
    rates = [window.tokens / window.seconds for window in found.windows]
    speed, streams = statistics.median(rates), facts["streams"]
    steps = sum(window.tokens for window in found.windows) / streams
    requests, misses, tiles = (found.per_step(n, steps) for n in ("requests", "misses", "missing_tiles"))
    ahead, judged, hit = (found.per_step(n, steps) for n in ("ahead_tiles", "ahead_judged", "ahead_right"))
    size, owns = facts.pop("tile_bytes"), facts.pop("owns_memory")
    routed = requests * facts.pop("num_tiles") * size
    missing = tiles * size if owns else 0.0
    moved = Moved(facts.pop("dense_bytes"), routed - missing, missing)
    least = moved.least_s(probed.best, facts["backend"], owns_memory=owns)
    layers, prefetch = facts.pop("num_layers"), facts.pop("prefetch")
    limit = streams / least if least else None
    return {
        **facts,
        "decode_tok_s": round(speed, 2),
        "step_ms": round(1e3 * streams / speed, 3),
        "spread": [round(min(rates), 2), round(max(rates), 2)],
        "hit_rate": round(1 - misses / requests, 4) if requests and owns else None,
        "missing_mb_step": round(missing / 1e6, 3),
        "distinct_experts_layer": round(requests / layers, 2),
        "limit_tok_s": round(limit, 2) if limit else None,
        "share_of_limit": round(speed / limit, 4) if limit else None,
        "prefetch": prefetch if ahead or prefetch == 0 else "none",
        "prefetched_tiles_step": round(ahead, 2),
        "prefetch_right": round(hit / judged, 4) if judged else None,
        "right": round(statistics.mean(found.right), 4) if found.right else None,
        "prompt": args.prompt,
        "tokens": args.tokens,
        "repeats": args.repeats,
        "rates_gb_s": {name: round(value / 1e9, 1) for name, value in vars(probed.best).items() if value},
    }


def _show(report: Report, rows: list[dict[str, Any]]) -> None:
    header = [
        "backend",
        "pool",
        "policy",
        "streams",
        "tok/s",
        "step ms",
        "hits",
        "limit",
        "of limit",
        "beside",
    ]
    body = [
        [
            row["backend"], f"{100 * row['pool_share']:.0f} %", row["policy"] or "-", str(row["streams"]),
            f"{row['decode_tok_s']:.1f}", f"{row['step_ms']:.2f}",
            "-" if row["hit_rate"] is None else f"{100 * row['hit_rate']:.0f} %",
            "-" if row["limit_tok_s"] is None else f"{row['limit_tok_s']:.0f}",
            "-" if row["share_of_limit"] is None else f"{100 * row['share_of_limit']:.0f} %", row["beside"],
        ]
        for row in rows
    ]  # fmt: skip
    report.line(f"{rows[0]['model']} ({rows[0]['geometry']}) on {rows[0]['device']}, medians")
    report.table(header, body)
    if (wrong := [row for row in rows if (row["right"] or 1.0) < 1.0]) and rows[0]["right"] is not None:
        report.line(f"{len(wrong)} of {len(rows)} rows left the walk: see `right`")
