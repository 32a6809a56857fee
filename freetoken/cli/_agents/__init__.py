"""One file, one coding agent: how it is told to use a FreeToken server.

A file states `PACKAGE` (the npm package and the version that was tried), `HELP`, and
`launch(server, folder)`: program, environment and config files. Nothing of the user's own
configuration is touched: what an agent needs as a file lies in `folder`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Server:
    """Where to send requests. `context` and `max_output` in tokens."""

    url: str
    model: str
    context: int
    api_key: str | None = None

    @property
    def max_output(self) -> int:
        """What an answer may take: a quarter of the context, as agents keep that much free."""
        return max(256, min(32_000, self.context // 4))


@dataclass(frozen=True)
class Launch:
    """program and its first arguments; environment to add; files to write (path -> text)."""

    program: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    files: dict[Path, str] = field(default_factory=dict)
