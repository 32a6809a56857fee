"""Who may call: an API key if one is set, no web page of another origin, no foreign host name.

A browser lets any page post to 127.0.0.1, and a rebound DNS name makes that page "same-origin"; the
Origin and Host checks stop both. Programs send no Origin and are not affected.
"""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from freetoken.api.errors import error_response
from freetoken.api.observe import served
from freetoken.core.errors import ForbiddenError, FreeTokenError, UnauthorizedError
from freetoken.core.options import Options

OPEN_PATHS = ("/", "/health", "/api/hello")


def is_loopback(host: str) -> bool:
    """True for localhost, its subdomains and loopback addresses; `host` has no port."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def allowed_origins(options: Options) -> tuple[str, ...]:
    return tuple(o.strip().rstrip("/") for o in (options.allowed_origins or "").split(",") if o.strip())


class Gate:
    """ASGI middleware: answers 401 or 403 itself, passes everything else on."""

    def __init__(self, app: ASGIApp, options: Options) -> None:
        self.app = app
        self._host = options.host.lower()
        self._key = options.api_key
        self._origins = allowed_origins(options)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self._refusal(scope["path"], Headers(scope=scope))
            if error is not None:
                await error_response(error, served(scope).error_body)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> FreeTokenError | None:
        host, origin = headers.get("host", ""), headers.get("origin", "")
        name = _host_name(host)
        if host and is_loopback(self._host) and name != self._host and not is_loopback(name):
            return ForbiddenError(
                f"This server listens on {self._host} only and does not answer to the host name {name!r}.",
                code="forbidden_host",
                hint="Call it as 127.0.0.1 or localhost, or start it with --host 0.0.0.0.",
            )
        if origin and not self._is_known(origin, host):
            return ForbiddenError(
                f"A web page of origin {origin!r} may not call this server.",
                code="forbidden_origin",
                hint="Start the server with --allowed-origins to let it.",
            )
        if self._key and path not in OPEN_PATHS and not _has_key(headers, self._key):
            return UnauthorizedError(
                "The API key is missing or wrong.",
                hint="Send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`.",
            )
        return None

    def _is_known(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin.rstrip("/") in self._origins:
            return True
        return bool(host) and urlsplit(origin).netloc.lower() == host.lower()


def _host_name(host: str) -> str:
    """The name without port: `[::1]:1919` -> `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")


def _has_key(headers: Headers, key: str) -> bool:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]
    return any(hmac.compare_digest(g.encode(), key.encode()) for g in given)
