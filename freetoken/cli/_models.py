"""Where a model that a user names lies: a folder, the embedded demo, the shared cache, or the hub's headers.

Owns that order. Doesn't open checkpoints: what is wrong inside a folder is told by whoever reads it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import freetoken
from freetoken.cli import _hub
from freetoken.core import env, hub_cache

DEMO = Path(freetoken.__file__).parent / "data" / "demo-model"


def local(name: str | None) -> Path | None:
    """The folder or file of a model on this machine; None for a name that is not here."""
    if name is None:
        return DEMO
    path = Path(name).expanduser()
    try:
        if path.exists():
            return path
    except (OSError, ValueError):
        return None
    return hub_cache.snapshot(name)


@contextmanager
def headers(name: str | None, *, offline: bool, file: str | None = None) -> Iterator[Path]:
    """A folder whose headers can be read, for as long as the context lasts.

    A model that is not here is asked for at the hub: config and headers, no weights.
    file   a pattern for the weight files of a model on the hub that has several
    """
    found = local(name)
    if found is not None:
        yield found
    elif name is None or offline or env.hub_offline() or not hub_cache.is_name(name):
        yield Path(name or "")
    else:
        with tempfile.TemporaryDirectory(prefix="freetoken-headers-") as folder:
            to = Path(folder) / name.rpartition("/")[2]
            to.mkdir()
            _hub.fetch_headers(name, to, file)
            yield to
