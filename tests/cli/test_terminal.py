"""The terminal helper: plain where there is no terminal, aligned columns, progress by phase."""

from __future__ import annotations

import io

import pytest

from freetoken.cli._terminal import Progress, Terminal, printable, visible


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_plain_whole_lines() -> None:
    pipe = io.StringIO()
    out = Terminal(pipe)
    out.transient("thinking ...")
    out.line(out.bad("error") + " " + out.dim("dim"))
    assert pipe.getvalue() == "error dim\n"


def test_a_screen_gets_colour_unless_it_asks_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[" in Terminal(Screen()).good("ok")
    monkeypatch.setenv("NO_COLOR", "1")
    assert Terminal(Screen()).good("ok") == "ok"


def test_a_transient_line_is_removed_by_the_next_output() -> None:
    screen = Screen()
    out = Terminal(screen, color=False)
    out.transient("thinking")
    out.line("done")
    assert screen.getvalue() == "\r\x1b[2Kthinking\r\x1b[2Kdone\n"


def test_numbers_align_right_and_words_left() -> None:
    pipe = io.StringIO()
    Terminal(pipe).table(("name", "n"), [("a", "5"), ("long", "123")])
    assert pipe.getvalue() == "  name    n\n  a       5\n  long  123\n"


def test_a_model_cannot_drive_the_terminal() -> None:
    assert printable("a\x1b[2Jb\x07\rc\n\td") == "a[2Jbc\n\td"


def test_colour_does_not_count_as_width() -> None:
    assert visible(Terminal(Screen(), color=True).good("ok")) == 2


def test_progress_names_each_phase_once_in_a_pipe() -> None:
    pipe = io.StringIO()
    progress = Progress(Terminal(pipe), plain_lines=True)
    for phase, percent in (("weights", 0), ("weights", 40), ("experts", 60), ("experts", 99)):
        progress(phase, percent)
    progress.finish()
    assert pipe.getvalue() == "    0 %  weights\n   60 %  experts\n"
    assert progress.seconds >= 0


def test_a_count_in_brackets_is_no_other_phase() -> None:
    pipe = io.StringIO()
    progress = Progress(Terminal(pipe), plain_lines=True)
    for done in (1, 2, 3):
        progress(f"kernels ({done} of 3)", 99)
    progress("ready", 100)
    assert pipe.getvalue() == "   99 %  kernels\n  100 %  ready\n"


def test_a_narrow_code_page_shows_what_it_can() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Terminal(stream).line("5 · 6")
    stream.flush()
    assert raw.getvalue() == b"5 ? 6\n"
