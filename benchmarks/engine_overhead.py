"""What a decode step costs beside the model: the null model (constant logits) through the whole engine.

    python benchmarks/engine_overhead.py [--streams 20] [--tokens 400] [--json]

Prints the median and 95th percentile of a step for one stream, and for many streams that are read
by an event loop in the same process, as a server does. Limits: 1 ms median alone, 2 ms p95 in company.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import platform
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from freetoken.core.generate import GenerateParams
from freetoken.core.options import Options
from freetoken.engine.build import DEMO_MODEL
from freetoken.llm import LLM, build_llm

LIMITS_MS = {"alone": ("p50", 1.0), "company": ("p95", 2.0)}


def null_checkpoint(folder: Path) -> Path:
    """A checkpoint of the null family, with the demo model's tokenizer."""
    config = {"model_type": "null", "vocab_size": 8192, "token_id": 300, "max_position_embeddings": 65536}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"unused.weight": torch.zeros(1)}, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO_MODEL / name, folder / name)
    return folder


async def stream(llm: LLM, number: int, tokens: int) -> None:
    params = GenerateParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    async for _ in llm.submit_text("one two three", params, f"stream-{number}"):
        pass


async def measure(llm: LLM, streams: int, tokens: int) -> dict[str, float]:
    """Run `streams` at once; milliseconds per step."""
    llm.built.engine.stats.step_s.clear()
    await asyncio.gather(*(stream(llm, i, tokens) for i in range(streams)))
    times = sorted(llm.built.engine.stats.step_s)
    return {"p50": 1000 * times[len(times) // 2], "p95": 1000 * times[int(len(times) * 0.95)]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        llm = build_llm(Options(model=str(null_checkpoint(Path(folder))), device="cpu"))
        for name, count in (("alone", 1), ("company", args.streams)):
            asyncio.run(measure(llm, count, 50))
            got = asyncio.run(measure(llm, count, args.tokens))
            which, limit = LIMITS_MS[name]
            rows.append({"case": name, "streams": count, **got, "limit": limit, "share": got[which] / limit})
            print(
                f"{name:8} {count:3} streams  p50 {got['p50']:.3f} ms  p95 {got['p95']:.3f} ms  "
                f"{which} is {got[which] / limit:.2f} of its limit ({limit} ms)"
            )
        llm.close()
    if args.json:
        machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
        today = datetime.date.today().isoformat()
        print(json.dumps({"bench": "engine_overhead", "machine": machine, "date": today, "rows": rows}))
    return 0 if all(row["share"] <= 1 for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
