"""`ft bench load`: how fast weights reach their place, beside plain reading of the same files.

Plain reading is parallel and goes into memory that is there already, or (`fresh`) into as much new memory as
a model takes, which some machines are slow to give. Loading fills a fresh bank, checks checksums and, for
safetensors, cuts tiles. All sides of a row read the disk (`direct`), or all the page cache (`warm`).
Without a model a random one is written, as safetensors and as FTW.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from freetoken.bench._report import Report, add_report_arguments
from freetoken.core.errors import ConfigError
from freetoken.core.units import GIB, MIB, align_up, format_bytes
from freetoken.devices.cpu import CpuDevice
from freetoken.engine.banks import Filling, make_bank
from freetoken.engine.convert import Wish, convert
from freetoken.engine.survey import expert_formats, find_family
from freetoken.experts.loading import THREADS
from freetoken.weights.files import ALIGN, Files, aligned
from freetoken.weights.load import open_checkpoint
from freetoken.weights.read_ahead import ReadAhead, natural

HELP = "speed of loading a model, from FTW and safetensors, beside plain reading of its files"
MODES = ("direct", "warm")
BLOCK = 8 * MIB
HIDDEN, WIDTH, EXPERTS = 2048, 768, 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="DIR", help="checkpoints (default: a random one, twice)")
    parser.add_argument("--size", type=float, default=2.0, metavar="GIB", help="of the random one")
    parser.add_argument("--mode", nargs="+", default=["direct"], choices=MODES, help="what both sides read")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="turns of each; medians count")
    parser.add_argument("--folder", metavar="DIR", help="where to write the random one")
    add_report_arguments(parser, svg=False)


def run(args: argparse.Namespace) -> int:
    if args.repeat < 1 or not 0 < args.size <= 1 << 20:
        raise ConfigError("--repeat is at least 1, --size a number of GiB above 0.", code="invalid_option")
    if args.folder and not Path(args.folder).is_dir():
        raise ConfigError(
            f"There is no folder {args.folder}.",
            code="invalid_option",
            hint="--folder takes one that is there.",
        )
    report = Report("load", args)
    rows: list[dict[str, Any]] = []
    with _models(args, report) as models:
        for path in models:
            for mode in args.mode:
                report.progress(f"{path.name}, {mode}")
                rows.append(measure(path, mode, args.repeat))
    report.table(
        ["", "reads", "GB", "plain GB/s", "fresh", "load", "of plain", "of fresh", "CPU s/GB"],
        [
            [f"{r['model']} ({r['container']})", r["mode"], f"{r['bytes'] / 1e9:.2f}",
             f"{r['plain_gb_s']:.2f}", f"{r['fresh_gb_s']:.2f}", f"{r['load_gb_s']:.2f}",
             f"{r['ratio']:.2f}", f"{r['ratio_fresh']:.2f}", f"{r['load_cpu_s_per_gb']:.2f}"]
            for r in rows
        ],
    )  # fmt: skip
    return report.finish(rows)


@contextmanager
def _models(args: argparse.Namespace, report: Report) -> Iterator[list[Path]]:
    if args.models:
        yield [Path(m) for m in args.models]
        return
    with tempfile.TemporaryDirectory(dir=args.folder, ignore_cleanup_errors=True) as folder:
        original = Path(folder) / "random"
        report.progress("writing a random model")
        write_random(original, int(args.size * GIB))
        converted = Path(folder) / "random-ftw"
        convert(Wish(original, converted), lambda what, percent: report.progress(f"{what} FTW {percent} %"))
        yield [original, converted]
        shutil.rmtree(folder, ignore_errors=True)


def write_random(path: Path, num_bytes: int) -> None:
    """A qwen3_moe checkpoint in bfloat16 of about that size; its weights are one random block, repeated."""
    record = 3 * HIDDEN * WIDTH * 2
    layers = max(1, round((num_bytes - 0.3e9) / (EXPERTS * record + 25e6)))
    raw = {
        "model_type": "qwen3_moe", "vocab_size": 32000, "hidden_size": HIDDEN, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64, "moe_intermediate_size": WIDTH,
        "num_experts": EXPERTS, "num_experts_per_tok": 4, "hidden_act": "silu", "dtype": "bfloat16",
        "intermediate_size": WIDTH, "max_position_embeddings": 4096,
    }  # fmt: skip
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(raw))
    family = find_family("qwen3_moe")
    block = torch.randn(32000 * HIDDEN).bfloat16()
    index: dict[str, str] = {}
    for number, shapes in enumerate(_shards(family.read_config(raw))):
        file = f"model-{number:05d}.safetensors"
        # A copy each: the writer refuses tensors that share memory.
        tensors = {n: block[: torch.Size(s).numel()].clone().view(s) for n, s in shapes.items()}
        save_file(tensors, path / file)
        index |= dict.fromkeys(shapes, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def _shards(config: Any) -> Iterator[dict[str, tuple[int, ...]]]:
    """Names and shapes of the tensors, a file for what lies outside of layers and one for each layer."""
    from freetoken.models import _tensors

    shapes = _tensors.expected(config, lambda layer: _tensors.expert_shapes(config, False))
    yield {n: s for n, s in shapes.items() if ".layers." not in n}
    for layer in range(config.num_layers):
        yield {n: s for n, s in shapes.items() if n.startswith(_tensors.prefix(layer))}


def measure(path: Path, mode: str, repeat: int) -> dict[str, Any]:
    """Read and load in turns; rates in GB/s of the files' bytes."""
    files = sorted((*path.glob("*.safetensors"), *path.glob("*.ftw")))
    total = sum(f.stat().st_size for f in files)
    cached = mode == "warm"
    if cached:
        for file in files:
            _touch(file)
    runs = {
        "plain": lambda: read_plain(files, cached),
        "fresh": lambda: read_plain(files, cached, _room(total + len(files) * BLOCK)),
        "load": lambda: load(path, cached),
    }
    times: dict[str, list[float]] = {side: [] for side in runs}
    cpu: dict[str, list[float]] = {side: [] for side in runs}
    for turn in range(repeat):  # who comes first changes: some disks give more to who comes after a pause
        for side in list(runs)[:: -1 if turn % 2 else 1]:
            gc.collect()  # the bank of the turn before
            began, spent = time.perf_counter(), time.process_time()
            runs[side]()
            times[side].append(time.perf_counter() - began)
            cpu[side].append(time.process_time() - spent)

    def ratio_to(side: str) -> float:
        return statistics.median(p / q for p, q in zip(times[side], times["load"], strict=True))

    return {
        "model": path.name,
        "container": files[0].suffix[1:],
        "mode": mode,
        "bytes": total,
        "size": format_bytes(total),
        **{f"{side}_gb_s": total / statistics.median(times[side]) / 1e9 for side in runs},
        **{f"{side}_cpu_s_per_gb": statistics.median(cpu[side]) / total * 1e9 for side in runs},
        "ratio": ratio_to("plain"),
        "ratio_fresh": ratio_to("fresh"),
        "threads": THREADS,
    }


def _room(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes + ALIGN, dtype=torch.uint8)


def _touch(path: Path) -> None:
    with path.open("rb") as file:
        while file.read(BLOCK):
            pass


def read_plain(paths: list[Path], cached: bool, out: Tensor | None = None) -> None:
    """Every block of the files, by as many threads as loading has.

    out   uint8, where they go one behind the other; else into one buffer for each thread, again and again
    """
    files = Files(cached=cached)
    blocks = [(path, at) for path in paths for at in range(0, path.stat().st_size, BLOCK)]
    if out is None:
        buffers = [aligned(BLOCK).zero_() for _ in range(THREADS)]
    else:
        start = -out.data_ptr() % ALIGN
        buffers = [out[at : at + BLOCK] for at in range(start, start + len(blocks) * BLOCK, BLOCK)]

    def work(turn: int) -> None:
        for number, (path, at) in enumerate(blocks[turn::THREADS]):
            left = min(path.stat().st_size - at, BLOCK)
            place = buffers[turn if out is None else turn + number * THREADS]
            files.read_into(path, at, place[: align_up(left, ALIGN)], least=left)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    files.close()


def load(path: Path, cached: bool) -> None:
    """What a start does with weights: the dense ones in the order of layers, then the bank."""
    checkpoint = open_checkpoint(path, Files(cached=cached))
    family = find_family(checkpoint.model_type)
    config = family.read_config(checkpoint.config)
    family.check(config, checkpoint.source)
    source = ReadAhead(checkpoint.source, checkpoint.files)
    dense = sorted((n for n in source.names() if ".experts." not in n), key=natural)
    kept = [source.read_coded(name) if source.coding(name) else source.read(name) for name in dense]
    source.close()
    formats = expert_formats(family, config, checkpoint)
    if formats:
        filling = Filling(
            family, config, checkpoint, make_bank(config, formats, checkpoint.records), CpuDevice()
        )
        filling.start()
        filling.wait()
        filling.stop()  # what it does with a full bank would disturb the next turn
    del kept
