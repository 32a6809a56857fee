"""What it costs a step that pages leave the device and come back: the caller's time, and the device's.

    python benchmarks/cold_pages.py [--device cuda] [--pages 1024] [--page-kib 640] [--json]

A pool of pages is put into the tier of host memory in one batch, and loaded in another. `caller_us` is the
time of the thread that asks, a page; `device_ms` what `compute` waits for the batch (wall time where the
device's memory is the host's). Medians of rounds; the first round, which takes memory, stands beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from freetoken.core import choices
from freetoken.core.interfaces import Device
from freetoken.core.options import Options
from freetoken.core.units import KIB
from freetoken.engine.cold import ColdTier
from freetoken.engine.states import StateMover

ROUNDS = 5


def timed(device: Device, action: Callable[[], None], pages: int) -> tuple[float, float]:
    """Microseconds of the caller a page, milliseconds of the device."""
    device.synchronize()
    before, start = device.compute.record(), time.perf_counter()
    action()
    seconds = time.perf_counter() - start
    after = device.compute.record()
    device.synchronize()
    return seconds / pages * 1e6, (after.time_s() - before.time_s()) * 1e3


def measure(device: Device, pages: int, page_bytes: int) -> dict[str, float]:
    kv = device.pool("kv", page_bytes, pages + 1, min_units=2, max_units=pages + 1)
    tier = ColdTier(device, kv, StateMover(device, kv, None, 0), 4 * pages * page_bytes, None)
    time.sleep(1.0)  # the thread that locks memory ahead
    out: dict[str, list[tuple[float, float]]] = {"put": [], "load": []}
    for number in range(ROUNDS + 1):
        keys = [(number * pages + page).to_bytes(16, "big") for page in range(pages)]

        def put(keys: list[bytes] = keys) -> None:
            for page, key in enumerate(keys, 1):
                tier.put_page(key, b"", page)
            tier.carry_out()

        def load(keys: list[bytes] = keys) -> None:
            for page, key in enumerate(keys, 1):
                tier.load_page(key, b"", page)
            tier.carry_out()

        out["put"].append(timed(device, put, pages))
        out["load"].append(timed(device, load, pages))
        time.sleep(0.5)
    result: dict[str, float] = {"locked_bytes": tier.snapshot()["cold_locked_bytes"]}
    for name, times in out.items():
        for index, unit in enumerate(("caller_us", "device_ms")):
            result[f"{name}_{unit}"] = statistics.median(t[index] for t in times[1:])
            result[f"first_{name}_{unit}"] = times[0][index]
    tier.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pages", type=int, default=1024)
    parser.add_argument("--page-kib", type=int, default=640)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    module = choices.load("freetoken.devices", args.device)
    device = module.create(Options(device=args.device))
    result = measure(device, args.pages, args.page_kib * KIB)
    device.close()
    if args.json:
        print(json.dumps({"device": args.device, "pages": args.pages, "page_kib": args.page_kib, **result}))
    else:
        for name, value in result.items():
            print(f"{name:24} {value:12.2f}")


if __name__ == "__main__":
    main()
