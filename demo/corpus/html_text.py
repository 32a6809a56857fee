# ruff: noqa: E501, SIM905 - sentences and small makers read best on one line
"""HTML pages of manuals to plain text: headings, paragraphs, lists and code, without navigation.

Knows nothing about where pages come from. Text inside <pre> keeps its line breaks, all other white space is folded.
"""

import gzip
import re
from html.parser import HTMLParser
from pathlib import Path

_SKIP = {"script", "style", "nav", "head", "footer", "form", "button", "svg", "math"}
_BLOCK = set("p div section h1 h2 h3 h4 h5 li tr dt dd table ul ol dl pre blockquote".split())
_TIGHT = {"tr", "dt", "dd", "ul", "ol", "dl"}
_CHROME = re.compile(
    r"sphinxsidebar|related|navheader|navfooter|navigation|quickview|toplang|bottomlang|sidebar|menu|searchbox|toc\b|headerlink"
)


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.out: list[str] = []
        self.skip: list[str] = []
        self.pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self.skip:
            if tag == self.skip[0]:
                self.skip.append(tag)
            return
        a = dict(attrs)
        marks = " ".join(filter(None, (a.get("class"), a.get("id"), a.get("role"))))
        if tag in _SKIP or (tag in ("div", "table", "p", "a") and _CHROME.search(marks)):
            self.skip = [tag]
            return
        if tag == "pre":
            self.pre += 1
        if tag == "li":
            self.out.append("\n- ")
        elif tag in _BLOCK:
            self.out.append("\n" if tag in _TIGHT else "\n\n")
        elif tag in ("br", "td"):
            self.out.append("\n" if tag == "br" else " ")

    def handle_endtag(self, tag: str) -> None:
        if self.skip:
            if tag == self.skip[0]:
                self.skip.pop()
            return
        if tag == "pre":
            self.pre = max(0, self.pre - 1)
        if tag in ("p", "pre", "h1", "h2", "h3", "h4", "dd"):
            self.out.append("\n" if tag == "dd" else "\n\n")

    def handle_data(self, data: str) -> None:
        if not self.skip:
            self.out.append(data if self.pre else re.sub(r"\s+", " ", data))


def page_text(path: Path) -> str:
    """Plain text of one page, which may be gzipped; "" where a page has no body."""
    packed = gzip.open if path.suffix == ".gz" else open
    with packed(path, "rt", errors="replace") as f:
        raw = f.read()
    body = re.search(r"<main.*?</main>|<body.*</body>", raw, re.S)
    parser = _Text()
    parser.feed(body.group(0) if body else raw)
    return re.sub(r"(?m)^ +(?=- )", "", "".join(parser.out))


def split_pages(text: str, size: int = 6000):
    """Cut a long page at paragraphs into pieces of about `size` characters."""
    part, length = [], 0
    for paragraph in re.split(r"\n\n+", text):
        if length + len(paragraph) > size and length > size // 3:
            yield "\n\n".join(part)
            part, length = [], 0
        part.append(paragraph.strip("\n"))
        length += len(paragraph) + 2
    if part:
        yield "\n\n".join(part)
