"""`ft bench elastic`: what running streams pay when device memory moves between experts and everything else.

Streams decode; again and again a part of the device's memory is taken away and given back at a step boundary.
A pause is the longest gap between two tokens of any stream around a move, less the usual gap. The same
prompts have run without moves before: every token and log probability must be the same, or the bench fails.
With --resizes the budget changes at random again and again, and answers must go on as the model's walk does.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from freetoken.bench._engine import Asked, Driven
from freetoken.bench._report import Report, add_report_arguments
from freetoken.bench._setups import Prompts, add_setup_arguments, has_gpu, is_small, opened, setups
from freetoken.core.errors import ConfigError
from freetoken.core.units import GIB, MIB, format_bytes, parse_bytes

HELP = "pauses of running streams while device memory is taken away and given back"
MOVE, SMALL_MOVE = 4 * GIB, 8 * MIB
PROMPT, STREAMS, MOVES = 64, 4, 6
BETWEEN, BETWEEN_RESIZES = 24, 4
"""Tokens of each stream between two moves."""
AFTERWARDS = 16


@dataclass(frozen=True)
class Move:
    """A change of the budget: bytes, when it was asked for and done, streams that were running then."""

    delta: int
    began_s: float
    ended_s: float
    running: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_setup_arguments(parser)
    add = parser.add_argument
    add("--move", type=parse_bytes, metavar="SIZE", help="memory that moves (default 4GiB, small: 8MiB)")
    add("--moves", type=int, default=MOVES, metavar="N", help=f"moves, to and fro (default {MOVES})")
    add("--resizes", type=int, metavar="N", help="instead: N random sizes, up to --move below the budget")
    add("--streams", type=int, default=STREAMS, metavar="N", help=f"requests at once (default {STREAMS})")
    add_report_arguments(parser, svg=False)


def run(args: argparse.Namespace) -> int:
    if args.moves < 1 or args.streams < 1 or (args.resizes is not None and args.resizes < 1):
        raise ConfigError("--moves, --resizes and --streams are at least 1.", code="invalid_option")
    if args.move == 0:
        raise ConfigError("--move is above 0: nothing would move.", code="invalid_option")
    _choose_device(args)
    report, prompts = Report("elastic", args), Prompts(args.model)
    size = args.move or (SMALL_MOVE if is_small(args) else MOVE)
    count = args.resizes or args.moves
    tokens = (BETWEEN_RESIZES if args.resizes else BETWEEN) * (count + 2)
    rows: list[dict[str, Any]] = []
    for one in setups(args):
        with opened([one], PROMPT + tokens + 8, args.streams, prefix_cache=False) as members:
            full = members[0].engine.built.engine.memory.budget_bytes
            if size >= full:
                raise ConfigError(
                    f"--move {format_bytes(size)} is all of the {format_bytes(full)} that there are.",
                    code="invalid_option",
                    hint="Move less, or raise --gpu-memory.",
                )
            prompts.learn(members[0].engine)
            texts = [prompts.take(PROMPT) for _ in range(args.streams)]
            report.progress(f"{count} moves of {'up to ' * bool(args.resizes)}{format_bytes(size)}")
            if args.resizes:
                row = _resized(members[0].engine, prompts, texts, size, count)
            else:
                row = _measure(members[0].engine, texts, size, count)
            rows.append({**members[0].facts, **row})
            members.clear()
    _show(report, rows)
    report.finish(rows)
    if wrong := [row for row in rows if not _held(row)]:
        report.line(f"FAILED: moving memory changed what {len(wrong)} of {len(rows)} engines said.")
    return 1 if wrong else 0


def _held(row: dict[str, Any]) -> bool:
    """Whether moving changed no answer; a walk says more than equality, which depends on who came first."""
    return bool(row.get("right", row["equal"]))


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
    full = engine.built.engine.memory.budget_bytes
    budgets = [full if number % 2 else full - size for number in range(count)]
    moved, after, moves = _stream(engine, texts, tokens, budgets)
    return {**_row(still, moved, moves), "hit_rate": [before, after]}


def _stream(
    engine: Driven,
    texts: list[list[int]],
    tokens: int,
    budgets: Sequence[int] = (),
    between: int = BETWEEN,
) -> tuple[list[Asked], float, list[Move]]:
    """Run the prompts side by side, setting one budget after the other; the answers, hit rate and moves."""
    before = engine.counters()
    asked = [engine.submit(text, tokens, logprobs=0) for text in texts]
    moves = []
    for number, budget in enumerate(budgets):
        engine.wait(asked, between * (number + 1))
        moves.append(_move(engine, budget, sum(not one.done for one in asked)))
    engine.wait(asked)
    after = engine.counters()
    requests = after["requests"] - before["requests"]
    return asked, round(1 - (after["misses"] - before["misses"]) / max(requests, 1), 4), moves


def _move(engine: Driven, budget: int, running: int) -> Move:
    built, clock = engine.built, engine.built.device.clock
    delta, began = budget - built.engine.memory.budget_bytes, clock.now()
    built.engine.resize(budget).result()
    return Move(delta, began, clock.now(), running)


def _resized(
    engine: Driven, prompts: Prompts, texts: list[list[int]], size: int, count: int
) -> dict[str, Any]:
    """`count` random budgets under load, then the full one again and the same prompts once more."""
    tokens, rng = BETWEEN_RESIZES * (count + 2), random.Random(count)
    still, _, _ = _stream(engine, texts, tokens)
    full = engine.built.engine.memory.budget_bytes
    budgets = [full - rng.randrange(size + 1) for _ in range(count)]
    moved, _, moves = _stream(engine, texts, tokens, budgets, BETWEEN_RESIZES)
    engine.built.engine.resize(full).result()
    again, _, _ = _stream(engine, texts, AFTERWARDS)
    row = _row(still, moved, moves)
    for name in ("pause_ms", "move_ms"):
        row[name] = [round(float(q), 2) for q in np.quantile(row[name], (0.5, 0.95, 1.0))]
    row["under_load"] = sum(move.running == len(texts) for move in moves)
    row["resizes"] = engine.built.engine.stats.resizes
    answers = [(text, one) for asked in (moved, again) for text, one in zip(texts, asked, strict=True)]
    if prompts.walk is not None:
        row["right"] = all(prompts.right(text, one.ids) == 1.0 for text, one in answers)
    row["equal"] &= all(_same(a, b) for a, b in zip(still, again, strict=True))
    return row


def _same(a: Asked, b: Asked) -> bool:
    """Whether what both said is the same, as far as the shorter one goes."""
    both = zip(zip(a.ids, a.logprobs, strict=True), zip(b.ids, b.logprobs, strict=True), strict=False)
    return all(mine == theirs and p.logprob == q.logprob for (mine, p), (theirs, q) in both)


def _row(still: list[Asked], moved: list[Asked], moves: list[Move]) -> dict[str, Any]:
    usual = statistics.median(gap for one in still for _, gap in _gaps(one))
    pauses = [max(_around(one, move) for one in moved) - usual for move in moves]
    equal = all(len(a.ids) == len(b.ids) and _same(a, b) for a, b in zip(still, moved, strict=True))
    return {
        "streams": len(moved),
        "move_bytes": max(abs(move.delta) for move in moves),
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
            f"{r['step_ms']:.2f}", f"{max(r['pause_ms']):.1f}", "yes" if _held(r) else "NO",
        ]
        for r in rows
    ]  # fmt: skip
    report.table(["backend", "pool", "streams", "moved", "step ms", "longest pause ms", "as before"], body)
