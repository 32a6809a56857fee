"""What stands in tracked files: no machine's paths, no package hosts; links and README blocks that hold."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from house_source import ROOT, report

# Written in pieces, so that this file passes its own test.
PATHS = "/(?:" + "|".join(("wo" + "rk", "ro" + "ot", "fa" + "rm", "home")) + r")/[A-Za-z.]"
HOSTS = "|".join(
    re.escape(host)
    for host in ("pypi" + ".org", "python" + "hosted.org", "registry." + "npmjs", "deb." + "debian")
)
BANNED = re.compile(f"(?<![A-Za-z0-9_.~-]){PATHS}|{HOSTS}")
BINARY = (".safetensors", ".npz", ".png", ".zip", ".whl")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in done.stdout.splitlines() if (ROOT / name).is_file()]


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_no_file_names_a_machine_path_or_a_package_host() -> None:
    breaches = []
    for path in tracked():
        if path.suffix in BINARY or path.name == "tokenizer.json":
            continue
        for n, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
            if BANNED.search(line):
                breaches.append(f"{path.relative_to(ROOT)}:{n}: {line.strip()[:100]}")
    assert not breaches, report(breaches)


def test_links_of_the_docs_resolve() -> None:
    breaches = []
    for page in pages():
        for target in LINK.findall(_without_code(page.read_text("utf-8"))):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            other = (page.parent / name).resolve() if name else page
            if not other.exists():
                breaches.append(f"{page.relative_to(ROOT)}: {target}")
            elif anchor and other.suffix == ".md" and anchor not in _anchors(other):
                breaches.append(f"{page.relative_to(ROOT)}: {target} (no such heading)")
    assert not breaches, report(breaches)


def _without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", _without_code(page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}


def test_every_docs_page_is_reached_from_the_architecture_or_the_readme() -> None:
    linked = set()
    for page in pages():
        for target in LINK.findall(page.read_text("utf-8")):
            linked.add((page.parent / target.partition("#")[0]).resolve())
    lost = [str(p.relative_to(ROOT)) for p in pages()[2:] if p.resolve() not in linked]
    assert not lost, report(lost)


def test_the_readme_is_short_and_its_shell_blocks_are_marked() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert text.count("\n") <= 200
    fences = re.findall(r"^```(\S*)(.*)$", text, re.MULTILINE)[::2]
    unmarked = [name for name, _ in fences if name not in ("bash", "text", "python", "json", "toml")]
    assert not unmarked, f"fences without a language that says whether CI runs them: {unmarked}"
    assert any(name == "bash" for name, _ in fences), "no block that CI runs"


@pytest.mark.parametrize("script", ["scripts/run.sh", "scripts/test.sh", ".ci/run"])
def test_scripts_are_there_and_parse(script: str) -> None:
    path = ROOT / script
    assert path.stat().st_mode & 0o111, f"{script} is not executable"
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
