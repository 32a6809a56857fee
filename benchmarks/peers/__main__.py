"""Any OpenAI-compatible servers side by side: the same client, the same prompts, in turns.

    python -m benchmarks.peers --walk DIR --server ours="ft serve --model DIR --port {port}" \\
        --server other="llama-server -m FILE.gguf --port {port}" [--url name=http://host:port] [--json]

Servers named by --server are started (`{port}` is filled in) and stopped, those of --url are running already.
In every round each server gets the same prompts, no two of a run begin alike, and the order turns. Between
two servers nobody is asked for --rest seconds: threads may wait awake for a while after an answer. Medians of
the rounds are shown, and of the rounds' ratios to the first server; one that is stopped (SIGTERM) shows the
rounds that it has. A walk (a checkpoint of `ft bench
synth`) makes answers checkable: `right` is the share of words that it continues with.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from freetoken.bench._client import Answer, Server, summary
from freetoken.bench._processes import split_command, started
from freetoken.bench._texts import Texts
from freetoken.core.errors import ConfigError, FreeTokenError

FIRST_TOKENS = 2


@dataclass(frozen=True)
class Case:
    """What a server is asked: so many streams of prompt and answer."""

    name: str
    streams: int
    prompt: int
    tokens: int
    figures: tuple[str, ...]


@dataclass
class Found:
    """What one server gave in one case: a list of figures for each measured round."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    right: list[float] = field(default_factory=list)
    prompt_tokens: int = 0


def cases(args: argparse.Namespace) -> list[Case]:
    some = [
        Case(
            f"{n} stream{'s' * (n > 1)}", n, args.prompt, args.tokens, ("sum_tok_s", "total_tok_s", "ttft_ms")
        )
        for n in args.streams
    ]
    long = [Case(f"prompt {n}", 1, n, FIRST_TOKENS, ("prefill_tok_s", "ttft_ms")) for n in args.prefill]
    return some + long


def ask(server: Server, case: Case, prompts: list[tuple[str, list[str] | None]], found: Found) -> None:
    answers = server.together([text for text, _ in prompts], case.tokens)
    row = summary(answers)
    row["ttft_ms"] = 1e3 * row.pop("ttft_s")
    found.prompt_tokens = answers[0].prompt_tokens or case.prompt
    row["prefill_tok_s"] = found.prompt_tokens / (row["ttft_ms"] / 1e3)
    found.rounds.append(row)
    found.right += [
        right(answer, follow) for answer, (_, follow) in zip(answers, prompts, strict=True) if follow
    ]


def right(answer: Answer, follow: list[str]) -> float:
    """Share of an answer's words that are the walk's."""
    said = answer.text.split()
    return sum(a == b for a, b in zip(said, follow, strict=False)) / max(len(said), 1)


class Stopped(Exception):
    """Somebody wants an end; the rounds so far count."""


def measure(servers: dict[str, Server], wanted: list[Case], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rounds over cases and servers; a row for each case and server that has a whole round."""
    names = list(servers)
    found = {(case.name, name): Found() for case in wanted for name in names}
    try:
        _rounds(servers, wanted, args, found)
    except Stopped:
        print("stopped early", file=sys.stderr)
    whole = [case for case in wanted if min(len(found[case.name, name].rounds) for name in names)]
    for case in whole:
        most = min(len(found[case.name, name].rounds) for name in names)
        for name in names:
            del found[case.name, name].rounds[most:]
    return [row(case, name, found, names[0]) for case in whole for name in names]


def _rounds(
    servers: dict[str, Server],
    wanted: list[Case],
    args: argparse.Namespace,
    found: dict[tuple[str, str], Found],
) -> None:
    texts, names = Texts(args.walk or "", args.start), list(servers)
    for case in wanted:
        for number in range(args.warm_up + args.repeats):
            prompts = [texts.take_with_answer(case.prompt, case.tokens) for _ in range(case.streams)]
            for at in range(len(names)):
                name = names[(at + number) % len(names)]
                into = found[case.name, name] if number >= args.warm_up else Found()
                if len(names) > 1:
                    time.sleep(args.rest)
                ask(servers[name], case, prompts, into)
        print(f"{case.name}: done", file=sys.stderr, flush=True)


def row(case: Case, name: str, found: dict[tuple[str, str], Found], first: str) -> dict[str, Any]:
    mine, base = found[case.name, name], found[case.name, first]
    out: dict[str, Any] = {"case": case.name, "server": name, "prompt_tokens": mine.prompt_tokens}
    for figure in case.figures:
        values = [r[figure] for r in mine.rounds]
        ratios = [b[figure] / v for b, v in zip(base.rounds, values, strict=True) if v]
        out[figure] = round(statistics.median(values), 2)
        out[f"{figure}_ratio"] = round(statistics.median(ratios), 3)
    out |= {"tokens": case.tokens, "streams": case.streams, "repeats": len(mine.rounds)}
    out["right"] = round(statistics.mean(mine.right), 4) if mine.right else None
    return out


def show(rows: Iterable[dict[str, Any]], first: str) -> None:
    print(f"ratios: {first} over the other", file=sys.stderr)
    for r in rows:
        figures = [key for key in r if key.endswith("_ratio")]
        parts = [
            f"{key.removesuffix('_ratio')} {r[key.removesuffix('_ratio')]:.1f} ({r[key]:.2f}x)"
            for key in figures
        ]
        told = "" if r["right"] is None else f"  right {100 * r['right']:.1f} %"
        print(f"{r['case']:>14}  {r['server']:<14} {'  '.join(parts)}{told}", file=sys.stderr)


def named(text: str) -> tuple[str, str]:
    name, _, rest = text.partition("=")
    if not name or not rest:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=...")
    return name, rest


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="peers", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = made.add_argument
    add(
        "--server",
        action="append",
        default=[],
        type=named,
        metavar="NAME=COMMAND",
        help="started, with {port}",
    )
    add("--url", action="append", default=[], type=named, metavar="NAME=URL", help="running already")
    add("--walk", metavar="DIR", help="checkpoint with walk.json (default: English words)")
    add("--prompt", type=int, default=512)
    add("--tokens", type=int, default=512)
    add("--streams", type=int, nargs="*", default=[1, 4])
    add("--prefill", type=int, nargs="*", default=[], metavar="TOKENS", help="also the time of long prompts")
    add("--repeats", type=int, default=5)
    add("--warm-up", type=int, default=2)
    add("--rest", type=float, default=2.0, help="seconds before another server is asked (default 2)")
    add("--start", type=int, default=0, help="where in the walk the first prompt begins, in strides")
    add("--json", action="store_true", help="end stdout with one JSON object of all rows")
    return made


def main(words: list[str] | None = None) -> int:
    made = parser()
    args = made.parse_args(words)
    names = [name for name, _ in args.server + args.url]
    if not names or len(set(names)) != len(names):
        made.error("name at least one server, and each by another name")
    if (
        min([args.prompt, args.repeats, *args.streams, *args.prefill]) < 1
        or args.tokens < 2
        or args.warm_up < 0
        or not 0 <= args.rest < math.inf
    ):
        made.error("sizes and repeats are at least 1, tokens at least 2, warm-up and rest at least 0")
    try:
        with ExitStack() as stack:
            # One after the other: a server may measure the machine while it starts.
            servers = {
                name: stack.enter_context(started(split_command(c), name)).ready() for name, c in args.server
            }
            for name, url in args.url:
                servers[name] = Server(url)
                try:
                    servers[name].find_model()
                except OSError as error:
                    raise ConfigError(f"{name} at {url} can't be asked: {error}.") from error
            rows = measure(servers, cases(args), args)
    except FreeTokenError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except Stopped:
        print("stopped before there was a server to measure", file=sys.stderr)
        return 128 + signal.SIGTERM
    show(rows, names[0])
    if args.json:
        machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        print(json.dumps({"bench": "peers", "machine": machine, "date": date, "rows": rows}))
    return 0


def _leave(number: int, frame: object) -> None:
    """A stop from outside ends the servers, too, and shows what there is."""
    raise Stopped


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    raise SystemExit(main())
