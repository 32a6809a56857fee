"""All GPU figures in one go, within minutes: a checkpoint is written, served and measured.

    python benchmarks/judge_gpu.py --dir FOLDER [--layers 20] [--minutes 8] [--phases http suffix decode ...]

    synth    `ft bench synth`: qwen3-30b-a3b, 20 layers, bf16 (26 GB), into FOLDER unless it is there
    http     two servers, expert slots for 37 % and 11 % of the pool, all else by default: 1 and 4 streams of
             512 + 512 tokens, prompts of 8k and 16k, in turns
    suffix   1, 16, 64, 256 new tokens behind a cached prompt of 16k, slots for 37 %
    fused    in process, 1 and 4 streams with all experts resident: a step without misses
    decode   in process, hybrid at 37 % and 11 %, 1 and 4 streams, beside the memories' limit
    prefill  in process, each idea of prompts taken away alone
    elastic  4 GiB taken away and given back while four streams run

Each phase prints a JSON line. One that fails says so in its line and the others go on; what the remaining
time can't hold is left out and named. Needs an NVIDIA GPU; with --tiny it runs anywhere with --device sim or
cpu, to try it. The packages it lacks are named first.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent
NAMES = ("http", "suffix", "fused", "decode", "prefill", "elastic")
NEEDED = (
    "torch",
    "numpy",
    "psutil",
    "tokenizers",
    "jinja2",
    "msgspec",
    "starlette",
    "uvicorn",
    "prometheus_client",
)
SHARES = ("0.37", "0.11")
PEER_REPEATS = ("5", "2")
STOP_S = 40.0


@dataclass(frozen=True)
class Phase:
    """A command whose last line of stdout is its object; `seconds`: what it is expected to take."""

    name: str
    seconds: float
    words: list[str]


def ft(*words: str) -> list[str]:
    return [sys.executable, "-m", "freetoken", "bench", *words, "--json"]


def phases(args: argparse.Namespace) -> list[Phase]:
    model = str(args.dir)
    tiny, on = args.tiny, ["--model", model, "--device", args.device]
    sizes = ["--prompt", "48", "--tokens", "32"] if tiny else ["--prompt", "512", "--tokens", "512"]
    repeats = ["--repeats", args.repeats or PEER_REPEATS[0], "--warm-up", "1" if tiny else PEER_REPEATS[1]]
    few = ["--repeats", "2" if tiny else "3", "--warm-up", "1"]
    long = ["128", "256"] if tiny else ["8192", "16384"]
    shares = ["0.75", "0.5"] if tiny else list(SHARES)
    at_first = ["--backend", "hybrid", "--share", shares[0]]
    streams = ["--streams", "1", "4"]
    found = [
        Phase("http", 230, peers(args, shares, [*sizes, *streams, "--prefill", *long, *repeats])),
        Phase("suffix", 45, ft("suffix", *on, *at_first, "--prefix", long[1], *repeats)),
        Phase("fused", 30, ft("decode", *on, "--backend", "fused", *streams, *few)),
        Phase("decode", 60, ft("decode", *on, "--backend", "hybrid", "--share", *shares, *streams, *few)),
        Phase("prefill", 80, ft("prefill", *on, *at_first, "--ablate", *few, "--prompt", *long)),
        Phase("elastic", 40, ft("elastic", *on, *at_first, *["--move", "1MiB"] * tiny)),
    ]
    return [phase for name in args.phases for phase in found if phase.name == name]


def peers(args: argparse.Namespace, shares: list[str], words: list[str]) -> list[str]:
    """Two servers of ours that differ in slots, compared as if they were strangers."""
    context = "1024" if args.tiny else "20480"
    base = f"{sys.executable} -m freetoken serve --model {args.dir} --device {args.device}"
    base += f" --max-model-len {context} --port {{port}}"
    out = [sys.executable, "-m", "benchmarks.peers", "--walk", str(args.dir), "--json", *words]
    for share in shares:
        out += [
            "--server",
            f"{share}={base}" + ("" if args.device == "cpu" else f" --moe-cache-rate {share}"),
        ]
    return out


def synth(args: argparse.Namespace) -> Phase:
    words = ["--out", str(args.dir), "--geometry", "qwen3-30b-a3b", "--format", args.format, "--seed", "1"]
    words += ["--layers", str(args.layers), *(["--tiny"] if args.tiny else [])]
    return Phase("synth", 90, ft("synth", *words))


def run(phase: Phase, left_s: float, say: Callable[[dict[str, Any]], None]) -> bool:
    """Run one phase and print its line; False if it failed."""
    began = time.monotonic()
    paths = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    line: dict[str, Any] = {"phase": phase.name}
    process = subprocess.Popen(
        phase.words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=REPO, text=True
    )
    try:
        out, told = process.communicate(timeout=left_s)
        if process.returncode:
            line |= {"error": f"exit code {process.returncode}", "tail": told.splitlines()[-8:]}
    except subprocess.TimeoutExpired:
        line["error"] = f"did not end within {left_s:.0f} s"
        out = stop(process)
    try:
        if out.strip():
            line |= json.loads(out.strip().splitlines()[-1])
    except ValueError as error:
        line["error"] = f"its last line is no object: {error}"
    line["seconds"] = round(time.monotonic() - began, 1)
    say(line)
    return "error" not in line


def stop(process: subprocess.Popen[str]) -> str:
    """Ask first: a phase that started servers stops them on its way out, and may tell what it has."""
    process.terminate()
    try:
        return process.communicate(timeout=STOP_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="where the checkpoint is, or shall be")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--format", default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--repeats", help="rounds of the HTTP and suffix phases")
    parser.add_argument("--phases", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the script")
    args = parser.parse_args()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not list((REPO / "freetoken" / "native").glob("libfreetoken.*")):
        missing.append("the native library (python setup.py build_ext --inplace)")
    if missing:
        print(f"missing: {', '.join(missing)}", file=sys.stderr)
    end = time.monotonic() + 60 * args.minutes
    fine = True

    def say(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)

    if not (args.dir / "config.json").is_file():
        fine = run(synth(args), end - time.monotonic(), say)
    for phase in phases(args):
        left = end - time.monotonic()
        if left < (1 if args.tiny else phase.seconds / 2):
            say({"phase": phase.name, "error": f"left out: {left:.0f} s remain"})
            fine = False
            continue
        fine = run(phase, left, say) and fine
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
