"""Decode and prefill speed on the CPU beside llama.cpp: the same weights, threads and run.

    python -m benchmarks.cpu_vs_llamacpp --llama FOLDER [--format bf16 q8_0] [--activations int8] [--json]

Both engines hold the same random qwen3_moe model (see `synthetic`). They take turns: a prompt, then some
tokens, and again; each turn's rates give one ratio, and the medians are printed. Logits of the first
prompt are compared, so that equal work is measured. llama.cpp has a thread of its own: it sets up AMX's tile
registers once a thread, and torch's products release them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_vs_llamacpp import gguf, llama
from benchmarks.cpu_vs_llamacpp.ours import Ours
from benchmarks.cpu_vs_llamacpp.synthetic import Geometry, Synthetic
from freetoken.core.options import CPU_ACTIVATIONS

Clock = Callable[[], float]


def turn(engine: Any, prompt: list[int], tokens: list[int], clock: Clock) -> tuple[float, float]:
    """(prefill, decode) in tokens per second."""
    engine.reset()
    began = clock()
    engine.decode(prompt)
    middle = clock()
    for token in tokens:
        engine.decode([token])
    end = clock()
    return len(prompt) / (middle - began), len(tokens) / max(end - middle, 1e-9)


def compare(
    mine: Ours, other: llama.Llama, there: Executor, prompt: list[int], vocab: int
) -> dict[str, float]:
    """How far the two engines' logits are apart after one prompt, in units of their spread."""
    turn(mine, prompt, [], time.perf_counter)
    there.submit(turn, other, prompt, [], time.perf_counter).result()
    theirs = torch.tensor(list(other.logits(vocab)))
    ours = mine.last.float()
    return {
        "logit_error": float((ours - theirs).abs().max() / theirs.std()),
        "same_argmax": float(ours.argmax() == theirs.argmax()),
    }


def measure(geometry: Geometry, fmt: str, args: argparse.Namespace) -> dict[str, Any]:
    source = Synthetic(geometry, fmt)
    clock = time.thread_time if args.cpu_time else time.perf_counter
    context = args.prompt + args.tokens + 64
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as there:
        path = Path(folder) / "model.gguf"
        gguf.write(source, path)
        other = there.submit(llama.Llama, llama.find(args.llama), path, context, args.threads).result()
        mine = Ours(source, context, args.threads, int8=args.activations == "int8")
        draw = random.Random(1)
        prompt = [draw.randrange(geometry.vocab) for _ in range(args.prompt)]
        row: dict[str, Any] = {
            "format": fmt,
            "activations": args.activations,
            "threads": args.threads,
            "llamacpp_kernels": other.kernels,
        }
        row |= compare(mine, other, there, prompt[:16], geometry.vocab)
        rates: list[tuple[tuple[float, float], tuple[float, float]]] = []
        for number in range(args.turns + 1):
            tokens = [draw.randrange(geometry.vocab) for _ in range(args.tokens)]
            pair = (
                turn(mine, prompt, tokens, clock),
                there.submit(turn, other, prompt, tokens, clock).result(),
            )
            if number:  # the first warms up
                rates.append(pair)
        if args.profile:
            row["profile_ms"] = {name: round(ms, 3) for name, ms in mine.profile(clock).items()}
    for at, phase in enumerate(("prefill", "decode")):
        ours, theirs = ([pair[who][at] for pair in rates] for who in (0, 1))
        row[f"{phase}_tok_s"] = statistics.median(ours)
        row[f"{phase}_llamacpp_tok_s"] = statistics.median(theirs)
        row[f"{phase}_ratio"] = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return row


def main() -> int:
    parser = argparse.ArgumentParser(prog="cpu_vs_llamacpp", description=__doc__.splitlines()[0])
    parser.add_argument("--llama", default="", help="folder with libllama; default: the installed llama_cpp")
    parser.add_argument("--format", nargs="+", default=["bf16", "q8_0", "q4_k"])
    parser.add_argument(
        "--activations",
        choices=CPU_ACTIVATIONS,
        default="16bit",
        help="ours; llama.cpp's are int8",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--layers", type=int, default=Geometry.layers)
    parser.add_argument("--experts", type=int, default=Geometry.experts)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="rates per second of CPU time, for a machine that others use; needs --threads 1",
    )
    parser.add_argument("--profile", action="store_true", help="our decode step by operation")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    if args.cpu_time and args.threads != 1:
        parser.error("--cpu-time counts one thread: add --threads 1")
    geometry = Geometry(layers=args.layers, experts=args.experts)
    rows = []
    for fmt in args.format:
        row = measure(geometry, fmt, args)
        rows.append(row)
        for phase in ("decode", "prefill"):
            ours, theirs, ratio = (row[phase + part] for part in ("_tok_s", "_llamacpp_tok_s", "_ratio"))
            print(f"{fmt:5} {phase:8} {ours:8.2f} tok/s, llama.cpp {theirs:8.2f}: {ratio:.2f}")
        if args.profile:
            shown = sorted(row["profile_ms"].items(), key=lambda item: -item[1])
            print("      a step in ms: " + ", ".join(f"{name} {ms:.2f}" for name, ms in shown))
        print(f"      logits differ by {row['logit_error']:.3f} of their spread")
    if args.json:
        machine = {"cpu": platform.processor() or platform.machine(), "system": platform.system()}
        day = datetime.date.today().isoformat()
        print(json.dumps({"bench": "cpu_vs_llamacpp", "machine": machine, "date": day, "rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
