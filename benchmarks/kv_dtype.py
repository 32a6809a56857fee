"""What narrow keys and values cost: the demo model's tool calls and perplexity with --kv-dtype auto and fp8.

    python -m benchmarks.kv_dtype [--cases 10] [--chats 20] [--json]

Held-out cases and chats of `demo.evaluate`, greedy, the same ones for both. Replies run 32 at a time.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from demo.chats.dice import Dice, load_lexicon
from demo.evaluate.__main__ import LEXICON
from demo.evaluate.cases import one_reply_cases
from demo.evaluate.perplexity import held_chats
from freetoken.core.options import Options
from freetoken.core.request import Output, SamplingParams, Submit
from freetoken.engine.build import Built, build

MAX_TOKENS = 320


def run_all(built: Built, submits: Sequence[Submit]) -> dict[str, list[Output]]:
    """Step the engine in this thread until every request has ended."""
    outputs: dict[str, list[Output]] = {s.request_id: [] for s in submits}
    engine = built.engine
    engine._sink = lambda batch: [outputs[o.request_id].append(o) for o in batch]
    for submit in submits:
        engine.submit(submit)
    engine.read_inbox()
    while not engine.idle:
        engine.step()
        engine._hand_out()
    return outputs


def replies(built: Built, prompts: Sequence[str]) -> list[str]:
    tokenizer = built.codec.tokenizer
    stop = built.codec.stop_ids
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, stop_ids=stop)
    submits = [Submit(f"r{i}", tokenizer.encode(p), params) for i, p in enumerate(prompts)]
    done = run_all(built, submits)
    ids = [[t for o in done[s.request_id] for t in o.token_ids] for s in submits]
    return [tokenizer.decode([t for t in row if t not in stop], skip_special=False) for row in ids]


def perplexity(built: Built, chats: Sequence[tuple[str, list[tuple[int, int]]]]) -> float:
    """Of the last assistant turn of each chat, given what stands before it."""
    encode = built.codec.tokenizer.encode
    submits = []
    for i, (text, spans) in enumerate(chats):
        start, end = spans[-1]
        answer = tuple(map(int, encode(text[start:end])))
        params = SamplingParams(
            temperature=0.0, max_tokens=len(answer), forced_ids=answer, logprobs=0, ignore_eos=True
        )
        submits.append(Submit(f"p{i}", encode(text[:start]), params))
    done = run_all(built, submits)
    found = [p.logprob for outputs in done.values() for o in outputs for p in o.logprobs]
    return math.exp(-float(np.mean(found)))


def measure(kv_dtype: str, cases: int, chats: int, seed: int) -> dict[str, Any]:
    lexicon = load_lexicon(LEXICON)
    built = build(Options(device="cpu", kv_dtype=kv_dtype, max_model_len=8192, num_tokens=65536))
    asked = one_reply_cases(Dice(lexicon, seed, held=True), cases)
    right: dict[str, list[bool]] = {}
    for case, text in zip(asked, replies(built, [c.prompt for c in asked]), strict=True):
        right.setdefault(case.kind, []).append(case.right(text))
    row = {
        "kv_dtype": kv_dtype,
        "kv_bytes_per_token": built.engine.memory._sizes.page_bytes / built.plan.page_size,
        "right": {kind: f"{sum(ok)}/{len(ok)}" for kind, ok in right.items()},
        "right_all": round(float(np.mean([ok for group in right.values() for ok in group])), 4),
        "cases": len(asked),
        "perplexity": round(perplexity(built, held_chats(Dice(lexicon, seed + 3, held=True), chats)), 4),
    }
    built.engine.close()
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10, help="of a kind")
    parser.add_argument("--chats", type=int, default=20)
    parser.add_argument("--seed", type=int, default=4242)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [measure(kv, args.cases, args.chats, args.seed) for kv in ("auto", "fp8")]
    for row in rows:
        print(json.dumps(row) if args.json else row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
