"""Real coding agents in a folder of their own: what is asked of them, and how they are run.

Pinned, non-interactive, without the user's environment. They are installed by npm only if
AGENTS_FOLDER names a folder for them (some hundred MB); else they must be on the PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freetoken.cli import _agents
from freetoken.core import choices

TASK = "Make test_calc.py pass."
DONE = "The test passes now."
CALC = "def add(a, b):\n    return a - b\n"
TEST = 'from calc import add\n\nassert add(2, 3) == 5\nprint("test passed")\n'


@dataclass(frozen=True)
class Session:
    """An agent's words for: read a file, edit it, run a command; and its non-interactive arguments."""

    name: str
    read: tuple[str, dict[str, Any]]
    edit: tuple[str, dict[str, Any]]
    run: tuple[str, dict[str, Any]]
    arguments: tuple[str, ...]

    @property
    def package(self) -> str:
        return str(choices.load(_agents.__name__, self.name).PACKAGE)

    def script(self, folder: Path) -> str:
        """The model's lines: think, read, edit, run the test, and say so only if it passed."""

        def call(tool: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
            path = str(folder / "calc.py")
            arguments = {k: v.replace("FILE", path) if isinstance(v, str) else v for k, v in tool[1].items()}
            return [{"name": tool[0], "arguments": arguments}]

        lines = [
            {"when": {"tools": False}, "say": "Fixing a sum"},
            {
                "when": {"results": 0},
                "think": "The sum is wrong.",
                "say": "I read the file first.",
                "calls": call(self.read),
            },
            {"when": {"results": 1}, "calls": call(self.edit)},
            {"when": {"results": 2}, "calls": call(self.run)},
            {"when": {"results": 3, "last": "test passed"}, "say": DONE},
            {"say": "Something else happened."},
        ]
        return "\n".join(json.dumps(line) for line in lines) + "\n"


_TEST_COMMAND = "python3 test_calc.py"
SESSIONS = (
    Session(
        "claude",
        ("Read", {"file_path": "FILE"}),
        ("Edit", {"file_path": "FILE", "old_string": "a - b", "new_string": "a + b"}),
        ("Bash", {"command": _TEST_COMMAND, "description": "Run the test"}),
        ("-p", TASK, "--dangerously-skip-permissions"),
    ),
    Session(
        "codex",
        ("exec_command", {"cmd": "cat calc.py"}),
        ("exec_command", {"cmd": "sed -i 's/a - b/a + b/' calc.py"}),
        ("exec_command", {"cmd": _TEST_COMMAND}),
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK),
    ),
    Session(
        "opencode",
        ("read", {"filePath": "FILE"}),
        ("edit", {"filePath": "FILE", "oldString": "a - b", "newString": "a + b"}),
        ("bash", {"command": _TEST_COMMAND, "description": "Run the test"}),
        ("run", TASK),
    ),
)


def workspace(folder: Path) -> Path:
    """A small repository with a failing test."""
    folder.mkdir(parents=True)
    (folder / "calc.py").write_text(CALC, encoding="utf-8")
    (folder / "test_calc.py").write_text(TEST, encoding="utf-8")
    subprocess.run(["git", "init", "-q", str(folder)], check=False)
    return folder


def find(session: Session) -> tuple[Path | None, str]:
    """(folder of the agent's program, reason if there is none)."""
    on_path = shutil.which(session.name)
    if on_path:
        return Path(on_path).parent, ""
    folder = os.environ.get("AGENTS_FOLDER")
    if not folder:
        return None, f"{session.name} is not on the PATH and AGENTS_FOLDER names no folder for it"
    bin_folder = Path(folder) / "node_modules" / ".bin"
    if not (bin_folder / session.name).exists():
        npm = shutil.which("npm")
        if npm is None:
            return None, "npm is not installed"
        command = [npm, "install", "--prefix", folder, "--no-audit", "--no-fund", session.package]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        if done.returncode:
            return None, f"npm install {session.package} failed: {done.stderr[-300:]}"
    return bin_folder, ""


def launch(session: Session, programs: Path, folder: Path, port: int, timeout_s: float) -> str:
    """Run `ft launch` for the session's task in `folder`; return what the agent printed."""
    home = folder.parent / f"home-{session.name}"
    home.mkdir(exist_ok=True)
    environment = {
        "HOME": str(home),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "IS_SANDBOX": "1",
        "ANTHROPIC_API_KEY": "must not arrive",
    }
    command = [sys.executable, "-m", "freetoken", "launch", session.name, "--port", str(port), "--"]
    done = subprocess.run(
        [*command, *session.arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return f"{done.stdout}\n{done.stderr}"
