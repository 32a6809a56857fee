"""Thoughts on the wire: what switches them, and the opaque string that stands for one.

A signature is never empty, because agents drop thoughts without one. It can carry the thought itself,
for clients that don't want to see it: then it comes back whole with the next request. What a client
sends here is data like any other text; a foreign or damaged signature carries nothing.
"""

from __future__ import annotations

import base64
import hashlib
import zlib

from freetoken.core.errors import RequestError

NO_THINKING = ("none", "minimal")
EFFORTS = (*NO_THINKING, "low", "medium", "high", "xhigh", "max")
_CARRIED = "ft1."
_MAX_THOUGHT_BYTES = 4 << 20


def check_effort(effort: str | None, param: str) -> str | None:
    """Return the word for how much to think; RequestError for an unknown one."""
    if effort is not None and effort not in EFFORTS:
        raise RequestError(
            f"{param} is {effort!r}.",
            code="out_of_range",
            hint=f"Use one of: {', '.join(EFFORTS)}.",
            param=param,
        )
    return effort


def thinks_by_effort(effort: str | None) -> bool | None:
    """Whether an effort means thinking; None leaves it to the server."""
    return None if effort is None else effort not in NO_THINKING


def sign(thought: str, *, carry: bool) -> str:
    """A signature for a thought, never empty; with `carry` it holds the thought itself."""
    if carry:
        return _CARRIED + base64.b64encode(zlib.compress(thought.encode())).decode()
    return base64.b64encode(hashlib.sha256(thought.encode()).digest()).decode()


def unsign(signature: str) -> str:
    """The thought that a signature carries, "" if it carries none."""
    if not signature.startswith(_CARRIED):
        return ""
    try:
        data = base64.b64decode(signature[len(_CARRIED) :], validate=True)
        return zlib.decompressobj().decompress(data, _MAX_THOUGHT_BYTES).decode()
    except (ValueError, zlib.error):
        return ""
