"""Logits of GGUF files beside llama.cpp's, teacher-forced: what every block type means to either engine.

    python -m benchmarks.gguf_vs_llamacpp --llama FOLDER [--model FILE.gguf ...] [--kinds Q4_K ...] [--json]

llama.cpp reads the file dequantised to F32, because its own paths round activations to 8 bits, with keys and
values in F32 and without flash attention. We read the file as it is, in float32: dense layers multiply from
blocks, experts on backend `cpu`. Without --model: TINY files of every type, dense (llama) and MoE (qwen3moe).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.cpu_vs_llamacpp import llama
from freetoken.core.batch import Segment
from freetoken.core.options import Options
from freetoken.engine.build import build
from freetoken.models import llama as llama_family
from freetoken.models import qwen3_moe
from freetoken.quant import _reading as reading
from freetoken.weights.gguf import GgufFile
from tests.weights import gguf_files
from tests.weights.test_gguf_types import DENSE, EXPERTS, KINDS, Quantiser, both_ways

VOCAB = 267
TEXT = (
    "The old lighthouse keeper climbed the stairs once more, counting each step under his breath. "
    "def mean(values):\n    return sum(values) / len(values)\n"
)
IDS = [int(i) for i in torch.randint(3, VOCAB, (57,), generator=torch.Generator().manual_seed(5))]


def ours(path: Path, ids: Sequence[int] | None) -> tuple[list[int], Tensor]:
    """The ids and the float32 logits [T, V] after each of them, token by token."""
    options = Options(model=str(path), device="cpu", dtype="float32", moe_backend="cpu", max_model_len=256)
    built = build(options)
    try:
        found = list(ids) if ids else [int(i) for i in built.codec.tokenizer.encode(TEXT)]
        size, rows = built.plan.page_size, []
        pages = tuple(range(1, len(found) // size + 2))
        for at, token in enumerate(found):
            segment = Segment(
                np.array([token], np.int32), at, pages[: at // size + 1], 0, 0, is_decode=at > 0
            )
            rows.append(built.engine.runner.launch([segment]).logits[0].float().clone())
        return found, torch.stack(rows)
    finally:
        built.close()


def theirs(folder: Path, path: Path, ids: Sequence[int], vocab: int) -> Tensor:
    engine, rows = llama.Llama(folder, path, 256, 1, exact=True), []
    for token in ids:
        engine.decode([token])
        rows.append(torch.tensor(list(engine.logits(vocab))))
    return torch.stack(rows)


def compare(mine: Tensor, other: Tensor) -> dict[str, Any]:
    gaps = other.topk(2).values
    same = mine.argmax(-1) == other.argmax(-1)
    return {
        "tokens": len(mine),
        "max_dlogit": float((mine - other).abs().max()),
        "largest_logit": float(other.abs().max()),
        "same_argmax": int(same.sum()),
        "gap_where_not": float((gaps[:, 0] - gaps[:, 1])[~same].max()) if not bool(same.all()) else 0.0,
    }


def as_f32(path: Path, to: Path) -> None:
    """The same file with every tensor in F32: its keys are copied byte by byte."""
    file, raw = GgufFile(path), path.read_bytes()
    blobs = {}
    for name, tensor in file.tensors.items():
        blocks, dtype = file.rows(tensor, 0, tensor.num_rows), tensor.type.dtype
        fmt = None if dtype is not None else reading.find(tensor.type.format)
        numbers = blocks.clone().view(dtype) if fmt is None else fmt.dequantise(blocks)
        blobs[name] = gguf_files.plain(numbers.float().reshape(tensor.shape))
    made = gguf_files.write_file(to, {}, blobs).read_bytes()
    keys = raw[24 : min(raw.find(gguf_files.string(name)) for name in blobs)]
    entries = made[24 : max(_entry_end(made, name, blob[1]) for name, blob in blobs.items())]
    head = raw[:24] + keys + entries
    data = made[len(made[:24] + entries) + -len(made[:24] + entries) % gguf_files.ALIGN :]
    to.write_bytes(head + bytes(-len(head) % gguf_files.ALIGN) + data)


def _entry_end(made: bytes, name: str, shape: Sequence[int]) -> int:
    text = gguf_files.string(name)
    return made.find(text) + len(text) + 4 + 8 * len(shape) + 12


def rows(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    for model in args.model:
        as_f32(Path(model), folder / "f32.gguf")
        ids, mine = ours(Path(model), None)
        other = theirs(args.llama, folder / "f32.gguf", ids, mine.shape[1])
        yield {"model": Path(model).name, **compare(mine, other)}
    for kind in args.kinds if not args.model else ():
        for name, family, raw in (
            ("llama", llama_family.FAMILY, {**DENSE, "vocab_size": VOCAB}),
            ("qwen3moe", qwen3_moe.FAMILY, {**EXPERTS, "vocab_size": VOCAB}),
        ):
            own = folder / f"{name}-{kind}"  # llama.cpp keeps files mapped
            own.mkdir()
            coded, plain = both_ways(own, family, raw, Quantiser(kind))
            ids, mine = ours(coded, IDS)
            yield {"model": f"{name} {kind}", **compare(mine, theirs(args.llama, plain, ids, mine.shape[1]))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--llama", default="", help="an unpacked @node-llama-cpp/linux-x64")
    parser.add_argument("--model", nargs="*", default=[], help="GGUF files; default: TINY ones of every type")
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.llama = llama.find(args.llama)
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(args, Path(folder)):
            print(json.dumps(row) if args.json else row, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
