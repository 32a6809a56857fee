"""`ft bench agents`: what scripted agents compute again after their edits, against what no cache could spare.

Owns the choice of agents and modes, the rows and the report. Counts come from the real engine, run by
`_agent_runs`, the bound from token lists alone (`_bound`). Without --model the model has shapes only, times
are simulated (`_agent_times`) and marked so; with it tokens are computed and timed here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from freetoken.bench import figures
from freetoken.bench._agent_runs import (
    MODES,
    NUM_SLOTS,
    STATE_BYTES,
    Runner,
    Turn,
    model_of_shapes,
    token_rows,
)
from freetoken.bench._agent_times import GEOMETRY, Times
from freetoken.bench._bound import bounds, least
from freetoken.bench._report import Report, add_report_arguments
from freetoken.bench._sessions import AGENTS, HARDER, Agent
from freetoken.core.errors import ConfigError, nearest
from freetoken.core.generate import LEAST_LOSS
from freetoken.core.options import Options

HELP = "what agents that edit their history compute again, against the bound; simulated or on a real model"
BASE_TOKENS = 24500
TRIES = 6
TAIL = "page or anchor tail"
REASONS = {
    TAIL: "what lies behind the last page or anchor ahead of the edit",
    "no_state": "known, but the edit lies inside a block and states stand at its edges",
    "evicted": "known once, and given up for want of memory",
    "cache_off": "nothing is kept",
}
"""Why tokens beyond the bound were computed again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, known = parser.add_argument, " ".join([*AGENTS, *HARDER])
    add("--agent", nargs="+", default=list(AGENTS), metavar="NAME", help=f"{known}; or all")
    add("--mode", nargs="+", default=list(MODES), choices=MODES, metavar="MODE", help=" ".join(MODES))
    add("--base", type=int, metavar="WORDS", help=f"length of the opening (default {BASE_TOKENS})")
    add("--turns", type=int, metavar="N", help="turns of an agent (default: its own)")
    add("--model", metavar="DIR", help="compute tokens with this checkpoint; `demo` is embedded")
    add("--device", default="cpu", help="where --model runs (default cpu)")
    add("--machine", default="4090", help="the machine that times are simulated for")
    add("--counts", action="store_true", help="tokens only, no times: much quicker")
    add("--tokens", metavar="FILE", help="write the token lists, an object a line, for _bound")
    add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    agents = _agents(args)
    simulated = None if args.model or args.counts else Times(args.machine)
    report = Report("agents", args)
    base = args.base or (BASE_TOKENS if args.model is None else 1500)
    report.line(_headline(args, base))
    rows: list[dict[str, Any]] = []
    lists: list[dict[str, object]] = []
    for name, agent in agents.items():
        interval, wanted = 4096, 0
        for mode in [m for m in MODES if m in args.mode]:
            report.progress(f"{name}: {mode}")
            turns, saved = _play(args, agent, base, mode, interval)
            if mode == "anchors":
                interval, wanted = max(sum(t.computed for t in turns) // max(saved, 1), 1), saved
            elif mode == "fixed" and wanted:
                turns, saved = _equal_count(args, agent, base, (interval, wanted), (turns, saved))
            if mode == args.mode[0]:
                lists += token_rows(name, turns)
            rows.append(_row(name, mode, turns, saved))
            if not args.counts:
                _add_times(rows[-1], turns, simulated)
    _show(report, rows)
    _write_tokens(args.tokens, lists)
    report.chart(_chart(rows))
    machine = None if args.model or args.counts else f"simulated: {args.machine}, {GEOMETRY}"
    return report.finish(rows, machine)


def _play(
    args: argparse.Namespace, agent: Agent, base: int, mode: str, interval: int
) -> tuple[list[Turn], int]:
    """An agent's session in one mode, and how many states it saved."""
    with _runner(args, mode, interval) as runner:
        turns = [runner.run(ask) for ask in agent.asks(base, args.turns or agent.turns)]
        return turns, runner.num_saved


def _equal_count(
    args: argparse.Namespace, agent: Agent, base: int, start: tuple[int, int], first: tuple[list[Turn], int]
) -> tuple[list[Turn], int]:
    """Intervals that save as many states as anchors did, within 3 % if any do: the nearest of a few tries.

    start  the interval of `first`, and how many states are wanted
    """
    (interval, wanted), best, last = start, first, first
    for _ in range(TRIES):
        if abs(best[1] - wanted) <= 0.03 * wanted:
            break
        interval = max(round(interval * last[1] / wanted), 1)
        last = _play(args, agent, base, "fixed", interval)
        best = min(best, last, key=lambda found: abs(found[1] - wanted))
    return best


def _agents(args: argparse.Namespace) -> dict[str, Agent]:
    known = AGENTS | HARDER
    names = list(known) if args.agent == ["all"] else args.agent
    for name in names:
        if name not in known:
            raise ConfigError(
                f"There is no agent {name!r}.",
                code="unknown_choice",
                hint=nearest(name, known) or f"There are: {', '.join(known)}.",
            )
    if (args.base is not None and args.base < 1) or (args.turns is not None and args.turns < 2):
        raise ConfigError("--base is at least 1, --turns at least 2.", code="invalid_option")
    return {name: known[name] for name in names}


def _headline(args: argparse.Namespace, base: int) -> str:
    if args.model:
        times = "counts only" if args.counts else "times measured here"
        return f"{args.model} on {args.device}, openings of {base} words, answers forced, {times}"
    if args.counts:
        return f"a model of shapes, openings of {base} words; counts only"
    return f"a model of shapes, openings of {base} words; times simulated: {GEOMETRY} on {args.machine}"


@contextmanager
def _runner(args: argparse.Namespace, mode: str, interval: int) -> Iterator[Runner]:
    with tempfile.TemporaryDirectory(prefix="freetoken-bench-") as folder:
        if args.model:
            path = None if args.model == "demo" else args.model
            options = Options(model=path, device=args.device)
        else:
            path = str(model_of_shapes(Path(folder)))
            memory = NUM_SLOTS * STATE_BYTES
            options = Options(model=path, device="cpu", num_tokens=1 << 20, checkpoint_memory=memory)
        runner = Runner(options, mode, interval)
        try:
            yield runner
        finally:
            runner.close()


def _row(agent: str, mode: str, turns: Sequence[Turn], saved: int) -> dict[str, Any]:
    """One agent in one mode. The first turn is cold for everyone and left out of the sums."""
    sums = bounds(token_rows(agent, turns))[agent]
    known = []
    over: Counter[str] = Counter()
    each = []
    for number, turn in enumerate(turns):
        bound = least(turn.prompt, known)
        known.append([*turn.prompt, *turn.answer])
        each.append({"prompt": len(turn.prompt), "computed": turn.computed, "bound": bound, **_why(turn)})
        if number:
            over[turn.report.loss or TAIL] += turn.computed - bound
    computed = sum(t.computed for t in turns[1:])
    return {
        "agent": agent,
        "mode": mode,
        "ratio_to_bound": round(computed / max(sums["bound"], 1), 4),
        **sums,
        "computed": computed,
        "checkpoints_saved": saved,
        "over_bound": {cause: count for cause, count in over.most_common() if count},
        "turns": each,
    }


def _add_times(row: dict[str, Any], turns: Sequence[Turn], simulated: Times | None) -> None:
    times = simulated.of(turns) if simulated else _measured(turns)
    for turn, (ttft_s, tok_s) in zip(row["turns"], times, strict=True):
        turn |= {"ttft_s": round(ttft_s, 4), "decode_tok_s": round(tok_s, 1)}
    row["ttft_s"] = round(statistics.median(found[0] for found in times[1:]), 4)
    row |= _decode([found[1] for found in times[1:] if found[1]], simulated)
    row["simulated"] = simulated is not None


def _decode(rates: Sequence[float], simulated: Times | None) -> dict[str, Any]:
    """Tokens/s over the turns, and the largest distance from a single long turn's (simulated only)."""
    found: dict[str, Any] = {"decode_tok_s": round(statistics.median(rates), 2) if rates else None}
    if simulated is None or not rates:
        return {**found, "single_turn_tok_s": None, "decode_spread": None}
    single = simulated.single_tok_s
    spread = max(abs(rate - single) for rate in rates) / single
    return {**found, "single_turn_tok_s": round(single, 2), "decode_spread": round(spread, 3)}


def _why(turn: Turn) -> dict[str, Any]:
    found = turn.report.to_dict()
    return {name: found[name] for name in ("lost", "edit", "where")}


def _measured(turns: Sequence[Turn]) -> list[tuple[float, float]]:
    return [(t.ttft_s, (len(t.answer) - 1) / t.decode_s if t.decode_s > 0 else 0.0) for t in turns]


def _write_tokens(path: str | None, rows: Sequence[dict[str, object]]) -> None:
    if path is None:
        return
    try:
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    except OSError as error:
        raise ConfigError(
            f"The token lists can't be written to {path}: {error.strerror}.",
            code="unwritable_file",
            hint="Give --tokens another path.",
        ) from error


def _show(report: Report, rows: Sequence[dict[str, Any]]) -> None:
    body = [
        [
            f"{row['agent']}  {row['mode']}",
            f"{row['asked']}",
            f"{row['computed']}",
            f"{row['bound']}",
            f"{row['ratio_to_bound']:.3f}",
            *(_seconds(row) if "ttft_s" in row else ()),
        ]
        for row in rows
    ]
    columns = ["", "asked", "computed", "bound", "ratio", "first s", "tok/s", "spread"]
    report.table(columns[: len(body[0])], body)
    for row in rows:
        if row["mode"] == "anchors" and row["over_bound"]:
            parts = ", ".join(f"{count} {cause}" for cause, count in row["over_bound"].items())
            report.line(f"  {row['agent']}: over the bound {parts}{_edits(row['turns'])}")
    for cause in REASONS:
        if any(cause in row["over_bound"] for row in rows):
            report.line(f"  {cause}: {REASONS[cause]}")


def _edits(turns: Sequence[dict[str, Any]]) -> str:
    """What was edited where more than a tail was lost."""
    found = Counter(turn["edit"] for turn in turns if turn["lost"] > LEAST_LOSS and turn["edit"])
    return "".join(f"; {count} x {edit}" for edit, count in found.most_common())


def _seconds(row: dict[str, Any]) -> tuple[str, str, str]:
    return (
        f"{row['ttft_s']:.3f}",
        "-" if row["decode_tok_s"] is None else f"{row['decode_tok_s']:.1f}",
        "-" if row["decode_spread"] is None else f"{100 * row['decode_spread']:.0f} %",
    )


def _chart(rows: Sequence[dict[str, Any]]) -> str:
    ratios = {(row["agent"], row["mode"]): row["ratio_to_bound"] for row in rows}
    agents = list(dict.fromkeys(row["agent"] for row in rows))
    modes = [mode for mode in MODES if any(row["mode"] == mode for row in rows)]
    return figures.bars(
        figures.Chart(
            title="Tokens computed again, against the bound",
            subtitle="1.0: what the token lists allow at best; the first turn left out",
            y_label="computed / bound",
            groups=agents,
            series=[figures.Series(mode, [ratios.get((a, mode)) for a in agents]) for mode in modes],
        )
    )
