"""What very many tensors cost on their way into the bank: seconds of CPU time for 1,000 of them, by part.

    ft bench synth --out DIR --geometry qwen3.6-35b-a3b --format nvfp4 --layers 4 --no-measure
    python -m benchmarks.expert_tensors --model DIR [--experts 400] [--threads 1 16]

Reads headers, checks them, makes the jobs, and brings some experts into a bank (twice: the second time its
memory is there), one after the other. `native` is inside the library, `python` is the rest, torch's
operations included: what takes the interpreter's lock again and again. Then threads bring all experts.
Ends stdout with one JSON object. Files should lie in memory.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from freetoken.engine.banks import make_bank
from freetoken.engine.survey import expert_formats, find_family
from freetoken.experts.loading import Deferred, Job, Loading
from freetoken.native.library import Library
from freetoken.weights.files import Arena
from freetoken.weights.load import Checkpoint, open_checkpoint

NATIVE = ("read_spans", "lay", "unblock", "pack_plain")


def timed(spent: list[float]) -> None:
    """Have the library's loading calls note their CPU time."""

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **named)
            finally:
                spent[0] += time.thread_time() - began

        return run

    for name in NATIVE:
        if name in vars(Library):
            setattr(Library, name, wrap(vars(Library)[name]))


def cpu(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    return call(), time.process_time() - began


def bring(checkpoint: Checkpoint, jobs: Sequence[Job]) -> None:
    arena = Arena()
    for job in jobs:
        with checkpoint.files.reading(arena):
            job.run()
        arena.reset()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--experts", type=int, default=400, help="that are brought one after the other")
    parser.add_argument("--threads", type=int, nargs="*", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    spent = [0.0]
    timed(spent)
    checkpoint, headers = cpu(lambda: open_checkpoint(args.model))
    family = find_family(checkpoint.model_type)
    config = family.read_config(checkpoint.config)
    _, checks = cpu(lambda: family.check(config, checkpoint.source))
    bank = make_bank(config, expert_formats(family, config, checkpoint), None)
    sink = Deferred(bank)
    _, jobs = cpu(lambda: family.load_experts(config, checkpoint.source, sink))
    total = sum(name.count(".experts.") for header in _headers(args.model) for name in header)
    some = sink.jobs[: args.experts]
    bring(checkpoint, some)
    spent[0] = 0.0
    _, took = cpu(lambda: bring(checkpoint, some))
    each = total / len(sink.jobs) * len(some) / 1000
    row: dict[str, Any] = {"bench": "expert_tensors", "tensors": total, "experts": len(sink.jobs)}
    row |= {"headers": headers * 1000 / total, "checks": checks * 1000 / total, "jobs": jobs * 1000 / total}
    row |= {"native": spent[0] / each, "python": (took - spent[0]) / each}
    row = {key: round(value, 5) if isinstance(value, float) else value for key, value in row.items()}
    for threads in args.threads:
        loading = Loading(bank, sink.jobs, checkpoint.files)
        began, used = time.perf_counter(), time.process_time()
        loading.start(threads)
        loading.wait()
        row[f"threads_{threads}_s"] = round(time.perf_counter() - began, 2)
        row[f"threads_{threads}_cpu_s"] = round(time.process_time() - used, 2)
    print(json.dumps(row))
    return 0


def _headers(model: Path) -> list[dict[str, Any]]:
    found = []
    for path in model.glob("*.safetensors"):
        with path.open("rb") as file:
            found.append(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
    return found


if __name__ == "__main__":
    raise SystemExit(main())
