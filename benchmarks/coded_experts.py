"""What coding the demo model anew costs: error of the weights, perplexity on held-out chats.

    python -m benchmarks.coded_experts [--formats q8_0 fp8_block mxfp4 ...] [--dense] [--all] [--json]

Every format is written by the converter as `ft checkpoint --experts FORMAT` does (`--dense`: all but experts,
`--all`: `--quantise`), and the last assistant turn of each of `--chats` chats is teacher-forced through the
engine. The first row is the model as it is.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.kv_dtype import perplexity
from demo.chats.dice import Dice, load_lexicon
from demo.evaluate.__main__ import LEXICON
from demo.evaluate.perplexity import held_chats
from freetoken.core.options import Options
from freetoken.engine.build import DEMO_MODEL, build
from freetoken.engine.convert import Wish, convert

FORMATS = ("q8_0", "fp8_block", "mxfp4", "nvfp4", "int4_g32")


def measure(experts: str, dense: str, chats: int, seed: int) -> dict[str, Any]:
    row: dict[str, Any] = {"experts": experts or "as they are", "dense": dense or "as it is"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ftw"
        done = convert(Wish(DEMO_MODEL, path, experts=experts, dense=dense, threads=2))
        if done.errors:
            row["error"] = {name: [round(rms, 5), round(worst, 5)] for name, rms, worst in done.errors}
        built = build(Options(model=str(path), device="cpu", max_model_len=8192, num_tokens=65536))
        try:
            for kind in ("experts", "dense"):
                row[f"{kind}_bytes"] = sum(f.stat().st_size for f in path.glob(f"{kind}-*.ftw"))
            dice = Dice(load_lexicon(LEXICON), seed, held=True)
            row["perplexity"] = round(perplexity(built, held_chats(dice, chats)), 5)
        finally:
            built.close()
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--dense", action="store_true", help="code all but the experts")
    parser.add_argument("--all", action="store_true", help="code both")
    parser.add_argument("--chats", type=int, default=24)
    parser.add_argument("--seed", type=int, default=4245)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for name in ("", *args.formats):
        row = measure(
            "" if args.dense else name, name if args.dense or args.all else "", args.chats, args.seed
        )
        print(json.dumps(row) if args.json else row, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
