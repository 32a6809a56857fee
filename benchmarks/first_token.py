"""From the start of `ft serve`'s process to the first token over HTTP, from safetensors and from FTW.

    python -m benchmarks.first_token --dir FOLDER [--layers 20] [--starts 2] [--device cuda] [--json]

FOLDER gets a synthetic checkpoint (qwen3-30b-a3b, bf16, 20 layers: 26 GB) and its FTW form, unless they are
there (`model`, `model-ftw`); name a folder in memory or on a disk with room in the page cache. Before each
start all files are read once in parallel, so both sides find them in memory and `plain_gb_s` says what plain
reading of the same bytes reaches. The first start is a warm-up that fills the kernel cache; a start that
still had to compile says how many kernels. Every answer must go on as the checkpoint's walk does.

Ends stdout with one JSON object: bars, medians and every start with its parts, in seconds. `listening` is
the port, `ready` is /health, `first_token` the first piece of a streamed answer, all from the start of the
process; `parts` are /v1/stats' `start_s`. `--seconds` bounds the whole: what no longer fits is left out and
named, what fails is `error`, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.start import health
from freetoken.bench._processes import Started, started
from freetoken.bench._texts import Texts
from freetoken.core.errors import DeviceError, FreeTokenError

BARS = {"safetensors": 15.0, "ftw": 12.0}
"""Seconds to the first token of 26 GB in memory, kernels compiled before."""
BARS_FROM_BYTES = 20e9
PROMPT, TOKENS = 64, 8
POLL_S = 0.01
RESERVE_S = 20.0
"""What a start may still take, and stopping it."""


def ft(*words: str) -> list[str]:
    return [sys.executable, "-m", "freetoken", *words]


def made(words: list[str], out: Path) -> float:
    """Run a command that writes `out`, unless it is there; seconds, 0 if it was."""
    if (out / "config.json").is_file():
        return 0.0
    began = time.perf_counter()
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise DeviceError(f"{' '.join(words[2:5])} failed: {' / '.join(done.stdout.splitlines()[-5:])}")
    return round(time.perf_counter() - began, 2)


def weights(model: Path) -> list[Path]:
    return sorted((*model.glob("*.safetensors"), *model.glob("*.ftw")))


def kernels() -> int:
    """Compiled kernels in Triton's cache."""
    cache = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    return sum(1 for _ in cache.glob("*/*.cubin")) if cache.is_dir() else 0


def plain_rate(model: Path) -> float:
    """GB/s of reading all weights in parallel through the page cache, which has them afterwards."""
    from freetoken.bench.load import read_plain

    files, began = weights(model), time.perf_counter()
    read_plain(files, cached=True)
    return sum(f.stat().st_size for f in files) / (time.perf_counter() - began) / 1e9


def ready(one: Started, began: float, row: dict[str, Any], patience_s: float) -> None:
    """Wait for /health; notes when the port first answered and every percentage it told."""
    port, percents = one.port, []
    while time.perf_counter() < began + patience_s and one.process.poll() is None:
        said = health(port)
        if said is not None:
            row.setdefault("listening_s", round(time.perf_counter() - began, 3))
            percents.append(int(said.get("percent", -1)))
            if said["status"] == "ok":
                row["ready_s"] = round(time.perf_counter() - began, 3)
                row["percent_told"] = list(dict.fromkeys(percents))[:: max(1, len(set(percents)) // 12)]
                return
        time.sleep(POLL_S)
    tail = one.log.read_text("utf-8", "replace").splitlines()[-5:]
    raise DeviceError(f"the server is not ready after {patience_s:.0f} s: {' / '.join(tail)}")


def start(model: Path, args: argparse.Namespace, turn: int, patience_s: float) -> dict[str, Any]:
    """One start: its seconds, what it said, and whether the answer was the right one."""
    row: dict[str, Any] = {"container": weights(model)[0].suffix[1:]}
    row["plain_gb_s"] = round(plain_rate(model), 2)
    compiled = kernels()
    command = ft("serve", "--model", str(model), "--device", args.device, "--port", "{port}", *args.serve)
    prompt, follow = Texts(str(model), turn).take_with_answer(PROMPT, TOKENS)
    began = time.perf_counter()
    with started(command, row["container"]) as one:
        ready(one, began, row, patience_s)
        one.server.find_model()
        answer = one.server.complete(prompt, TOKENS)
        row["first_token_s"] = round(answer.times_s[0] - began, 3)
        row["answer_s"] = round(answer.ttft_s, 3)
        said = answer.text.split()
        row["right"] = sum(a == b for a, b in zip(said, follow or said, strict=False)) / max(len(said), 1)
        stats = one.server.get("/v1/stats")
        row["parts"] = stats["start_s"]
        row["slots"] = stats["memory"]["slots"]
    row["kernels_compiled"] = kernels() - compiled
    return row


def summary(rows: list[dict[str, Any]], num_bytes: int) -> dict[str, Any]:
    """Medians for each container over the starts that compiled nothing, beside the bars of a large model."""
    out: dict[str, Any] = {}
    for container, bar in BARS.items():
        mine = [
            r for r in rows if r["container"] == container and not r["kernels_compiled"] and not r["warm_up"]
        ]
        if not mine:
            continue
        seconds = statistics.median(r["first_token_s"] for r in mine)
        out[container] = {"first_token_s": seconds, "starts": len(mine)}
        if num_bytes >= BARS_FROM_BYTES:
            out[container] |= {"bar_s": bar, "met": seconds <= bar}
    return out


def measure(args: argparse.Namespace, end: float, body: dict[str, Any]) -> None:
    """Write what is missing, then start after start; `body` gets what was found, also if one fails."""
    model, ftw = args.model or args.dir / "model", args.dir / "model-ftw"
    args.dir.mkdir(parents=True, exist_ok=True)
    words = ["--geometry", "qwen3-30b-a3b", "--format", "bf16", "--no-measure", "--layers", str(args.layers)]
    synth = ft("bench", "synth", "--out", str(model), *words, *(["--tiny"] if args.tiny else []))
    body["write_s"] = made(synth, model)
    body["convert_s"] = made(ft("checkpoint", "--model", str(model), "--out", str(ftw)), ftw)
    body["bytes"] = sum(f.stat().st_size for f in weights(ftw))
    order = [ftw, *[model, ftw] * args.starts]
    with tempfile.TemporaryDirectory() as home:
        os.environ["FREETOKEN_HOME"] = home  # no settings of the user's, no heat of an earlier start
        for turn, path in enumerate(order):
            left = end - time.perf_counter()
            if left < RESERVE_S:
                body["left_out"] = [p.name for p in order[turn:]]
                return
            body["starts"].append({**start(path, args, turn, left), "warm_up": not turn})
            if not args.json:
                print(body["starts"][-1], file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--dir", type=Path, required=True, help="where the checkpoints are, or shall be")
    add("--model", type=Path, help="a checkpoint of ft bench synth that is there (default: DIR/model)")
    add("--layers", type=int, default=20)
    add("--starts", type=int, default=1, help="of each container, after the warm-up")
    add("--device", default="cuda")
    add("--seconds", type=float, default=100.0, help="for everything")
    add("--tiny", action="store_true", help="a small model, to try the script")
    add("--serve", nargs=argparse.REMAINDER, default=[], help="more words for ft serve; must come last")
    add("--json", action="store_true", help="the object alone, nothing on stderr")
    args = parser.parse_args()
    began = time.perf_counter()
    body: dict[str, Any] = {"bench": "first_token", "device": args.device, "starts": []}
    try:
        measure(args, began + args.seconds, body)
    except (FreeTokenError, OSError, KeyError) as error:
        body["error"] = f"{type(error).__name__}: {error}"
    rows = body["starts"]
    body |= {"machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"}
    body |= {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}
    body |= {**summary(rows, body.get("bytes", 0)), "seconds": round(time.perf_counter() - began, 1)}
    print(json.dumps(body), flush=True)
    fine = "error" not in body and "left_out" not in body and all(r["right"] == 1.0 for r in rows)
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
