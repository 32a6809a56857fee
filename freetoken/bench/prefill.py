"""`ft bench prefill`: how long prompts take, against the link's time for the experts that are not resident.

Every prompt is new and runs alone, one token is asked for, prefix reuse is off. With --ablate each idea of
the way prompts go is taken away alone: the second buffer (overlap), layers over the whole prompt instead of
the pool once a chunk, resident experts used in place. Engines take turns; medians are shown.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from freetoken.bench._rates import Rates
from freetoken.bench._report import Report, add_report_arguments
from freetoken.bench._setups import (
    Member,
    Probed,
    Prompts,
    Setup,
    add_repeat_arguments,
    add_setup_arguments,
    check_repeats,
    groups,
    is_small,
    opened,
    setups,
)
from freetoken.core import cost
from freetoken.core.errors import ConfigError
from freetoken.core.model_config import ModelConfig

HELP = "prompt speed by length, against the link's time; --ablate takes its ideas away one by one"
LENGTHS = (4096, 8192, 16384, 32768)
SMALL_LENGTHS = (512, 1024)
CHUNK = 8192
RIDERS = 2048
FULL, SERIAL, BY_CHUNK, COLD = "full", "no overlap", "pool per chunk", "nothing resident"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = f"{HELP}. Try: ft bench prefill --device sim --backend hybrid --share 0.4 --ablate"
    add_setup_arguments(parser)
    add = parser.add_argument
    add(
        "--prompt", nargs="+", type=int, metavar="TOKENS",
        help="lengths (default 4096 8192 16384 32768 on a GPU, 512 1024 elsewhere)",
    )  # fmt: skip
    add("--ablate", action="store_true", help="also without overlap, chunk by chunk, with nothing resident")
    add("--chunk", type=int, help=f"tokens of a chunk in the chunk-by-chunk run (default {CHUNK}, or a half)")
    add_repeat_arguments(parser, repeats=5, warm_up=1)
    add_report_arguments(parser, svg=False)


@dataclass
class Case:
    """One engine, one length, one way; the seconds of its rounds and what crossed the link in each.

    jobs   macro-chunks that a prompt went in: how often the absent pool crosses the link
    """

    member: Member
    length: int
    way: str
    seconds: list[float] = field(default_factory=list)
    link_bytes: list[float] = field(default_factory=list)
    jobs: int = 0


@dataclass(frozen=True)
class Way:
    """How an ablation changes the setup and the engine's macro-chunk (0 = as planned).

    cold   slots are emptied before every prompt
    """

    name: str
    change: Callable[[Setup], Setup] = lambda setup: setup
    macro: Callable[[int], int] = lambda length: 0
    cold: bool = False


def ways(args: argparse.Namespace) -> list[Way]:
    if not args.ablate:
        return [Way(FULL)]

    def add(setup: Setup, **more: Any) -> Setup:
        return replace(setup, extra=(*setup.extra, *more.items()))

    return [
        Way(FULL, macro=lambda length: length),
        Way(SERIAL, lambda setup: add(setup, disable_moe_prefill_overlap=True), lambda length: length),
        Way(BY_CHUNK, macro=lambda length: args.chunk or min(CHUNK, max(length // 2, 1))),
        Way(COLD, macro=lambda length: length, cold=True),
    ]


def run(args: argparse.Namespace) -> int:
    check_repeats(args)
    if min(args.prompt or [1]) < 1 or (args.chunk is not None and args.chunk < 1):
        raise ConfigError("--prompt and --chunk are at least 1.", code="invalid_option")
    report, prompts, probed = Report("prefill", args), Prompts(args.model), Probed()
    wanted = setups(args)
    lengths = args.prompt or (SMALL_LENGTHS if is_small(args) else LENGTHS)
    if args.ablate and not _has_slots(wanted[0]):
        raise ConfigError(
            "--ablate takes away what streaming experts to a device does; here nothing is streamed.",
            code="invalid_option",
            hint="Add --device cuda or sim, --backend hybrid or offload, and --share.",
        )
    done: list[tuple[Case, dict[str, Any]]] = []
    chosen = ways(args)
    variants = [(way, way.change(setup)) for setup in wanted for way in chosen]
    for group in groups([setup for _, setup in variants]):
        context = max(lengths) + 16
        # Short prompts would ride in a step: they go layer by layer, too.
        ride = min(RIDERS, max(min(lengths) // 4, 1))
        more = {"prefix_cache": False, "cold_memory": 0, "max_prefill_length": ride}
        with opened(group, context, 1, **more) as members:
            cases = []
            for member, (way, _) in zip(members, _taken(variants, group), strict=True):
                prompts.learn(member.engine)
                probed.look(member)
                cases += [(Case(member, length, way.name), way) for length in lengths]
            for number in range(args.warm_up + args.repeats):
                for case, way in cases:
                    report.progress(f"round {number + 1}: {case.length} tokens, {way.name}")
                    if way.cold:
                        empty_slots(case.member)
                    _prompt(case, way.macro(case.length), prompts, keep=number >= args.warm_up)
            done += [(case, _facts(case.member)) for case, _ in cases]
            for member in members:
                probed.look(member)
    rows = [_row(case, facts, probed.best, args) for case, facts in done]
    _show(report, rows)
    return report.finish(rows)


def _taken(variants: list[tuple[Way, Setup]], group: list[Setup]) -> list[tuple[Way, Setup]]:
    """The variants of a group, which are the next ones in order."""
    some, rest = variants[: len(group)], variants[len(group) :]
    variants[:] = rest
    return some


def _has_slots(setup: Setup) -> bool:
    return setup.device in ("cuda", "sim") and setup.backend in ("hybrid", "offload")


def _prompt(case: Case, macro: int, prompts: Prompts, *, keep: bool) -> None:
    engine = case.member.engine
    scheduler = engine.built.engine.scheduler
    limits = scheduler.limits
    scheduler.limits = replace(limits, macro_tokens=macro or limits.macro_tokens)
    asked = engine.submit(prompts.take(case.length), 1)
    before, jobs = _link_bytes(case.member), engine.built.engine.stats.jobs
    engine.wait([asked])
    scheduler.limits = limits
    if keep:
        case.seconds.append(asked.first_s)
        case.jobs = engine.built.engine.stats.jobs - jobs
        case.link_bytes.append(_link_bytes(case.member) - before)


def empty_slots(member: Member) -> None:
    """Give nearly all expert slots back, and take them again: hardly anybody is in them. Nothing may run."""
    built = member.engine.built
    experts, slots = built.engine.runner.experts, built.engine.memory.num_slots - 1
    built.device.enter()
    experts.resize(min(built.plan.min_slots, slots))
    experts.resize(slots)


def _link_bytes(member: Member) -> float:
    stats = member.engine.built.engine.runner.experts.stats
    return float(stats.prefill_link_bytes)


def _facts(member: Member) -> dict[str, Any]:
    built = member.engine.built
    return {**member.facts, "config": built.config, "flops": built.device.machine.gpu_flops}


def prompt_flops(config: ModelConfig, length: int) -> float:
    """Arithmetic of a prompt: mixers (the mean context is half of it), experts, one row of the head."""
    total = cost.head(config, 1)[1]
    for layer, spec in enumerate(config.layers):
        total += cost.mixer(config, layer, length, length // 2)[1]
        if spec.mlp != "moe" or config.moe is None:
            total += cost.dense_mlp(config, length)[1]
            continue
        total += cost.shared_expert(config, length)[1]
        total += cost.expert_flops(config, length * config.moe.top_k)
    return total


def _row(case: Case, facts: dict[str, Any], best: Rates, args: argparse.Namespace) -> dict[str, Any]:
    seconds, config, rate = statistics.median(case.seconds), facts.pop("config"), facts.pop("flops")
    moved = statistics.median(case.link_bytes)
    link_s = max(moved, 0.0) / best.link if best.link else 0.0
    return {
        **facts,
        "prompt": case.length,
        "way": case.way,
        "ms": round(1e3 * seconds, 2),
        "prefill_tok_s": round(case.length / seconds, 1),
        "spread_ms": [round(1e3 * min(case.seconds), 2), round(1e3 * max(case.seconds), 2)],
        "passes": case.jobs,
        "link_gb": round(max(moved, 0.0) / 1e9, 4),
        "link_ms": round(1e3 * link_s, 2),
        "over_link": round(seconds / link_s, 3) if link_s else None,
        "tflop": round(prompt_flops(config, case.length) / 1e12, 4),
        "tflop_s": round(prompt_flops(config, case.length) / seconds / 1e12, 3),
        "nominal_tflop_s": round(rate / 1e12, 1) if facts["device"] != "cpu" else None,
        "repeats": args.repeats,
    }


def _show(report: Report, rows: list[dict[str, Any]]) -> None:
    report.line(f"{rows[0]['model']} ({rows[0]['geometry']}) on {rows[0]['device']}, medians")
    whole = {(r["backend"], r["policy"], r["prompt"]): r["ms"] for r in rows if r["way"] == FULL}
    body = [
        [
            str(row["prompt"]), row["way"], row["backend"], f"{100 * row['pool_share']:.0f} %",
            f"{row['ms']:.1f}", f"{row['prefill_tok_s']:.0f}", f"{row['link_ms']:.1f}",
            "-" if row["over_link"] is None else f"{row['over_link']:.2f}x",
            f"{100 * (whole[row['backend'], row['policy'], row['prompt']] / row['ms'] - 1):+.0f} %",
        ]
        for row in sorted(rows, key=lambda row: row["prompt"])
    ]  # fmt: skip
    report.table(["tokens", "way", "backend", "pool", "ms", "tok/s", "link ms", "of link", "speed"], body)
