"""`ft bench serve` and `benchmarks.peers`: the client's arithmetic, a server of ours, servers of anyone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from benchmarks.peers import __main__ as peers
from freetoken.bench import serve, synth
from freetoken.bench._client import Answer, Server, summary
from freetoken.bench._processes import free_port, started
from freetoken.bench._texts import Texts
from freetoken.core.errors import ConfigError, DeviceError
from tests.bench.makers import last_object, run_bench


@contextmanager
def stranger(pause_s=0.0, fault="", asked=None):
    """A server of somebody else that continues English."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer(200, json.dumps({"data": [{"id": "strange"}]}))

        def do_POST(self):
            wish = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if asked is not None:
                asked.append(wish["prompt"])
            if fault == "refuses":
                return self._answer(400, '{"error": "no"}')
            words = [] if fault == "silent" else ["word"] * wish["max_tokens"]
            self.send_response(200)
            self.end_headers()
            for word in words:
                time.sleep(pause_s)
                self._event({"choices": [{"text": f" {word}"}]})
            if fault == "breaks":
                return self._event({"error": {"message": "broken"}})
            usage = {"prompt_tokens": len(wish["prompt"].split()), "completion_tokens": len(words)}
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, body):
            self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")

        def _answer(self, status, text):
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args):
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_rates_count_what_lies_behind_the_first_piece():
    one = Answer(10.0, [11.0, 12.0, 15.0], tokens=9, ended_s=15.5)
    assert (one.ttft_s, one.tok_s) == (1.0, 2.0)
    other = Answer(10.5, [13.0, 14.0], tokens=2, ended_s=14.5)
    assert summary([one, other]) == {"ttft_s": 2.5, "sum_tok_s": 3.0, "total_tok_s": 2.0}


def test_two_servers_of_anyone_are_compared_in_turns(capsys):
    with stranger(0.002) as first, stranger(0.02) as second:
        words = f"--url a={first} --url b={second}/v1 --prompt 7 --tokens 6 --streams 1 2 --rest 0"
        words += " --repeats 3 --warm-up 1"
        assert peers.main([*words.split(), "--prefill", "9", "--json"]) == 0
    rows = {(row["case"], row["server"]): row for row in last_object(capsys)["rows"]}
    assert set(rows) == {(c, s) for c in ("1 stream", "2 streams", "prompt 9") for s in "ab"}
    assert all(row["repeats"] == 3 and row["right"] is None for row in rows.values())
    assert rows["1 stream", "a"]["sum_tok_s_ratio"] == 1.0
    assert rows["1 stream", "b"]["sum_tok_s_ratio"] > 1.5 and rows["2 streams", "b"]["sum_tok_s_ratio"] > 1.5
    assert rows["prompt 9", "b"]["prompt_tokens"] == 9


def test_a_comparison_that_is_stopped_shows_the_rounds_that_it_has():
    asked: list[str] = []
    with stranger(asked=asked) as url:
        words = [f"--url=a={url}", "--streams", "1", "2", "--warm-up", "0", "--repeats", "100000", "--json"]
        command = [sys.executable, "-m", "benchmarks.peers", *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            while len(asked) < 4 and process.poll() is None:
                time.sleep(0.01)
            process.terminate()
            out, told = process.communicate(timeout=60)
    (row,) = json.loads(out.splitlines()[-1])["rows"]
    assert row["case"] == "1 stream" and row["repeats"] >= 3 and "stopped early" in told


def test_a_server_is_ready_whose_words_have_no_text_and_not_one_that_refuses():
    with stranger(fault="silent") as url:
        Server(url, "strange").try_out()
        with pytest.raises(DeviceError):
            Server(url, "strange").complete("one", 2)
    with stranger(fault="refuses") as url, pytest.raises(DeviceError):
        Server(url, "strange").try_out()


@pytest.mark.parametrize("fault", ["refuses", "breaks", "silent"])
def test_a_server_that_fails_fails_the_comparison(fault, capsys):
    with stranger(fault=fault) as url:
        assert peers.main(["--url", f"a={url}", "--streams", "1", "--repeats", "1"]) != 0
    assert "error" in capsys.readouterr().err


def test_wrong_words_are_refused(capsys):
    some = ("", "--url a=http://x --url a=http://y", "--url nameless")
    for words in (
        *some,
        *(f"--url a=http://x {more}" for more in ("--repeats 0", "--rest -1", "--rest nan")),
    ):
        with pytest.raises(SystemExit):
            peers.main(words.split())


def test_a_url_where_nobody_listens_is_named(capsys):
    assert peers.main(["--url", f"a=http://127.0.0.1:{free_port()}"]) != 0
    assert "error: a at http" in capsys.readouterr().err


def test_a_server_that_ends_or_is_not_there_is_told_with_its_log():
    command = [sys.executable, "-c", "import sys; sys.exit('no model')"]
    with started(command, "theirs") as process, pytest.raises(DeviceError) as ended:
        process.ready(60)
    assert ended.value.code == "server_failed" and "no model" in ended.value.message
    with pytest.raises(ConfigError), started(["/no/such/server"], "theirs"):
        pass


def test_a_server_that_dies_amid_a_run_is_told_with_its_log():
    code = "import time; print('last words', flush=True); time.sleep(600)"
    told = pytest.raises(DeviceError, match="it ended with code .*last words")
    with told as e, started([sys.executable, "-c", code], "it") as one:
        while not one.log.read_text():
            time.sleep(0.01)
        one.process.kill()
        raise ConnectionResetError("broken")
    assert e.value.code == "server_failed" and e.value.hint


def test_a_connection_that_breaks_while_its_server_lives_is_told_as_it_is():
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(ConnectionResetError), started(command, "it"):
        raise ConnectionResetError("broken")


def test_a_server_that_never_answers_is_given_up_and_stopped():
    with (
        started([sys.executable, "-c", "import time; time.sleep(600)"], "theirs") as process,
        pytest.raises(DeviceError),
    ):
        process.ready(0.3)
    assert process.process.poll() is not None


@pytest.mark.skipif(sys.platform == "win32", reason="no such signal")
@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGHUP])
def test_a_bench_that_is_told_to_end_leaves_no_server_behind(told):
    code = (
        "import signal, sys, time; from freetoken.bench._processes import started\n"
        f"signal.signal({int(told)}, signal.SIG_DFL)  # under nohup a hang-up is nothing\n"
        "with started([sys.executable, '-c', 'import time; time.sleep(600)'], 'x') as one:\n"
        "    print(one.process.pid, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as bench:
        try:
            child = int(bench.stdout.readline())
            bench.send_signal(told)
            assert bench.wait(60) == 128 + told
            assert not psutil.pid_exists(child)
        finally:
            bench.kill()


def test_our_own_server_is_measured_with_its_experts(tmp_path, capsys):
    run_bench(synth, "--out", tmp_path / "m", "--tiny", "--layers", 2, "--no-measure")
    words = ("--device", "sim", "--backend", "hybrid", "--share", 0.5, "--streams", 1, 3, "--prompt", 16)
    assert run_bench(
        serve, "--model", tmp_path / "m", *words, "--tokens", 12, "--repeats", 1, "--warm-up", 1, "--json"
    ) == 0  # fmt: skip
    one, three = last_object(capsys)["rows"]
    assert (one["streams"], three["streams"], one["share"], one["backend"]) == (1, 3, 0.5, "hybrid")
    assert 3.0 <= one["distinct_experts_layer"] <= 5.0 < three["distinct_experts_layer"] <= 12.0
    assert 0 < one["hit_rate"] < 1 and one["sum_tok_s"] > 0 and three["ttft_ms"] > 0


def test_texts_follow_the_walk_or_english(tmp_path):
    english = Texts()
    assert english.take(5) != english.take(5) and english.take_with_answer(3, 2)[1] is None
    (tmp_path / "walk.json").write_text(json.dumps({"text": [" a", " b", " c"], "ids": [1, 2, 3]}))
    walk = Texts(str(tmp_path))
    assert walk.take_with_answer(4, 2) == (" a b c a", ["b", "c"])


def test_the_client_takes_any_form_of_address():
    with stranger() as url:
        for base in (url, f"{url}/", f"{url}/v1"):
            server = Server(base)
            assert server.find_model() == "strange" and server.complete("a b", 3).tokens == 3
