"""Sampling flags of `ft chat` and `ft generate`; ranges are checked here, the model fills the gaps."""

from __future__ import annotations

import argparse
from typing import Any

from freetoken.core.errors import ConfigError
from freetoken.core.generate import GenerateParams
from freetoken.core.options import Options

# name, type, least, most, help
_FLAGS: tuple[tuple[str, type, float, float, str], ...] = (
    ("temperature", float, 0.0, 2.0, "0 is greedy (default: the model's)"),
    ("top_p", float, 0.0, 1.0, "keep the likeliest tokens up to this probability"),
    ("top_k", int, 0, 1 << 20, "keep the k likeliest tokens, 0 is off"),
    ("min_p", float, 0.0, 1.0, "drop tokens below this share of the likeliest one"),
    ("max_tokens", int, 1, 1 << 30, "most tokens of an answer"),
    ("seed", int, -(1 << 63), (1 << 63) - 1, "the same seed gives the same answer"),
)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, kind, _, _, text in _FLAGS:
        metavar = "N" if kind is int else "X"
        group.add_argument("--" + name.replace("_", "-"), dest=name, type=kind, metavar=metavar, help=text)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text")


def sampling_params(args: argparse.Namespace, options: Options) -> GenerateParams:
    """Build the params of one answer; ConfigError names a flag that is out of range."""
    values: dict[str, Any] = {}
    for name, _, least, most, _ in _FLAGS:
        value = getattr(args, name)
        if value is None:
            continue
        if not least <= value <= most:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {value}, allowed are {least:g} to {most:g}.",
                code="invalid_option",
                hint="Leave it out for the model's own setting.",
            )
        values[name] = value
    thinking: Any = options.thinking
    return GenerateParams(
        **values, stop=args.stop, thinking=thinking, thinking_budget=options.thinking_budget
    )
