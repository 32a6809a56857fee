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
WARM, SMALL_WARM = (64, 96), (16, 16)
"""Tokens of a prompt and an answer that fill the slots before anything is measured."""
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


@dataclass(frozen=True)
class Way:
    """How prompts go: tokens of a macro-chunk by the prompt's length (0 = as planned).

    cold   slots are emptied before every prompt
    """

    name: str
    macro: Callable[[int], int] = lambda length: 0
    cold: bool = False


@dataclass
class Found:
    """The seconds of measured rounds and what crossed the link in each.

    passes   macro-chunks that a prompt went in: how often the absent pool crosses the link
    """

    seconds: list[float] = field(default_factory=list)
    link_bytes: list[float] = field(default_factory=list)
    passes: int = 0


@dataclass
class Case:
    """One engine, one length, one way."""

    member: Member
    length: int
    way: Way
    found: Found = field(default_factory=Found)


def ways(setup: Setup, args: argparse.Namespace) -> list[tuple[Setup, list[Way]]]:
    """The engines that a setup needs, and the ways that prompts go on each."""
    if not args.ablate:
        return [(setup, [Way(FULL)])]
    serial = replace(setup, extra=(*setup.extra, ("disable_moe_prefill_overlap", True)))
    chunk = Way(BY_CHUNK, lambda length: args.chunk or min(CHUNK, max(length // 2, 1)))
    return [
        (setup, [Way(FULL, _whole), chunk]),
        (serial, [Way(SERIAL, _whole)]),
        (setup, [Way(COLD, _whole, cold=True)]),
    ]


def _whole(length: int) -> int:
    return length


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
    # Short prompts would ride in a step: they go layer by layer, too, and so does each half of them.
    ride = RIDERS if min(lengths) >= 2 * RIDERS else max(min(lengths) // 4, 1)
    more = {"prefix_cache": False, "cold_memory": 0, "max_prefill_length": ride}
    done: list[tuple[Found, dict[str, Any]]] = []
    engines = [engine for setup in wanted for engine in ways(setup, args)]
    for group in groups([setup for setup, _ in engines]):
        mine, engines = engines[: len(group)], engines[len(group) :]
        with opened(group, max(*lengths, sum(WARM)) + 16, 1, **more) as members:
            cases = [
                Case(member, length, way)
                for member, (_, some) in zip(members, mine, strict=True)
                for length in lengths
                for way in some
            ]
            done += _group(cases, args, (prompts, probed, report))
            members.clear()  # a row must not keep an engine alive
            cases.clear()
    rows = [_row(found, facts, probed.best, args) for found, facts in done]
    _show(report, rows)
    return report.finish(rows)


def _group(
    cases: list[Case], args: argparse.Namespace, using: tuple[Prompts, Probed, Report]
) -> list[tuple[Found, dict[str, Any]]]:
    """Measure engines that live side by side; decoding has filled their slots before."""
    prompts, probed, report = using
    members = list({id(case.member): case.member for case in cases}.values())
    for member in members:
        prompts.learn(member.engine)
        probed.look(member)
        warm = SMALL_WARM if is_small(args) else WARM
        member.engine.run(prompts.take(warm[0]), warm[1])
    for number in range(args.warm_up + args.repeats):
        for case in cases:
            report.progress(f"round {number + 1}: {case.length} tokens, {case.way.name}")
            if case.way.cold:
                empty_slots(case.member)
            _prompt(case, prompts, keep=number >= args.warm_up)
    for member in members:
        probed.look(member)
    return [(case.found, _facts(case)) for case in cases]


def _has_slots(setup: Setup) -> bool:
    return setup.device in ("cuda", "sim") and setup.backend in ("hybrid", "offload")


def _prompt(case: Case, prompts: Prompts, *, keep: bool) -> None:
    engine = case.member.engine
    scheduler, stats = engine.built.engine.scheduler, engine.built.engine.stats
    limits, macro = scheduler.limits, case.way.macro(case.length)
    scheduler.limits = replace(limits, macro_tokens=macro or limits.macro_tokens)
    before, jobs = _link_bytes(case.member), stats.jobs
    asked = engine.submit(prompts.take(case.length), 1)
    engine.wait([asked])
    scheduler.limits = limits
    if keep:
        case.found.seconds.append(asked.first_s)
        case.found.passes = stats.jobs - jobs
        case.found.link_bytes.append(_link_bytes(case.member) - before)


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


def _facts(case: Case) -> dict[str, Any]:
    built = case.member.engine.built
    return {
        **case.member.facts,
        "prompt": case.length,
        "way": case.way.name,
        "flop": prompt_flops(built.config, case.length),
        "nominal": built.device.machine.gpu_flops if built.device.owns_memory else 0.0,
    }


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


def _row(found: Found, facts: dict[str, Any], best: Rates, args: argparse.Namespace) -> dict[str, Any]:
    seconds, flop, nominal = statistics.median(found.seconds), facts.pop("flop"), facts.pop("nominal")
    moved = max(statistics.median(found.link_bytes), 0.0)
    link_s = moved / best.link if best.link else 0.0
    return {
        **facts,
        "ms": round(1e3 * seconds, 2),
        "prefill_tok_s": round(facts["prompt"] / seconds, 1),
        "spread_ms": [round(1e3 * min(found.seconds), 2), round(1e3 * max(found.seconds), 2)],
        "passes": found.passes,
        "link_gb": round(moved / 1e9, 4),
        "link_ms": round(1e3 * link_s, 2),
        "over_link": round(seconds / link_s, 3) if link_s else None,
        "tflop": round(flop / 1e12, 4),
        "tflop_s": round(flop / seconds / 1e12, 3),
        "nominal_tflop_s": round(nominal / 1e12, 1) or None,
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
