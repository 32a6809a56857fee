"""What a user writes becomes an option's value or an error that names the place: nothing is guessed."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from freetoken.core import log
from freetoken.core.errors import ConfigError
from freetoken.core.options import Options, check, parse_value

NUMBERS = [f.name for f in fields(Options) if f.metadata["kind"] in (int, float, "bytes", "rate")]


def fault(name: str, value: object) -> ConfigError:
    with pytest.raises(ConfigError) as e:
        parse_value(name, value, "config.toml")
    return e.value


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["nan", "inf", float("nan"), float("inf"), True, "", [], "x", "9" * 400])
def test_no_number_is_made_of_what_is_none(name: str, value: object) -> None:
    e = fault(name, value)
    assert e.code in ("invalid_option", "invalid_size") and e.hint
    assert e.message.startswith("config.toml: ")


@pytest.mark.parametrize("name", NUMBERS)
def test_no_size_count_or_rate_is_negative(name: str) -> None:
    if name in ("sim_seed", "port"):  # a seed may be anything; the port has an error of its own
        return
    for value in (-1, "-1", "-5"):
        assert fault(name, value).code in ("invalid_option", "invalid_size")


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("max_prefill_length", "0", "at least 1"),
        ("max_running_requests", "0", "at least 1"),
        ("page_size", "0", "at least 1"),
        ("num_tokens", "1", "at least 2"),
        ("max_model_len", "1", "at least 2"),
        ("gpu_memory", "0", "at least 1"),
        ("sim_link_bw", "0", "at least 0.001"),
        ("moe_cpu_threads", "5000", "at most 1024"),
        ("port", 1.5, "a whole number"),
        ("port", "80a", "a whole number"),
        ("model", "", "text"),
        ("model", 5, "text"),
        ("memory_ratio", "1.5", "a share from 0 to 1"),
    ],
)
def test_a_value_out_of_bounds_is_told_them(name: str, value: object, wanted: str) -> None:
    assert wanted in fault(name, value).message


@pytest.mark.parametrize(
    ("name", "value", "read"),
    [
        ("port", 8080.0, 8080),
        ("sim_seed", "-1", -1),
        ("kv_reserve_tokens", "0", 0),
        ("drain_seconds", 0, 0.0),
    ],
)
def test_what_fits_is_taken(name: str, value: object, read: object) -> None:
    assert parse_value(name, value, "flag") == read


def test_a_log_file_that_cannot_be_written_is_an_error_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as e:
        log.configure("info", str(tmp_path / "nowhere" / "log.txt"))
    assert e.value.code == "unwritable_file" and e.value.hint


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [("moe_policy", "lrux", "lru"), ("tool_parser", "qwen-xml", "qwen_xml"), ("machine", "4099", "4090")],
)
def test_names_of_an_axis_are_checked_like_any_choice(name: str, value: str, near: str) -> None:
    e = fault(name, value)
    assert e.code == "invalid_option" and near in e.message and near in e.hint
    assert parse_value(name, near, "flag") == near
    with pytest.raises(ConfigError, match=name):
        check(Options(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_cpu_threads", -1),
        ("moe_cpu_threads", 0),
        ("moe_cpu_threads", 9999),
        ("moe_prefetch", 1000),
        ("gpu_memory", 0),
        ("sim_link_bw", float("nan")),
        ("moe_cache_rate", 1.5),
        ("max_running_requests", 2.5),
        ("model", ""),
    ],
)
def test_values_given_from_python_have_the_bounds_of_flags(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name) as e:
        check(Options(**{name: value}))  # type: ignore[arg-type]
    assert e.value.code == "invalid_option" and e.value.hint


def test_options_that_say_nothing_pass_the_check() -> None:
    check(Options())
