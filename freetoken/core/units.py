"""Bytes, rates and times as people write and read them. Pure; no other room parses a size."""

from __future__ import annotations

import re

from freetoken.core.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_FACTORS = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1 << 40}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*$", re.IGNORECASE)
_RATE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(?:GB/s)?\s*$", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Read `8GiB`, `8g`, `512MB` or a plain number of bytes; units are powers of 1024."""
    if isinstance(text, int):
        return text
    match = _SIZE.match(text)
    if not match or len(text) > 32:
        raise ConfigError(
            f"{text!r} is not a size.", code="invalid_size", hint="Write it like 8GiB or 512MiB."
        )
    return int(float(match[1]) * _FACTORS[match[2].lower()])


def parse_rate(text: str) -> float:
    """Read `12GB/s`, or a plain number of GB/s (powers of ten); GB/s."""
    match = _RATE.match(text)
    if not match or len(text) > 32 or not float(match[1]):
        raise ConfigError(f"{text!r} is not a rate.", code="invalid_size", hint="Write it like 12GB/s.")
    return float(match[1])


def format_bytes(num_bytes: float) -> str:
    """Write bytes with three significant digits: `1.50 GiB`."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= factor:
            value = num_bytes / factor
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{int(num_bytes)} B"


def format_count(n: float) -> str:
    """Write a count briefly: `17.7M`."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(n) >= factor:
            return f"{n / factor:.3g}{unit}"
    return f"{n:.3g}"


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def align_up(n: int, to: int) -> int:
    return -(-n // to) * to
