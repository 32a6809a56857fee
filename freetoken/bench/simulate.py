"""`ft bench simulate`: decode and prefill speed of published models on published machines, no weights.

Owns the memory split, the runs and the report. Times come from a virtual clock (`_plant`), residency from
the policies that serve. A model that a machine can't hold says why; where only host memory is too small,
the model's smaller format takes its place and the row names it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from freetoken.bench import figures, synthetic
from freetoken.bench._columns import make_policy
from freetoken.bench._plant import MODES, TILES, Plant, Step, prefill_seconds
from freetoken.bench._report import Report, add_report_arguments
from freetoken.bench.geometries import GEOMETRIES, Geometry, geometry
from freetoken.bench.replay import Reads, read_trace
from freetoken.bench.traces import Trace, load_trace
from freetoken.core.errors import ConfigError
from freetoken.core.machine import PRESETS, Machine, preset
from freetoken.core.units import GIB

HELP = "decode and prefill speed of large models on six machines, simulated without weights"
PROMPTS = (4096, 8192, 16384, 32768)
CONTEXT_TOKENS = 8192
WORKSPACE_BYTES = 5 * GIB // 2
SPARE_HOST_BYTES = 8 * GIB
PUBLISHED_CHUNK = 8192
STEPS = 256
LABELS = {
    "hybrid": "hybrid (cache + split)",
    "offload": "offload (cache)",
    "cpu": "cpu",
    "static": "static split",
}
PREFILLS = {
    "overlap": "overlap",
    "serial": "no overlap",
    "chunked": "8k chunks, whole pool each",
    "chunked_serial": "8k chunks, no overlap",
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
    add_report_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.steps < 1:
        raise ConfigError("At least one decode step must be timed.", hint="See --steps.")
    machines = [preset(name) for name in args.machine]
    wanted = geometry(args.model)
    trace = load_trace(args.trace) if args.trace else synthetic.cached(synthetic.shape(wanted.shape))
    _check_shape(trace, wanted)
    reads = read_trace(trace)
    if not reads.decode:
        raise ConfigError(f"The trace {trace.name} holds no decode steps.", code="invalid_trace")
    report = Report("simulate", args)
    report.line(f"simulated: {wanted.name} ({wanted.format}), routing from {trace.name}")
    rows: list[dict[str, Any]] = []
    for machine in machines:
        fit = fit_model(machine, wanted)
        report.progress(f"{machine.name}: {fit.geometry.name}")
        rows += decode_rows(machine, fit, reads, args) + prefill_rows(machine, fit)
    _show(report, machines, rows)
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


def decode_rows(machine: Machine, fit: Fit, reads: Reads, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a mode: tokens per second at batch 1 and what the misses became."""
    rows = []
    for mode in MODES:
        row = _row(machine, fit, kind="decode", mode=mode)
        if fit.why:
            rows.append({**row, "tok_s": None, "why": fit.why})
            continue
        steps = simulate_decode(machine, fit, mode, reads, policy=args.policy, steps=args.steps)
        seconds = sum(s.seconds for s in steps)
        requests, missing = sum(s.requests for s in steps), sum(s.misses for s in steps)
        filled = sum(s.filled_tiles for s in steps)
        rows.append(
            {
                **row,
                "tok_s": round(len(steps) / seconds, 2),
                "miss_rate": round(missing / max(1, requests), 4),
                "fill_share": round(filled / (missing * TILES), 4) if missing else 0.0,
                "cpu_tiles": sum(s.cpu_tiles for s in steps),
                "filled_tiles": filled,
            }
        )
    return rows


def simulate_decode(
    machine: Machine, fit: Fit, mode: str, reads: Reads, *, policy: str, steps: int
) -> list[Step]:
    """Run a trace's first decode steps; those of its first quarter warm the cache and are dropped."""
    name = {"static": "static_prefill", "cpu": "static"}.get(mode, policy)
    slots = 0 if mode == "cpu" else fit.num_slots
    plant = Plant(machine, fit.geometry, mode, make_policy(name), slots)
    decode = reads.decode[: max(steps, 1) * 4 // 3 + 1]
    prefills = {at: (ids, counts) for at, ids, counts in reads.prefills}
    done = []
    for step, layers in enumerate(decode):
        if step in prefills and slots:
            plant.seed(*prefills[step], step)
        done.append(plant.decode(layers, step))
    return done[len(decode) // 4 :]


def prefill_rows(machine: Machine, fit: Fit) -> list[dict[str, Any]]:
    """Prompts of each length, with and without overlap, and as the published system streams them."""
    rows = []
    for tokens in PROMPTS:
        for mode in PREFILLS:
            row = {**_row(machine, fit, kind="prefill", mode=mode), "tokens": tokens}
            if fit.why:
                rows.append({**row, "seconds": None, "why": fit.why})
                continue
            seconds = _prefill(machine, fit, tokens, mode)
            rows.append({**row, "seconds": round(seconds, 4), "tok_s": round(tokens / seconds, 1)})
    return rows


def _prefill(machine: Machine, fit: Fit, tokens: int, mode: str) -> float:
    g = fit.geometry
    if not mode.startswith("chunked"):
        share = fit.num_slots / g.pool
        return prefill_seconds(machine, g, tokens, share, overlap=mode == "overlap")
    chunk = min(tokens, PUBLISHED_CHUNK)
    return -(-tokens // chunk) * prefill_seconds(machine, g, chunk, 0.0, overlap=mode == "chunked")


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


def _show(report: Report, machines: Sequence[Machine], rows: Sequence[dict[str, Any]]) -> None:
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
    report.line("\nPrefill, seconds: " + " / ".join(PREFILLS.values()) + " (the published way)")
    body = [
        [name, *[_joined(prefill[name, mode, tokens]["seconds"] for mode in PREFILLS) for tokens in PROMPTS]]
        for name in names
    ]
    report.table(["", *[f"{tokens // 1024}k" for tokens in PROMPTS]], body)
    report.chart(_decode_chart(names, decode), "-decode")
    report.chart(_prefill_chart(names, prefill), "-prefill")


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


def _prefill_chart(names: Sequence[str], rows: dict[tuple[str, str, int], dict[str, Any]]) -> str:
    series = [
        figures.Series(f"{name}, {PREFILLS[mode]}", [rows[name, mode, t].get("tok_s") for t in PROMPTS])
        for name in names[:1]
        for mode in PREFILLS
    ]
    series += [
        figures.Series(f"{name}, overlap", [rows[name, "overlap", t].get("tok_s") for t in PROMPTS])
        for name in names[1:]
    ]
    return figures.bars(
        figures.Chart(
            title="Prefill speed, simulated",
            subtitle="the prompt in tokens; experts cross the link once a prompt",
            y_label="tokens per second",
            groups=[f"{t // 1024}k" for t in PROMPTS],
            series=series,
        )
    )


def _check_shape(trace: Trace, g: Geometry) -> None:
    found = (trace.num_layers, trace.num_experts, trace.top_k)
    if found != (g.layers, g.experts, g.top_k):
        raise ConfigError(
            f"The trace is of {found[0]}x{found[1]}k{found[2]}, the model {g.name} is {g.shape}.",
            code="invalid_trace",
            hint="Leave --trace out for synthetic routing of the model's shape.",
        )
