"""GET /v1/cache and POST /v1/cache/resize: what memory is used for, and how much of it, while requests run.

Knows the shape of both; the engine decides and moves. Reached from this machine or with a key only (auth.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from freetoken.api.body import decode
from freetoken.api.face import LanguageModel
from freetoken.core.errors import CapacityError, ConfigError, RequestError
from freetoken.core.units import parse_bytes


class ResizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """memory: the device memory to use from now on, in bytes or like "8GiB".

    No client of another protocol writes this body, so a field that is not known is a mistake.
    """

    memory: int | str


_DECODER = msgspec.json.Decoder(ResizeRequest)


def parse(body: bytes) -> int:
    """The wish in bytes. RequestError for anything that is no size."""
    wish = decode(_DECODER, body).memory
    try:
        size = parse_bytes(wish)
    except (ConfigError, ValueError, TypeError, OverflowError) as error:
        raise _no_size(wish) from error
    if not 0 < size < 1 << 50:
        raise _no_size(wish)
    return size


def resize(llm: LanguageModel, size: int) -> dict[str, Any]:
    """Do it, and report; blocks while the engine moves what it holds. What does not fit changes nothing."""
    try:
        llm.resize_memory(size)
    except CapacityError as error:
        raise RequestError(error.message, code=error.code, hint=error.hint, param="memory") from error
    return report(llm)


def report(llm: LanguageModel) -> dict[str, Any]:
    """What the pools and the prefix cache hold."""
    stats = llm.stats()
    groups = {name: stats.get(name) for name in ("memory", "cache")}
    return {"object": "cache", **{name: dict(g) for name, g in groups.items() if isinstance(g, Mapping)}}


def _no_size(wish: int | str) -> RequestError:
    return RequestError(
        f"memory is {str(wish)[:40]!r}, which is no size.",
        code="out_of_range",
        hint="Send bytes as a number, or a text like 8GiB.",
        param="memory",
    )
