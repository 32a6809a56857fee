"""`ft verify`: the same prompts through every backend; do they say the same?

The first backend is the reference. Answers are greedy; for each other one the first differing token is
named, with the largest distance of log probabilities before it. A difference counts as a near tie, not
as a fault, if the reference's two best tokens lie closer than twice the tolerance. Exit code 1 on a fault.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from freetoken.chat.conversation import Conversation, Message
from freetoken.chat.events import TokenInfo, fold
from freetoken.cli import _options
from freetoken.cli._session import LocalSession, quiet_log, start_engine
from freetoken.cli._terminal import Terminal
from freetoken.core.errors import ConfigError, nearest
from freetoken.core.generate import GenerateParams
from freetoken.core.options import BACKENDS, Options

HELP = "answer the same prompts on every backend and compare tokens and log probabilities"
PROMPTS = ("Who are you?", "What is 347 + 586?", "What is an algorithm?", "Count from one to five.")
TOLERANCE = {"float32": 1e-4, None: 0.25}
EXACT_TOLERANCE = 0.0
MACHINE = "4060-laptop"
SLOT_SHARE = 0.3


@dataclass(frozen=True)
class Finding:
    """One prompt on one backend against the reference. Positions count answer tokens from 0.

    first_difference  None if all tokens are equal
    distance          largest |difference| of a drawn token's log probability before it (nats)
    near_tie          the reference nearly drew the other token too
    """

    backend: str
    prompt: int
    tokens: int
    first_difference: int | None
    distance: float
    near_tie: bool

    def fault(self, tolerance: float) -> bool:
        return self.distance > tolerance or (self.first_difference is not None and not self.near_tie)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backends", metavar="A,B", help="the first is the reference (default: all that run)"
    )
    parser.add_argument("--prompts", metavar="FILE", help="one prompt a line (default: four short ones)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="tokens an answer (default 32)")
    parser.add_argument("--tolerance", type=float, metavar="X", help="allowed distance of log probabilities")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    _options.add_option_flags(parser)


def run(args: argparse.Namespace) -> int:
    if args.tokens < 1:
        raise ConfigError("--tokens is at least 1.", code="invalid_option", hint="Like: --tokens 8")
    resolved = _options.resolve(args)
    quiet_log(resolved.options, resolved.origin["log_level"] != "default")
    notes = Terminal(sys.stderr)
    _options.say_notes(resolved, notes)
    prompts = _prompts(args.prompts)
    backends = _backends(args.backends)
    tolerance = args.tolerance if args.tolerance is not None else _tolerance(resolved.options)
    reference: list[list[TokenInfo]] = []
    findings: list[Finding] = []
    for backend in backends:
        options = placement(resolved.options, backend)
        notes.line(notes.dim(f"{backend} on {options.device} ..."))
        answers = _answers(options, prompts, args.tokens, notes)
        reference = reference or answers
        pairs = enumerate(zip(reference, answers, strict=True))
        findings += [compare(backend, n, r, a, tolerance) for n, (r, a) in pairs]
    findings = [f for f in findings if f.backend != backends[0]]
    faults = [f for f in findings if f.fault(tolerance)]
    if args.json:
        rows = [{**asdict(f), "fault": f.fault(tolerance)} for f in findings]
        print(json.dumps({"reference": backends[0], "tolerance": tolerance, "rows": rows}))
    else:
        _print(findings, backends[0], tolerance, Terminal(sys.stdout))
    return 1 if faults else 0


def placement(options: Options, backend: str) -> Options:
    """Options that run `backend` here: where there is no GPU, one that needs it is simulated."""
    shared = backend in ("fused", "cpu")
    if options.device in ("cuda", "sim"):
        return replace(options, moe_backend=backend)
    if shared:
        return replace(options, device="cpu", moe_backend=backend)
    sized = options.moe_cache_size is not None or options.moe_cache_rate is not None
    return replace(
        options,
        device="sim",
        machine=options.machine or MACHINE,
        moe_backend=backend,
        moe_cache_rate=options.moe_cache_rate if sized else SLOT_SHARE,
    )


def compare(
    backend: str, prompt: int, reference: Sequence[TokenInfo], answer: Sequence[TokenInfo], tolerance: float
) -> Finding:
    """Compare two greedy answers token by token; beyond the first difference nothing is comparable."""
    distance = 0.0
    for n, (r, a) in enumerate(zip(reference, answer, strict=False)):
        if r.id != a.id:
            return Finding(backend, prompt, n, n, distance, _near_tie(r, tolerance))
        distance = max(distance, abs(r.logprob - a.logprob))
    shorter = min(len(reference), len(answer))
    first = None if len(reference) == len(answer) else shorter
    return Finding(backend, prompt, shorter, first, distance, False)


def _near_tie(token: TokenInfo, tolerance: float) -> bool:
    best = [t.logprob for t in token.top[:2]]
    return len(best) == 2 and best[0] - best[1] <= 2 * tolerance


def _answers(options: Options, prompts: Sequence[str], tokens: int, out: Terminal) -> list[list[TokenInfo]]:
    engine, _ = start_engine(options, out)
    session = LocalSession(engine)
    params = GenerateParams(temperature=0.0, max_tokens=tokens, logprobs=2, thinking="off", ignore_eos=True)
    try:
        streams = (session.ask(Conversation((Message.make("user", p),)), params) for p in prompts)
        return [fold(stream).logprobs for stream in streams]
    finally:
        session.close()


def _tolerance(options: Options) -> float:
    return EXACT_TOLERANCE if options.exact else TOLERANCE.get(options.dtype, TOLERANCE[None])


def _backends(text: str | None) -> list[str]:
    known = [b for b in BACKENDS if b != "auto"]
    names = text.split(",") if text else known
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--backends: there is no backend {name!r}.",
                code="invalid_option",
                hint=nearest(name, known) or f"There are: {', '.join(known)}.",
            )
    if len(names) < 2:
        raise ConfigError("--backends needs two or more.", code="invalid_option", hint="Like: fused,hybrid")
    return names


def _prompts(path: str | None) -> list[str]:
    if path is None:
        return list(PROMPTS)
    try:
        lines = [line.strip() for line in Path(path).read_text("utf-8").splitlines()]
    except OSError as e:
        raise ConfigError(
            f"{path} cannot be read: {e.strerror}.", code="unreadable_file", hint="Check --prompts."
        ) from e
    found = [line for line in lines if line]
    if not found:
        raise ConfigError(f"{path} holds no prompt.", code="unreadable_file", hint="One prompt a line.")
    return found


def _print(findings: Sequence[Finding], reference: str, tolerance: float, out: Terminal) -> None:
    rows = []
    for f in findings:
        first = "none" if f.first_difference is None else str(f.first_difference)
        verdict = (
            out.bad("differs") if f.fault(tolerance) else "near tie" if f.near_tie else out.good("equal")
        )
        rows.append((f.backend, str(f.prompt + 1), str(f.tokens), first, f"{f.distance:.2g}", verdict))
    out.line(f"against {reference}, tolerance {tolerance:g}")
    out.table(("backend", "prompt", "tokens equal", "first difference", "distance", "verdict"), rows)
