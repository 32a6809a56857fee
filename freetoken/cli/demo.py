"""`ft demo`: what FreeToken does, in half a minute, with the model that is built in.

Four parts: a chat that streams; a tool call that runs; one answer from four placements of the experts,
counters beside; GPU memory halved in the middle of an answer. Every claim it prints is checked, and a
claim that fails makes the exit code 1. Downloads nothing, needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
import time

from freetoken import __version__
from freetoken.chat.conversation import Conversation, Message
from freetoken.cli import _banner, _host, _placements
from freetoken.cli._session import Engine, LocalSession, start_engine
from freetoken.cli._terminal import Terminal
from freetoken.cli._tools import OFFERED
from freetoken.cli._turn import Turn
from freetoken.cli._view import AnswerView, Shown
from freetoken.core import log
from freetoken.core.generate import GenerateParams
from freetoken.core.options import Options

HELP = "see it work: chat, tool call, four placements, memory halved mid-answer (30 s)"
CHATS = ("Who are you?", "Tell me a joke.")
SUM, RESULT = "What is 48 times 73?", "3504"
INDENT = "    "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ci", action="store_true", help="plain output for scripts; exit code 1 on a failed claim"
    )


def run(args: argparse.Namespace) -> int:
    log.configure("warning")
    out = Terminal(sys.stdout, color=False if args.ci else None)
    out.live = out.live and not args.ci
    started = time.monotonic()
    out.line(out.bold(f"FreeToken {__version__}"))
    out.line(_host.machine_line())
    demo = _Demo(out)
    demo.chat_and_tool()
    demo.placements()
    demo.next_steps(time.monotonic() - started)
    return 1 if demo.faults else 0


class _Demo:
    """The demo's parts; `faults` collects claims that did not hold."""

    def __init__(self, out: Terminal) -> None:
        self.out = out
        self.faults: list[str] = []

    def chat_and_tool(self) -> None:
        out = self.out
        out.title("1  A chat, on this machine's CPU")
        out.wrapped(_banner.DEMO_NOTE)
        engine, progress = start_engine(Options(device="cpu"), out)
        out.line(out.dim(f"  loaded in {progress.seconds:.1f} s: {engine.plan.lines()[0]}"))
        session = LocalSession(engine)
        try:
            turn = Turn(session, GenerateParams(temperature=0.0, max_tokens=120), out, indent=INDENT)
            for prompt in CHATS:
                out.line(f"  > {prompt}")
                turn.run(Conversation((Message.make("user", prompt),)))
                self._claim(bool(turn.last.answer.content), f"an answer to {prompt!r}")
            self._tool_call(turn)
        finally:
            session.close()

    def _tool_call(self, turn: Turn) -> None:
        self.out.title("2  A tool call, run by a calculator on this machine")
        self.out.line(f"  > {SUM}")
        turn.tools = OFFERED
        turn.run(Conversation((Message.make("user", SUM),)))
        self._claim(turn.calls > 0, "the model calls the calculator")
        self._claim(RESULT in turn.last.answer.content.replace(",", ""), f"the answer says {RESULT}")

    def placements(self) -> None:
        out = self.out
        out.title("3  One answer, four placements of the experts")
        out.wrapped(
            f"{_placements.PROMPT!r}, greedy. The simulated laptop runs the real control code on this CPU "
            "with a virtual clock; its tok/s are the clock's. Where experts lie may change speed, never text."
        )
        outcomes: list[_placements.Outcome] = []
        for placement in _placements.placements():
            engine, _ = start_engine(placement.options, out)
            try:
                outcomes.append(_placements.answer(placement, engine))
            finally:
                engine.close()
        self._table(outcomes)
        options = _placements.laptop("hybrid", _placements.AMPLE_MEMORY)
        engine, _ = start_engine(options, out)
        try:
            self._halve(engine, outcomes[0].text)
        finally:
            engine.close()

    def _table(self, outcomes: list[_placements.Outcome]) -> None:
        reference = outcomes[0].text
        self.out.table(_placements.COLUMNS, [o.row(reference) for o in outcomes])
        if len({o.requests for o in outcomes}) > 1:
            self.out.line(
                INDENT + self.out.dim("a GPU launches one step ahead: that step's experts are counted too")
            )
        faults = [fault for o in outcomes for fault in o.faults(reference)]
        self.faults += faults
        self._say(faults, "texts equal; hits + misses = requests; filled + CPU tiles = missing tiles")

    def _halve(self, engine: Engine, reference: str) -> None:
        out = self.out
        out.title("4  Half of the GPU memory taken away in the middle of an answer (simulated)")
        stream = _placements.Shrinking(engine)
        shown: Shown = AnswerView(out, thinking="show", indent=INDENT).show(stream)
        said = shown.answer.reasoning + shown.answer.content
        out.line(INDENT + out.dim(stream.describe()))
        faults = stream.faults()
        self.faults += faults
        self._say(faults, "the memory is halved, slots are given up, the answer goes on")
        self._claim(said == reference, "the text is the same as before, unbroken")

    def _claim(self, holds: bool, sentence: str) -> None:
        if not holds:
            self.faults.append(sentence)
        self._say([] if holds else [sentence], sentence)

    def _say(self, faults: list[str], sentence: str) -> None:
        for fault in faults:
            self.out.line(f"  {self.out.bad('FAILED')}  {fault}")
        if not faults:
            self.out.line(f"  {self.out.good('ok')}  {sentence}")

    def next_steps(self, seconds: float) -> None:
        out = self.out
        out.title("What next")
        rows = (
            ("ft chat", "talk to it in this terminal"),
            (
                "ft serve",
                "the OpenAI API on http://127.0.0.1:1919, a page in the browser at the same address",
            ),
            ("ft serve /path/to/checkpoint", "your own model: a Hugging Face folder (docs/serving.md)"),
            ("ft doctor", "what this machine has and what is missing"),
        )
        for command, what in rows:
            out.line(f"  {out.accent(f'{command:<30}')}{what}")
        out.line()
        state = f"{len(self.faults)} claims failed" if self.faults else "every claim above was checked"
        out.line(f"{seconds:.0f} s; {state}.")
