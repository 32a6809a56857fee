"""`ft bench checkpoints`: what saving recurrent states costs, and what HTTP adds to a short turn.

    prefill  a prompt that is new, with a state saved at every anchor, against the same with none saved
    decode   an answer whose anchors are saved, against the same answer
    turn     a few new tokens behind a long history over HTTP: a client's time to the first token less the
             engine's own, which is in the request's receipt

One engine serves both ways in turns, and medians of the pairs' ratios are shown; without saving there are no
anchors either. Saved states are counted: a row that saved none or computed its history again fails the bench.
A model that keeps no states has the turn only.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from freetoken.bench._client import Server
from freetoken.bench._engine import Asked
from freetoken.bench._processes import started
from freetoken.bench._report import Report, add_report_arguments
from freetoken.bench._setups import (
    Member,
    Prompts,
    Setup,
    add_repeat_arguments,
    add_setup_arguments,
    check_repeats,
    is_small,
    opened,
    serve_command,
    setups,
)
from freetoken.bench._texts import Texts
from freetoken.core.errors import ConfigError, DeviceError

HELP = "what saving recurrent states costs prefill and decode, and what HTTP adds to a short turn"
PREFIX, SMALL_PREFIX = 16384, 1024
TOKENS, SMALL_TOKENS = 512, 64
BLOCK, SMALL_BLOCK = 512, 64
"""Tokens from one anchor of a prompt to the next: a tool's result, an answer."""
BETWEEN, SMALL_BETWEEN = 64, 16
"""Tokens from one anchor of an answer to the next: a thought, a call."""
LIMITS = {"prefill": 0.01, "decode": 0.005, "turn": 10.0}
"""Shares of the time without saving; milliseconds beside the engine's."""
_TURN_WORDS = 64
_TURN_EXTRA = 8
"""Tokens of a turn that the template writes, about."""
_RECEIPT_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_setup_arguments(parser)
    add = parser.add_argument
    small = f"default {PREFIX} on cuda, else {SMALL_PREFIX}"
    add("--prefix", type=int, metavar="N", help=f"tokens of the prompt, and of the history ({small})")
    add(
        "--tokens",
        type=int,
        metavar="N",
        help=f"of an answer (default {TOKENS} on cuda, else {SMALL_TOKENS})",
    )
    add("--no-http", action="store_true", help="leave the turn over HTTP out")
    add_repeat_arguments(parser, repeats=9)
    add_report_arguments(parser, svg=False)


@dataclass
class Pairs:
    """Seconds without and with saved states, round by round, and how many were saved in a round."""

    without: list[float] = field(default_factory=list)
    saving: list[float] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)

    def row(self, case: str, tokens: int) -> dict[str, Any]:
        """share: what saving adds to the time without it."""
        pairs = list(zip(self.without, self.saving, strict=True))
        shares, added = [b / a - 1 for a, b in pairs], [b - a for a, b in pairs]
        share, saved = statistics.median(shares), statistics.median(self.saved)
        return {
            "case": case,
            "tokens": tokens,
            "ms_without": round(1e3 * statistics.median(self.without), 3),
            "ms_saving": round(1e3 * statistics.median(self.saving), 3),
            "saved": saved,
            "us_a_state": round(1e6 * statistics.median(added) / saved, 1) if saved else None,
            "share": round(share, 5),
            "share_spread": [round(min(shares), 5), round(max(shares), 5)],
            "limit": LIMITS[case],
            "within": share <= LIMITS[case],
            "repeats": len(pairs),
        }


def run(args: argparse.Namespace) -> int:
    check_repeats(args)
    small = is_small(args)
    prefix = (SMALL_PREFIX if small else PREFIX) if args.prefix is None else args.prefix
    tokens = (SMALL_TOKENS if small else TOKENS) if args.tokens is None else args.tokens
    if prefix < 256 or tokens < 8:
        raise ConfigError("--prefix is at least 256, --tokens at least 8.", code="invalid_option")
    report, prompts = Report("checkpoints", args), Prompts(args.model)
    rows: list[dict[str, Any]] = []
    for one in setups(args):
        with opened([one], prefix + tokens + 64, 2) as members:
            facts = _facts(members[0], args)
            if facts["state_mb"]:
                prompts.learn(members[0].engine)
                report.progress("prefill")
                rows.append(facts | _prefill(members[0], prompts, prefix, args).row("prefill", prefix))
                report.progress("decode")
                rows.append(facts | _decode(members[0], prompts, tokens, args).row("decode", tokens))
            members.clear()
        if not args.no_http:
            rows.append(facts | _turn(one, prefix, args, report))
    _show(report, rows)
    report.finish(rows)
    if failed := [row for row in rows if not row.get("saved", 1) or not row.get("reused", True)]:
        report.line(f"FAILED: {len(failed)} rows saved no state or computed their history again.")
    return 1 if failed else 0


def _facts(member: Member, args: argparse.Namespace) -> dict[str, Any]:
    plan = member.engine.built.plan
    if not plan.checkpoint_units and args.no_http:
        raise ConfigError(
            f"{plan.model_name} keeps no recurrent states, or there is no memory to save any.",
            code="no_states",
            hint="Name a model with recurrent layers: ft bench synth --geometry qwen3.6-35b-a3b.",
        )
    state_bytes = member.engine.built.engine.memory.state_bytes if plan.checkpoint_units else 0
    places = {"device_states": plan.checkpoint_units, "host_states": plan.checkpoint_slots}
    return {**member.facts, "state_mb": round(state_bytes / 1e6, 2), **places}


@dataclass(frozen=True)
class Case:
    """A request, and its anchors: positions of the prompt, ids of the answer."""

    prompt: list[int]
    tokens: int
    positions: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()

    def run(self, member: Member, *, saving: bool) -> tuple[Asked, int]:
        """Ask an engine that has forgotten all earlier prompts; without `saving` it has no anchors either.

        The second is how many states were saved.
        """
        reuse = member.engine.built.engine.scheduler.reuse
        reuse.clear()
        reuse.captures = saving
        before = reuse.snapshot()["checkpoints_saved"]
        anchors = (self.positions, self.ids) if saving else ((), ())
        asked = member.engine.run(self.prompt, self.tokens, anchors=anchors)
        return asked, reuse.snapshot()["checkpoints_saved"] - before


def _pairs(
    member: Member, args: argparse.Namespace, next_case: Callable[[], Case], taken: Callable[[Asked], float]
) -> Pairs:
    """Each case twice, with and without saving; the order turns from round to round."""
    pairs = Pairs()
    for number in range(args.warm_up + args.repeats):
        case, took, saved = next_case(), {}, 0
        for saving in (False, True) if number % 2 else (True, False):
            asked, count = case.run(member, saving=saving)
            took[saving], saved = taken(asked), saved + count
        if number >= args.warm_up:
            pairs.without.append(took[False])
            pairs.saving.append(took[True])
            pairs.saved.append(saved)
    return pairs


def _prefill(member: Member, prompts: Prompts, prefix: int, args: argparse.Namespace) -> Pairs:
    """A new prompt's time to the first token, an anchor at the end of each block."""
    block = SMALL_BLOCK if is_small(args) else BLOCK
    positions = tuple(range(block, prefix, block))
    return _pairs(member, args, lambda: Case(prompts.take(prefix), 1, positions), lambda asked: asked.first_s)


def _decode(member: Member, prompts: Prompts, tokens: int, args: argparse.Namespace) -> Pairs:
    """All of an answer's steps behind the first; every so many tokens one is an anchor."""
    every = SMALL_BETWEEN if is_small(args) else BETWEEN
    case = Case(prompts.take(every), tokens)
    asked, _ = case.run(member, saving=False)
    case = replace(case, ids=tuple(dict.fromkeys(asked.ids[every - 1 :: every])))
    return _pairs(member, args, lambda: case, lambda asked: asked.times_s[-1] - asked.times_s[0])


def _turn(one: Setup, prefix: int, args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """A server in a process of its own; the history is sent whole each time, only its last turn is new."""
    report.progress("starting a server")
    texts, adds, firsts, cached, computed = Texts(args.model), [], [], [], []
    with started(serve_command(one, prefix + prefix // 2 + 256, 2), "ft serve") as process:
        server = process.ready()
        history = _history(texts, prefix)
        server.chat(history, 1)
        for number in range(args.warm_up + args.repeats):
            report.progress(f"turn, round {number + 1}")
            last = {"role": "user", "content": texts.take(_TURN_WORDS - _TURN_EXTRA)}
            answer = server.chat([*history, last], 1)
            receipt = _receipt(server, answer.id)
            if number >= args.warm_up:
                first_s = answer.told_s - answer.asked_s
                firsts.append(1e3 * first_s)
                adds.append(1e3 * (first_s - receipt["seconds"]["engine_to_first_token"]))
                cached.append(receipt["tokens"]["cached"])
                computed.append(receipt["tokens"]["computed"])
    added, ttft = statistics.median(adds), statistics.median(firsts)
    return {
        "case": "turn",
        "tokens": int(statistics.median(computed)),
        "cached": min(cached),
        "reused": max(computed) < 4 * _TURN_WORDS,
        "ms_ttft": round(ttft, 3),
        "ms_engine": round(ttft - added, 3),
        "ms_added": round(added, 3),
        "ms_added_spread": [round(min(adds), 3), round(max(adds), 3)],
        "limit": LIMITS["turn"],
        "within": added <= LIMITS["turn"],
        "repeats": len(adds),
    }


def _history(texts: Texts, tokens: int) -> list[dict[str, str]]:
    """A conversation of about so many tokens, in turns of 256 words."""
    roles, words = ("user", "assistant"), 256
    count = max(2, tokens // (words + _TURN_EXTRA)) // 2 * 2
    return [{"role": roles[at % 2], "content": texts.take(words)} for at in range(count)]


def _receipt(server: Server, request_id: str) -> dict[str, Any]:
    """A request's receipt, which is written when its answer has gone out."""
    end = time.monotonic() + _RECEIPT_S
    while True:
        found = server.get(f"/v1/requests/{request_id}")
        if "seconds" in found:
            return found
        if time.monotonic() > end:
            raise DeviceError(f"The server has no receipt of request {request_id}.", code="server_failed")
        time.sleep(0.01)


def _show(report: Report, rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    state = f"a state {first['state_mb']} MB" if first["state_mb"] else "no states to save"
    report.line(f"{first['model']} ({first['geometry']}) on {first['device']}, {state}")
    body = []
    for r in rows:
        if r["case"] == "turn":
            times = [f"{r['ms_engine']:.2f}", f"{r['ms_ttft']:.2f}", f"{r['ms_added']:.2f} ms"]
            body.append([r["case"], r["backend"], str(r["tokens"]), "-", *times, f"{r['limit']:g} ms"])
        else:
            times = [f"{r['ms_without']:.2f}", f"{r['ms_saving']:.2f}", f"{100 * r['share']:.2f} %"]
            limit = f"{100 * r['limit']:g} %"
            body.append([r["case"], r["backend"], str(r["tokens"]), f"{r['saved']:g}", *times, limit])
    report.table(["case", "backend", "tokens", "states", "ms", "with", "added", "limit"], body)
