"""Request bytes to typed values: size limit, JSON, types. Every fault is a 400 with a stable code.

    invalid_json       not JSON, not UTF-8, cut short, or nested too deeply
    missing_field      a required field is absent           param = the field
    invalid_type       a field has the wrong type           param = its path, like messages[0].role
    request_too_large  413, more than MAX_BYTES
    request_timeout    408, not whole after MAX_SECONDS
Unknown fields are ignored: clients send service fields that mean nothing here.
"""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from freetoken.core.errors import RequestError, TooLargeError, TooSlowError
from freetoken.core.units import MIB, format_bytes

MAX_BYTES = 64 * MIB
MAX_SECONDS = 60.0
_PATH = re.compile(r"^(?P<what>.*?) - at (?:`key` in |`value` in )?`\$\.?(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]+)`")
T = TypeVar("T")


async def read_body(request: Request) -> bytes:
    """Read the whole body. Raises TooLargeError, TooSlowError, or ClientDisconnect if the client leaves."""
    try:
        return await asyncio.wait_for(_read(request), MAX_SECONDS)
    except asyncio.TimeoutError as error:
        raise TooSlowError(
            f"The request body did not arrive within {MAX_SECONDS:.0f} s.", hint="Send it in one go."
        ) from error


async def _read(request: Request) -> bytes:
    chunks: list[bytes] = []
    size = 0
    # What is announced is as good as sent: nobody has to send it to hear that it's too much.
    _check_size(int(request.headers.get("content-length", 0)))
    async for chunk in request.stream():
        size += len(chunk)
        _check_size(size)
        chunks.append(chunk)
    return b"".join(chunks)


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise TooLargeError(
            f"The request body is larger than {format_bytes(MAX_BYTES)}.", hint="Send a shorter prompt."
        )


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode a body; RequestError names the place and what was expected there."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(
            f"The request body is not valid JSON: {reason}.",
            code="invalid_json",
            hint="Send one JSON object, encoded as UTF-8.",
        ) from error


def _type_error(text: str) -> RequestError:
    found = _PATH.match(text)
    what, path = (found["what"], found["path"]) if found else (text, "")
    missing = _MISSING.match(what)
    if missing:
        name = f"{path}.{missing['name']}".lstrip(".")
        return RequestError(
            f"{name} is missing.", code="missing_field", hint="Add this field to the request.", param=name
        )
    place = path or "The request body"
    return RequestError(
        f"{place}: {what[0].lower()}{what[1:]}.",
        code="invalid_type",
        hint="Send the field with the expected type.",
        param=path or None,
    )
