"""Commands that the pages print: command, bench and flags exist, and so do the files and tests they name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from house_source import ROOT, report

from freetoken.cli import bench, main
from freetoken.core import choices

PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
COMMAND = re.compile(r"(?:[A-Z_]+=\S+ )*((?:ft|pytest|(?:\S*/)?python[0-9.]*) .*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
FILE = re.compile(r"(?<![\w/.-])(?:tests|benchmarks|scripts)/[\w/.-]*\w")
MODULE = re.compile(r"(?<=-m )(?:benchmarks|freetoken)\.[\w.]*\w")
SELECTED = re.compile(r"-k (?:\"([^\"]+)\"|(\S+))")


def commands_of(text: str) -> Iterator[str]:
    """What code blocks and spans of code run with `ft`, `python` and `pytest`, comments left out."""
    prose = BLOCK.sub("", text)
    blocks = "\n".join([*BLOCK.findall(text), *re.findall(r"^    .*", prose, re.MULTILINE)])
    for line in [*blocks.replace("\\\n", " ").splitlines(), *SPAN.findall(prose)]:
        if found := COMMAND.fullmatch(re.split(r"(?:^|\s)#|&&|;|\|", line)[0].strip()):
            yield found[1]


def printed() -> list[tuple[str, str]]:
    """(page, command) of all pages."""
    return [
        (page.relative_to(ROOT).as_posix(), line)
        for page in PAGES
        for line in commands_of(page.read_text("utf-8"))
    ]


@cache
def flags_of(package: str, name: str) -> frozenset[str]:
    command = choices.load(package, name)
    parser = main.Parser("ft", command.HELP)
    command.add_arguments(parser)
    return frozenset(parser.flags())


def unknown_in(line: str) -> str:
    """What `ft` would not know in this line; placeholders like NAME and <name> are passed over."""
    words = line.split(" -- ")[0].split()
    if words[0] != "ft" or not words[1].isalpha() or not words[1].islower():
        return ""
    package, name = main.PACKAGE, words[1]
    if name not in main.commands():
        return name
    if name == "bench" and len(words) > 2 and words[2].isalpha() and words[2].islower():
        package, name = bench.PACKAGE, words[2]
        if name not in bench.benches():
            return name
    known = flags_of(package, name)
    return " ".join(flag for flag in FLAG.findall(" ".join(words)) if flag not in known)


def missing_in(line: str) -> str:
    """Files, modules and selected tests that are not there."""
    modules = [m.replace(".", "/") for m in MODULE.findall(line)]
    lost = [m for m in modules if not (ROOT / m).is_dir() and not (ROOT / f"{m}.py").is_file()]
    files = FILE.findall(line)
    lost += [f for f in files if not (ROOT / f).exists()]
    if line.startswith("pytest") and not lost and files:
        names = " ".join(_tests_of(f) for f in files)
        for quoted, bare in SELECTED.findall(line):
            words = re.split(r" (?:or|and) ", (quoted or bare).lower())
            lost += [word for word in words if word.rstrip("0123456789") not in names]
    return " ".join(lost)


@cache
def _tests_of(name: str) -> str:
    path = ROOT / name
    files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    # Names of parameters are words of the file, too, so the whole text is asked.
    return "\n".join(f"{file.name}\n{file.read_text('utf-8')}" for file in files).lower()


def test_the_pages_print_commands() -> None:
    assert len(printed()) > 200 and {line.split()[0] for _, line in printed()} >= {"ft", "python", "pytest"}


def test_commands_and_flags_that_pages_print_exist() -> None:
    wrong = [f"{page}: {line}: {lost}" for page, line in printed() if (lost := unknown_in(line))]
    assert not wrong, report(wrong)


def test_files_and_tests_that_printed_commands_name_exist() -> None:
    wrong = [f"{page}: {line}: {lost}" for page, line in printed() if (lost := missing_in(line))]
    assert not wrong, report(wrong)


def test_what_does_not_exist_is_found() -> None:
    assert unknown_in("ft sreve --port 1") == "sreve"
    assert unknown_in("ft bench polcy") == "polcy"
    assert unknown_in("ft serve M --prot 1 --port 2") == "--prot"
    assert missing_in("pytest tests/house tests/nowhere") == "tests/nowhere"
    assert missing_in("python -m benchmarks.nothing") == "benchmarks/nothing"
    assert missing_in("pytest tests/house/test_tools.py -k quixotic") == "quixotic"
