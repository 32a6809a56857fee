"""`ft checkpoint` from the command line: writing, being killed, verifying, and the memory it takes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from freetoken.cli import main as cli
from tests.engine.test_preflight import LARGE, sparse

DEMO = Path(cli.__file__).resolve().parent.parent / "data" / "demo-model"


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path / "home"))


def ft(*argv: str) -> int:
    return cli.main(["checkpoint", *argv])


def test_a_model_is_written_verified_and_damage_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    assert ft("--model", str(DEMO), "--out", str(out), "--experts", "nvfp4", "--shard-size", "2MiB") == 0
    said = capsys.readouterr().err
    assert "124 tensors, 256 experts in nvfp4" in said and f"ft serve --model {out}" in said
    for name in ("gate", "up", "down"):
        assert f"  expert {name} " in said
    assert (out / "tokenizer.json").read_bytes() == (DEMO / "tokenizer.json").read_bytes()
    assert ft("verify", str(out)) == 0 and "all as written" in capsys.readouterr().err
    shard = out / "experts-00002.ftw"
    with shard.open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)
        file.seek(5000)
        file.write(bytes([byte[0] ^ 4]))
    assert ft("verify", str(out)) == 4
    said = capsys.readouterr().err
    assert "error [damaged_weights]" in said and "in experts-00002.ftw" in said and "expert " in said


def test_everything_is_coded_with_one_word_as_people_write_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "demo"
    assert ft("--model", str(DEMO), "--out", str(out), "--quantise", "int4-g32") == 0
    said = capsys.readouterr().err
    assert "124 tensors, 256 experts in int4_g32" in said
    for name in ("expert gate", "expert up", "expert down", "attention", "DeltaNet", "dense MLP", "head"):
        assert f"  {name} " in said
    index = json.loads((out / "ftw.json").read_text())["index"]
    assert index["tensors"]["model.embed_tokens.weight"][0] == "codes:int4_g32"
    assert ft("verify", str(out)) == 0


@pytest.mark.soak
def test_a_killed_conversion_leaves_nothing_that_looks_whole_and_goes_on(tmp_path: Path) -> None:
    out, journal = tmp_path / "demo", tmp_path / "demo.partial" / "ftw.journal"
    command = [sys.executable, "-m", "freetoken", "checkpoint", "--model", str(DEMO), "--out", str(out)]
    command += ["--experts", "q4_1", "--threads", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        if journal.exists() and journal.read_text().count("\n") > 150:
            process.kill()
            break
        time.sleep(0.005)
    assert process.wait() == -9 and not out.exists() and journal.exists()
    assert process.stderr is not None
    process.stderr.close()
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "were there from an earlier run" in done.stderr
    assert ft("verify", str(out)) == 0 and not journal.parent.exists()


PEAK = """
import resource, sys
from freetoken.cli import main
code = main.main(sys.argv[1:])
print(code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
"""


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
@pytest.mark.parametrize(("experts", "dense"), [("", ""), ("q8_0", ""), ("q8_0", "q8_0")])
def test_a_model_larger_than_the_bound_is_written_within_it(experts: str, dense: str, tmp_path: Path) -> None:
    """Peak memory is at most 2 GB and one shard, whatever the model's size."""
    shard = 256 << 20
    size = sparse(tmp_path / "large", {**LARGE, "num_hidden_layers": 5, "num_experts": 64})
    assert size > (2 << 30) + shard + (1 << 30)
    argv = ["checkpoint", "--model", str(tmp_path / "large"), "--out", str(tmp_path / "out")]
    argv += ["--shard-size", str(shard), "--experts", experts, "--dense", dense]
    done = subprocess.run([sys.executable, "-c", PEAK, *argv], capture_output=True, text=True, timeout=3000)
    code, peak = done.stdout.split()[-2:]
    assert code == "0", done.stderr
    assert int(peak) <= (2 << 30) + shard, f"{int(peak) >> 20} MiB"
    print(f"{size >> 20} MiB read, written with a peak of {int(peak) >> 20} MiB")
    shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        ([], "usage"),
        (["--model", "x"], "usage"),
        (["verify"], "usage"),
        (["verify", "a", "b"], "usage"),
        (["verify", str(DEMO)], "usage"),
        (["check", "a"], "usage"),
        (["--model", "no-such", "--out", "o"], "unknown_path"),
        (["--model", str(DEMO), "--out", "o", "--experts", "fp4"], "unknown_choice"),
        (["--model", str(DEMO), "--out", "o", "--dense", "fp4"], "unknown_choice"),
        (["--model", str(DEMO), "--out", "o", "--quantise", "../x"], "unknown_choice"),
        (["--model", str(DEMO), "--out", "o", "--shard-size", "1"], "invalid_size"),
        (["--model", str(DEMO), "--out", "o", "--threads", "-1"], "invalid_option"),
        (["--model", str(DEMO), "--out", str(DEMO)], "output_exists"),
        (["--model", str(DEMO), "--out", "/proc/no/such"], "unwritable_file"),
    ],
)
def test_wrong_words_are_refused(
    argv: list[str],
    code: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ft(*argv) != 0
    assert f"error [{code}]" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    script = (
        "import sys; from freetoken.cli import main; main.main(['checkpoint', '--help']); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().endswith("False")


def test_the_index_is_compact_and_says_where_it_came_from(tmp_path: Path) -> None:
    assert ft("--model", str(DEMO), "--out", str(tmp_path / "d")) == 0
    text = (tmp_path / "d" / "ftw.json").read_text()
    index = json.loads(text)["index"]
    assert len(text) < 20_000 and index["origin"]["model"] == "demo-model"
