"""Single calls on files and shells: read, write, list, search, run.

Knows nothing about sessions of several steps; those are in coding.py.
"""

from demo.chats.calculating import calculator
from demo.chats.dice import Dice
from demo.chats.packing import pack, param
from demo.chats.tasks import Task, listing, lower_first, quoted


def some_lines(d: Dice, low: int = 1, high: int = 4) -> str:
    makers = [
        d.sentence,
        lambda: f"{d.word()} = {d.number()}",
        lambda: f"# {d.phrase(1, 3)}",
        lambda: f"- {d.phrase(1, 4)}",
        lambda: f"{d.word()}: {d.word()}",
    ]
    return "\n".join(d.pick(makers)() for _ in range(d.whole(low, high)))


def read(d: Dice) -> Task:
    p, body = d.path(), some_lines(d)
    return pack(
        d,
        "read file/read/open file/cat/get file contents/view file/load file",
        ["Read a file", "Read the contents of a file", "Returns the text of a file."],
        [(param(d, "path/file_path/filename/file/path", "string", "Path of the file"), p)],
        [
            f"Read {p}",
            f"Read the file {quoted(d, p)}.",
            f"What is in {p}?",
            f"Show me {p}.",
            f"Open {p} and tell me what it says.",
            f"cat {p}",
            f"Print the contents of {quoted(d, p)}",
            f"What does the file {p} contain?",
        ],
        body if d.chance(0.7) else {"content": body},
        [f"{p} contains:\n\n{body}", f"The file says:\n\n{body}", f"Here is {p}:\n\n{body}"],
        f"read {p}",
    )


def write(d: Dice) -> Task:
    p, body = d.path(), some_lines(d, 2) if d.chance(0.4) else d.sentence()
    queries = [
        f"Write this to {p}:\n{body}",
        f"Create {p} with the content:\n{body}",
        f"Save this text in {p}:\n{body}",
    ]
    if "\n" not in body:
        queries += [
            f'Write "{body}" to {p}',
            f"Create {p} with the content: {body}",
            f'Make a file {p} that contains "{body}"',
        ]
    pairs = [
        (param(d, "path/file_path/filename/file", "string", "Path of the file"), p),
        (param(d, "content/text/contents/data", "string", "The text to write"), body),
    ]
    return pack(
        d,
        "write file/write/save file/create file/put file",
        ["Write text to a file", "Create or overwrite a file"],
        pairs,
        queries,
        d.pick(
            ["ok", {"status": "ok", "bytes": len(body)}, f"Wrote {len(body)} bytes to {p}", {"success": True}]
        ),
        [f"I wrote the text to {p}.", f"Done. {p} was saved.", f"The file {p} is written."],
        f"write to {p}",
    )


def folder(d: Dice) -> Task:
    p, names = d.folder(), [d.file_name() for _ in range(d.whole(1, 5))]
    return pack(
        d,
        "list files/list dir/ls/list directory/list folder",
        ["List the files in a folder", "List a directory"],
        [(param(d, "path/directory/dir/folder", "string", "The folder"), p)],
        [
            f"List the files in {p}",
            f"What files are in {quoted(d, p)}?",
            f"ls {p}",
            f"Show the folder {p}.",
            f"Which files does {p} have?",
        ],
        "\n".join(names) if d.chance(0.5) else {"files": names},
        [f"The folder {p} has: {', '.join(names)}.", f"I see {listing(names)}."],
        f"list {p}",
    )


def shell(d: Dice) -> Task:
    p, w = d.path(), d.word()
    command, say, out, answer = d.pick(
        [
            (f"ls {p}", f"Run ls on {p}", p, ""),
            (f"wc -l {p}", f"Count the lines of {p} with wc", f"{d.whole(1, 900)} {p}", ""),
            (f"grep {w} {p}", f"Run grep for {w} in {p}", f"{w} {d.word()}", ""),
            (f"mkdir {w}", f"Make a directory {w}", "", f"The directory {w} was made."),
            ("pwd", "Run pwd", "/home/" + w, ""),
            ("date", "Run the date command", d.date(), ""),
            (f"python3 {p}", f"Run {p} with python3", d.sentence(), ""),
            ("git status", "Run git status", "nothing to commit, working tree clean", ""),
            (f"echo {w}", f"Run echo {w}", w, ""),
            ("uname -a", "Run uname -a", f"Linux {w} {d.whole(5, 6)}.{d.whole(0, 19)}", ""),
            (f"rm {p}", f"Delete {p} with rm", "", f"{p} was deleted."),
            (f"cat {p}", f"Run cat {p}", d.sentence(), ""),
        ]
    )
    return pack(
        d,
        "bash/run command/shell/execute/terminal/run shell/exec",
        ["Run a shell command", "Execute a command in the terminal", "Run a command and return its output"],
        [(param(d, "command/cmd/command/script", "string", "The command to run"), command)],
        [
            f"{say}.",
            lower_first(say),
            f"Please {lower_first(say)}",
            f"Run `{command}`",
            f"Execute: {command}",
            f"run {command}",
        ],
        out or d.pick(["(no output)", "ok"]),
        [answer or f"The output is: {out}", answer or f"It printed: {out}"],
        f"run {command}",
    )


def grep(d: Dice) -> Task:
    what, where = d.word() if d.chance(0.6) else d.code_name(), d.folder()
    hits = [f"{d.path()}:{d.whole(1, 300)}: {what} {d.word()}" for _ in range(d.whole(1, 3))]
    pairs = [
        (param(d, "pattern/query/text/regex", "string", "What to find"), what),
        (param(d, "path/directory/folder", "string", "Where to search"), where),
    ]
    return pack(
        d,
        "grep/search files/find in files/search code",
        ["Search files for a pattern", "Find text in files"],
        pairs,
        [
            f"Search for {quoted(d, what)} in {where}",
            f"Find {quoted(d, what)} in the files of {where}.",
            f"grep {what} in {where}",
            f"Where does {what} occur in {where}?",
        ],
        "\n".join(hits),
        [
            f"I found it in {listing([h.split(':')[0] for h in hits])}.",
            "These lines match:\n\n" + "\n".join(hits),
        ],
        f"search for {what}",
    )


def python(d: Dice) -> Task:
    sum_ = calculator(d)
    a, op, b = (
        sum_.why.split()[1:4] if sum_.why.startswith("compute ") else (str(d.number()), "+", str(d.number()))
    )
    value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) // max(1, int(b))}[
        op
    ]
    code = d.pick([f"print({a} {op} {b})", f"{a} {op} {b}", f"print({a}{op}{b})"])
    return pack(
        d,
        "run python/python/execute code/code interpreter",
        ["Run Python code", "Execute Python and return the output"],
        [(param(d, "code/source/script", "string", "Python code"), code)],
        [
            f"Run this Python code: {code}",
            f"Execute `{code}`",
            f"What does this print? {code}",
            f"python: {code}",
        ],
        str(value),
        [f"The output is {value}.", f"It printed {value}."],
        f"run the code {code}",
    )


FILES = {read: 1.2, write: 1.0, folder: 0.7, shell: 1.0, grep: 0.6, python: 0.4}
