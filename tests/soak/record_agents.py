"""Records what real agents send, for tests/api/recorded: python -m tests.soak.record_agents

The API runs without a model: a script's lines are read as events, so a session takes seconds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from freetoken.api.app import create_app
from freetoken.chat import parsers
from freetoken.chat.script import Script
from freetoken.chat.stream_parser import StreamParser
from freetoken.core import choices
from freetoken.core.options import Options
from tests.soak import agent_sessions
from tests.soak.scrub import scrub_request

RECORDED = Path(__file__).parent.parent / "api" / "recorded"
sys.path.insert(0, str(RECORDED.parent))
GRAMMAR = choices.load(parsers.__name__, "qwen_xml").GRAMMAR


def scripted(script: Script) -> Any:
    """A token source that says the script's lines."""
    from scripted_llm import ScriptedLLM, finish

    def play(asked: Any) -> list[Any]:
        text = script.answer(asked.prompt, GRAMMAR, in_thinking=True)
        parser = StreamParser(GRAMMAR, tools=asked.prompt.offered_tools, in_thinking=True)
        events = [*parser.feed(text), *parser.finish()]
        return [*events, finish("tool_calls" if parser.num_calls else "stop", tokens=20, reasoning=3)]

    llm = ScriptedLLM(play)
    llm.max_model_len = 65536
    return llm


class Recorder:
    """ASGI: keeps the body of each POST and passes everything on."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.requests: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""

        async def keep() -> Message:
            nonlocal body
            message = await receive()
            body += message.get("body", b"")
            return message

        await self.app(scope, keep, send)
        if scope.get("method") == "POST":
            headers = {k.decode(): v.decode() for k, v in scope["headers"]}
            query = scope["query_string"].decode()
            self.requests.append(
                {"path": scope["path"], "query": query, "headers": headers, "body": json.loads(body)}
            )


def record(session: agent_sessions.Session, folder: Path) -> list[dict[str, Any]]:
    programs, reason = agent_sessions.find(session)
    if programs is None:
        raise SystemExit(reason)
    script = folder.parent / f"{session.name}.jsonl"
    script.write_text(session.script(folder), encoding="utf-8")
    recorder = Recorder(create_app(scripted(Script.from_file(script)), Options()))
    server = uvicorn.Server(uvicorn.Config(recorder, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    print(agent_sessions.launch(session, programs, folder, port, timeout_s=300)[-300:])
    server.should_exit = True
    thread.join()
    return [scrub_request(request, str(folder)) for request in recorder.requests]


def main() -> None:
    for session in agent_sessions.SESSIONS:
        with tempfile.TemporaryDirectory() as place:
            requests = record(session, agent_sessions.workspace(Path(place) / "project"))
        lines = ",\n".join(json.dumps(request, ensure_ascii=False) for request in requests)
        (RECORDED / f"{session.name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        print(session.name, len(requests), "requests", file=sys.stderr)


if __name__ == "__main__":
    os.environ.pop("FREETOKEN_HOME", None)
    main()
