"""Runs `server.run` over a scripted model in a process of its own, so that signals can be sent to it.

argv: seconds an answer takes, drain seconds, port. Prints the URL, and at the end what was left.
Every attempt to open an outbound connection is counted by an audit hook.
"""

from __future__ import annotations

import sys
import threading

OUTBOUND: list[str] = []


def watch(event: str, args: tuple[object, ...]) -> None:
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "subprocess.Popen"):
        OUTBOUND.append(f"{event} {args[1:]}")


def main() -> int:
    from scripted_llm import ScriptedLLM, say

    from freetoken.api import ports, server
    from freetoken.chat.events import TextDelta
    from freetoken.core import log
    from freetoken.core.options import Options

    answer_s, drain_s, port = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    log.configure("info")
    llm = ScriptedLLM(lambda _: [TextDelta("begun "), answer_s, *say("done")])
    options = Options(port=port, drain_seconds=drain_s)
    sock = ports.bind(options.host, options.port)
    sys.addaudithook(watch)
    code = server.run(llm, options, sock=sock, on_ready=lambda url: print(url, flush=True))
    others = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    print(f"live={len(llm.live)} threads={others} outbound={OUTBOUND}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
