"""`ft plan MODEL`: what fits where, what speed to expect and why, from headers alone.

MODEL is a folder, a model of the local cache, or (online) a name on the hub, whose headers are fetched
and nothing else. Decides nothing: it is the plan that serving would make.

    exit codes   0 it fits · 3 it fits on none of the machines asked for · others as for every command
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from freetoken.cli import _models, _options
from freetoken.cli._terminal import Terminal
from freetoken.core.machine import PRESETS
from freetoken.core.units import format_bytes, format_count

HELP = "what fits where, expected speed and why, before anything is downloaded or loaded"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all-machines", action="store_true", help="a row for each known machine")
    parser.add_argument(
        "--file", metavar="PATTERN", help="of a model on the hub, the weight files meant, like '*Q4_K_M*'"
    )
    parser.add_argument("--offline", action="store_true", help="never ask the hub")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    _options.add_option_flags(parser)


def run(args: argparse.Namespace) -> int:
    options = _options.resolve(args).options
    presets = tuple(PRESETS.values()) if args.all_machines else ()
    if options.machine:
        presets = (PRESETS[options.machine],)
    with _models.headers(options.model, offline=args.offline, file=args.file) as directory:
        # Late: torch is not needed to refuse a wrong option or name.
        from freetoken.engine import outlook

        model, found = outlook.look(options, directory, presets)
    fits = any(each.plan for each in found)
    out = Terminal(sys.stdout)
    if args.json:
        out.line(json.dumps({"model": _model(model), "machines": [_row(each) for each in found]}))
        return 0 if fits else 3
    name = options.model or model.name
    out.line(
        f"{out.bold(name)}  {model.family}, {format_count(model.num_weights)} weights, "
        f"{format_count(model.num_active)} active: {model.shape}"
    )
    out.line(
        f"  experts {format_bytes(model.sizes.pool_bytes)} ({', '.join(model.formats) or 'none'}), "
        f"dense {format_bytes(model.sizes.dense_bytes)}, "
        f"KV {format_bytes(model.sizes.page_bytes // model.sizes.page_size)} a token"
    )
    if len(found) > 1:
        out.line()
        out.table(
            ("machine", "fits", "backend", "expert slots", "KV tokens", "tok/s", "4k prompt"),
            [_cells(each) for each in found],
        )
    else:
        _tell(found[0], out)
    return 0 if fits else 3


def _tell(found: Any, out: Terminal) -> None:
    """One machine's answer in sentences."""
    if found.plan is None:
        out.line(f"  {out.bad('does not fit')} {found.machine}")
        out.wrapped(found.why)
        return
    out.line(f"  {out.good('fits')} {found.machine}")
    for line in found.plan.lines():
        out.wrapped(line)
    expected = found.expectation
    out.line(
        f"  {out.bold('expected')}  {_interval(expected.decode)} tok/s; first token of "
        + ", ".join(f"{n} tokens after {_interval(t)} s" for n, t in expected.ttft)
    )
    for reason in expected.reasons:
        out.wrapped(reason, "    ")


def _cells(found: Any) -> tuple[str, ...]:
    if found.plan is None:
        return (found.machine, "no", "", "", "", "", found.why.split(": ")[0])
    plan, expected = found.plan, found.expectation
    ttft = dict(expected.ttft).get(4096)
    return (
        found.machine,
        "yes",
        plan.backend,
        str(max(plan.memory.num_slots - 1, 0)),
        str(plan.kv_tokens),
        _interval(expected.decode),
        f"{_interval(ttft)} s" if ttft else "-",
    )


def _interval(pair: tuple[float, float]) -> str:
    low, high = (f"{v:.0f}" if v >= 20 else f"{v:.1f}" if v >= 1 else f"{v:.2g}" for v in pair)
    return f"{low}-{high}"


def _model(model: Any) -> Mapping[str, Any]:
    sizes = model.sizes
    return {
        "name": model.name,
        "family": model.family,
        "weights": model.num_weights,
        "active_weights": model.num_active,
        "expert_formats": list(model.formats),
        "expert_bytes": sizes.pool_bytes,
        "dense_bytes": sizes.dense_bytes,
        "kv_bytes_per_token": sizes.page_bytes // sizes.page_size,
    }


def _row(found: Any) -> Mapping[str, Any]:
    plan, expected = found.plan, found.expectation
    if plan is None:
        return {"machine": found.machine, "fits": False, "why": found.why}
    return {
        "machine": found.machine,
        "fits": True,
        "backend": plan.backend,
        "expert_slots": max(plan.memory.num_slots - 1, 0),
        "kv_tokens": plan.kv_tokens,
        "host_bytes": plan.host_bytes,
        "tokens_per_s": list(expected.decode),
        "first_token_s": {str(n): list(t) for n, t in expected.ttft},
        "reasons": [*plan.reasons, *expected.reasons],
    }
