# ruff: noqa: E501 - sentences and small makers read best on one line
"""Sessions in the shape of a coding agent: look, read, edit, test, answer.

Owns the order of steps and the agent's words. Tool answers come from a Workspace, so a session is always consistent.
"""

from demo.chats.bugs import Problem, bug, problem
from demo.chats.dice import Dice
from demo.chats.workspace import Toolbox, Workspace

_SUCCESS = ["all tests passed", "{n} passed", "OK ({n} tests)", "{n} passed in 0.{n}s", "PASSED"]
_COMMANDS = ["pytest -q", "python3 -m pytest", "make test", "pytest", "npm test", "cargo test"]


class Session:
    """One toolbox with any number of problems solved one after the other."""

    def __init__(self, d: Dice, thinking: bool) -> None:
        self.d, self.thinking = d, thinking
        tester = d.r.choices(["test", "shell", ""], [0.55, 0.35, 0.1])[0]
        changer = d.r.choices(["edit", "write"], [0.85, 0.15])[0]
        extra = [r for r in ("write", "list") if r != changer and d.chance(0.3)]
        roles = ("read", changer, *([tester] if tester else []), *(["find"] if d.chance(0.4) else []), *extra)
        self.changer, self.tester = changer, tester
        self.box = Toolbox(d, roles)
        self.command = d.pick(_COMMANDS)
        self.as_json = d.chance(0.1)

    def workspace(self, p: Problem) -> Workspace:
        success = self.d.pick(_SUCCESS).format(n=self.d.whole(1, 40))
        return Workspace(self.box, {p.path: p.text}, {p.path: p.after}, p.failure, success, self.as_json)

    def request(self, p: Problem) -> str:
        """The user's words, with the test command where it cannot be known otherwise."""
        if self.tester == "shell":
            return p.request + self.d.pick(
                [
                    f" Run `{self.command}` afterwards.",
                    f" Then run {self.command}",
                    f" Test with `{self.command}`.",
                ]
            )
        return p.request

    def test_call(self) -> tuple[str, dict]:
        return self.box.call("shell", self.command) if self.tester == "shell" else self.box.call("test")

    def _step(self, call: tuple[str, dict], thought: str, words: str) -> dict:
        spoken = words if not self.thinking and self.d.chance(0.25) else ""
        return dict(
            role="assistant", content=spoken, calls=[call], reasoning=thought if self.thinking else None
        )

    def solve(self, p: Problem, request: str | None = None, lead: list | None = None) -> list[dict]:
        """All messages of one solved problem. lead: calls [(call, thought)] before the file is read."""
        d, ws = self.d, self.workspace(p)
        change = (
            self.box.call("edit", p.path, p.old, p.new)
            if self.changer == "edit"
            else self.box.call("write", p.path, p.after)
        )
        steps = [(c, t, t) for c, t in lead or []]
        steps.append(
            (
                self.box.call("read", p.path),
                d.pick([f"I read {p.path} first.", "First I look at the file."]),
                d.pick(["I'll read the file first.", "Let me look at the file."]),
            )
        )
        steps.append(
            (
                change,
                d.pick([f"I change it: {p.why}.", f"In {p.path} {p.why}."]),
                d.pick(["I found it. I'll change it.", "Now I change the line."]),
            )
        )
        if self.tester:
            steps.append(
                (
                    self.test_call(),
                    d.pick(["Now I run the tests.", "I check it with the tests."]),
                    d.pick(["Now I run the tests.", "Let me run the tests."]),
                )
            )
        messages = [dict(role="user", content=request or self.request(p))]
        for call, thought, words in steps:
            messages += [self._step(call, thought, words), dict(role="tool", content=ws.run(*call))]
        passed = d.pick([" The tests pass.", " All tests pass now."]) if self.tester else ""
        answer = d.pick(
            [
                f"I changed {p.path}: {p.why}.{passed}",
                f"Done: {p.why}.{passed}",
                f"{p.path} is fixed: {p.why}.{passed}",
            ]
        )
        messages.append(
            dict(
                role="assistant",
                content=answer,
                reasoning="The tests pass. I am done."
                if self.thinking and self.tester
                else "I am done."
                if self.thinking
                else None,
            )
        )
        return messages

    def find_first(self, p: Problem) -> list[dict]:
        """The user names only the function; the agent searches for it."""
        d = self.d
        request = d.pick(
            [
                f"Fix the function {p.name}.",
                f"There is a bug in {p.name}. Find it and fix it.",
                f"{p.name} is wrong, please fix it.",
            ]
        )
        tail = (
            d.pick([f" Run `{self.command}` afterwards.", f" Test with `{self.command}`."])
            if self.tester == "shell"
            else ""
        )
        return self.solve(p, request + tail, [(self.box.call("find", p.name), f"I search for {p.name}.")])

    def test_first(self, p: Problem) -> list[dict]:
        """The user only wants the tests to pass; the agent runs them to learn what fails."""
        d = self.d
        how = f" with `{self.command}`" if self.tester == "shell" else ""
        request = d.pick(
            [
                f"Run the tests{how} and fix what fails.",
                f"Some test fails. Run the tests{how} and repair it.",
                f"Make the tests pass{how}.",
            ]
        )
        return self.solve(p, request, [(self.test_call(), "I run the tests to see what fails.")])

    def create(self) -> list[dict]:
        """Write a new file whose contents the user dictates, then test."""
        d = self.d
        p = bug(d, 0)
        if p is None or "write" not in self.box.name:
            return self.any()
        body = p.after.strip()
        ask = d.pick(
            [
                f"Create {p.path} with this code:\n{body}",
                f"Write this to {p.path}:\n{body}",
                f"Make a new file {p.path}:\n{body}",
            ]
        )
        call = self.box.call("write", p.path, body)
        ws = Workspace(self.box, {}, {p.path: body}, p.failure, "ok", self.as_json)
        done = dict(
            role="assistant",
            content=d.pick([f"I wrote {p.path}.", f"{p.path} is there now."]),
            reasoning="The file is written." if self.thinking else None,
        )
        return [
            dict(role="user", content=ask),
            self._step(call, "I write the file.", "I'll write it."),
            dict(role="tool", content=ws.run(*call)),
            done,
        ]

    def any(self, extra: int | None = None) -> list[dict]:
        """One problem in one of the shapes that this toolbox allows."""
        d, x = self.d, self.d.r.random()
        if self.changer == "write":
            extra = 0 if d.chance(0.6) else 1
        if x < 0.15 and "find" in self.box.name:
            p = bug(d, extra or 1)
            return self.find_first(p) if p else self.any(extra)
        if x < 0.4 and self.tester:
            return self.test_first(problem(d, extra))
        if x < 0.45 and "write" in self.box.name:
            return self.create()
        return self.solve(problem(d, extra))


def coding_session(
    d: Dice, thinking: bool, count: int, extra: int | None = None
) -> tuple[list[dict], list[dict]]:
    """(messages, tools) of `count` problems in one session."""
    s = Session(d, thinking)
    return [m for _ in range(count) for m in s.any(extra)], s.box.tools
