"""`ft bench synthetic`: routing made up to behave like published statistics of real models.

Owns the generator and its calibrated parameters. It knows no model: every trace from here is labelled
synthetic. A layer's router logits are a sum of four things: a fixed popularity, a topic that is drawn anew
for every request and drifts, a theme that lasts some tokens, and noise; besides, a share of the choices is
random, since real routing has a flat tail. Layer 0 is nearly uniform.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.bench import _locality
from freetoken.bench._report import Report, add_report_arguments
from freetoken.bench.traces import DECODE, NO_ROUTING, PREFILL, Trace, load_trace, save_trace
from freetoken.core import env
from freetoken.core.errors import ConfigError
from freetoken.core.log import logger

HELP = "write a synthetic routing trace calibrated to published statistics"
VERSION = 1
FLAT_LAYER = 0.15
PROMPT_TOKENS, ANSWER_TOKENS, REQUESTS = 128, 384, 3


@dataclass(frozen=True)
class Routing:
    """Strengths in units of the noise's standard deviation, durations in tokens.

    popularity, topic, theme   strengths
    topic_tokens, theme_tokens durations after which correlation is 1/e
    tail                       share of the choices that is random
    """

    popularity: float
    topic: float
    topic_tokens: float
    theme: float
    theme_tokens: float
    tail: float


@dataclass(frozen=True)
class Shape:
    """A trace geometry with the routing it is given. calibrated = fitted to published miss rates."""

    name: str
    layers: int
    experts: int
    top_k: int
    routing: Routing
    calibrated: bool = False


QWEN_LIKE = Routing(0.605, 1.593, 178.0, 1.057, 12.7, 0.11)
DEEPSEEK_LIKE = Routing(2.355, 0.903, 153.0, 2.311, 21.3, 0.289)
GEOMETRIES: dict[str, Shape] = {
    s.name: s
    for s in (
        Shape("40x256k8", 40, 256, 8, QWEN_LIKE, calibrated=True),
        Shape("43x256k6", 43, 256, 6, DEEPSEEK_LIKE, calibrated=True),
    )
}


def shape(name: str) -> Shape:
    """Return a geometry by name; any other LxEkK gets the first one's routing, uncalibrated."""
    if name in GEOMETRIES:
        return GEOMETRIES[name]
    match = re.fullmatch(r"(\d+)x(\d+)k(\d+)", name)
    if not match or int(match[3]) > int(match[2]) or int(match[1]) == 0 or int(match[3]) == 0:
        raise ConfigError(f"{name!r} is not a geometry.", hint="Write layers x experts k top-k: 40x256k8.")
    return Shape(name, int(match[1]), int(match[2]), int(match[3]), QWEN_LIKE)


def generate(
    shape: Shape,
    *,
    seed: int = 0,
    requests: int = REQUESTS,
    prompt_tokens: int = PROMPT_TOKENS,
    answer_tokens: int = ANSWER_TOKENS,
) -> Trace:
    """Make a trace of `requests` one after the other; the same seed gives the same trace."""
    rng = np.random.default_rng(seed)
    router = _Router(shape, rng)
    tokens = prompt_tokens + answer_tokens
    topk = np.empty((requests * tokens, shape.layers, shape.top_k), dtype=_dtype(shape.experts))
    for request in range(requests):
        router.new_topic()
        for token in range(tokens):
            topk[request * tokens + token] = router.next_token()
    phase = np.tile(np.repeat([PREFILL, DECODE], [prompt_tokens, answer_tokens]), requests)
    return Trace(
        topk=topk,
        phase=phase.astype(np.uint8),
        request=np.repeat(np.arange(requests, dtype=np.int32), tokens),
        step=np.arange(requests * tokens, dtype=np.int32),
        num_experts=shape.experts,
        meta={
            "name": f"synthetic-{shape.name}",
            "synthetic": True,
            "calibrated": shape.calibrated,
            "seed": seed,
            "version": VERSION,
            "routing": asdict(shape.routing),
        },
    )


def cached(shape: Shape, *, seed: int = 0) -> Trace:
    """The default trace of a geometry, made once and kept under the home folder where that is writable."""
    path = env.home() / "traces" / f"synthetic-{shape.name}-{seed}-v{VERSION}.npz"
    if path.exists():
        return load_trace(path)
    trace = generate(shape, seed=seed)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_trace(trace, path)
    except OSError as error:
        logger("bench").info("the synthetic trace can't be kept in %s: %s", path.parent, error.strerror)
    return trace


class _Router:
    """The logits of all layers and how they move from token to token."""

    def __init__(self, shape: Shape, rng: np.random.Generator) -> None:
        self._rng, self._routing, self._top_k = rng, shape.routing, shape.top_k
        self._size = (shape.layers, shape.experts)
        self._strength = np.ones((shape.layers, 1))
        self._strength[0] = FLAT_LAYER
        self._popularity = self._normal()
        self._topic = self._normal()
        self._theme = self._normal()

    def new_topic(self) -> None:
        self._topic = self._normal()

    def next_token(self) -> NDArray[np.int64]:
        """int64 [L, k]: the chosen experts, most probable first."""
        r = self._routing
        self._topic = self._drift(self._topic, r.topic_tokens)
        self._theme = self._drift(self._theme, r.theme_tokens)
        logits = r.popularity * self._popularity + r.topic * self._topic + r.theme * self._theme
        logits = logits * self._strength + self._normal()
        tail = self._rng.random(self._size) < r.tail * self._top_k / self._size[1]
        logits[tail] += 100.0
        chosen = np.argpartition(-logits, self._top_k - 1, axis=1)[:, : self._top_k]
        order = np.argsort(-np.take_along_axis(logits, chosen, axis=1), axis=1, kind="stable")
        ranked: NDArray[np.int64] = np.take_along_axis(chosen, order, axis=1)
        return ranked

    def _drift(self, x: NDArray[np.float64], tokens: float) -> NDArray[np.float64]:
        keep = float(np.exp(-1.0 / tokens))
        return keep * x + float(np.sqrt(1.0 - keep * keep)) * self._normal()

    def _normal(self) -> NDArray[np.float64]:
        return self._rng.standard_normal(self._size)


def _dtype(experts: int) -> Any:
    return np.uint8 if experts < NO_ROUTING[1] else np.uint16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--geometry", default="40x256k8", help="layers x experts k top-k, like 43x256k6")
    parser.add_argument("--out", metavar="FILE", help="where to write the trace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    add_report_arguments(parser, svg=False)


def run(args: argparse.Namespace) -> int:
    report = Report("synthetic", args)
    chosen = shape(args.geometry)
    if args.requests < 1:
        raise ConfigError("A trace needs at least one request.", hint="See --requests.")
    if args.seed < 0:
        raise ConfigError("--seed is at least 0.", code="invalid_option")
    trace = generate(chosen, seed=args.seed, requests=args.requests)
    found = _locality.measure(trace)
    label: Callable[[float], str] = lambda value: f"{100 * value:.1f} %"  # noqa: E731
    report.line(f"{trace.name}: {len(trace.topk)} tokens, {'' if chosen.calibrated else 'not '}calibrated")
    report.table(["statistic", "value"], [[key, label(value)] for key, value in found.items()])
    if args.out:
        save_trace(trace, args.out)
        report.line(f"trace: {Path(args.out)}")
    return report.finish([{"trace": trace.name, **found}])
