"""A hub of models on the loopback: listings, files by name, ranges. What it was asked is kept."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves `root/OWNER/NAME/...`; `asked` holds (path, range)."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.asked: list[tuple[str, str]] = []
        self.sent_bytes = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.asked.append((path, self.headers.get("Range", "")))
        parts = path.split("/")
        if path.startswith("api/models/"):
            self._api(self.server.root.joinpath(*parts[2:4]), parts[4:])
        elif "resolve" in parts:
            self._file(self.server.root.joinpath(*parts[:2], *parts[4:]))
        else:
            self._send(404, b"{}")

    def _api(self, folder: Path, rest: list[str]) -> None:
        if not folder.is_dir():
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        found = [f for f in sorted(folder.rglob("*")) if f.is_file()]
        if rest[:1] == ["tree"]:
            body: object = [
                {
                    "type": "file",
                    "oid": "a" * 40,
                    "path": str(f.relative_to(folder)),
                    "size": f.stat().st_size,
                }
                for f in found
            ]
        else:
            siblings = [{"rfilename": str(f.relative_to(folder)), "size": f.stat().st_size} for f in found]
            body = {"id": "/".join(folder.parts[-2:]), "sha": COMMIT, "siblings": siblings, "private": False}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _file(self, path: Path) -> None:
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        size, status, start, stop = path.stat().st_size, 200, 0, path.stat().st_size
        etag = f'"{abs(hash(path.name)):040x}"'
        headers = {"ETag": etag, "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if wanted := self.headers.get("Range", "").removeprefix("bytes="):
            first, _, last = wanted.partition("-")
            start, stop, status = int(first), min(int(last or size - 1) + 1, size), 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        with path.open("rb") as file:
            file.seek(start)
            body = file.read(stop - start) if self.command == "GET" else b""
        self._send(status, body, headers, stop - start)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, length: int = -1
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length if length >= 0 else len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
            self.server.sent_bytes += len(body)


@contextmanager
def serving(root: Path) -> Iterator[Hub]:
    hub = Hub(root)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join(timeout=5)
