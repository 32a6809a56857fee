"""`ft bench beside`: what a long prompt does to a stream that decodes beside it, and to the expert slots.

Every round: a stream decodes alone (its step and its hits are the usual ones), a long prompt is answered
alone (how many of the first four steps' experts it left in their slots), then the same stream decodes while
another long prompt arrives. The stream's gaps from the prompt's arrival to its first token are compared with
what is promised: --prefill-gap-ms and one step. Medians of rounds; gaps of all rounds in one pile.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from freetoken.bench._engine import Asked, Driven
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

HELP = "a long prompt beside a running stream: the stream's gaps, and the hits behind the prompt"
LENGTH, SMALL_LENGTH = 32768, 768
STREAM, SMALL_STREAM = (256, 192), (16, 24)
"""Tokens of the stream before anything is measured, and tokens that its usual step is taken from."""
FIRST_STEPS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = f"{HELP}. Try: ft bench beside --device sim --backend hybrid --share 0.4"
    add_setup_arguments(parser)
    add = parser.add_argument
    add(
        "--prompt", nargs="+", type=int, metavar="TOKENS",
        help=f"lengths (default {LENGTH} on a GPU, {SMALL_LENGTH} elsewhere)",
    )  # fmt: skip
    add("--prefill-gap-ms", type=float, metavar="X", help="the pause allowed (default: as serving)")
    add_repeat_arguments(parser, repeats=3, warm_up=1)
    add_report_arguments(parser, svg=False)


@dataclass
class Found:
    """Figures of the measured rounds. A pair of hits is (hits, routed experts)."""

    steps_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    longest_s: list[float] = field(default_factory=list)
    prompt_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    steady: list[tuple[float, float]] = field(default_factory=list)
    behind: list[tuple[float, float]] = field(default_factory=list)
    right: list[float] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    check_repeats(args)
    lengths = args.prompt or [SMALL_LENGTH if is_small(args) else LENGTH]
    gap = args.prefill_gap_ms
    if min(lengths) < 1 or (gap is not None and not 0 < gap < math.inf):
        raise ConfigError("--prompt is at least 1, --prefill-gap-ms above 0.", code="invalid_option")
    report, prompts = Report("beside", args), Prompts(args.model)
    stream = SMALL_STREAM if is_small(args) else STREAM
    more = {"prefix_cache": False, "cold_memory": 0, "prefill_gap_ms": args.prefill_gap_ms}
    rows: list[dict[str, Any]] = []
    for group in groups(setups(args)):
        with opened(group, max(lengths) + sum(stream) + 2048, 2, **more) as members:
            for member in members:
                prompts.learn(member.engine)
            for length in lengths:
                found = [Found() for _ in members]
                for number in range(args.warm_up + args.repeats):
                    for member, one in zip(members, found, strict=True):
                        report.progress(f"round {number + 1}: {length} tokens")
                        into = one if number >= args.warm_up else Found()
                        _round(member.engine, length, stream, prompts, into)
                rows += [_row(m, length, one, args) for m, one in zip(members, found, strict=True)]
            members.clear()
            del member
    _show(report, rows)
    return report.finish(rows)


def _round(engine: Driven, length: int, stream: tuple[int, int], prompts: Prompts, found: Found) -> None:
    lead, measured = stream
    usual = engine.submit(prompts.take(lead), lead + measured + 8)
    window = engine.window([usual], lead, lead + measured)
    found.steps_s.append(window.seconds / window.tokens)
    asked = window.used("requests")
    found.steady.append((asked - window.used("misses"), asked))

    before = engine.counters()
    alone = engine.run(prompts.take(length), FIRST_STEPS + 1)
    after = engine.counters()
    routed, missed = (after[name] - before[name] for name in ("requests", "misses"))
    found.behind.append((routed - missed, routed))
    found.alone_s.append(alone.first_s)

    text = prompts.take(lead)
    running = engine.submit(text, engine.built.plan.max_model_len - lead)
    engine.wait([running], lead)
    arrived = engine.submit(prompts.take(length), 1)
    engine.wait([arrived])
    came = len(running.ids)
    engine.wait([running], came + 4)
    engine.built.engine.abort(running.name)
    engine.wait([running])
    gaps = _gaps(running, arrived)
    found.gaps_s += gaps
    found.longest_s.append(max(gaps))
    found.prompt_s.append(arrived.first_s)
    if (right := prompts.right(text, running.ids)) is not None:
        found.right.append(right)


def _gaps(running: Asked, arrived: Asked) -> list[float]:
    """The stream's gaps that lie, wholly or partly, between the prompt's arrival and its first token."""
    start, end = arrived.submitted_s, arrived.times_s[0]
    return [b - a for a, b in itertools.pairwise(running.times_s) if b > start and a < end]


def _row(member: Member, length: int, found: Found, args: argparse.Namespace) -> dict[str, Any]:
    plan, step = member.engine.built.plan, statistics.median(found.steps_s)
    gaps = sorted(found.gaps_s)
    p95 = gaps[int(0.95 * (len(gaps) - 1))]
    return {
        **member.facts,
        "prompt": length,
        "step_ms": round(1e3 * step, 3),
        "allowed_ms": round(1e3 * (plan.prefill_gap_s + step), 2),
        "gaps": len(gaps),
        "gap_p50_ms": round(1e3 * gaps[len(gaps) // 2], 2),
        "gap_p95_ms": round(1e3 * p95, 2),
        "gap_longest_ms": round(1e3 * max(found.longest_s), 2),
        "within": p95 <= plan.prefill_gap_s + step,
        "prompt_alone_ms": round(1e3 * statistics.median(found.alone_s), 1),
        "prompt_beside_ms": round(1e3 * statistics.median(found.prompt_s), 1),
        "hits_steady": _share(found.steady),
        f"hits_first_{FIRST_STEPS}": _share(found.behind),
        "right": round(statistics.mean(found.right), 4) if found.right else None,
        "repeats": args.repeats,
    }


def _share(pairs: list[tuple[float, float]]) -> float | None:
    hits, routed = (sum(one) for one in zip(*pairs, strict=True))
    return round(hits / routed, 4) if routed else None


def _show(report: Report, rows: list[dict[str, Any]]) -> None:
    report.line(f"{rows[0]['model']} ({rows[0]['geometry']}) on {rows[0]['device']}")
    body = [
        [
            str(r["prompt"]), r["backend"], f"{100 * r['pool_share']:.0f} %", f"{r['step_ms']:.2f}",
            f"{r['gap_p50_ms']:.1f}", f"{r['gap_p95_ms']:.1f}", f"{r['gap_longest_ms']:.1f}",
            f"{r['allowed_ms']:.1f}", f"{r['prompt_alone_ms']:.0f}", f"{r['prompt_beside_ms']:.0f}",
            _percent(r["hits_steady"]), _percent(r[f"hits_first_{FIRST_STEPS}"]),
        ]
        for r in rows
    ]  # fmt: skip
    header = ["tokens", "backend", "pool", "step ms", "gap p50", "p95", "longest", "allowed"]
    report.table([*header, "alone ms", "beside ms", "hits", "first 4"], body)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
