"""Chat templates written for the tests, in the manner of those that models publish."""

from __future__ import annotations

from pathlib import Path

ALL = {
    path.stem: path.read_text("utf-8")
    for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))
}
