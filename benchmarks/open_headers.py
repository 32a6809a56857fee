"""How long opening and refusing takes for checkpoints of many tensors or many gigabytes, from headers alone.

    python -m benchmarks.open_headers [--repeat 3] [--json]

Writes two sparse checkpoints that take no room on disk: 30B-A3B in bfloat16 (18,867 tensors, 57 GiB) and a
larger one in NVFP4 as ModelOpt writes it (over 74,000 tensors in shards with an index). A fresh process each
time imports, then times `open` (headers, index, dialect), `survey` (all that a family checks) and `refuse`
(`build` with a budget that can't hold it, from path to CapacityError).
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from freetoken.engine.build import DEMO_MODEL
from freetoken.models import _tensors, qwen3_moe

LARGE = {
    **qwen3_moe.TINY, "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "mlp_only_layers": [], "max_position_embeddings": 262144,
    "dtype": "bfloat16",
}  # fmt: skip
CODED = {
    **LARGE, "hidden_size": 4096, "moe_intermediate_size": 1536,
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}  # fmt: skip
Entry = tuple[str, tuple[int, ...]]
SIZES = {"BF16": 2, "U8": 1, "F8_E4M3": 1, "F32": 4}
TIMED = """
import json, sys, time
from freetoken.core.errors import CapacityError
from freetoken.core.options import Options
from freetoken.engine.build import build
from freetoken.engine.survey import survey
from freetoken.weights.load import open_checkpoint
path, times = sys.argv[1], {}
build(Options(device="cpu")).close()  # imports

def timed(what, run):
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    times[what] = (time.perf_counter() - wall, time.process_time() - cpu)
    return result

def refuse():
    try:
        build(Options(model=path, device="sim", gpu_memory=1 << 30))
    except CapacityError as error:
        return error.code
    raise SystemExit("it fits")

checkpoint = timed("open", lambda: open_checkpoint(path))
timed("survey", lambda: survey(Options(model=path, device="cpu"), checkpoint, lambda phase, percent: None))
checkpoint.close()
timed("refuse", refuse)
print(json.dumps(times))
"""


def plain(raw: Mapping[str, Any]) -> Iterator[tuple[str, Entry]]:
    config = qwen3_moe.FAMILY.read_config(raw)
    shapes = _tensors.expected(config, lambda layer: _tensors.expert_shapes(config, False))
    for name, shape in shapes.items():
        yield name, ("BF16", shape)


def coded(raw: Mapping[str, Any]) -> Iterator[tuple[str, Entry]]:
    """Experts in NVFP4, with the scale of their inputs that ModelOpt writes beside them."""
    for name, (dtype, shape) in plain({k: v for k, v in raw.items() if k != "quantization_config"}):
        if ".experts." not in name:
            yield name, (dtype, shape)
            continue
        rows, columns = shape
        base = name.removesuffix(".weight")
        yield name, ("U8", (rows, columns // 2))
        yield base + ".weight_scale", ("F8_E4M3", (rows, columns // 16))
        yield base + ".weight_scale_2", ("F32", ())
        yield base + ".input_scale", ("F32", ())


def write(path: Path, raw: Mapping[str, Any], tensors: Mapping[str, Entry], shards: int) -> int:
    """Sparse files of these tensors; returns the bytes they claim to have."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(dict(raw)))
    for file in DEMO_MODEL.iterdir():
        if file.suffix in (".json", ".jinja") and "index" not in file.name and file.name != "config.json":
            shutil.copy(file, path)
    names, total, where = list(tensors), 0, {}
    each = -(-len(names) // shards)
    for number in range(shards):
        file, header, at = f"model-{number + 1:05}-of-{shards:05}.safetensors", {}, 0
        for name in names[number * each : (number + 1) * each]:
            dtype, shape = tensors[name]
            size = SIZES[dtype] * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
            at, where[name] = at + size, file
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        with (path / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + at)
        total += at
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, raw, tensors, shards in (
            ("bfloat16", LARGE, dict(plain(LARGE)), 16),
            ("NVFP4", CODED, dict(coded(CODED)), 16),
        ):
            path = Path(folder) / name
            row: dict[str, Any] = {"model": name, "tensors": len(tensors), "shards": shards}
            row["bytes"] = write(path, raw, tensors, shards)
            runs = [
                json.loads(
                    subprocess.run(
                        [sys.executable, "-c", TIMED, str(path)], capture_output=True, text=True, check=True
                    ).stdout.splitlines()[-1]
                )
                for _ in range(args.repeat)
            ]
            for what in runs[0]:
                for i, kind in enumerate(("s", "cpu_s")):
                    row[f"{what}_{kind}"] = round(statistics.median(run[what][i] for run in runs), 3)
            rows.append(row)
            if not args.json:
                print(row, flush=True)
    if args.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
