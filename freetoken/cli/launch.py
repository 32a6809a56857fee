"""`ft launch AGENT`: run a coding agent on the server that runs here.

Owns finding the server, showing or writing what the agent needs, and the child's environment, from
which keys of cloud services are removed. Knows no agent: those are files in `_agents/`. Nothing is
installed, and the user's own configuration of the agent is left alone.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from freetoken.cli import _agents, _options
from freetoken.cli._agents import Launch, Server
from freetoken.cli._remote import find_server, first_key
from freetoken.cli._terminal import Terminal
from freetoken.core import choices, env
from freetoken.core.errors import BusyError, ConfigError
from freetoken.core.options import Options

HELP = "run a coding agent (claude, codex, opencode) on the running server"
USAGE = """run a coding agent on the server that runs here

  ft launch claude                       Claude Code
  ft launch codex -- exec "fix the test" what follows -- goes to the agent
  ft launch opencode --dry-run           only show command, environment and files

Keys of cloud services are removed from the agent's environment. Nothing is installed.
"""
CLOUD_KEYS = re.compile(
    r"^(ANTHROPIC_|OPENAI_|AZURE_OPENAI_|CLAUDE_CODE_USE_|GOOGLE_APPLICATION_CREDENTIALS$)"
    r"|^AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|BEARER_TOKEN)"
    r"|(_API_KEY|_AUTH_TOKEN|_ACCESS_TOKEN)$"
)
_DEFAULT_CONTEXT = 65_536


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = USAGE
    parser.add_argument("agent", metavar="AGENT", help=", ".join(choices.names(_agents.__name__)))
    parser.set_defaults(rest=[])
    parser.add_argument("--dry-run", action="store_true", help="only show what would be run and written")
    parser.add_argument("--name", metavar="MODEL", help="model name to ask for (default: the server's)")
    _options.add_option_flags(parser, positional_model=False)


def run(args: argparse.Namespace) -> int:
    agent = choices.load(_agents.__name__, args.agent)
    options = _options.resolve(args).options
    server = _server(options, args.name, required=not args.dry_run)
    launch: Launch = agent.launch(server, env.home() / "launch" / args.agent)
    removed = env.names_matching(CLOUD_KEYS)
    if args.dry_run:
        _show(launch, args.rest, removed, Terminal(sys.stdout))
        return 0
    program = shutil.which(launch.program) or _not_installed(agent, launch)
    for path, text in launch.files.items():
        _write(path, text)
    child = env.child(removed, launch.environment)
    return subprocess.call([program, *launch.arguments, *args.rest], env=child)


def _server(options: Options, name: str | None, *, required: bool) -> Server:
    """The server that runs, or what it would be."""
    found = find_server(options.host, options.port, options.api_key)
    if found is None and required:
        raise BusyError(
            f"No server answers at {options.host}:{options.port}.",
            code="no_server",
            hint="Start one in another terminal: ft serve",
        )
    host = "127.0.0.1" if options.host == "0.0.0.0" else options.host
    url = found.place if found else f"http://{host}:{options.port}"
    model = name or (found.model_name if found else options.served_model_name or "freetoken-demo")
    context = (found.max_model_len if found else 0) or options.max_model_len or _DEFAULT_CONTEXT
    return Server(url, model, context, first_key(options.api_key))


def _not_installed(agent: ModuleType, launch: Launch) -> str:
    raise ConfigError(
        f"{agent.HELP} is not installed: there is no {launch.program!r} on the PATH.",
        code="agent_not_installed",
        hint=f"Install it yourself, for example: npm install -g {agent.PACKAGE}",
    )


def _show(launch: Launch, words: list[str], removed: list[str], out: Terminal) -> None:
    """What a real launch would do, keys hidden, as lines that a shell understands."""
    for name in removed:
        out.line(f"unset {name}")
    for name, value in launch.environment.items():
        secret = name.endswith(("_TOKEN", "_KEY")) and value != "none"
        out.line(f"export {name}={'...' if secret else shlex.quote(value)}")
    for path, text in launch.files.items():
        out.line(f"# {path}")
        for line in text.splitlines():
            out.line(f"#   {line}")
    out.line(shlex.join([launch.program, *launch.arguments, *words]))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path} can't be written: {error}.",
            code="unwritable_file",
            hint="Set FREETOKEN_HOME to a folder of yours.",
        ) from error
