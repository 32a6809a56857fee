"""`ft generate`: one prompt in, the answer on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
import io
import json
import sys

from freetoken.chat.conversation import Conversation, Message
from freetoken.cli import _options, _sampling
from freetoken.cli._session import LocalSession, Stream, quiet_log, start_engine
from freetoken.cli._terminal import Terminal
from freetoken.cli._view import AnswerView, Shown, figures, hit_rate
from freetoken.core.errors import ConfigError

HELP = "answer one prompt (--prompt, or stdin) and print the answer to stdout"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", metavar="TEXT", help="the prompt; without it, stdin is read")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--raw", action="store_true", help="continue the prompt, with no chat template")
    parser.add_argument("--show-thinking", action="store_true", help="print the thinking, to stderr")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of text")
    _sampling.add_sampling_flags(parser)
    _options.add_option_flags(parser)


def run(args: argparse.Namespace) -> int:
    resolved = _options.resolve(args)
    prompt = _prompt(args)
    notes = Terminal(sys.stderr)
    _options.say_notes(resolved, notes)
    quiet_log(resolved.options, resolved.origin["log_level"] != "default")
    params = _sampling.sampling_params(args, resolved.options)
    engine, _ = start_engine(resolved.options, notes)
    session = LocalSession(engine)
    try:
        before = session.stats()
        if args.raw:
            stream: Stream = session.complete(prompt, params)
        else:
            system = (Message.make("system", args.system),) if args.system else ()
            stream = session.ask(Conversation((*system, Message.make("user", prompt))), params)
        shown = _answer(args, stream)
        notes.line(notes.dim(figures(shown, hit_rate(before, session.stats()))))
    finally:
        session.close()
    finish = shown.answer.finish
    return 130 if shown.interrupted else int(finish is None or finish.reason == "error")


def _prompt(args: argparse.Namespace) -> str:
    text = args.prompt
    if text is None and not sys.stdin.isatty():
        text = sys.stdin.read()
    if not text:
        raise ConfigError(
            "There is no prompt.",
            code="usage",
            hint="Give --prompt TEXT, or pipe one in: echo Hi | ft generate",
        )
    return str(text)


def _answer(args: argparse.Namespace, stream: Stream) -> Shown:
    if args.json:
        shown = AnswerView(Terminal(io.StringIO()), thinking="hide").show(stream)
        answer = shown.answer
        body = {
            "content": answer.content,
            "reasoning": answer.reasoning,
            "tool_calls": [{"name": c.name, "arguments": c.arguments} for c in answer.tool_calls],
            "finish_reason": answer.finish.reason if answer.finish else None,
            "tokens": shown.tokens,
            "first_s": round(shown.first_s, 4),
            "total_s": round(shown.total_s, 4),
        }
        print(json.dumps(body, ensure_ascii=False))
        return shown
    shown = AnswerView(Terminal(sys.stdout), thinking="hide").show(stream)
    if args.show_thinking and shown.answer.reasoning:
        print(shown.answer.reasoning, file=sys.stderr)
    return shown
