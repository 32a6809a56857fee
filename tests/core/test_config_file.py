"""config.toml: reading with names checked, edits that keep the file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.core import config_file
from freetoken.core.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    path = folder / "config.toml"
    path.write_text(text, "utf-8")
    return path


def code_of(path: Path) -> str:
    with pytest.raises(ConfigError) as e:
        config_file.read(path)
    assert e.value.hint, "every error names the next step"
    return e.value.code


def test_options_are_parsed_to_their_types(tmp_path: Path) -> None:
    path = write(
        tmp_path, '[default]\nport = 2000\ngpu_memory = "8GiB"\nexact = true\nmoe_cache_rate = 0.25\n'
    )
    assert config_file.read(path) == {
        "port": 2000,
        "gpu_memory": 8 << 30,
        "exact": True,
        "moe_cache_rate": 0.25,
    }


def test_a_missing_default_file_is_empty_and_a_missing_named_one_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FREETOKEN_HOME", str(tmp_path))
    assert config_file.read() == {}
    assert code_of(tmp_path / "other.toml") == "config_missing"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[default]\nmoe_bakend = 'cpu'\n", "unknown_option"),
        ("port = 1\n", "unknown_option"),
        ("[defautl]\nport = 1\n", "unknown_option"),
        ("default = 3\n", "config_syntax"),
        ("[default\n", "config_syntax"),
        ("a = " + "[" * 10_000, "config_syntax"),
    ],
)
def test_what_is_wrong_has_a_code(tmp_path: Path, text: str, code: str) -> None:
    assert code_of(write(tmp_path, text)) == code


def test_wrong_values_name_the_file_and_the_option(tmp_path: Path) -> None:
    path = write(tmp_path, "[default]\nport = 'many'\n")
    with pytest.raises(ConfigError, match="config.toml: port is 'many'"):
        config_file.read(path)


def test_a_file_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert code_of(path) == "config_unreadable"


def test_the_mark_that_windows_editors_begin_with_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(b"\xef\xbb\xbf[default]\r\nport = 5\r\n")
    assert config_file.read(file) == {"port": 5}
    config_file.set_value("port", "6", file)
    assert config_file.read(file) == {"port": 6}


def test_an_edit_of_what_is_no_text_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError) as e:
        config_file.set_value("port", "6", file)
    assert e.value.code == "config_unreadable" and file.read_bytes() == b"\xff\xfe"


def test_an_edit_keeps_comments_order_and_the_users_way_of_writing(tmp_path: Path) -> None:
    path = write(tmp_path, "# mine\n[default]\nport = 2000  # why\nhost = '0.0.0.0'\n")
    config_file.set_value("gpu_memory", "8GiB", path)
    config_file.set_value("port", "3000", path)
    text = path.read_text("utf-8")
    assert text == "# mine\n[default]\ngpu_memory = \"8GiB\"\nport = 3000\nhost = '0.0.0.0'\n"


def test_unset_removes_only_what_was_there(tmp_path: Path) -> None:
    path = write(tmp_path, "[default]\nport = 2000\n")
    assert config_file.unset("port", path)
    assert not config_file.unset("port", path)
    assert config_file.read(path) == {}


def test_an_edit_never_touches_a_broken_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[default\n")
    with pytest.raises(ConfigError):
        config_file.set_value("port", "3000", path)
    assert path.read_text("utf-8") == "[default\n"


@settings(deadline=None)  # a file is written and read
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_any_text_survives_writing_and_reading(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("config") / "config.toml"
    config_file.set_value("served_model_name", text, path)
    assert config_file.read(path) == {"served_model_name": text}


def test_a_folder_that_cannot_be_written_is_an_error_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(ConfigError) as e:
        config_file.set_value("port", "3000", tmp_path / "file" / "config.toml")
    assert e.value.code == "unwritable_file" and e.value.hint


@pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps rights elsewhere")
def test_only_its_owner_can_read_a_file_written_here(tmp_path: Path) -> None:
    config_file.set_value("api_key", "secret", tmp_path / "config.toml")
    assert (tmp_path / "config.toml").stat().st_mode & 0o077 == 0
