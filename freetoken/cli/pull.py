"""`ft pull OWNER/MODEL`: fetch a model into the cache that all tools of the hub share.

Says what it will take before it takes it, and refuses what the disk can't hold. A broken download is
resumed by running it again.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from freetoken.cli import _hub
from freetoken.cli._terminal import Terminal
from freetoken.core import env, hub_cache
from freetoken.core.errors import CapacityError, ConfigError
from freetoken.core.units import GIB, format_bytes

HELP = "download a model into the shared cache of the hub's tools"
SPARE_DISK = GIB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="OWNER/MODEL", help="the model's name on the hub")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit (default: main)")
    parser.add_argument("--file", metavar="PATTERN", help="weight files to take, like '*Q4_K_M*.gguf'")
    parser.add_argument("--dry-run", action="store_true", help="say what would be fetched, fetch nothing")


def run(args: argparse.Namespace) -> int:
    out = Terminal(sys.stderr)
    if not hub_cache.is_name(args.model):
        raise ConfigError(
            f"{args.model!r} is not a name like owner/model.", code="usage", hint="See: ft pull --help"
        )
    found = _hub.files(args.model, args.revision)
    small = [file for file in found if _hub.matches(file.path, _hub.SMALL)]
    wanted = small + _hub.choose(args.model, found, args.file)
    total = sum(file.num_bytes for file in wanted)
    where = env.hub_cache()
    out.line(f"{args.model}: {len(wanted)} files, {format_bytes(total)}, into {where}")
    if args.dry_run:
        return 0
    _check_disk(where, total, hub_cache.folder(args.model))
    path = _hub.download(args.model, [file.path for file in wanted], args.revision, bars=out.live)
    print(path)
    first = next((file.path for file in wanted if _hub.matches(file.path, _hub.GGUF)), "")
    out.line(f"Serve it with: ft serve {path / first if first else args.model}")
    return 0


def _check_disk(where: Path, total: int, own: Path) -> None:
    here = sum(file.stat().st_size for file in own.glob("blobs/*")) if own.is_dir() else 0
    parent = next(path for path in (where, *where.parents) if path.exists())
    free = shutil.disk_usage(parent).free
    if total - here + SPARE_DISK > free:
        raise CapacityError(
            f"Disk: {format_bytes(total)} wanted, {format_bytes(here)} of it here, "
            f"{format_bytes(free)} free.",
            code="disk_full",
            hint="Make room (`ft models` shows what takes it, `ft rm` removes one), or set HF_HUB_CACHE.",
        )
