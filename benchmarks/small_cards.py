"""Small cards, played by a large one: `ft serve --gpu-memory SIZE` and nothing else, size by size.

    python -m benchmarks.small_cards --model DIR [--sizes 8GiB 12GiB ...] [--link 12GB/s] [--json]

For each size a server starts, tells its plan, answers `--repeats` prompts of 512 tokens with 256 tokens after
one for warming up, and then one long prompt (24,500 tokens, less where the model's context is shorter).
`taken_bytes` is what the driver sees this server take, at the end; `within` whether that is no more than
SIZE, `plan_off` how far the plan's sum is from it, as a share (where all experts fit, less is taken).
The limit is what `ft bench decode` says; here stand figures over HTTP. Ends stdout with one JSON object;
exit code 1 if a size did not serve. --link plays a slower link than there is (`--sim-link-bw`);
`long_link_gb_s`, the experts that the long prompt brought over its time to the first token, can't be more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from freetoken.bench._processes import started
from freetoken.bench._report import Report
from freetoken.bench._texts import Texts
from freetoken.core.errors import ConfigError, FreeTokenError
from freetoken.core.units import format_bytes, parse_bytes, parse_rate

PROMPT, TOKENS, LONG, LONG_TOKENS = 512, 256, 24_500, 8
SIZES = ("8GiB", "12GiB", "16GiB", "24GiB", "32GiB")


def measure(model: Path, size: str, args: argparse.Namespace) -> dict[str, Any]:
    row: dict[str, Any] = {"gpu_memory": size, "model": model.name, "link_gb_s": args.link}
    command = [sys.executable, "-m", "freetoken", "serve", "--model", str(model), "--port", "{port}"]
    command += ["--device", args.device, "--gpu-memory", size]
    command += ["--sim-link-bw", str(args.link)] if args.link else []
    began, texts = time.perf_counter(), Texts(str(model), parse_bytes(size) >> 20)
    try:
        with started(command, size) as one:
            server = one.ready(args.patience)
            row["ready_s"] = round(time.perf_counter() - began, 2)
            told = one.log.read_text("utf-8", "replace").splitlines()
            row["plan"] = [line.strip() for line in told if " INFO " not in line and " %  " not in line]
            row["context"] = server.get("/v1/models")["data"][0]["max_model_len"]
            answers = [server.complete(texts.take(PROMPT), TOKENS) for _ in range(1 + args.repeats)][1:]
            row["decode_tok_s"] = round(statistics.median(a.tok_s for a in answers), 2)
            row["ttft_s"] = round(statistics.median(a.ttft_s for a in answers), 3)
            before = server.get("/v1/stats")
            row["long_prompt"] = min(LONG, row["context"] - 64)
            row["long_ttft_s"] = round(server.complete(texts.take(row["long_prompt"]), LONG_TOKENS).ttft_s, 3)
            after = server.get("/v1/stats")
            crossed = (after["experts"]["prefill_link_bytes"] - before["experts"]["prefill_link_bytes"]) / 1e9
            row["long_link_gb_s"] = round(crossed / row["long_ttft_s"], 2)
            row |= memory(after, parse_bytes(size)) | rates(before)
    except FreeTokenError as error:
        row["error"] = str(error)
    return row


def memory(stats: dict[str, Any], size: int) -> dict[str, Any]:
    told = stats["memory"]
    taken, planned = told["taken_bytes"], told["planned_bytes"]
    row = {"backend": stats["backend"], "slots": told["slots"]}
    row |= {"taken_bytes": taken, "planned_bytes": planned}
    if taken:
        row |= {"within": taken <= size, "plan_off": round(abs(planned - taken) / taken, 4)}
    return row


def rates(stats: dict[str, Any]) -> dict[str, Any]:
    experts = stats["experts"]
    return {"hit_rate": round(experts["hits"] / max(experts["requests"], 1), 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="SIZE")
    parser.add_argument("--link", type=parse_rate, metavar="RATE", help="play a slower link, like 12GB/s")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--patience", type=float, default=300.0, help="seconds until a server must answer")
    parser.add_argument("--json", action="store_true")
    try:
        args = parser.parse_args()
        for size in args.sizes:
            parse_bytes(size)
    except ConfigError as error:
        parser.error(str(error))
    report, rows = Report("small_cards", args), []
    for size in args.sizes:
        row = measure(args.model, size, args)
        rows.append(row)
        report.line(f"{size}: {row.get('error') or _line(row)}")
    report.finish(rows)
    return int(any("error" in row for row in rows))


def _line(row: dict[str, Any]) -> str:
    return (
        f"ready {row['ready_s']} s, {row['backend']}, {row['slots']} slots, context {row['context']}, "
        f"{row['decode_tok_s']} tok/s, {row['long_prompt']} tokens in {row['long_ttft_s']} s, "
        f"{format_bytes(row['taken_bytes'])} taken of {format_bytes(row['planned_bytes'])}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
