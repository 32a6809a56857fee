"""`ft bench simulate`: decode and prefill speed of published models on published machines, no weights.

Owns the memory split, the runs and the report. The control code that serves runs here too (`_shaped`), on
a virtual clock. A model that a machine can't hold says why; where only host memory is too small, the
model's smaller format takes its place and the row names it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from freetoken.bench import _published, _shaped, figures, synthetic
from freetoken.bench._columns import make_policy
from freetoken.bench._report import Report, add_report_arguments
from freetoken.bench._shaped import MODES
from freetoken.bench.geometries import GEOMETRIES, Geometry, geometry
from freetoken.bench.traces import DECODE, Trace, load_trace
from freetoken.core.errors import ConfigError
from freetoken.core.machine import PRESETS, Machine, preset
from freetoken.core.units import GIB
from freetoken.experts.shape_only import ShapeOnly

HELP = "decode and prefill speed of large models on six machines, simulated without weights"
PROMPTS = (4096, 8192, 16384, 32768)
CONTEXT_TOKENS = 8192
WORKSPACE_BYTES = 5 * GIB // 2
SPARE_HOST_BYTES = 8 * GIB
STEPS = 96
WARM_STEPS = 24
LABELS = {
    "hybrid": "hybrid (cache + split)",
    "offload": "offload (cache)",
    "cpu": "cpu",
    "static": "static split",
}
PREFILLS = {
    "overlap": "overlap",
    "serial": "no overlap",
    "published": "published way",
    "published_serial": "published way, no overlap",
}


@dataclass(frozen=True)
class Fit:
    """What of a model a machine holds: expert slots, or why nothing runs."""

    geometry: Geometry
    num_slots: int = 0
    why: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machine", nargs="+", default=list(PRESETS), help=f"presets: {' '.join(PRESETS)}")
    parser.add_argument("--model", default="qwen3.6-35b-a3b", help=f"geometry: {' '.join(GEOMETRIES)}")
    parser.add_argument(
        "--trace", metavar="FILE", help="routing (default: synthetic of the model's geometry)"
    )
    parser.add_argument("--policy", default="two_speed", help="residency policy of hybrid and offload")
    parser.add_argument("--steps", type=int, default=STEPS, help="decode steps that are timed")
    parser.add_argument(
        "--prompt",
        type=int,
        nargs="*",
        default=list(PROMPTS),
        metavar="TOKENS",
        help="prompts that are timed",
    )
    add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.steps < 1 or min(args.prompt, default=1) < 1:
        raise ConfigError("Steps and prompts are at least 1.", hint="See --steps and --prompt.")
    machines = [preset(name) for name in args.machine]
    wanted = geometry(args.model)
    make_policy(args.policy)
    trace = load_trace(args.trace) if args.trace else synthetic.cached(synthetic.shape(wanted.shape))
    _check(trace, wanted)
    report = Report("simulate", args)
    report.line(f"simulated: {wanted.name} ({wanted.format}), routing from {trace.name}")
    rows: list[dict[str, Any]] = []
    for machine in machines:
        fit = fit_model(machine, wanted)
        for mode in MODES:
            report.progress(f"{machine.name}: {fit.geometry.name} {mode}")
            rows.append(decode_row(machine, fit, mode, trace, args))
        for mode in PREFILLS:
            report.progress(f"{machine.name}: {fit.geometry.name} prefill, {PREFILLS[mode]}")
            rows += prefill_rows(machine, fit, mode, trace, args)
    _show(report, machines, rows, args.prompt)
    return report.finish(rows, machine="simulated: " + ", ".join(m.name for m in machines))


def fit_model(machine: Machine, wanted: Geometry) -> Fit:
    """Divide a machine's memory; falls back to the model's smaller format where the pool is too large."""
    fit = _divide(machine, wanted)
    if fit.why and wanted.smaller:
        smaller = _divide(machine, geometry(wanted.smaller))
        return smaller if not smaller.why else fit
    return fit


def _divide(machine: Machine, g: Geometry) -> Fit:
    gb = 1e9
    if g.pool_bytes + SPARE_HOST_BYTES > machine.host_memory:
        return Fit(g, why=f"pool {g.pool_bytes / gb:.0f} GB > host {machine.host_memory / gb:.0f} GB")
    fixed = g.dense_bytes + CONTEXT_TOKENS * g.kv_bytes_per_token + WORKSPACE_BYTES
    slots = min(int((machine.gpu_memory - fixed) // g.expert_bytes), g.pool)
    if slots < g.top_k:
        return Fit(g, why=f"dense weights and KV {fixed / gb:.0f} GB > GPU {machine.gpu_memory / gb:.0f} GB")
    return Fit(g, slots)


def decode_row(
    machine: Machine, fit: Fit, mode: str, trace: Trace, args: argparse.Namespace
) -> dict[str, Any]:
    """Tokens per second at batch 1 in one mode, and what the misses became."""
    row = _row(machine, fit, kind="decode", mode=mode)
    if fit.why:
        return {**row, "tok_s": None, "why": fit.why}
    model = _open(machine, fit, mode, args)
    found = _shaped.decode(model, trace, args.steps)
    return {
        **row,
        "steps": found.steps,
        "tok_s": round(found.steps / found.seconds, 2) if found.steps else None,
        "miss_rate": round(found.misses / max(1, found.requests), 4),
        "fill_share": round(found.filled_tiles / max(1, found.missing_tiles), 4),
        "missing_tiles": found.missing_tiles,
        "filled_tiles": found.filled_tiles,
        "cpu_tiles": found.cpu_tiles,
    }


def prefill_rows(
    machine: Machine, fit: Fit, mode: str, trace: Trace, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Prompts of each length, the slots warm from decode."""
    row = _row(machine, fit, kind="prefill", mode=mode)
    if fit.why:
        return [{**row, "tokens": tokens, "seconds": None, "why": fit.why} for tokens in args.prompt]
    if mode.startswith("published"):
        overlap = mode == "published"
        took = [
            _published.prefill_seconds(machine, fit.geometry, tokens, overlap=overlap)
            for tokens in args.prompt
        ]
    else:
        model = _open(machine, fit, "hybrid", args, overlap=mode == "overlap")
        _shaped.decode(model, trace, WARM_STEPS)
        took = [_shaped.prefill(model, trace, tokens) for tokens in args.prompt]
    return [
        {**row, "tokens": tokens, "seconds": round(s, 4), "tok_s": round(tokens / s, 1)}
        for tokens, s in zip(args.prompt, took, strict=True)
    ]


def _open(
    machine: Machine, fit: Fit, mode: str, args: argparse.Namespace, *, overlap: bool = True
) -> ShapeOnly:
    return _shaped.open_model(
        machine, fit.geometry, mode, num_slots=fit.num_slots, policy=args.policy, overlap=overlap
    )


def _row(machine: Machine, fit: Fit, *, kind: str, mode: str) -> dict[str, Any]:
    g = fit.geometry
    return {
        "kind": kind,
        "mode": mode,
        "machine": machine.name,
        "model": g.name,
        "slots": fit.num_slots,
        "slots_percent": round(100 * fit.num_slots / g.pool, 1),
        "simulated": True,
    }


def _show(
    report: Report, machines: Sequence[Machine], rows: Sequence[dict[str, Any]], prompts: Sequence[int]
) -> None:
    decode = {(r["machine"], r["mode"]): r for r in rows if r["kind"] == "decode"}
    prefill = {(r["machine"], r["mode"], r["tokens"]): r for r in rows if r["kind"] == "prefill"}
    names = [m.name for m in machines]
    report.line("\nDecode, tokens per second at batch 1:")
    body = []
    for name in names:
        first = decode[name, "hybrid"]
        cells = ["-" if (v := decode[name, mode]["tok_s"]) is None else f"{v:.1f}" for mode in MODES]
        if "why" in first:
            body.append([f"{name}: {first['why']}", "-", "-", "-", *cells])
            continue
        shares = [f"{first['slots_percent']:.0f} %", f"{100 * first['miss_rate']:.0f} %"]
        body.append([f"{name}  {first['model']}", *shares, f"{first['fill_share']:.2f}", *cells])
    report.table(["", "slots", "misses", "fill share", *MODES], body)
    report.chart(_decode_chart(names, decode), "-decode")
    if not prompts:
        return
    report.line(f"\nPrefill, seconds: {' / '.join(PREFILLS.values())} (8k chunks, the whole pool for each)")
    body = [
        [name, *[_joined(prefill[name, mode, tokens]["seconds"] for mode in PREFILLS) for tokens in prompts]]
        for name in names
    ]
    report.table(["", *[f"{tokens / 1024:g}k" for tokens in prompts]], body)
    report.chart(_prefill_chart(names, prefill, prompts), "-prefill")


def _joined(seconds: Any) -> str:
    return " / ".join("-" if s is None else f"{s:.2f}" for s in seconds)


def _decode_chart(names: Sequence[str], rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    return figures.bars(
        figures.Chart(
            title="Decode speed, simulated",
            subtitle="; ".join(dict.fromkeys(rows[n, "hybrid"]["model"] for n in names)) + ", batch 1",
            y_label="tokens per second",
            groups=names,
            series=[figures.Series(LABELS[m], [rows[n, m]["tok_s"] for n in names]) for m in MODES],
        )
    )


def _prefill_chart(
    names: Sequence[str], rows: dict[tuple[str, str, int], dict[str, Any]], prompts: Sequence[int]
) -> str:
    first = names[0]
    lines = [(f"{first}, {label}", first, mode) for mode, label in PREFILLS.items()]
    lines += [(f"{name}, overlap", name, "overlap") for name in names[1:]]
    return figures.bars(
        figures.Chart(
            title="Prefill speed, simulated",
            subtitle="by prompt length; the published way streams the whole pool for every 8k tokens",
            y_label="tokens per second",
            groups=[f"{tokens / 1024:g}k" for tokens in prompts],
            series=[
                figures.Series(label, [rows[name, mode, t].get("tok_s") for t in prompts])
                for label, name, mode in lines
            ],
        )
    )


def _check(trace: Trace, g: Geometry) -> None:
    found = (trace.num_layers, trace.num_experts, trace.top_k)
    if found != (g.layers, g.experts, g.top_k):
        raise ConfigError(
            f"The trace is of {found[0]}x{found[1]}k{found[2]}, the model {g.name} is {g.shape}.",
            code="invalid_trace",
            hint="Leave --trace out for synthetic routing of the model's shape.",
        )
    if not (trace.phase == DECODE).any():
        raise ConfigError(f"The trace {trace.name} holds no decode steps.", code="invalid_trace")
