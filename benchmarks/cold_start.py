"""What preparing a GPU's kernels takes at a first start: one by one, and beside each other.

    python -m benchmarks.cold_start --model DIR [--workers 0 8] [--helpers 4] [--cores 8] [--json]

For each number of workers (0: each kernel when it is first launched) a process of its own loads the model and
makes itself ready, with an empty kernel cache, then once more with what that one left (`warm`). `--cores` is
how many CPUs the process may use, `--helpers` how many processes may help it (default: as `ft serve` does).
`ahead_s` is the rehearsal, `self_test_s` what comes behind it, `before_s` loading, where the first kernel is
compiled too; `late` kernels were compiled although there had been a rehearsal, `cpu_s` counts all processes,
`grew_mb` is the highest memory above that before, `child_mb` the highest of another process. Ends stdout with
one JSON object; exit code 1 if a start failed or a rehearsal left kernels out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.first_token import kernels
from freetoken.bench._report import Report
from freetoken.core.options import Options


def cpu_s() -> float:
    """CPU seconds of this process and of all that it has waited for."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, kinds))


def peak_mb(whose: int = resource.RUSAGE_SELF) -> float:
    return resource.getrusage(whose).ru_maxrss / 1024


def one(args: argparse.Namespace, workers: int) -> dict[str, Any]:
    """Load the model in this process and make it ready."""
    if args.cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    from freetoken.engine.build import build
    from freetoken.engine.engine import SELF_TEST_PROMPT
    from freetoken.engine.rehearsal import prepare_kernels

    began = time.perf_counter()
    options = Options(
        model=args.model, device=args.device, moe_backend=args.backend, moe_cache_rate=args.share
    )
    built = build(options)
    row: dict[str, Any] = {"workers": workers, "cores": len(os.sched_getaffinity(0))}
    row["before_s"] = round(time.perf_counter() - began, 2)
    used, memory = cpu_s(), peak_mb()
    began = time.perf_counter()
    if workers and built.device.compiles:
        engine = built.engine
        how = {"workers": workers, "helpers": args.helpers}
        done = prepare_kernels(engine.runner, engine.scheduler, SELF_TEST_PROMPT, **how)
        row["ahead_s"] = round(time.perf_counter() - began, 2)
        if done is not None:
            row |= {"asked": done.asked, "compiled": done.compiled, "failed": done.failed}
            row["helped"] = done.helped
    began, there = time.perf_counter(), kernels()
    built.engine.self_test(ahead=False)
    row["self_test_s"] = round(time.perf_counter() - began, 2)
    row |= {"late": kernels() - there if workers else 0, "kernels": kernels()}
    row |= {"cpu_s": round(cpu_s() - used, 1), "grew_mb": round(peak_mb() - memory)}
    row["child_mb"] = round(peak_mb(resource.RUSAGE_CHILDREN))
    built.close()
    return row


def start(args: argparse.Namespace, workers: int, cache: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.cold_start", "--one", str(workers), "--model", args.model]
    command += ["--device", args.device, "--cores", str(args.cores), "--share", str(args.share)]
    command += ["--backend", args.backend]
    command += [] if args.helpers is None else ["--helpers", str(args.helpers)]
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return {"workers": workers, "error": done.stderr.strip().splitlines()[-1]}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--model", required=True)
    add("--device", default="cuda")
    add("--backend", default="hybrid")
    add("--share", type=float, default=0.37)
    add("--workers", type=int, nargs="+", default=[0, 8])
    add("--helpers", type=int, help="processes that may help (default: one for every other worker)")
    add("--cores", type=int, default=0, help="CPUs of each process (default: all)")
    add("--json", action="store_true")
    add("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(*args.workers, args.cores, args.helpers or 0, 0) < 0:
        parser.error("--workers, --helpers and --cores are at least 0")
    if args.one is not None:
        print(json.dumps(one(args, args.one)))
        return 0
    report, rows = Report("cold_start", args), []
    for workers in args.workers:
        with tempfile.TemporaryDirectory() as cache:
            for warm in (False, True):
                rows.append(start(args, workers, cache) | {"warm": warm})
                report.line(str(rows[-1]))
    report.finish(rows)
    return int(any("error" in row or row["late"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
