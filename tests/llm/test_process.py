"""The process keeps to itself: it opens no connection, and holds no more memory than the plan says."""

import subprocess
import sys
import textwrap

import pytest

from tests.engine.test_real_crowds import write_model

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


def run(code: str, timeout: float = 110) -> str:
    script = PRELUDE + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=timeout)
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


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("prompts", "words", "least"),
    [
        (80, "250", 64 << 10),
        pytest.param(500, "250", 2 << 10, marks=pytest.mark.soak),
        pytest.param(200, "5 + 4 * min(i, 100)", 32 << 10, marks=pytest.mark.soak, id="rising contexts"),
    ],
)
def test_memory_levels_off_once_the_caches_are_full(prompts, words, least, tmp_path):
    """Unique prompts on a tiny hybrid model. A prompt's pages and states are 150 KiB: kept, they would show.

    words  of prompt i
    least  bytes a prompt of the second half that count as growth
    """
    model = write_model("hybrid", tmp_path, vocab_size=8192)
    out = run(
        f"""
        import gc, random
        def held():
            fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
            return 1024 * (int(fields["RssAnon"].split()[0]) + int(fields["VmSwap"].split()[0]))
        llm = build_llm(Options(model={model!r}, device="cpu", num_tokens=4096, max_model_len=512,
                                checkpoint_memory=256 << 10, cold_memory=256 << 10))
        memo = llm.built.codec._inert.memo
        memo.max_bytes = 128 << 10
        rng, series, full = random.Random(1), [], False
        for i in range({prompts}):
            words = " ".join(rng.choices("the a user asks tool file number what is".split(), k={words}))
            ask(llm, f"{{i}} {{words}}", 2)
            counts = llm.built.snapshot()["cache"]
            assert counts["bytes"] <= 256 << 10 and counts["cold_bytes"] <= 256 << 10, counts
            assert memo.num_bytes <= memo.max_bytes
            both = min(counts["bytes"], counts["cold_bytes"])
            full = full or (both > 200 << 10 and memo.num_bytes > 120 << 10)
            if i % 5 == 4:
                gc.collect(1)
                series.append(held())
        print(full, counts["evicted_pages"], *series)
        llm.close()
        """,
        timeout=500 if prompts < 200 else 1100,
    )
    full, evicted, *series = out.split()
    assert full == "True" and int(evicted) > prompts, "the caches never filled"
    quarter = len(series) // 4
    early, late = series[-2 * quarter : -quarter], series[-quarter:]
    middle, end = (sorted(map(int, part))[quarter // 2] for part in (early, late))
    slope = (end - middle) / (5 * quarter)
    print(f"{slope / 1024:.2f} KiB a prompt; {int(series[-1]) >> 20} MiB held; {evicted} pages evicted")
    assert slope <= least
