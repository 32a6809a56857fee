"""What drawing a step's tokens costs on a GPU: the launches of `kernels.sample` beside torch's operations.

    python benchmarks/sampling.py [--rows 1 4 32] [--vocab 151936] [--rounds 200] [--seconds 15] [--json]

Per case, medians in microseconds: `device` from the first operation of a step to the end of its last, on the
GPU's clock and behind a filler, so that the host is ahead of it; `host` what enqueuing takes the caller. Both
makers in turns, on the same logits. `agree`: the share of rows whose token is the same.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from freetoken.kernels.sample import Choice, Slip, reference, triton

CASES: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_k 20, top_p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "top_k 64": {"temperature": 0.7, "top_k": 64},
    "top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
}
MAKERS: dict[str, ModuleType] = {"ours": triton, "torch": reference}
CYCLES_OF_US = 2000
"""Of the fastest clock: the filler lasts until everything behind it is enqueued."""


class Step:
    """One case: the logits of `rows`, and how they are drawn."""

    def __init__(self, rows: int, vocab: int, how: dict[str, Any]) -> None:
        self.logits = 4 * torch.randn(rows, vocab, device="cuda")
        self.choices = [Choice(row, row, (row + 0.5) / rows, **how) for row in range(rows)]
        self.last = torch.zeros(rows, dtype=torch.int64, device="cuda")
        self.slip = Slip.cut(Slip.memory(rows, locked=True), rows)

    def ids(self, maker: ModuleType) -> Tensor:
        maker.sample(self.logits, self.choices, self.last, self.slip)
        torch.cuda.synchronize()
        return self.slip.told[0].clone()

    def time(self, maker: ModuleType, cycles: int) -> tuple[float, float]:
        """Microseconds on the device, behind a filler of so many cycles, and on the host."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        begin.record()
        started = time.perf_counter()
        maker.sample(self.logits, self.choices, self.last, self.slip)
        host = time.perf_counter() - started
        end.record()
        end.synchronize()
        return 1000 * begin.elapsed_time(end), 1e6 * host


def measure(step: Step, rounds: int, deadline: float) -> dict[str, float]:
    agree = float((step.ids(triton) == step.ids(reference)).double().mean())
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in MAKERS}
    warm = {name: [step.time(maker, CYCLES_OF_US)[1] for _ in range(5)] for name, maker in MAKERS.items()}
    cycles = {name: int(CYCLES_OF_US * (200 + 2 * min(values))) for name, values in warm.items()}
    for number in range(rounds):
        for name, maker in MAKERS.items():
            times[name].append(step.time(maker, cycles[name]))
        if number >= 5 and time.monotonic() > deadline:
            break
    found = {"agree": agree, "rounds": float(len(times["ours"]))}
    for name, all_of in times.items():
        for what, values in zip(("device", "host"), zip(*all_of, strict=True), strict=True):
            found[f"{name}_{what}_us"] = round(statistics.median(values), 1)
    found["device_ratio"] = round(found["torch_device_us"] / found["ours_device_us"], 2)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 32])
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=15, help="bounds all cases together")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    if not triton.supports("cuda"):
        print("needs a CUDA device of compute capability 8.0 or more")
        return 1
    rows, share = [], args.seconds / (len(args.rows) * len(CASES))
    with torch.inference_mode():
        for count in args.rows:
            for name, how in CASES.items():
                got = measure(Step(count, args.vocab, how), args.rounds, time.monotonic() + share)
                rows.append({"case": name, "rows": count, **got})
                print(
                    f"{count:3} rows  {name:20} device {got['ours_device_us']:7.1f} us, torch "
                    f"{got['torch_device_us']:8.1f} ({got['device_ratio']:.1f}x)  "
                    f"host {got['ours_host_us']:6.1f}, torch {got['torch_host_us']:8.1f}  "
                    f"agree {got['agree']:.3f}",
                    flush=True,
                )
    if args.json:
        machine, today = torch.cuda.get_device_name(), datetime.date.today().isoformat()
        print(json.dumps({"bench": "sampling", "machine": machine, "date": today, "rows": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
