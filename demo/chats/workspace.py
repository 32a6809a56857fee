# ruff: noqa: E501 - sentences and small makers read best on one line
"""A pretend project: files in memory and the tools of a coding agent over them.

Serves training (what a tool answers) and evaluation (a model's own calls are carried out). Tests pass when every wanted
edit is in place. Tool and parameter names differ from toolbox to toolbox; roles do not.
"""

import json

from demo.chats.dice import Dice
from demo.chats.packing import param
from demo.chats.tasks import styled, tool_schema

_NAMES = {
    "read": ("read file/read/open file/view/cat file", "Read a file"),
    "edit": ("edit file/edit/replace in file/str replace/apply edit", "Replace text in a file"),
    "write": ("write file/write/create file/save file", "Write a file"),
    "test": ("run tests/test/pytest/run test suite/check", "Run the tests"),
    "shell": ("bash/run command/shell/exec/terminal", "Run a shell command, e.g. the tests"),
    "find": ("grep/search/search files/find in files", "Search the files for a text"),
    "list": ("list files/ls/list dir/glob", "List the files of a folder"),
}
_EDIT = [
    ("old", "new"),
    ("old_string", "new_string"),
    ("search", "replace"),
    ("old_text", "new_text"),
    ("before", "after"),
]


class Toolbox:
    """The tools of one coding session: role -> tool name and parameter names."""

    def __init__(self, d: Dice, roles: tuple[str, ...]) -> None:
        style = d.r.choices([0, 1, 3], [0.75, 0.15, 0.1])[0]
        path = d.pick(["path", "path", "file_path", "file", "filename"])
        old, new = d.pick(_EDIT)
        self.name: dict[str, str] = {}
        self.fields: dict[str, list[str]] = {}
        self.tools: list[dict] = []
        texts = {
            "read": [path],
            "edit": [path, old, new],
            "write": [path, d.pick(["content", "content", "text", "contents"])],
            "test": [],
            "shell": [d.pick(["command", "command", "cmd"])],
            "find": [d.pick(["query", "pattern", "text"])],
            "list": [d.pick(["path", "folder", "directory"])],
        }
        for role in roles:
            names, about = _NAMES[role]
            self.name[role] = styled(d.pick(names.split("/")).split(), style)
            self.fields[role] = texts[role]
            self.tools.append(
                tool_schema(d, self.name[role], about, [param(d, f, "string", "") for f in texts[role]])
            )
        d.r.shuffle(self.tools)

    def call(self, role: str, *values: str) -> tuple[str, dict]:
        return self.name[role], dict(zip(self.fields[role], values, strict=True))

    def role_of(self, name: str) -> str | None:
        return next((r for r, n in self.name.items() if n == name), None)


class Workspace:
    """files: path -> text; wanted: path -> text after the work; failure: what a failing test prints."""

    def __init__(
        self,
        box: Toolbox,
        files: dict[str, str],
        wanted: dict[str, str],
        failure: str,
        success: str,
        as_json: bool = False,
    ) -> None:
        self.box, self.files, self.wanted, self.failure, self.success, self.as_json = (
            box,
            dict(files),
            wanted,
            failure,
            success,
            as_json,
        )
        self.tested = False

    @property
    def solved(self) -> bool:
        return all(self.files.get(p, "").strip() == t.strip() for p, t in self.wanted.items())

    def run(self, name: str, args: dict) -> str:
        """Carry out one call; wrong calls answer with an error, as real tools do."""
        role = self.box.role_of(name)
        if role is None or list(args) != self.box.fields[role]:
            return json.dumps({"error": "invalid call"})
        return getattr(self, f"_{role}")(*args.values())

    def _read(self, path: str) -> str:
        if path not in self.files:
            return f"Error: no such file: {path}"
        return (
            json.dumps({"content": self.files[path]}, ensure_ascii=False)
            if self.as_json
            else self.files[path]
        )

    def _edit(self, path: str, old: str, new: str) -> str:
        if path not in self.files:
            return f"Error: no such file: {path}"
        if old not in self.files[path]:
            return f"Error: text not found in {path}"
        self.files[path] = self.files[path].replace(old, new, 1)
        return '{"ok": true}' if self.as_json else f"edited {path}"

    def _write(self, path: str, content: str) -> str:
        self.files[path] = content
        return '{"ok": true}' if self.as_json else f"wrote {path}"

    def _test(self) -> str:
        self.tested = True
        return self.success if self.solved else self.failure

    def _shell(self, command: str) -> str:
        if "test" in command:
            return self._test()
        return "\n".join(self.files) if command.startswith("ls") else self._read(command.split()[-1])

    def _find(self, query: str) -> str:
        hits = [
            f"{p}:{i}: {line.strip()}"
            for p, t in self.files.items()
            for i, line in enumerate(t.split("\n"), 1)
            if query in line
        ]
        return "\n".join(hits) or "no match"

    def _list(self, folder: str) -> str:
        return "\n".join(self.files)
