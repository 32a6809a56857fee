"""What the engine benches vary, and engines opened for it: options of a run, prompts, interleaving.

Owns the flags that these benches share. Engines of one group live side by side and take turns; where host
memory doesn't hold them all, or the device is a real GPU, each is a group of its own and rows say so.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from freetoken.bench._engine import Driven
from freetoken.bench._rates import Rates, machine_rates, probe
from freetoken.core.errors import ConfigError
from freetoken.core.host_memory import host_memory
from freetoken.core.options import BACKENDS, DEVICES, Options
from freetoken.core.units import parse_bytes, parse_rate
from freetoken.engine.build import DEMO_MODEL, Built, build
from freetoken.native.topology import default_threads

DEMO = "demo"
_LOADED = 1.4
"""Host memory that a loaded model takes, as a multiple of its files."""
_STRIDE = 1777
_TEXT = Path(__file__).resolve().parent.parent / "data" / "dictionary.tsv"
_TEXT_CHARS = 400_000


@dataclass(frozen=True)
class Setup:
    """One engine to measure. share None: as many slots as fit; extra: further options by name."""

    model: str
    device: str
    backend: str = "auto"
    share: float | None = None
    policy: str | None = None
    threads: int | None = None
    prefetch: int | None = None
    extra: tuple[tuple[str, Any], ...] = ()

    def options(self, context: int, streams: int, **more: Any) -> Options:
        """Options of an engine that holds `streams` requests of `context` tokens."""
        wishes: dict[str, Any] = {
            "model": None if self.model == DEMO else self.model,
            "device": self.device,
            "moe_backend": self.backend,
            "moe_cache_rate": self.share,
            "moe_policy": self.policy,
            "moe_cpu_threads": self.threads,
            "moe_prefetch": self.prefetch,
            "max_model_len": context,
            "max_running_requests": max(streams, 1),
            "num_tokens": (context + 32) * streams,
            **dict(self.extra),
            **more,
        }
        return Options(**{key: value for key, value in wishes.items() if value is not None})


def add_setup_arguments(parser: argparse.ArgumentParser) -> None:
    """--model, --device and what may be compared: several values make several rows."""
    add = parser.add_argument
    add("--model", default=DEMO, metavar="DIR", help="checkpoint (default: the embedded demo model)")
    add("--device", default="auto", choices=DEVICES, help="where to run")
    add("--backend", nargs="+", default=["auto"], choices=BACKENDS, metavar="NAME", help=" ".join(BACKENDS))
    add(
        "--share", nargs="+", type=float, default=[None], metavar="SHARE",
        help="expert slots as shares of the pool, like 0.37 0.11 (default: what fits)",
    )  # fmt: skip
    add("--policy", nargs="+", default=[None], metavar="NAME", help="residency policies (default: the best)")
    add(
        "--prefetch", nargs="+", type=int, default=[None], metavar="TILES",
        help="tiles of the next layer's likely experts to bring early, 0 = none (default: serving's)",
    )  # fmt: skip
    add("--threads", type=int, metavar="N", help="threads of the CPU branch (default: as serving chooses)")
    add("--gpu-memory", type=parse_bytes, metavar="SIZE", help="GPU memory to use at most")
    add("--link", type=parse_rate, metavar="RATE", help="play a slower link, like 12GB/s")
    add("--sim-machine", metavar="NAME", help="machine that --device sim plays")


def add_repeat_arguments(parser: argparse.ArgumentParser, repeats: int = 5, warm_up: int = 2) -> None:
    parser.add_argument("--repeats", type=int, default=repeats, help=f"measured rounds (default {repeats})")
    parser.add_argument(
        "--warm-up", type=int, default=warm_up, help=f"rounds before them (default {warm_up})"
    )


def has_gpu(args: argparse.Namespace) -> bool:
    return args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())


def is_small(args: argparse.Namespace) -> bool:
    """Whether sizes for a machine without a GPU, or for the demo model, are right."""
    return not has_gpu(args) or args.model == DEMO


def check_repeats(args: argparse.Namespace) -> None:
    if args.repeats < 1 or args.warm_up < 0:
        raise ConfigError("--repeats is at least 1 and --warm-up at least 0.", code="invalid_option")


def setups(args: argparse.Namespace) -> list[Setup]:
    """Every combination asked for; --share says nothing to backends without slots."""
    if any(share is not None and not 0 < share <= 1 for share in args.share):
        raise ConfigError("--share takes shares of the pool, above 0 and up to 1.", code="invalid_option")
    extra = {"gpu_memory": args.gpu_memory, "machine": args.sim_machine, "sim_link_bw": args.link}
    base = Setup(
        args.model,
        args.device,
        threads=args.threads,
        extra=tuple((key, value) for key, value in extra.items() if value is not None),
    )
    if args.device == "cpu" and any(share is not None for share in args.share):
        raise ConfigError("A CPU has no slots for experts.", code="invalid_option", hint="Leave --share out.")
    if args.link is not None and args.device in ("auto", "cpu") and not has_gpu(args):
        raise ConfigError("A CPU has no link.", code="invalid_option", hint="Add --device sim.")
    found = []
    for backend, share, policy, ahead in itertools.product(
        args.backend, args.share, args.policy, args.prefetch
    ):
        one = replace(base, backend=backend)
        if backend not in ("fused", "cpu"):
            one = replace(one, share=share, policy=policy, prefetch=ahead)
        if one not in found:
            found.append(one)
    return found


def serve_command(one: Setup, context: int, streams: int) -> list[str]:
    """`ft serve` with what the setup names, all else by default."""
    words = [sys.executable, "-m", "freetoken", "serve", "--port", "{port}", "--max-model-len", str(context)]
    words += ["--max-running-requests", str(streams), "--log-level", "warning", "--device", one.device]
    words += ["--moe-backend", one.backend]
    given = {
        "--model": None if one.model == DEMO else one.model,
        "--moe-cache-rate": one.share,
        "--moe-policy": one.policy,
        "--moe-cpu-threads": one.threads,
        "--moe-prefetch": one.prefetch,
        **{"--" + name.replace("_", "-"): value for name, value in one.extra},
    }
    for name, value in given.items():
        words += [name, str(value)] if value is not None else []
    return words


class Prompts:
    """Pieces of the model's walk, or of English text; no two begin alike."""

    def __init__(self, model: str) -> None:
        path = DEMO_MODEL if model == DEMO else Path(model)
        self.walk: list[int] | None = None
        if (path / "walk.json").is_file():
            self.walk = json.loads((path / "walk.json").read_text("utf-8"))["ids"]
        self._ids: list[int] = self.walk or []
        self._number = 0

    def learn(self, engine: Driven) -> None:
        """Without a walk, text in the model's own tokens."""
        if not self._ids:
            text = _TEXT.read_text("utf-8")[:_TEXT_CHARS]
            self._ids = [int(i) for i in engine.built.codec.tokenizer.encode(text)]

    def take(self, count: int) -> list[int]:
        at = self._number * _STRIDE
        self._number += 1
        return self._cut(at, count)

    def right(self, prompt: Sequence[int], answer: Sequence[int]) -> float | None:
        """Share of an answer that is the walk's; None if the model walks none."""
        if self.walk is None or not answer:
            return None
        follow = self._cut(self.walk.index(prompt[-1]) + 1, len(answer))
        return sum(a == b for a, b in zip(answer, follow, strict=True)) / len(answer)

    def _cut(self, at: int, count: int) -> list[int]:
        n = len(self._ids)
        at %= n
        return (self._ids[at:] + self._ids * (count // n + 1))[:count]


@dataclass
class Member:
    """An engine of a group, and what it was opened for."""

    setup: Setup
    engine: Driven

    @property
    def facts(self) -> dict[str, Any]:
        """What every row says of the engine behind it."""
        built = self.engine.built
        plan, config, moe = built.plan, built.config, built.config.moe
        pool = config.num_moe_layers * moe.num_experts if moe else 0
        slots = max(built.engine.memory.num_slots - 1, 0)
        has_slots = bool(plan.memory.num_slots) and pool
        return {
            "model": plan.model_name,
            "geometry": f"{config.num_moe_layers}x{moe.num_experts}k{moe.top_k}" if moe else "dense",
            "device": plan.device,
            "backend": plan.backend,
            "policy": plan.policy if has_slots else None,
            "threads": self.setup.threads or default_threads(),
            "pool_share": round(min(slots / pool, 1.0), 4) if has_slots else 1.0,
        }


def _tested(options: Options) -> Built:
    """Built and tried out as a server does before it is ready: kernels are compiled and captured then."""
    try:
        built = build(options)
    except ConfigError as error:
        if error.param != "max_model_len":
            raise
        hint = "Measure shorter prompts and answers, or fewer rounds of them."
        raise ConfigError(error.message, code=error.code, hint=hint, param=error.param) from error
    built.engine.self_test()
    return built


@contextmanager
def opened(some: Sequence[Setup], context: int, streams: int, **more: Any) -> Iterator[list[Member]]:
    """Engines of a group, all running while the block lasts. What they held is free behind it.

    The block empties the list that it is given, and keeps no member.
    """
    with ExitStack() as stack:
        yield [
            Member(one, stack.enter_context(Driven(_tested(one.options(context, streams, **more)))))
            for one in some
        ]
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def groups(some: Sequence[Setup]) -> list[list[Setup]]:
    """Setups that can live side by side."""
    path = DEMO_MODEL if some[0].model == DEMO else Path(some[0].model)
    files = path.parent.glob(path.name) if path.is_file() else path.glob("*")
    needed = _LOADED * sum(f.stat().st_size for f in files if f.is_file())
    together = some[0].device in ("cpu", "sim") or (some[0].device == "auto" and path == DEMO_MODEL)
    if together and needed * len(some) < host_memory().free_bytes:
        return [list(some)]
    return [[one] for one in some]


class Probed:
    """The best rates that any probe of the run has seen."""

    def __init__(self) -> None:
        self.best = Rates()

    def look(self, member: Member) -> None:
        built = member.engine.built
        if built.device.name == "sim":
            self.best = machine_rates(built.device.machine)
            return
        self.best = self.best.better(probe(built.device, built.filling.bank if built.filling else None))
