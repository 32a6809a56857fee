"""The dispatcher: commands are found, errors read the same everywhere, exit codes hold."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from freetoken import __version__
from freetoken.cli import main as cli
from freetoken.core import choices
from freetoken.core.errors import CapacityError, ConfigError, DeviceError, FreeTokenError, WeightsError


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path / "home"))


def test_help_lists_every_command_with_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in cli.commands():
        assert f"  {name} " in shown
        assert choices.constant(cli.PACKAGE, name, "HELP") in shown
        assert len(choices.constant(cli.PACKAGE, name, "HELP")) > 10


@pytest.mark.parametrize("name", cli.commands())
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    assert f"usage: ft {name}" in capsys.readouterr().out


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"freetoken {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "code", "hint"),
    [
        (["sreve"], "unknown_command", "serve"),
        (["serve", "--moe-bakend", "cpu"], "unknown_option", "--moe-backend"),
        (["serve", "--moe-backend", "hybird"], "invalid_option", "hybrid"),
        (["serve", "--gpu-memory", "much"], "invalid_size", "8GiB"),
        (["serve", "--memory-ratio", "1.5"], "invalid_option", ""),
        (["serve", "--port"], "usage", "ft serve --help"),
        (["serve", "--config", "nowhere.toml"], "config_missing", "ft config set"),
        (["serve", "a", "b"], "unknown_option", "ft serve --help"),
        (["generate", "--prompt", ""], "usage", "pipe one in"),
        (["serve", "--log-file", "/no/such/folder/log"], "unwritable_file", "--log-file"),
        (["generate", "--prompt", "x", "--temperature", "9"], "invalid_option", "model's own"),
        (["config", "gte", "port"], "usage", "get"),
        (["config", "get", "prot"], "unknown_option", "port"),
        (["config", "set", "port"], "usage", "--help"),
        (["bench", "polcy"], "unknown_command", "policy"),
        (["verify", "--backends", "fused,hybird"], "invalid_option", "hybrid"),
        (["verify", "--backends", "fused"], "invalid_option", "fused,hybrid"),
        (["verify", "--tokens", "0"], "invalid_option", "--tokens 8"),
        (["verify", "--prompts", "nowhere.txt"], "unreadable_file", "--prompts"),
    ],
)
def test_a_wrong_word_names_the_next_step(
    argv: list[str], code: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error [{code}]: ")
    assert hint in said
    assert "Traceback" not in said


def test_an_unknown_environment_name_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FREETOKEN_MOE_BAKEND", "cpu")
    assert cli.main(["config"]) == 2
    assert "FREETOKEN_MOE_BACKEND" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("x"), 2), (CapacityError("x"), 3), (WeightsError("x"), 4), (DeviceError("x"), 5)],
)
def test_errors_have_the_documented_exit_codes(
    error: FreeTokenError, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr(choices.load(cli.PACKAGE, "config"), "run", fail)
    assert cli.main(["config"]) == code
    assert capsys.readouterr().err == f"error [{error.code}]: x\n"


def test_a_fault_of_ours_is_one_line_unless_debugging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise KeyError("lost")

    monkeypatch.setattr(choices.load(cli.PACKAGE, "config"), "run", fail)
    assert cli.main(["config"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error [internal_error]: KeyError") and "Traceback" not in said
    assert "--log-level debug" in said
    assert cli.main(["config", "--log-level", "debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_missing_package_is_not_called_a_fault_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise ModuleNotFoundError("No module named 'zlorp.sub'", name="zlorp.sub")

    monkeypatch.setattr(choices.load(cli.PACKAGE, "config"), "run", fail)
    assert cli.main(["config"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error [missing_package]: ") and "zlorp" in said and "pip install -e ." in said


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_memory_that_ran_out_is_said_as_such(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr(choices.load(cli.PACKAGE, "config"), "run", fail)
    assert cli.main(["config"]) == CapacityError.exit_code
    assert capsys.readouterr().err.startswith("error [host_memory]: ")


def test_what_the_system_refuses_is_said_as_such(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(choices.load(cli.PACKAGE, "config"), "run", fail)
    assert cli.main(["config"]) == 1
    assert capsys.readouterr().err.startswith("error [system_refused]: The system refused: No space left")


def test_closed_streams_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    assert cli.main(["config"]) == 0
    assert cli.main(["no-such-command"]) == 2
    for stream in (sys.stdout, sys.stderr):
        stream.close()


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(choices.load(cli.PACKAGE, "config"), "run", interrupt)
    assert cli.main(["config"]) == 130


def test_config_shows_where_each_value_came_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FREETOKEN_HOST", "0.0.0.0")
    assert cli.main(["config", "set", "moe-backend", "hybrid"]) == 0
    assert cli.main(["config", "set", "port", "2000"]) == 0
    capsys.readouterr()
    assert cli.main(["config", "--json", "--port", "3000"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["port"] == {"value": 3000, "from": "flag"}
    assert shown["host"] == {"value": "0.0.0.0", "from": "environment"}
    assert shown["moe_backend"] == {"value": "hybrid", "from": "config.toml"}
    assert shown["device"] == {"value": "auto", "from": "default"}


def test_config_never_shows_the_key(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FREETOKEN_API_KEY", "open-sesame")
    for argv in (["config"], ["config", "--json"], ["config", "get", "api_key"], ["config", "--all"]):
        assert cli.main(argv) == 0
        assert "open-sesame" not in capsys.readouterr().out


def test_a_switch_can_be_turned_off_against_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "set", "exact", "true"]) == 0
    capsys.readouterr()
    assert cli.main(["config", "get", "exact", "--no-exact"]) == 0
    assert capsys.readouterr().out.startswith("off")


def test_published_flags_without_meaning_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--moe-prefill-hit-d2d"]) == 0
    assert "--moe-prefill-hit-d2d changes nothing: " in capsys.readouterr().out


def test_bench_lists_measurements_and_passes_their_own_flags_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 0
    assert "policy" in capsys.readouterr().out
    assert cli.main(["bench", "policy", "--help"]) == 0
    assert "usage: ft bench policy" in capsys.readouterr().out
