"""What the engine does on a GPU, stepped in its own process: decode and prompts, without HTTP.

    python benchmarks/gpu_engine.py --model DIR --backend hybrid --share 0.37 [--threads 12] [--json]

Decodes one and four streams, then prompts of the given lengths, each once to warm and once measured.
`limit_tok_s` reads the missing bytes of the run at the link's and the host's rates together, beside the
step without misses if `--free-ms` gives it. A model with `walk.json` (ids of the cycle that greedy decoding
walks) has its tokens checked. `--device cpu` runs the same on the CPU, to try the script.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from freetoken.core.options import Options
from freetoken.core.request import Output, SamplingParams, Submit
from freetoken.engine.build import DEMO_MODEL, Built, build

WARM = 64


class Bench:
    """An engine stepped by hand; outputs by request."""

    def __init__(self, built: Built, walk: list[int], known: bool) -> None:
        """known: greedy decoding follows the walk, so answers can be checked."""
        self.built, self.engine, self.walk, self.known = built, built.engine, walk, known
        self.tokens: dict[str, list[int]] = {}
        self.engine._sink = self._take
        self._number = 0

    def _take(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.error is not None:
                raise output.error
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)

    def submit(self, length: int, tokens: int) -> tuple[str, list[int]]:
        """A piece of the walk no other request starts with; its name, and what should follow."""
        at = self._number * 1777 % max(1, len(self.walk) - length - tokens - 1)
        self._number += 1
        name = f"r{self._number}"
        self.tokens[name] = []
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self.engine.submit(Submit(name, np.array(self.walk[at : at + length], np.int32), params))
        return name, self.walk[at + length : at + length + tokens]

    def step(self) -> None:
        self.engine.read_inbox()
        if not self.engine.idle:
            self.engine.step()
        self.engine._hand_out()

    def until(self, names: list[str], count: int) -> None:
        while min(len(self.tokens[name]) for name in names) < count:
            self.step()

    def counters(self) -> dict[str, int]:
        """The experts' counters so far, all of them."""
        experts = self.engine.runner.experts
        if self.built.device.kernels:
            self.built.device.synchronize()
            experts.table.count(experts.stats)  # type: ignore[attr-defined]
        stats = experts.stats
        return {
            "requests": stats.requests,
            "hits": stats.hits,
            "link": stats.link_bytes,
            "host": stats.host_bytes,
        }


def decode(bench: Bench, streams: int, tokens: int) -> dict[str, Any]:
    """Streams of `tokens` each behind prompts of 64, after WARM tokens."""
    asked = [bench.submit(64, WARM + tokens) for _ in range(streams)]
    names = [name for name, _ in asked]
    bench.until(names, WARM)
    before, began, start = bench.counters(), time.perf_counter(), min(len(bench.tokens[n]) for n in names)
    bench.until(names, WARM + tokens)
    took, steps = time.perf_counter() - began, WARM + tokens - start
    used = {key: value - before[key] for key, value in bench.counters().items()}
    right = sum(a == b for name, follow in asked for a, b in zip(bench.tokens[name], follow, strict=True))
    return {
        "case": f"decode {streams}",
        "tok_s": round(streams * steps / took, 1),
        "step_ms": round(1e3 * took / steps, 3),
        "hit_rate": round(used["hits"] / max(1, used["requests"]), 3),
        "missing_mb_step": round((used["link"] + used["host"]) / steps / 1e6, 1),
        "right": round(right / (streams * (WARM + tokens)), 3) if bench.known else None,
    }


def prompt(bench: Bench, length: int) -> dict[str, Any]:
    name, _ = bench.submit(length, 1)
    began = time.perf_counter()
    bench.until([name], 1)
    took = time.perf_counter() - began
    return {"case": f"prompt {length}", "ms": round(1e3 * took, 1), "tok_s": round(length / took, 1)}


def open_engine(args: argparse.Namespace) -> tuple[Bench, float]:
    began = time.perf_counter()
    longest = max([1024, *args.prompts]) + 512
    wishes: dict[str, Any] = {"model": args.model, "device": args.device, "max_model_len": longest}
    if args.device != "cpu":
        wishes |= {"moe_backend": args.backend, "moe_cpu_threads": args.threads}
        wishes["moe_cache_rate"] = args.share if args.backend in ("hybrid", "offload") else None
    built = build(Options(**wishes))
    path = Path(args.model or DEMO_MODEL) / "walk.json"
    if path.exists():
        walk = json.loads(path.read_text())["ids"]
    else:
        rng = random.Random(0)
        walk = [rng.randrange(256, built.config.vocab_size // 2) for _ in range(4 * longest)]
    return Bench(built, walk, path.exists()), time.perf_counter() - began


def limit(bench: Bench, row: dict[str, Any], free_ms: float) -> float:
    """tok/s of one stream if link and host moved the missing bytes together and nothing else cost."""
    machine = bench.built.device.machine
    rate = machine.link_bw + machine.host_bw_beside_link
    return 1e3 / (free_ms + 1e9 * row["missing_mb_step"] / rate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="checkpoint folder (default: the demo model)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--backend", default="hybrid", choices=("hybrid", "offload", "fused"))
    parser.add_argument("--share", type=float, default=0.37, help="slots as a share of the pool")
    parser.add_argument("--threads", type=int, help="threads of the CPU branch")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, nargs="*", default=[8192])
    parser.add_argument(
        "--free-ms", type=float, default=0.0, help="a step without misses, from --backend fused"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    bench, seconds = open_engine(args)
    print(f"{args.backend} on {bench.built.device.machine.name}, loaded in {seconds:.1f} s", flush=True)
    rows = []
    for streams in (1, 4):
        rows.append(decode(bench, streams, args.tokens))
        if streams == 1:
            rows[-1]["limit_tok_s"] = round(limit(bench, rows[-1], args.free_ms), 1) if args.free_ms else None
        print(rows[-1], flush=True)
    for length in args.prompts:
        prompt(bench, length)
        rows.append(prompt(bench, length))
        print(rows[-1], flush=True)
    bench.engine.close()
    if args.json:
        facts = {
            "bench": "gpu_engine",
            "machine": bench.built.device.machine.name,
            "torch": torch.__version__,
        }
        facts |= {"date": datetime.date.today().isoformat(), "backend": args.backend, "share": args.share}
        print(json.dumps(facts | {"threads": args.threads, "rows": rows}))


if __name__ == "__main__":
    main()
