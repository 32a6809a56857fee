# ruff: noqa: E501, E731, SIM905 - sentences and small makers read best on one line
"""python -m demo.evaluate MODEL [OUT.json] [--cases 120] [--device cpu] [--only calls,coding,calculator,perplexity,draft,routing,samples]

Greedy, on the CPU, in float32, on words that training never drew. --cases 40 gives a first impression in a few minutes.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

from demo.chats.chat_format import prompt_end, render
from demo.chats.dice import Dice, load_lexicon
from demo.evaluate.cases import one_reply_cases
from demo.evaluate.decoder import Decoder
from demo.evaluate.perplexity import Drafter, by_position, chat_perplexity, held_chats
from demo.evaluate.routing import figures, record
from demo.evaluate.sessions import calculating, coding

PARTS = "calls coding calculator perplexity draft routing samples".split()
LEXICON = Path(__file__).parent / "held_words.json.xz"
QUESTIONS = [
    ("Hi!", False), ("Who are you?", True), ("What can you do?", False), ("How are you?", False), ("Tell me a joke.", False), ("Write a short poem.", False),
    ("What is the capital of France?", False), ("What does photosynthesis mean?", True), ("What is 347 + 586?", True), ("My name is Anna.", False), ("What is a mixture of experts?", False),
    ("Who won the world cup?", False), ("Thanks!", False), ("Good night.", False),
]  # fmt: skip


class Report:
    """Figures so far, written after each part."""

    def __init__(self, path: str) -> None:
        self.path, self.began, self.figures = path, time.time(), {}

    def note(self, name: str, value: object) -> None:
        self.figures[name] = value
        shown = {k: v for k, v in value.items() if k != "wrong"} if isinstance(value, dict) else value
        print(
            f"[{time.time() - self.began:6.1f}] {name}: {json.dumps(shown, ensure_ascii=False)}", flush=True
        )
        if self.path:
            Path(self.path).write_text(json.dumps(self.figures, indent=1, ensure_ascii=False))


def calls(report: Report, decoder: Decoder, d: Dice, count: int) -> None:
    cases = one_reply_cases(d, count)
    groups = defaultdict(list)
    for case, text in zip(cases, decoder.reply([c.prompt for c in cases], 480), strict=True):
        groups[case.kind].append((case, text, case.right(text)))
    for kind, rows in groups.items():
        wrong = [
            dict(
                user=c.prompt.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0],
                wanted=c.wanted,
                got=text,
            )
            for c, text, ok in rows
            if not ok
        ]
        report.note(
            kind, dict(n=len(rows), right=round(float(np.mean([ok for *_, ok in rows])), 3), wrong=wrong[:10])
        )


def traces(report: Report, decoder: Decoder, d: Dice, steps: int, out: str) -> None:
    """Record `steps` decode steps; with `out` a trace file of them."""
    trace = record(decoder, d, steps)
    if out:
        np.savez_compressed(out, **trace)
    report.note("routing", figures(trace))


def main() -> None:
    ap = argparse.ArgumentParser(prog="python -m demo.evaluate")
    ap.add_argument("model")
    ap.add_argument("out", nargs="?", default="")
    ap.add_argument("--only", default=",".join(PARTS))
    ap.add_argument("--traces", default="")
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--experts", default="grouped_mm")
    ap.add_argument("--lexicon", default=str(LEXICON))
    for name, value in dict(cases=120, seed=4242, batch=32, threads=2, steps=6000).items():
        ap.add_argument(f"--{name}", type=int, default=value)
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    report, decoder, lexicon = (
        Report(a.out),
        Decoder(a.model, a.batch, a.device, a.experts),
        load_lexicon(a.lexicon),
    )
    dice = lambda n: Dice(lexicon, a.seed + n, held=True)
    wanted = a.only.split(",")
    if "calls" in wanted:
        calls(report, decoder, dice(0), a.cases)
    if "calculator" in wanted:
        report.note("calculator_to_the_answer", calculating(decoder, dice(1), a.cases))
    if "coding" in wanted:
        report.note("coding_session", coding(decoder, dice(2), a.cases // 2))
    if "perplexity" in wanted:
        report.note("chat_perplexity", chat_perplexity(decoder, held_chats(dice(3), a.cases)))
        report.note("perplexity_by_position", by_position(decoder, dice(4), max(1, a.cases // 40)))
    if "draft" in wanted:
        chats = held_chats(dice(5), a.cases // 2)
        report.note(
            "draft_head", Drafter(a.model, decoder).agreement([t for t, _ in chats], [s for _, s in chats])
        )
    if "samples" in wanted:
        prompts = [render([dict(role="user", content=q)])[0] + prompt_end(t) for q, t in QUESTIONS]
        report.note(
            "samples",
            [
                dict(user=q, thinking=t, model=y)
                for (q, t), y in zip(QUESTIONS, decoder.reply(prompts, 120), strict=True)
            ],
        )
    if "routing" in wanted:
        traces(report, decoder, dice(6), a.steps, a.traces)


if __name__ == "__main__":
    main()
