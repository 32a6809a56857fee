"""What one layer-step of experts costs on a GPU, kernel by kernel, at Qwen3-30B-A3B's geometry or another.

    python benchmarks/expert_step.py [--rows 1 4 16] [--format bf16] [--json]
    python benchmarks/expert_step.py --format mxfp4 --hidden 2880 --size 2880 --top-k 4     gpt-oss-120b's

Four layers of 128 experts in some weight format, all resident; then the same with none resident, read from
host memory. Times are medians of replayed graphs, per layer; `gb_s` is the experts' bytes over the time of
the tiles alone, `step_us` look-up, tiles and sum one after the other.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from freetoken.core import choices
from freetoken.core.codes import Coded
from freetoken.core.model_config import Activation
from freetoken.core.options import Options
from freetoken.devices import cuda
from freetoken.experts.gpu_support import device_record
from freetoken.experts.record import layout
from freetoken.kernels import expert_step as step
from freetoken.kernels.expert_step import Call, Place, Table

LAYERS, EXPERTS, ROUNDS = 4, 128, 5


def table(num_tiles: int, *, resident: bool) -> Table:
    total = LAYERS * EXPERTS
    made = Table.empty([num_tiles] * LAYERS, EXPERTS, total, "cuda")
    if resident:
        made.slot_of.copy_(torch.arange(1, total + 1))
        made.expert_of[1:].copy_(torch.arange(total))
        made.tiles_in.fill_(num_tiles)
    return made


def places(device: Any, name: str, hidden: int, size: int) -> list[Place]:
    fmt = choices.load("freetoken.quant", name).FORMAT
    one = layout(hidden, size, fmt)
    record = torch.zeros(one.record_bytes, dtype=torch.uint8)
    parts = (torch.randn(one.tile_width, hidden) * 0.02 for _ in range(3))
    fmt.pack_tile(*parts, one.tiles(record)[0][: one.code_bytes])
    one.tiles(record)[1:] = one.tiles(record)[0]
    host = record.expand(LAYERS * EXPERTS, -1).contiguous()
    address = device.pin(host)
    slots = torch.empty(LAYERS * EXPERTS + 1, one.record_bytes, dtype=torch.uint8, device="cuda")
    slots[1:].copy_(host)
    return [
        Place(
            layer, EXPERTS, host[layer * EXPERTS : (layer + 1) * EXPERTS],
            address + layer * EXPERTS * one.record_bytes, slots, device_record(one, fmt), Activation(),
        )
        for layer in range(LAYERS)
    ]  # fmt: skip


def calls(rows: int, top_k: int, coded: Coded) -> list[Call]:
    rng, hidden = np.random.default_rng(rows), coded.hidden
    runs, made = step.num_runs("cuda", coded.num_tiles, coded.tile_width), []
    scratch = torch.empty(rows * top_k, runs, hidden, device="cuda")
    for _ in range(ROUNDS * LAYERS):
        ids = np.stack([np.sort(rng.choice(EXPERTS, top_k, replace=False)) for _ in range(rows)])
        weights = torch.rand(rows, top_k, device="cuda")
        x = torch.randn(rows, hidden, device="cuda").bfloat16()
        made.append(Call(x, torch.from_numpy(ids.astype(np.int32)).cuda(), weights, scratch, None))
    return made


def median_us(work: Callable[[], None]) -> float:
    """Microseconds of a layer-step: the median of 20 replays of ROUNDS x LAYERS of them."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(23):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        times.append(a.elapsed_time(b) * 1e3)
    return sorted(times[3:])[10] / (ROUNDS * LAYERS)


def resident_rows(made: list[Place], top_k: int, rows: int) -> dict[str, Any]:
    coded, record = made[0].coded, made[0].records.shape[1]
    own, asked = table(coded.num_tiles, resident=True), calls(rows, top_k, coded)
    distinct = sum(len(call.ids.unique()) for call in asked) / len(asked)

    def each(*parts: Callable[[Table, Place, Call], Any]) -> Callable[[], None]:
        def run() -> None:
            for number, call in enumerate(asked):
                for part in parts:
                    part(own, made[number % LAYERS], call)

        return run

    look_up = median_us(each(step.look_up))
    tiles = median_us(each(step.look_up, step.run_tiles)) - look_up
    whole = median_us(each(step.look_up, step.run_tiles, step.combine))
    return {
        "case": f"{rows} rows resident",
        "experts": round(distinct, 1),
        "look_up_us": round(look_up, 2),
        "tiles_us": round(tiles, 2),
        "step_us": round(whole, 2),
        "combine_us": round(median_us(each(step.combine)), 2),
        "victims_us": round(median_us(each(lambda t, p, c: step.prepare_victims(t))), 2),
        "gb_s": round(distinct * record / tiles / 1e3, 1),
    }


def from_host(made: list[Place], top_k: int) -> dict[str, Any]:
    """Nothing is resident and nothing is kept: what the link gives to kernels."""
    coded, record = made[0].coded, made[0].records.shape[1]
    own, asked = table(coded.num_tiles, resident=False), calls(1, top_k, coded)

    def run() -> None:
        for number, call in enumerate(asked):
            step.look_up(own, made[number % LAYERS], call)
            step.run_tiles(own, made[number % LAYERS], call)

    took = median_us(run)
    return {
        "case": "1 row from host",
        "tiles_us": round(took, 1),
        "gb_s": round(top_k * record / took / 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--format", default="bf16", help="a weight format; bf16 by default")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--size", type=int, default=768, help="columns of an expert's middle")
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    device = cuda.create(Options(device="cuda"))
    made = places(device, args.format, args.hidden, args.size)
    rows = [resident_rows(made, args.top_k, count) for count in args.rows] + [from_host(made, args.top_k)]
    for row in rows:
        print(row)
    print(f"link by copies: {device.machine.link_bw / 1e9:.1f} GB/s")
    if args.json:
        facts = {"bench": "expert_step", "format": args.format, "machine": device.machine.name}
        facts |= {"geometry": [args.hidden, args.size, args.top_k]}
        print(json.dumps(facts | {"date": datetime.date.today().isoformat(), "rows": rows}))


if __name__ == "__main__":
    main()
