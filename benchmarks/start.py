"""How long `ft serve` takes from the start of its process to a listening socket, and to its first answers.

    python -m benchmarks.start [--model DIR] [--repeat 5] [--json]

Polls `/health`: `listening` is the first answer of any kind, `ready` the first that says `ok`; `percent`
lists what was said in between. CPU seconds are the server's own up to that moment: on a loaded machine they
say more than the wall's.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from typing import Any

import psutil

DEADLINE_S = 600.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def health(port: int) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:  # it answers 503 while it loads
        return dict(json.load(error))
    except OSError:
        return None


def start(model: str | None, home: str) -> dict[str, Any]:
    port = free_port()
    command = [sys.executable, "-m", "freetoken", "serve", "--port", str(port)]
    command += ["--device", "cpu", *(["--model", model] if model else [])]
    began, row, percents = time.perf_counter(), {}, []
    environment = {**os.environ, "FREETOKEN_HOME": home}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = psutil.Process(server.pid)
    try:
        while time.perf_counter() < began + DEADLINE_S and server.poll() is None:
            said = health(port)
            spent = sum(process.cpu_times()[:2])
            if said is not None and not row:
                row |= {"listening_s": time.perf_counter() - began, "listening_cpu_s": spent}
            if said is not None:
                percents.append(int(said.get("percent", -1)))
            if said is not None and said["status"] == "ok":
                row |= {"ready_s": time.perf_counter() - began, "ready_cpu_s": spent}
                break
            time.sleep(0.01)
    finally:
        server.terminate()
        server.wait(60)
    return {**row, "percent": list(dict.fromkeys(percents))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        runs = [start(args.model, home) for _ in range(args.repeat)]
    row: dict[str, Any] = {
        key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0] if key != "percent"
    }
    row["percent"] = runs[-1]["percent"]
    print(json.dumps(row) if args.json else row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
