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
from freetoken.core.errors import CapacityError, ConfigError
from tests.cli.fake_hub import Hub, serving
from tests.engine.test_preflight import LARGE, sparse

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
    assert not hub.asked, "a model that is here is looked at without asking the hub"
    refused = ft(tmp_path, hub.url, "rm", NAME)
    assert refused.returncode == 2 and "--yes" in refused.stderr
    assert ft(tmp_path, hub.url, "rm", NAME, "--yes").returncode == 0 and not path.exists()
    assert json.loads(ft(tmp_path, hub.url, "models", "--json").stdout)["models"] == []


def test_a_plan_of_a_remote_model_asks_for_headers_alone(hub: Hub, tmp_path: Path) -> None:
    hub.sent_bytes = 0
    done = ft(tmp_path, hub.url, "plan", "Owner/Big", "--machine", "4090", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["model"]["expert_bytes"] > 50 << 30 and hub.sent_bytes < 4 << 20
    (machine,) = told["machines"]
    assert machine["backend"] == "hybrid" and 0 < machine["tokens_per_s"][0] < machine["tokens_per_s"][1]
    assert not list(tmp_path.rglob("*.safetensors")), "nothing is kept"


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
    both = files(("config.json", 1), ("model.safetensors", 5), ("x-Q4_K_M.gguf", 5), ("README.md", 1))
    assert [f.path for f in pull.choose("n", both, None)] == ["config.json", "model.safetensors"]
    assert [f.path for f in pull.choose("n", both, "*Q4_K_M*")] == ["config.json", "x-Q4_K_M.gguf"]
    assert [f.path for f in pull.choose("n", files(("x.gguf", 5)), None)] == ["x.gguf"]
    for some, pattern, code in (
        (files(("a.gguf", 5), ("b.gguf", 6)), None, "choose_file"),
        (files(("a.gguf", 5)), "*Q8*", "choose_file"),
        (files(("pytorch_model.bin", 5)), None, "no_weights"),
    ):
        with pytest.raises(ConfigError) as e:
            pull.choose("n", some, pattern)
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
