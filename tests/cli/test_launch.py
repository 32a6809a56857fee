"""`ft launch`: what an agent is told, what it must not inherit, and that nothing else is touched."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from test_remote import ScriptedModel

from freetoken.api import server
from freetoken.cli import _agents
from freetoken.cli import main as cli
from freetoken.cli._agents import Server
from freetoken.core import choices
from freetoken.core.options import Options

AGENTS = choices.names(_agents.__name__)
PROGRAM = """#!{python}
import json, os, sys
json.dump({{"argv": sys.argv[1:], "env": dict(os.environ)}}, open({report!r}, "w"))
sys.exit(7)
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with server.serving(ScriptedModel(), Options(port=0)) as base:
        yield int(urlsplit(base).port or 0)


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs by the agents' names that write down how they were run."""
    folder, file = tmp_path / "bin", tmp_path / "report.json"
    folder.mkdir()
    for name in AGENTS:
        program = folder / name
        program.write_text(PROGRAM.format(python=sys.executable, report=str(file)), encoding="utf-8")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return file


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_runs_with_the_servers_address_model_and_context(agent, port, report, home):
    assert cli.main(["launch", agent, "--port", str(port), "--", "-p", "do --this"]) == 7
    seen = json.loads(report.read_text("utf-8"))
    assert seen["argv"][-2:] == ["-p", "do --this"]
    told = json.dumps(seen) + "".join(p.read_text("utf-8") for p in home.rglob("*.*") if p.is_file())
    assert all(word in told for word in (f"http://127.0.0.1:{port}", "scripted", "4096"))


@pytest.mark.parametrize("agent", AGENTS)
def test_cloud_keys_never_reach_the_agent(agent, port, report, monkeypatch):
    secrets = (
        "ANTHROPIC_API_KEY",
        "OPENAI_API_KEY",
        "OPENAI_BASE_URL",
        "AWS_SECRET_ACCESS_KEY",
        "XAI_API_KEY",
    )
    for name in (*secrets, "CLAUDE_CODE_USE_BEDROCK", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("AWS_REGION", "moon")
    cli.main(["launch", agent, "--port", str(port)])
    environment = json.loads(report.read_text("utf-8"))["env"]
    assert "secret" not in environment.values()
    assert environment["AWS_REGION"] == "moon"


@pytest.mark.parametrize("agent", AGENTS)
def test_a_dry_run_shows_everything_and_does_nothing(agent, report, home, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret-1")
    words = ["launch", agent, "--dry-run", "--port", "1", "--api-key", "secret-2", "--max-model-len", "5000"]
    assert cli.main([*words, "--", "go"]) == 0
    shown = capsys.readouterr().out
    assert "unset OPENAI_API_KEY" in shown and "secret" not in shown
    assert "http://127.0.0.1:1" in shown and "5000" in shown
    assert shown.strip().splitlines()[-1].endswith("go")
    assert not home.exists() and not report.exists()


@pytest.mark.parametrize("agent", AGENTS)
def test_a_missing_agent_is_named_with_its_package_and_never_installed(
    agent, port, home, capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cli.main(["launch", agent, "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert "agent_not_installed" in error and choices.load(_agents.__name__, agent).PACKAGE in error
    assert not home.exists()


def test_one_of_several_keys_is_used(report, home):
    with server.serving(ScriptedModel(), Options(port=0, api_key="one,two")) as base:
        port = str(urlsplit(base).port)
        assert cli.main(["launch", "claude", "--port", port, "--api-key", "one,two"]) == 7
    assert json.loads(report.read_text("utf-8"))["env"]["ANTHROPIC_AUTH_TOKEN"] == "one"


def test_without_a_server_the_next_step_is_named(report, capsys):
    assert cli.main(["launch", "codex", "--port", "1"]) == 1
    assert "ft serve" in capsys.readouterr().err
    assert cli.main(["launch", "codx"]) == 2
    assert "codex" in capsys.readouterr().err


@pytest.mark.parametrize("agent", AGENTS)
def test_a_key_travels_by_the_environment_only(agent, tmp_path):
    found = choices.load(_agents.__name__, agent).launch(Server("http://x", "m/n", 8192, "key-1"), tmp_path)
    assert "key-1" in found.environment.values()
    assert "key-1" not in "".join(found.files.values()) + "".join(found.arguments)
