"""`ft bench synth`: write a checkpoint of a published geometry with made-up weights, as fast as the disk.

The weights are random, but serving them is like serving a real model: routing has popularity, topics and
locality, greedy decoding walks a known cycle (walk.json), and experts matter: one dropped moves every logit
(see `_synth_weights`). What routing came out is measured by running the first layers, and printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from freetoken.bench import _synth_gguf, _synth_measure, _synth_shapes, _synth_text
from freetoken.bench import _synth_weights as weights
from freetoken.bench._report import Report, add_report_arguments
from freetoken.bench._synth_files import Shard, write_files, write_index, write_shards
from freetoken.bench._synth_write import Checkpoint, amplitudes, coding_of
from freetoken.core.errors import CapacityError, ConfigError
from freetoken.core.units import format_bytes
from freetoken.engine.survey import find_family
from freetoken.models._family import DecoderFamily

HELP = "write a large synthetic checkpoint: any supported geometry, depth and format of experts"
EPILOG_SIZES = "--tiny is 30 MB and takes a second."
WORDS, TINY_WORDS = 32768, 1024
MEASURED_LAYERS = 4
PROMPT, DECODED = 512, 256
TINY_PROMPT, TINY_DECODED = 128, 64
_SPARE = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = f"{HELP}. {EPILOG_SIZES}"
    add = parser.add_argument
    add("--out", required=True, metavar="DIR", help="where to write; a new or empty folder")
    add(
        "--geometry", default=_synth_shapes.DEFAULT, metavar="NAME",
        help=f"{' '.join(_synth_shapes.NAMES)} (default {_synth_shapes.DEFAULT})",
    )  # fmt: skip
    add("--layers", type=int, metavar="N", help="depth (default: the geometry's)")
    add(
        "--format", metavar="NAME",
        help=f"of experts: {' '.join(_synth_shapes.FORMATS)} (default: the geometry's own)",
    )  # fmt: skip
    add("--gguf", metavar="FILE", help="write the same numbers as a GGUF file, too (qwen3-30b-a3b in bf16)")
    add("--tiny", action="store_true", help="the same kind of model in a few megabytes")
    add("--seed", type=int, default=1, help="another seed is another model, and another walk")
    add("--drift", type=float, metavar="SHARE", help="how much of a router's choice the layer before decides")
    add("--threads", type=int, metavar="N", help="threads that write (default: all cores)")
    add("--no-measure", action="store_true", help="write only")
    add("--measure-layers", type=int, default=MEASURED_LAYERS, metavar="N", help="layers that are run")
    add_report_arguments(parser, svg=False)


def run(args: argparse.Namespace) -> int:
    out, report = Path(args.out), Report("synth", args)
    recipe, fmt = _synth_shapes.recipe(args.geometry, args.format)
    _check(args, out)
    raw = _synth_shapes.config_of(recipe, args.layers, tiny=args.tiny)
    words = TINY_WORDS if args.tiny else WORDS
    eos = _synth_text.eos_ids(words)
    raw |= {"eos_token_id": eos[0], "bos_token_id": eos[1]}
    coding = coding_of(recipe, fmt)
    if coding.quantization:
        raw["quantization_config"] = coding.quantization
    if args.gguf:
        _synth_gguf.check(raw)
    family = find_family(raw["model_type"])
    config = family.read_config(raw)
    norm_one = 1.0 - family.norm_offset if isinstance(family, DecoderFamily) else 1.0
    sizes = amplitudes(config, coding)
    wishes = weights.Calibration() if args.drift is None else weights.Calibration(drift=args.drift)
    plan = weights.Plan(config, wishes, args.seed, sizes.written, norm_one, recipe.router)
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    walk = _synth_text.write_text_side(out, words, config.vocab_size, args.seed)
    made = Checkpoint(recipe, coding, plan, sizes)
    shards = made.shards(walk)
    _write(out, shards, raw, args, report)
    if args.gguf:
        file = _synth_gguf.gguf_file(made, walk, out, raw)
        _room_for(file.num_bytes, Path(args.gguf).absolute().parent)
        write_files([(Path(args.gguf), file)], _threads(args), _progress(file.num_bytes, report))
    took = time.perf_counter() - began
    total = sum(shard.num_bytes for shard in shards)
    row: dict[str, Any] = {"geometry": args.geometry, "format": fmt, "layers": config.num_layers}
    row |= {"tiny": args.tiny, "seed": args.seed, "path": str(out), "bytes": total}
    row |= {"seconds": round(took, 2), "gb_s": round(total / took / 1e9, 2), "drift": wishes.drift}
    report.line(f"{out}: {total / 1e9:.2f} GB in {took:.1f} s")
    if not args.no_measure:
        report.progress("running the first layers")
        lengths = (TINY_PROMPT, TINY_DECODED) if args.tiny else (PROMPT, DECODED)
        row |= _synth_measure.measure(out, recipe.router, args.measure_layers, *lengths)
        _show(report, row)
    return report.finish([row])


def _check(args: argparse.Namespace, out: Path) -> None:
    if args.layers is not None and args.layers < 1 or args.measure_layers < 1:
        raise ConfigError("A model has at least one layer.", hint="See --layers and --measure-layers.")
    if args.seed < 0:
        raise ConfigError("--seed is at least 0.", code="invalid_option")
    if args.drift is not None and not 0 <= args.drift < 1:
        raise ConfigError("--drift is a share from 0 to below 1.", code="invalid_option")
    if args.threads is not None and args.threads < 1:
        raise ConfigError("--threads is at least 1.", code="invalid_option")
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(
            f"{out} is there and not empty.", code="output_exists", hint="Name a new folder with --out."
        )


def _write(
    out: Path, shards: Sequence[Shard], raw: dict[str, Any], args: argparse.Namespace, report: Report
) -> None:
    """Write shards, then the index, and config.json last: what is cut short is no checkpoint."""
    total = sum(shard.num_bytes for shard in shards)
    _room_for(total, out)
    weight_map = write_shards(out, list(shards), _threads(args), _progress(total, report))
    report.progress("")
    write_index(out, weight_map, total)
    (out / "config.json").write_text(json.dumps(raw, indent=1), "utf-8")


def _threads(args: argparse.Namespace) -> int:
    return int(args.threads or os.cpu_count() or 1)


def _room_for(num_bytes: int, where: Path) -> None:
    free = shutil.disk_usage(where).free
    if num_bytes + _SPARE > free:
        raise CapacityError(
            f"The checkpoint takes {format_bytes(num_bytes)}, {where} has {format_bytes(free)} free.",
            hint="Give fewer --layers, a narrower --format, or another place.",
        )


def _progress(total: int, report: Report) -> Callable[[int], None]:
    began = time.perf_counter()

    def note(done: int) -> None:
        rate = done / max(time.perf_counter() - began, 1e-3) / 1e9
        report.progress(f"{100 * done // total:3d} %  {done / 1e9:.1f} GB, {rate:.1f} GB/s")

    return note


def _show(report: Report, row: dict[str, Any]) -> None:
    lru = {k.rsplit("_", 1)[1]: v for k, v in row.items() if k.startswith("lru_misses_")}
    lines = [[f"LRU misses with slots for {share} % of the pool", _percent(v)] for share, v in lru.items()]
    lines += [
        ["experts shared with the token before", _percent(row["step_overlap"])],
        ["next layer's experts known a layer early", _percent(row["prediction_recall"])],
        ["greedy tokens that follow the walk", _percent(row["follows_walk"])],
        ["the right token's lead, logits", str(row["lead_logits"])],
    ]
    report.table([f"measured on {row['measured_layers']} layers", ""], lines)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
