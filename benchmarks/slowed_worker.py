"""How well the CPU's workers share a layer when one of them is slow, and what sharing costs.

    python -m benchmarks.slowed_worker [--threads 2] [--slow 3] [--busy] [--seconds 4] [--json]

A layer of eight experts is computed in turns: all workers alike, one of them slowed by the fault hook, and
with --busy one that shares its core with a process that never sleeps. The ideal split gives each worker
work in proportion to its speed: n workers of which one has speed 1/s need n / (n - 1 + 1/s) times as long
as n alike. Medians of turns; the best turn is shown too, since other processes only ever add time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

from freetoken.bench import _native
from freetoken.native.topology import default_threads, worker_cpus

EXPERTS, TURNS = 8, 15


def spin(cpu: int) -> None:
    """Use a core up."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cpu})
    while True:
        pass


def in_turns(
    cases: dict[str, Callable[[], None]], call: Callable[[], None], seconds: float
) -> dict[str, Any]:
    """Seconds of a call in each case, one number a turn; a case sets itself up."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(TURNS):
        for name, prepare in cases.items():
            prepare()
            call()
            found[name].append(_native.window(call, seconds / TURNS / len(cases)))
    return found


def measure(threads: int, slow: float, busy: bool, seconds: float) -> list[dict[str, Any]]:
    lib = _native.require_library()
    lib.start(threads)
    made = _native.make("bf16", 2048, 768, 256 << 20)
    layer = _native.Caller(made, lib.tier, EXPERTS, 1)
    last = threads - 1
    cases: dict[str, Callable[[], None]] = {
        "alike": lambda: lib.fault(last, slow=1.0),
        "slowed": lambda: lib.fault(last, slow=slow),
    }
    neighbour: list[multiprocessing.Process] = []
    if busy:
        cpu = worker_cpus()[-1]

        def start() -> None:
            lib.fault(last, slow=1.0)
            neighbour.append(multiprocessing.Process(target=spin, args=(cpu,), daemon=True))
            neighbour[-1].start()
            time.sleep(0.05)

        def stop() -> None:
            while neighbour:
                neighbour.pop().kill()
            lib.fault(last, slow=1.0)

        cases = {"alike": stop, "slowed": lambda: lib.fault(last, slow=slow), "busy": start}
    found = in_turns(cases, layer, seconds)
    lib.fault(last, slow=1.0)
    while neighbour:
        neighbour.pop().kill()
    layer.close()
    return [row(threads, name, found, 2.0 if name == "busy" else slow) for name in cases]


def row(threads: int, name: str, found: dict[str, list[float]], slow: float) -> dict[str, Any]:
    """One case beside the ideal split of the same turns."""
    factor = 1.0 if name == "alike" else threads / (threads - 1 + 1 / slow)
    pairs = list(zip(found[name], found["alike"], strict=True))
    return {
        "case": name,
        "threads": threads,
        "us": round(1e6 * statistics.median(found[name]), 1),
        "ideal_us": round(1e6 * factor * statistics.median(found["alike"]), 1),
        "over_ideal": round(statistics.median(a / (factor * b) for a, b in pairs) - 1, 3),
        "best_over_ideal": round(min(found[name]) / (factor * min(found["alike"])) - 1, 3),
    }


def dispatch(threads: int) -> list[dict[str, Any]]:
    """What waking everybody costs, and a whole layer of experts so small that little else is left."""
    lib = _native.require_library()
    lib.start(threads)
    made = _native.make("bf16", 64, 64, 0)
    tiny = _native.Caller(made, lib.tier, EXPERTS, 1)
    rows = []
    for name, call, count in (("wake", lambda: lib.ping(200), 200), ("tiny layer", tiny, 1)):
        times = [_native.window(call, 0.05) / count for _ in range(TURNS)]
        us, best = (round(1e6 * t, 2) for t in (statistics.median(times), min(times)))
        rows.append({"case": name, "threads": threads, "us": us, "best_us": best})
    tiny.close()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="slowed_worker", description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--slow", type=float, default=3.0)
    parser.add_argument("--busy", action="store_true", help="also beside a process that takes one core")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    if args.threads < 2:
        parser.error("one thread has nobody to share with")
    rows = measure(args.threads, args.slow, args.busy, args.seconds) + dispatch(args.threads)
    for r in rows:
        print("  ".join(f"{k} {v}" for k, v in r.items()))
    if args.json:
        machine = {"cpu": platform.processor() or platform.machine(), "system": platform.system()}
        day = datetime.date.today().isoformat()
        print(json.dumps({"bench": "slowed_worker", "machine": machine, "date": day, "rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
