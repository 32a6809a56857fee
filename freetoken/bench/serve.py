"""`ft bench serve`: a server in a process of its own, driven over HTTP at rising numbers of streams.

Says what clients see: tokens a second in sum, the time to the first token, gaps. Beside it, from the server's
own counters while all streams run: distinct experts a layer, which is what batching costs a mixture of
experts, and the share of them that was resident. Default flags of `ft serve` but those given. Rounds go
through all numbers of streams in turn; servers that differ take turns too.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from freetoken.bench._client import Answer, Server, summary
from freetoken.bench._hammer import hammering
from freetoken.bench._processes import started
from freetoken.bench._report import Report, add_report_arguments
from freetoken.bench._setups import (
    DEMO,
    Setup,
    add_repeat_arguments,
    add_setup_arguments,
    check_repeats,
    groups,
    is_small,
    serve_command,
    setups,
)
from freetoken.bench._texts import Texts
from freetoken.core.errors import ConfigError
from freetoken.engine.build import DEMO_MODEL
from freetoken.engine.survey import find_family
from freetoken.weights.load import open_checkpoint

HELP = "a server over HTTP at 1 to 16 streams: tokens a second, first token, distinct experts a layer"
STREAMS = (1, 2, 4, 8, 16)
SIZES, SMALL_SIZES = (512, 256), (32, 24)
QUIET, HAMMERED = "quiet", "hammered"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_setup_arguments(parser)
    add = parser.add_argument
    add("--streams", nargs="+", type=int, default=list(STREAMS), metavar="N", help="requests at once")
    add(
        "--prompt",
        type=int,
        metavar="TOKENS",
        help=f"of a prompt (default {SIZES[0]} on a GPU, else {SMALL_SIZES[0]})",
    )
    add(
        "--tokens",
        type=int,
        metavar="N",
        help=f"of an answer (default {SIZES[1]} on a GPU, else {SMALL_SIZES[1]})",
    )
    add_repeat_arguments(parser, repeats=3, warm_up=1)
    add("--hammer", type=int, default=0, metavar="N", help="also beside N threads that eat host bandwidth")
    add_report_arguments(parser, svg=False)


@dataclass
class Case:
    """One server at one number of streams, and what its rounds gave."""

    setup: Setup
    server: Server
    streams: int
    beside: str = QUIET
    sums: list[dict[str, float]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    counted: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    check_repeats(args)
    prompt, tokens = (given or size for given, size in zip(
        (args.prompt, args.tokens), SMALL_SIZES if is_small(args) else SIZES, strict=True
    ))  # fmt: skip
    if min(*args.streams, prompt) < 1 or tokens < 2 or args.hammer < 0:
        raise ConfigError(
            "--streams and --prompt are at least 1, --tokens at least 2.", code="invalid_option"
        )
    report, texts = Report("serve", args), Texts(args.model)
    rows: list[dict[str, Any]] = []
    for group in groups(setups(args)):
        report.progress(f"starting {len(group)} servers")
        with ExitStack() as stack:
            context = 2 * prompt + tokens + 64
            command = [(one, serve_command(one, context, max(args.streams))) for one in group]
            # One after the other: each measures the machine while it starts.
            servers = [
                (one, stack.enter_context(started(words, "ft serve")).ready()) for one, words in command
            ]
            cases = [Case(one, server, n) for one, server in servers for n in args.streams]
            _rounds(cases, args, (texts, prompt, tokens), report)
            if args.hammer:
                again = [Case(one, server, n, HAMMERED) for one, server in servers for n in args.streams]
                with hammering(args.hammer):
                    _rounds(again, args, (texts, prompt, tokens), report)
                cases += again
            rows += [_row(case, args.model) | {"prompt": prompt, "tokens": tokens} for case in cases]
    _show(report, rows)
    return report.finish(rows)


def _rounds(
    cases: list[Case], args: argparse.Namespace, what: tuple[Texts, int, int], report: Report
) -> None:
    texts, prompt, tokens = what
    for number in range(args.warm_up + args.repeats):
        for case in cases:
            report.progress(f"round {number + 1}: {case.streams} streams")
            before: list[dict[str, Any]] = []
            some = [texts.take(prompt) for _ in range(case.streams)]
            answers = case.server.together(
                some,
                tokens,
                lambda case=case, before=before: before.append(case.server.get("/v1/stats")),  # type: ignore[misc]
            )
            after = case.server.get("/v1/stats")
            if number >= args.warm_up:
                case.sums.append(summary(answers))
                case.gaps += _gaps(answers)
                case.counted.append((before[0], after))


def _gaps(answers: list[Answer]) -> list[float]:
    return [b - a for one in answers for a, b in zip(one.times_s, one.times_s[1:], strict=False)]


def _row(case: Case, model: str) -> dict[str, Any]:
    median = {key: statistics.median(s[key] for s in case.sums) for key in case.sums[0]}
    asked, hits, misses, steps = (
        sum(after[part][name] - before[part][name] for before, after in case.counted)
        for part, name in (
            ("experts", "requests"),
            ("experts", "hits"),
            ("experts", "misses"),
            ("engine", "steps"),
        )
    )
    last, layers = case.counted[-1][1], _moe_layers(model)
    gaps = sorted(case.gaps)
    return {
        "model": last["model"],
        "device": last["device"],
        "backend": last["backend"],
        "policy": last["policy"],
        "share": case.setup.share,
        "streams": case.streams,
        "beside": case.beside,
        "sum_tok_s": round(median["sum_tok_s"], 2),
        "total_tok_s": round(median["total_tok_s"], 2),
        "ttft_ms": round(1e3 * median["ttft_s"], 1),
        "gap_p50_ms": round(1e3 * gaps[len(gaps) // 2], 2) if gaps else None,
        "gap_p95_ms": round(1e3 * gaps[int(0.95 * (len(gaps) - 1))], 2) if gaps else None,
        "distinct_experts_layer": round(asked / steps / layers, 2) if steps and layers else None,
        "hit_rate": round(hits / (hits + misses), 4) if hits + misses else None,
        "repeats": len(case.sums),
    }


def _moe_layers(model: str) -> int:
    checkpoint = open_checkpoint(DEMO_MODEL if model == DEMO else model)
    try:
        return find_family(checkpoint.model_type).read_config(checkpoint.config).num_moe_layers
    finally:
        checkpoint.close()


def _show(report: Report, rows: list[dict[str, Any]]) -> None:
    body = [
        [
            str(r["streams"]), r["backend"], "-" if r["share"] is None else f"{100 * r['share']:.0f} %",
            f"{r['sum_tok_s']:.1f}", f"{r['total_tok_s']:.1f}", f"{r['ttft_ms']:.0f}",
            _number(r["gap_p95_ms"]), _number(r["distinct_experts_layer"]),
            "-" if r["hit_rate"] is None else f"{100 * r['hit_rate']:.0f} %", r["beside"],
        ]
        for r in rows
    ]  # fmt: skip
    report.line(f"{rows[0]['model']} on {rows[0]['device']}, over HTTP, medians")
    header = ["streams", "backend", "pool", "decode tok/s", "all tok/s", "first ms", "gap p95 ms", "experts"]
    report.table([*header, "hits", "beside"], body)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
