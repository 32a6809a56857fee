"""Who may call, and how much at once: an API key if any is set, no web page of another origin, no
foreign host name, so many running requests a key. Figures of the engine stay on this machine unless
callers have keys.

A browser lets any page post to 127.0.0.1, and a rebound DNS name makes that page "same-origin"; the
Origin and Host checks stop both. Programs send no Origin and are not affected.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from freetoken.api.errors import error_response
from freetoken.api.observe import served
from freetoken.core.errors import (
    ConfigError,
    ForbiddenError,
    FreeTokenError,
    TooManyError,
    UnauthorizedError,
)
from freetoken.core.options import Options

OPEN_PATHS = ("/", "/health", "/api/hello")
ADMIN_PATHS = ("/v1/stats", "/v1/requests", "/v1/cache", "/metrics")


def is_loopback(host: str) -> bool:
    """True for localhost, its subdomains and loopback addresses; `host` has no port."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_keys(options: Options) -> tuple[str, ...]:
    """All keys, of the option and of the file. ConfigError `unreadable_file` if that can't be read."""
    lines = (options.api_key or "").split(",")
    if options.api_key_file:
        try:
            lines += Path(options.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"The key file can't be read: {error}.",
                code="unreadable_file",
                hint="Give --api-key-file the path of a file with one key a line.",
            ) from error
    keys = (line.strip() for line in lines)
    return tuple(dict.fromkeys(key for key in keys if key and not key.startswith("#")))


def allowed_origins(options: Options) -> tuple[str, ...]:
    return tuple(o.strip().rstrip("/") for o in (options.allowed_origins or "").split(",") if o.strip())


class Gate:
    """ASGI middleware: answers 401 or 403 itself, passes everything else on."""

    def __init__(self, app: ASGIApp, options: Options, keys: Sequence[str]) -> None:
        self.app = app
        self._host = options.host.lower()
        self._keys = [_digest(key) for key in keys]
        self._origins = allowed_origins(options)
        self._most = options.max_requests_per_key
        self._running: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        caller = self._caller(headers)
        who = caller or (scope["client"] or ("",))[0]
        is_counted = self._most is not None and scope["method"] == "POST"
        error = self._refusal(scope, headers, caller)
        if error is None and is_counted and self._running[who] >= (self._most or 0):
            error = _too_many(self._running[who])
        if error is not None:
            await error_response(error, served(scope).error_body)(scope, receive, send)
            return
        if not is_counted:
            await self.app(scope, receive, send)
            return
        self._running[who] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._running[who] -= 1
            if not self._running[who]:
                del self._running[who]

    def _caller(self, headers: Headers) -> str:
        """The digest of the known key that was sent, "" if none. Every key is compared, always."""
        found = ""
        for given in _given_keys(headers):
            digest = _digest(given)
            for key in self._keys:
                if hmac.compare_digest(digest, key):
                    found = key
        return found

    def _refusal(self, scope: Scope, headers: Headers, caller: str) -> FreeTokenError | None:
        path: str = scope["path"]
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
        if self._keys and path not in OPEN_PATHS and not caller:
            return UnauthorizedError(
                "The API key is missing or wrong.",
                hint="Send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`.",
            )
        client = (scope["client"] or ("",))[0]
        if not self._keys and path.startswith(ADMIN_PATHS) and client and not is_loopback(client):
            return ForbiddenError(
                f"{path} answers to this machine only.",
                code="forbidden_admin",
                hint="Start the server with --api-key to open it to callers with a key.",
            )
        return None

    def _is_known(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin.rstrip("/") in self._origins:
            return True
        return bool(host) and origin.partition("://")[2].lower() == host.lower()


def _host_name(host: str) -> str:
    """The name without port: `[::1]:1919` -> `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")


def _given_keys(headers: Headers) -> list[str]:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    return [headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _too_many(running: int) -> TooManyError:
    return TooManyError(
        f"{running} requests of this caller are running.",
        hint="Wait until one has finished, or start the server with a larger --max-requests-per-key.",
    )
