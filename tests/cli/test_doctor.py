"""`ft doctor`: a healthy machine passes, each defect is named, the bundle holds nothing private."""

from __future__ import annotations

import json
import re
import socket
import zipfile
from pathlib import Path

import pytest

from freetoken.cli import _checks, _host
from freetoken.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path / "settings"))


def checks(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, dict[str, str]]]:
    code = cli.main(["doctor", "--json", *argv])
    rows = json.loads(capsys.readouterr().out)["checks"]
    return code, {row["name"]: row for row in rows}


def test_this_machine_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    code, rows = checks(capsys)
    assert code == 0, rows
    assert {"freetoken", "python", "packages", "torch", "cpu", "memory", "gpu", "model", "port"} <= set(rows)


def test_the_plain_report_ends_with_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("Ready. Try: ft demo\n")


def test_a_missing_model_is_bad_and_says_what_to_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, rows = checks(capsys, "--model", str(tmp_path / "nothing"))
    assert code == 1
    assert rows["model"]["state"] == "bad" and "config.json" in rows["model"]["hint"]


def test_a_taken_port_names_its_holder_and_a_free_one(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, rows = checks(capsys, "--port", str(port))
    assert code == 0
    assert rows["port"]["state"] == "warn" and "this process" in rows["port"]["fact"]
    assert "--port" in rows["port"]["hint"]


def test_a_wrong_option_in_the_environment_is_reported_not_raised(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FREETOKEN_PROT", "1")
    code, rows = checks(capsys)
    assert code == 1 and "unknown_option" in rows["options"]["fact"]


def test_a_foreign_package_of_the_same_name_is_found(tmp_path: Path) -> None:
    package = tmp_path / "freetoken"
    package.mkdir()
    (package / "__init__.py").write_text("", "utf-8")
    info = tmp_path / "freetoken-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: freetoken\nVersion: 0.1.2\n", "utf-8")
    (info / "entry_points.txt").write_text("[console_scripts]\nft = freetoken.entry:go\n", "utf-8")
    found = _checks.foreign_copies([tmp_path], _checks.module_folder())
    assert len(found) == 2
    assert any("0.1.2" in fact for fact in found)


def test_our_own_installation_is_not_foreign() -> None:
    folder = _checks.module_folder().parent
    assert _checks.foreign_copies([folder], _checks.module_folder()) == []


def test_a_gpu_that_is_not_there_is_explained() -> None:
    found, how = _host.gpus()
    assert how
    assert isinstance(found, list)


def test_a_cpu_build_of_torch_is_told_from_a_cuda_build() -> None:
    build = _host.torch_build()
    assert build is not None
    assert build.version.split(".")[0].isdigit()
    assert ("+cpu" in build.version) <= (build.cuda == "")


def test_the_bundle_holds_no_key_no_model_path_and_no_user_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "users" / "jane"
    home.mkdir(parents=True)
    monkeypatch.setattr(Path, "home", lambda: home)
    monkeypatch.setenv("FREETOKEN_HOME", str(home / "settings"))
    monkeypatch.setenv("FREETOKEN_API_KEY", "open-sesame")
    monkeypatch.setenv("FREETOKEN_SERVED_MODEL_NAME", "shown")
    path = tmp_path / "report.zip"
    assert cli.main(["doctor", "--bundle", str(path)]) == 0
    assert "Bug report written" in capsys.readouterr().err
    with zipfile.ZipFile(path) as bundle:
        names = bundle.namelist()
        text = "".join(bundle.read(n).decode("utf-8") for n in names)
    assert sorted(names) == ["README.txt", "checks.json", "options.json", "versions.json"]
    assert "open-sesame" not in text and str(home) not in text
    assert "shown" in text and '"torch"' in text


def test_a_bundle_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--bundle", str(tmp_path / "no" / "report.zip")]) == 2
    assert "unwritable_file" in capsys.readouterr().err


def test_doctor_looks_for_every_package_that_is_needed() -> None:
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert block is not None
    needed = {re.split(r"[<>=;]", word)[0].strip() for word in re.findall(r'"([^"]+)"', block[1])}
    assert needed - {"torch", "tomli"} == set(_checks.PACKAGES)
