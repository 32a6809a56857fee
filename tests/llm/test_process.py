"""The process keeps to itself: it opens no connection, and holds no more memory than the plan says."""

import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
from freetoken.chat.conversation import Conversation, Message
from freetoken.chat.events import fold
from freetoken.core.generate import GenerateParams
from freetoken.core.options import Options
from freetoken.llm import build_llm
import freetoken.models.qwen3_5_moe, freetoken.devices.sim, freetoken.experts.backends.hybrid

def ask(llm, text, tokens):
    params = GenerateParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    return fold(llm.submit_chat(Conversation((Message.make("user", text),)), params, text[:20]))
"""


def run(code: str) -> str:
    script = PRELUDE + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_serving_opens_no_outbound_connection():
    out = run("""
        import socket, sys, threading, urllib.request
        from freetoken.api.server import serving
        seen = []
        sys.addaudithook(lambda event, args: seen.append(args[1]) if event == "socket.connect" else None)
        sys.addaudithook(lambda event, args: seen.append(args[0]) if event == "socket.getaddrinfo" else None)
        llm = build_llm(Options(device="cpu", port=0))
        with serving(llm, llm.options) as url:
            urllib.request.urlopen(url + "/v1/models").read()
            ask(llm, "Hi!", 5)
        llm.close()
        hosts = {address[0] if isinstance(address, tuple) else address for address in seen}
        print(sorted(hosts))
    """)
    assert out.strip() == "['127.0.0.1']", "only the test's own client connects, to the loopback"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "wishes",
    ["device='cpu'", "device='sim', machine='4060-laptop', moe_backend='hybrid', gpu_memory=96 << 20"],
)
def test_memory_stays_within_the_plan(wishes):
    out = run(f"""
        def held():
            fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
            return 1024 * (int(fields["RssAnon"].split()[0]) + int(fields["RssShmem"].split()[0]))
        before = held()
        llm = build_llm(Options({wishes}))
        peak = held()
        for i in range(3):
            ask(llm, str(i) + " one two three four" * 300, 30)
            peak = max(peak, held())
        print(peak - before, llm.plan.host_bytes)
        llm.close()
    """)
    grown, planned = map(int, out.split())
    assert grown <= planned * 1.05 + 256 * 2**20, f"{grown} bytes held, {planned} planned"
