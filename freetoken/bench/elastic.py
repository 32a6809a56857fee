"""`ft bench elastic`: what running streams pay when device memory moves between experts and everything else.

Streams decode; again and again a part of the device's memory is taken away and given back at a step boundary.
A pause is the longest gap between two tokens of any stream around a move, less the usual gap. The same
prompts have run without moves before: every token and log probability must be the same, or the bench fails.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import dataclass
from typing import Any

from freetoken.bench._engine import Asked, Driven
from freetoken.bench._report import Report, add_report_arguments
from freetoken.bench._setups import Prompts, add_setup_arguments, has_gpu, is_small, opened, setups
from freetoken.core.errors import ConfigError
from freetoken.core.units import GIB, MIB, format_bytes, parse_bytes

HELP = "pauses of running streams while device memory is taken away and given back"
MOVE, SMALL_MOVE = 4 * GIB, 8 * MIB
PROMPT, STREAMS, MOVES = 64, 4, 6
BETWEEN = 24
"""Tokens of each stream between two moves."""


@dataclass(frozen=True)
class Move:
    """A change of the budget: bytes, how long it took, when it was asked for and done."""

    delta: int
    began_s: float
    ended_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_setup_arguments(parser)
    add = parser.add_argument
    add("--move", type=parse_bytes, metavar="SIZE", help="memory that moves (default 4GiB, small: 8MiB)")
    add("--moves", type=int, default=MOVES, metavar="N", help=f"moves, to and fro (default {MOVES})")
    add("--streams", type=int, default=STREAMS, metavar="N", help=f"requests at once (default {STREAMS})")
    add_report_arguments(parser, svg=False)


def run(args: argparse.Namespace) -> int:
    if args.moves < 1 or args.streams < 1:
        raise ConfigError("--moves and --streams are at least 1.", code="invalid_option")
    _choose_device(args)
    report, prompts = Report("elastic", args), Prompts(args.model)
    size = args.move or (SMALL_MOVE if is_small(args) else MOVE)
    tokens = BETWEEN * (args.moves + 2)
    rows: list[dict[str, Any]] = []
    for one in setups(args):
        with opened([one], PROMPT + tokens + 8, args.streams, prefix_cache=False) as members:
            prompts.learn(members[0].engine)
            texts = [prompts.take(PROMPT) for _ in range(args.streams)]
            report.progress(f"{args.moves} moves of {format_bytes(size)}")
            rows.append({**members[0].facts, **_measure(members[0].engine, texts, size, args.moves)})
            members.clear()
    _show(report, rows)
    report.finish(rows)
    if wrong := [row for row in rows if not row["equal"]]:
        report.line(f"FAILED: moving memory changed what {len(wrong)} of {len(rows)} engines said.")
    return 1 if wrong else 0


def _choose_device(args: argparse.Namespace) -> None:
    """A CPU has no memory of its own to take away: without a GPU a simulated one gives and takes."""
    if args.device == "auto" and not has_gpu(args):
        args.device = "sim"
        args.backend = ["hybrid"] if args.backend == ["auto"] else args.backend
    if args.device == "cpu":
        raise ConfigError(
            "A CPU has no memory of its own that could be taken away.",
            code="invalid_option",
            hint="Leave --device out, or use --device sim.",
        )


def _measure(engine: Driven, texts: list[list[int]], size: int, count: int) -> dict[str, Any]:
    tokens = BETWEEN * (count + 2)
    _stream(engine, texts, tokens)  # the second time is the same work with warm slots
    still, before, _ = _stream(engine, texts, tokens)
    moved, after, moves = _stream(engine, texts, tokens, size, count)
    return {**_row(still, moved, moves), "hit_rate": [before, after]}


def _stream(
    engine: Driven, texts: list[list[int]], tokens: int, size: int = 0, count: int = 0
) -> tuple[list[Asked], float, list[Move]]:
    """Run the prompts side by side, moving `size` bytes `count` times; the answers, hit rate and moves."""
    before = engine.counters()
    asked = [engine.submit(text, tokens, logprobs=0) for text in texts]
    moves = []
    for number in range(count):
        engine.wait(asked, BETWEEN * (number + 1))
        moves.append(_move(engine, size if number % 2 else -size))
    engine.wait(asked)
    after = engine.counters()
    requests = after["requests"] - before["requests"]
    return asked, round(1 - (after["misses"] - before["misses"]) / max(requests, 1), 4), moves


def _move(engine: Driven, delta: int) -> Move:
    built, clock = engine.built, engine.built.device.clock
    began = clock.now()
    built.engine.resize(built.engine.memory.budget_bytes + delta).result()
    return Move(delta, began, clock.now())


def _row(still: list[Asked], moved: list[Asked], moves: list[Move]) -> dict[str, Any]:
    usual = statistics.median(gap for one in still for _, gap in _gaps(one))
    pauses = [max(_around(one, move) for one in moved) - usual for move in moves]
    equal = all(
        a.ids == b.ids and [p.logprob for p in a.logprobs] == [p.logprob for p in b.logprobs]
        for a, b in zip(still, moved, strict=True)
    )
    return {
        "streams": len(moved),
        "move_bytes": abs(moves[0].delta),
        "moves": len(moves),
        "step_ms": round(1e3 * usual, 3),
        "pause_ms": [round(1e3 * max(0.0, pause), 2) for pause in pauses],
        "move_ms": [round(1e3 * (move.ended_s - move.began_s), 2) for move in moves],
        "equal": equal,
    }


def _gaps(one: Asked) -> list[tuple[float, float]]:
    """(when it ended, seconds) of every gap between two tokens."""
    return [(b, b - a) for a, b in itertools.pairwise(one.times_s)]


def _around(one: Asked, move: Move) -> float:
    """The longest gap that a move may have caused: those that end after it was asked for, up to one more."""
    longest = 0.0
    for ended, gap in _gaps(one):
        if ended >= move.began_s:
            longest = max(longest, gap)
            if ended - gap > move.ended_s:
                break
    return longest


def _show(report: Report, rows: list[dict[str, Any]]) -> None:
    report.line(f"{rows[0]['model']} ({rows[0]['geometry']}) on {rows[0]['device']}")
    body = [
        [
            r["backend"], f"{100 * r['pool_share']:.0f} %", str(r["streams"]), format_bytes(r["move_bytes"]),
            f"{r['step_ms']:.2f}", f"{max(r['pause_ms']):.1f}", "yes" if r["equal"] else "NO",
        ]
        for r in rows
    ]  # fmt: skip
    report.table(["backend", "pool", "streams", "moved", "step ms", "longest pause ms", "equal"], body)
