"""`ft checkpoint`: write a model as an FTW directory, which loads at the disk's speed; or verify one.

    ft checkpoint --model DIR --out DIR [--quantise nvfp4]    write; the same line again continues
    ft checkpoint verify DIR                                  read everything against its checksums
Needs no GPU and the memory of a few experts. Prints what coding matrices anew has cost.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from freetoken.cli._terminal import Progress, Terminal
from freetoken.core import choices
from freetoken.core.errors import ConfigError, WeightsError
from freetoken.core.units import format_bytes, parse_bytes

HELP = "write a model as FTW, which loads at the disk's speed, or verify one"
VERIFY = "verify"
ALIASES = {"fp8": "fp8_block", "int4": "int4_g32"}
SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="verify DIR", help="check every byte of an FTW directory")
    parser.add_argument("--model", metavar="DIR", help="the checkpoint to read, whatever its container")
    parser.add_argument("--out", metavar="DIR", help="the directory to write; it appears when it is whole")
    parser.add_argument(
        "--experts", metavar="FORMAT", default="",
        help="code the experts anew: " + ", ".join(choices.names("freetoken.quant")),
    )  # fmt: skip
    parser.add_argument(
        "--dense", metavar="FORMAT", default="",
        help="code attention, dense MLPs, shared experts and the head anew, in one of the same formats",
    )  # fmt: skip
    parser.add_argument("--quantise", metavar="FORMAT", default="", help="both of these")
    parser.add_argument("--shard-size", metavar="SIZE", default="8GiB", help="largest file (default 8GiB)")
    parser.add_argument(
        "--threads", type=int, default=0, metavar="N", help="default: as many as there are cores"
    )


def run(args: argparse.Namespace) -> int:
    out = Terminal(sys.stderr)
    if args.threads < 0:
        raise ConfigError("--threads must be at least 1.", code="invalid_option", hint="Leave it out.")
    if args.words:
        if args.words[0] != VERIFY or len(args.words) != 2 or args.model or args.out:
            raise _usage("Write `ft checkpoint verify DIR`, or --model and --out.")
        return _verify(Path(args.words[1]), args.threads, out)
    if not args.model or not args.out:
        raise _usage("--model and --out are needed.")
    return _write(args, out)


def _usage(message: str) -> ConfigError:
    return ConfigError(message, code="usage", hint="See: ft checkpoint --help")


def _threads(wish: int) -> int:
    from freetoken.native.topology import default_threads

    return wish or max(2, default_threads())


def _write(args: argparse.Namespace, out: Terminal) -> int:
    shard_bytes = parse_bytes(args.shard_size)
    if shard_bytes < 1 << 20:
        raise ConfigError("--shard-size must be at least 1MiB.", code="invalid_size", hint="Try 8GiB.")
    experts, dense = (_format(wish or args.quantise) for wish in (args.experts, args.dense))
    # Late: the help page needs no torch.
    from freetoken.engine.convert import Wish, convert

    progress = Progress(out, plain_lines=True)
    wish = Wish(
        model=Path(args.model).expanduser(),
        out=Path(args.out).expanduser(),
        experts=experts,
        dense=dense,
        needs_experts=bool(args.experts),
        shard_bytes=shard_bytes,
        threads=_threads(args.threads),
    )
    try:
        done = convert(wish, progress)
    finally:
        progress.finish()
    what = f"{done.num_tensors} tensors, {done.num_records} experts"
    if done.formats:
        what += f" in {', '.join(done.formats)}"
    out.line(f"{done.out}: {format_bytes(done.num_bytes)}, {what}, {progress.seconds:.1f} s")
    if done.resumed:
        out.line(f"  {done.resumed} of them were there from an earlier run")
    if done.errors:
        rows = [(name, f"{100 * rms:.3f} %", f"{100 * worst:.3f} %") for name, rms, worst in done.errors]
        out.table(("error of", "all of them", "the worst"), rows)
    if done.left_out:
        more = f" and {len(done.left_out) - 1} more" if len(done.left_out) > 1 else ""
        out.line(f"  {done.left_out[0]}{more} stay as they are: {dense} has no such number of columns")
    out.line(f"  ft serve --model {done.out}")
    return 0


def _format(wish: str) -> str:
    """A format by its name or as people write it: fp8, int4-g32."""
    name = wish.lower().replace("-", "_")
    name = ALIASES.get(name, name)
    if name and name not in choices.names("freetoken.quant"):
        choices.load("freetoken.quant", wish)  # says which there are
    return name


def _verify(path: Path, threads: int, out: Terminal) -> int:
    from freetoken.weights.ftw import is_ftw
    from freetoken.weights.ftw_verify import verify

    if not is_ftw(path):
        raise ConfigError(
            f"{path} is no FTW directory.",
            code="usage",
            hint="Only FTW has checksums; see ft checkpoint --help",
        )
    progress = Progress(out)
    try:
        found = verify(path, lambda percent: progress("verifying", percent), _threads(threads))
    finally:
        progress.finish()
    if found.damaged:
        for name in found.damaged[:SHOWN]:
            out.line(f"  {out.bad('damaged')}  {name}")
        more = f", and {len(found.damaged) - 1} more" if len(found.damaged) > 1 else ""
        what = f"{len(found.damaged)} of {found.num_pieces} parts of {path} are damaged"
        raise WeightsError(
            f"{what}: {found.damaged[0]}{more}.",
            code="damaged_weights",
            hint="Copy those files again, or write the directory anew with ft checkpoint.",
        )
    out.line(f"{path}: {found.num_pieces} parts, {format_bytes(found.num_bytes)}, all as written")
    return 0
