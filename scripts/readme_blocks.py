"""Run the `bash` blocks of a Markdown file, in order, each in a shell of its own, and stop at a failure.

Blocks fenced as `text` are shown, not run. A block that starts a server does so in the background and
ends it itself, as the page tells its readers to do. The virtual environment of the checkout comes first
on PATH, as it is for a reader who activated it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 600


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```bash\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def main(paths: list[str]) -> int:
    found = [(path, block) for path in paths for block in blocks(Path(path))]
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "FREETOKEN_HOME": home, "NO_COLOR": "1"}
        env["PATH"] = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{env['PATH']}"
        for path, block in found:
            print(f"--- {path}\n{block}", flush=True)
            started = time.monotonic()
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                timeout=TIMEOUT_S,
            )
            print(f"--- {time.monotonic() - started:.1f} s, exit code {done.returncode}", flush=True)
            if done.returncode:
                return 1
    print(f"{len(found)} blocks ran")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [str(ROOT / "README.md")]))
