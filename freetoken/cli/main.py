"""The `ft` command: finds the command's file by its name, runs it, renders its errors.

Knows no command. Invariant: every failure ends as `error [code]: message` with the next step on its
own line and the exit code of core/errors.py; tracebacks appear only with --log-level debug.

    exit codes   0 done · 1 failed · 2 wrong option or config · 3 does not fit · 4 bad checkpoint
                 5 device failed · 130 interrupted
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from freetoken import __version__
from freetoken.cli._terminal import Terminal
from freetoken.core import choices, env
from freetoken.core.errors import CapacityError, ConfigError, FreeTokenError, nearest

PACKAGE = "freetoken.cli"
INTERRUPTED = 130
ORDER = (
    *("demo", "serve", "chat", "generate", "plan", "pull", "models", "rm"),
    *("launch", "ctl", "doctor", "config", "verify", "checkpoint", "bench"),
)


class Parser(argparse.ArgumentParser):
    """argparse that raises ConfigError and knows no abbreviations."""

    def __init__(self, prog: str, description: str = "") -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=_Formatter,
        )

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"{message[:1].upper()}{message[1:]}.", code="usage", hint=f"See: {self.prog} --help"
        )

    def format_usage(self) -> str:
        words = [a.metavar or a.dest for a in self._actions if not a.option_strings]
        return f"usage: {self.prog} {' '.join(f'[{w}]' for w in words)} [options]\n"

    def format_help(self) -> str:
        # The long list of flags in argparse's own usage would hide what follows it.
        self.usage = self.format_usage().removeprefix("usage: ").rstrip()
        return super().format_help()

    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=100)


def commands() -> list[str]:
    """Names of all commands, the usual ones first."""
    found = [n for n in choices.names(PACKAGE) if n != "main"]
    return sorted(found, key=lambda n: (ORDER.index(n) if n in ORDER else len(ORDER), n))


def parse(prog: str, command: ModuleType, argv: Sequence[str]) -> argparse.Namespace:
    """Parse `argv` by the command's own arguments; an unknown flag names the nearest one.

    What follows `--` goes to `args.rest`, if the command has given that a default.
    """
    parser = Parser(prog, command.HELP)
    command.add_arguments(parser)
    own, rest = list(argv), []
    if parser.get_default("rest") is not None and "--" in own:
        own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    args, unknown = parser.parse_known_args(own)
    args.rest = rest
    if unknown:
        flag = unknown[0].split("=")[0]
        hint = nearest(flag, parser.flags()) if flag.startswith("-") else ""
        raise ConfigError(
            f"{prog} does not know {flag!r}.", code="unknown_option", hint=hint or f"See: {prog} --help"
        )
    return args


def overview() -> str:
    """The text of `ft --help`."""
    rows = [f"  {name:<10} {choices.constant(PACKAGE, name, 'HELP')}" for name in commands()]
    return "\n".join(
        [
            f"FreeToken {__version__}: mixture-of-experts models on the machine you own",
            "",
            "usage: ft COMMAND [options]      ft COMMAND --help      ft --version",
            "",
            *rows,
            "",
            "A first look without any download: ft demo",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    env.let_openmp_sleep()
    try:
        return _run(args)
    except SystemExit as done:  # argparse has printed a help page
        return int(done.code or 0)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader left (`ft ... | head`); keep the interpreter from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except FreeTokenError as error:
        _report(error, args)
        return error.exit_code
    except Exception as error:
        unexpected = _unexpected(error)
        _report(unexpected, args)
        return unexpected.exit_code


def _open_streams() -> None:
    """A service manager may start us with closed streams, which Python shows as None."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - open to the end
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _run(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if args[0] in ("-V", "--version"):
        print(f"freetoken {__version__}")
        return 0
    name = args[0].replace("-", "_")
    if name not in commands():
        raise ConfigError(
            f"There is no command {args[0]!r}.",
            code="unknown_command",
            hint=nearest(args[0], commands()) or "See: ft --help",
        )
    command = choices.load(PACKAGE, name)
    return int(command.run(parse(f"ft {args[0]}", command, args[1:])))


def _unexpected(error: Exception) -> FreeTokenError:
    if isinstance(error, ModuleNotFoundError) and not (error.name or "freetoken").startswith("freetoken"):
        return FreeTokenError(
            f"The Python package {error.name} is not installed.",
            code="missing_package",
            hint="The checkout is newer than its installation: run pip install -e . there once more "
            "(./scripts/run.sh does it).",
        )
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return CapacityError(
            "The system gives no more memory.",
            code="host_memory",
            hint="Close other programs, raise the limit (ulimit -v, a container's), or lower --num-tokens "
            "and --max-running-requests. `ft doctor` shows what is free.",
        )
    if isinstance(error, OSError) and error.strerror:
        return FreeTokenError(
            f"The system refused: {error.strerror}{f' ({error.filename})' if error.filename else ''}.",
            code="system_refused",
            hint="Check space, rights and limits; `ft doctor` shows what is there.",
        )
    text = str(error).strip().splitlines()
    return FreeTokenError(
        f"{type(error).__name__}: {text[0] if text else 'no message'}",
        hint="This is a fault in FreeToken. See it whole with --log-level debug; "
        "`ft doctor --bundle report.zip` collects what a bug report needs.",
    )


def _report(error: FreeTokenError, args: Sequence[str]) -> None:
    if _wants_traceback(args):
        traceback.print_exc()
    out = Terminal(sys.stderr)
    out.line(f"{out.bad(f'error [{error.code}]')}: {error.message}")
    if error.hint:
        out.line(f"  {error.hint.strip()}")


def _wants_traceback(args: Sequence[str]) -> bool:
    given = " ".join(args)
    return "--log-level debug" in given or "--log-level=debug" in given
