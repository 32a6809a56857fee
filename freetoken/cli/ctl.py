"""`ft ctl WHAT`: look at, and steer, a server that runs already.

Owns the words `requests` and `cache` and how their answers are shown; speaks HTTP through `_admin`. Knows no
engine: everything comes from the server's own endpoints.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from freetoken.cli import _options
from freetoken.cli._admin import Admin
from freetoken.cli._terminal import Terminal
from freetoken.core.errors import ConfigError, nearest
from freetoken.core.units import format_bytes

HELP = "look at a running server: requests (what was reused, and why not more), cache (memory, --memory SIZE)"
CAUSES = {
    "new": "nothing like it was asked before",
    "nonce": "a few tokens change with each request",
    "tools_reordered": "the same tools in another order",
    "tools_changed": "other tools are on offer",
    "text_changed": "the text was changed",
    "thinking_dropped": "a thought was left out",
    "turns_dropped": "a turn was left out",
    "turns_inserted": "a turn was put in",
    "answer_rewritten": "the answer came back in other words",
    "template_drift": "the template renders the same turns otherwise",
    "evicted": "known before, given up for want of memory",
    "no_state": "known, but no saved state stands close to it",
    "cache_off": "the prefix cache is off",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", metavar="WHAT", help=f"one of: {', '.join(WORDS)}")
    parser.add_argument("id", nargs="?", metavar="ID", help="requests: one of them, whole")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="requests: so many, newest first")
    parser.add_argument("--memory", metavar="SIZE", help="cache: use so much device memory from now on")
    parser.add_argument("--json", action="store_true", help="what the server says, as JSON")
    _options.add_option_flags(parser, positional_model=False)


def run(args: argparse.Namespace) -> int:
    if args.what not in WORDS:
        raise ConfigError(
            f"There is no ft ctl {args.what or ''}.".replace(" .", "."),
            code="usage",
            hint=nearest(args.what or "", WORDS) or f"There are: {', '.join(WORDS)}.",
        )
    options = _options.resolve(args).options
    admin = Admin(options.host, options.port, options.api_key)
    return WORDS[args.what](args, admin, Terminal(sys.stdout))


def _requests(args: argparse.Namespace, admin: Admin, out: Terminal) -> int:
    if args.id:
        receipt = admin.get(f"/v1/requests/{args.id}")
        _print_json(receipt, out) if args.json else _print_receipt(receipt, out)
        return 0
    if args.limit < 1:
        raise ConfigError("--limit is at least 1.", code="invalid_option")
    listed = admin.get(f"/v1/requests?limit={args.limit}")
    if args.json:
        _print_json(listed, out)
        return 0
    rows = [_row(receipt) for receipt in listed.get("data", ())]
    if rows:
        out.table(("ended", "id", "prompt", "reused", "lost", "answer", "first s", "why not more"), rows)
    running = listed.get("running", 0)
    out.line(out.dim(f"{running} running" + ("" if rows else "; none has ended yet")))
    return 0


def _row(receipt: Mapping[str, Any]) -> tuple[str, ...]:
    tokens, prefix = receipt["tokens"], receipt.get("prefix") or [{}]
    ended = time.strftime("%H:%M:%S", time.localtime(receipt["ended"]))
    return (
        ended,
        str(receipt["id"])[:12],
        f"{tokens['prompt']}",
        f"{tokens['cached']}",
        f"{sum(p.get('lost') or 0 for p in prefix)}",
        f"{tokens['completion']}",
        f"{receipt['seconds']['to_first_token']:.3f}",
        why(prefix[0]),
    )


def why(prefix: Mapping[str, Any]) -> str:
    """One line: the cause, and where."""
    cause, where, at = prefix.get("cause"), prefix.get("where"), prefix.get("first_difference")
    text = CAUSES.get(str(cause), str(cause)) if cause else ""
    if cause in ("evicted", "no_state", "new", None) or not where:
        return text
    return f"{text}: {where}, token {at}"


def _print_receipt(receipt: Mapping[str, Any], out: Terminal) -> None:
    for prefix in receipt.get("prefix") or ():
        out.line(f"reused {prefix['reused']}, computed {prefix['recomputed']}, lost {prefix['lost']} tokens")
        if prefix.get("cause"):
            out.line(f"  {why(prefix)}")
    for group in ("tokens", "seconds", "bytes", "engine"):
        values = {k: v for k, v in (receipt.get(group) or {}).items() if v}
        if values:
            out.title(group)
            out.table(("", ""), [(name, _number(group, value)) for name, value in values.items()])


def _number(group: str, value: Any) -> str:
    if group == "bytes":
        return format_bytes(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cache(args: argparse.Namespace, admin: Admin, out: Terminal) -> int:
    wished = args.memory is not None
    report = admin.post("/v1/cache/resize", {"memory": args.memory}) if wished else admin.get("/v1/cache")
    if args.json:
        _print_json(report, out)
        return 0
    memory, cache = report.get("memory", {}), report.get("cache", {})
    if "budget_bytes" in memory:
        out.line(f"memory {format_bytes(memory['budget_bytes'])}")
    rows = [(name, str(value)) for group in (memory, cache) for name, value in group.items()]
    out.table(("", ""), rows)
    return 0


def _print_json(value: Mapping[str, Any], out: Terminal) -> None:
    out.line(json.dumps(value, ensure_ascii=False))


Word = Callable[[argparse.Namespace, Admin, Terminal], int]
WORDS: dict[str, Word] = {"requests": _requests, "cache": _cache}
