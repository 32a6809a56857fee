"""`ft pull`, `ft models`, `ft rm` and `ft plan` against a hub on the loopback, and with no hub at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from freetoken.cli import _hub, pull
from freetoken.cli._models import DEMO
from freetoken.cli.main import main
from freetoken.core import profile
from freetoken.core.errors import CapacityError, ConfigError
from freetoken.models import qwen3_moe
from tests.cli.fake_hub import Hub, serving
from tests.engine.test_preflight import LARGE, sparse
from tests.models import checkpoints
from tests.weights import gguf_models

NAME = "Owner/Tiny"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    root = tmp_path_factory.mktemp("hub")
    shutil.copytree(DEMO, root / NAME)
    (root / NAME / "original").mkdir()
    (root / NAME / "original" / "weights.pth").write_text("not wanted")
    sparse(root / "Owner" / "Big", LARGE)
    with serving(root) as hub:
        yield hub


def ft(home: Path, endpoint: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), **variables}
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"):
        environment.pop(name, None) if name not in variables else None
    command = [sys.executable, "-m", "freetoken", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


def test_a_model_is_pulled_listed_planned_and_removed(hub: Hub, tmp_path: Path) -> None:
    done = ft(tmp_path, hub.url, "pull", NAME)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert sorted(f.name for f in path.iterdir()) == sorted(
        f.name for f in DEMO.iterdir() if f.suffix != ".md"
    )
    assert f"ft serve {NAME}" in done.stderr
    hub.asked.clear()
    (listed,) = json.loads(ft(tmp_path, hub.url, "models", "--json").stdout)["models"]
    assert listed["model"] == NAME and listed["bytes"] > 30 << 20 and listed["path"] == str(path)
    planned = ft(tmp_path, hub.url, "plan", NAME, "--json")
    assert json.loads(planned.stdout)["machines"][0]["fits"], planned.stderr
    refused = ft(tmp_path, hub.url, "rm", NAME)
    assert refused.returncode == 2 and "--yes" in refused.stderr
    assert ft(tmp_path, hub.url, "rm", NAME, "--yes").returncode == 0 and not path.exists()
    assert json.loads(ft(tmp_path, hub.url, "models", "--json").stdout)["models"] == []
    assert not hub.asked, "what is here is looked at and removed without asking the hub"


def test_a_plan_of_a_remote_model_asks_for_headers_alone(hub: Hub, tmp_path: Path) -> None:
    hub.sent_bytes = 0
    done = ft(tmp_path, hub.url, "plan", "Owner/Big", "--machine", "4090", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["model"]["expert_bytes"] > 50 << 30 and hub.sent_bytes < 4 << 20
    (machine,) = told["machines"]
    assert machine["backend"] == "hybrid" and 0 < machine["tokens_per_s"][0] < machine["tokens_per_s"][1]
    assert not list(tmp_path.rglob("*.safetensors")), "nothing is kept"


def test_a_plan_of_remote_gguf_files_asks_for_their_heads_alone(hub: Hub, tmp_path: Path) -> None:
    raw = {**qwen3_moe.TINY, "mlp_only_layers": [], "hidden_size": 256, "num_hidden_layers": 2}
    tensors = checkpoints.random_tensors(qwen3_moe.FAMILY, raw)
    # A vocabulary makes the header longer than what is asked for at first.
    words = {"tokenizer.ggml.tokens": [f"word {i:>10}" for i in range(80_000)]}
    for kind in ("Q8_0", "F32"):
        path = hub.root / "Owner" / "Blocks" / kind / f"tiny-{kind}.gguf"
        path.parent.mkdir(parents=True)
        gguf_models.write(path, raw, tensors, more=words)
        with path.open("ab") as file:
            file.truncate(path.stat().st_size + (64 << 20))
    done = ft(tmp_path, hub.url, "plan", "Owner/Blocks", "--json")
    assert "choose_file" in done.stderr and "tiny-F32.gguf" in done.stderr and "--file" in done.stderr
    done = ft(tmp_path, hub.url, "plan", "Owner/Blocks", "--file", "tiny-*", "--json")
    assert "choose_file" in done.stderr
    hub.sent_bytes = 0
    done = ft(tmp_path, hub.url, "plan", "Owner/Blocks", "--file", "*F32*", "--json")
    assert done.returncode == 0, done.stderr
    there = ft(tmp_path, hub.url, "plan", str(path), "--json")
    remote, local = (json.loads(one.stdout)["model"] for one in (done, there))
    assert {**remote, "name": ""} == {**local, "name": ""} and remote["expert_bytes"] > 0
    assert (1 << 20) < hub.sent_bytes < (8 << 20)


@pytest.mark.parametrize("words", [("pull", "Owner/Nope"), ("plan", "Owner/Nope")])
def test_an_unknown_model_is_told(words: tuple[str, ...], hub: Hub, tmp_path: Path) -> None:
    done = ft(tmp_path, hub.url, *words)
    assert done.returncode == 1 and "model_not_found" in done.stderr and "spelling" in done.stderr


def test_without_a_network_every_command_says_what_to_do(tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:9"
    done = ft(tmp_path, nobody, "pull", NAME)
    assert done.returncode == 1 and "hub_unreachable" in done.stderr and "ft models" in done.stderr
    done = ft(tmp_path, nobody, "pull", NAME, HF_HUB_OFFLINE="1")
    assert done.returncode == 1 and "hub_offline" in done.stderr


@pytest.mark.parametrize(
    "words", [("plan", NAME, "--offline"), ("generate", "--model", NAME, "--prompt", "x")]
)
def test_a_model_that_is_not_here_is_told_how_to_come(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert main(list(words)) == 4
    assert f"ft pull {NAME}" in capsys.readouterr().err


def files(*sizes: tuple[str, int]) -> list[_hub.File]:
    return [_hub.File(path, size) for path, size in sizes]


def test_the_weights_to_fetch_are_chosen_by_container_or_pattern() -> None:
    def chosen(pattern: str | None, *sizes: tuple[str, int]) -> list[str]:
        return [file.path for file in _hub.choose("n", files(*sizes), pattern)]

    both = ("config.json", 1), ("model.safetensors", 5), ("x-Q4_K_M.gguf", 5), ("README.md", 1)
    split = ("q/x-00001-of-00002.gguf", 5), ("q/x-00002-of-00002.gguf", 5), ("q/mmproj-x.gguf", 1)
    assert chosen(None, *both) == ["model.safetensors"]
    assert chosen("*Q4_K_M*", *both) == ["x-Q4_K_M.gguf"]
    assert chosen(None, ("x.gguf", 5)) == ["x.gguf"]
    assert chosen(None, *split) == [split[0][0], split[1][0]]
    for some, pattern, code in (
        ((("a.gguf", 5), ("b.gguf", 6)), None, "choose_file"),
        ((("a.gguf", 5),), "*Q8*", "choose_file"),
        ((("pytorch_model.bin", 5),), None, "no_weights"),
    ):
        with pytest.raises(ConfigError) as e:
            chosen(pattern, *some)
        assert e.value.code == code and e.value.hint


def test_a_disk_that_is_too_small_is_told_before_anything_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(CapacityError) as e:
        pull._check_disk(tmp_path / "not" / "yet", 1 << 60, tmp_path / "own")
    assert e.value.code == "disk_full" and "1048576 TiB" in e.value.message


def test_a_model_that_fits_nowhere_ends_with_the_arithmetic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sparse(tmp_path, {**LARGE, "hidden_size": 16384})
    assert main(["plan", str(tmp_path), "--device", "cpu"]) == 3
    told = " ".join(capsys.readouterr().out.split())
    assert "does not fit" in told and "experts 432 GiB" in told and "available" in told


def test_all_machines_get_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sparse(tmp_path, LARGE)
    assert main(["plan", str(tmp_path), "--all-machines"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {"4090", "4060-laptop", "pro-6000"} <= {row[0] for row in rows if row}


def test_a_plan_goes_by_what_was_measured_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told() -> tuple[list[float], str]:
        assert main(["plan", str(DEMO), "--device", "cpu", "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["machines"]
        return row["tokens_per_s"], " ".join(row["reasons"])

    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path))
    (low, high), why = told()
    assert "ft bench bw" in why, "a guess says how it becomes a measurement"
    profile.save(profile.Profile(profile.machine_key(), host_bw=1e9, threads=1))
    (slow_low, slow_high), slow_why = told()
    assert slow_high < high and slow_high / slow_low < high / low and "ft bench bw" not in slow_why
