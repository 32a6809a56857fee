"""Taking the address to listen on, and saying who has it when it is taken.

Pure socket and process look-ups; nothing here connects anywhere.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys

import psutil

from freetoken.core.errors import ConfigError

BACKLOG = 2048
TRIES = 100
MAX_PORT = 65535


def bind(host: str, port: int) -> socket.socket:
    """Return a listening-ready socket; port 0 takes any free one.

    Raises ConfigError `port_taken` (naming the holder and the next free port), `port_refused`,
    `invalid_port` or `invalid_host`.
    """
    if not 0 <= port <= MAX_PORT:
        raise ConfigError(
            f"Port {port} does not exist.",
            code="invalid_port",
            hint=f"Choose one up to {MAX_PORT}; 0 takes any free one.",
            param="port",
        )
    try:
        return _bound(host, port)
    except socket.gaierror as error:
        raise ConfigError(
            f"{host!r} is not an address of this machine.",
            code="invalid_host",
            hint="Use 127.0.0.1, or 0.0.0.0 to listen on every network.",
            param="host",
        ) from error
    except PermissionError as error:
        raise ConfigError(
            f"This user may not listen on port {port}.",
            code="port_refused",
            hint="Choose a port above 1023 with --port.",
            param="port",
        ) from error
    except OSError as error:
        if not _is_taken(host, port):
            raise ConfigError(
                f"Can't listen on {host}:{port}: {error}.",
                code="invalid_host",
                hint="Check --host and --port.",
                param="host",
            ) from error
        free = next_free(host, port + 1)
        hint = f"Use --port {free}, which is free, or stop that process."
        raise ConfigError(
            f"Port {port} is taken by {holder(port)}.", code="port_taken", hint=hint, param="port"
        ) from error


def url(sock: socket.socket) -> str:
    """`http://127.0.0.1:1919` for a bound socket; a wildcard address shows as loopback."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def next_free(host: str, start: int) -> int:
    """The first port from `start` on that can be bound; 0 (any) if none of the next hundred can."""
    for port in range(start, min(start + TRIES, MAX_PORT + 1)):
        if not _is_taken(host, port):
            return port
    return 0


def holder(port: int) -> str:
    """The process that listens on `port`, like `ollama (pid 4711)`, as far as this user may see."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status != psutil.CONN_LISTEN or connection.laddr.port != port or not connection.pid:
                continue
            who = "this process" if connection.pid == os.getpid() else psutil.Process(connection.pid).name()
            return f"{who} (pid {connection.pid})"
    return "another process"


def _bound(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    info = next((i for i in found if i[0] == socket.AF_INET), found[0])
    # The protocol must be named: asyncio turns delays off (TCP_NODELAY) only where it reads TCP.
    sock = socket.socket(*info[:3])
    try:
        if sys.platform == "win32":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(info[4])
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_taken(host: str, port: int) -> bool:
    try:
        _bound(host, port).close()
    except OSError as error:
        return error.errno in (errno.EADDRINUSE, errno.EACCES)
    return False
