"""The shared folder of downloaded models is read as the hub's own tools write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from freetoken.core import env, hub_cache


def downloaded(cache: Path, name: str, *, commit: str = "c1", main: bool = True) -> Path:
    """A model of two files, as the hub's client lays it out."""
    folder = cache / ("models--" + name.replace("/", "--"))
    for part in ("refs", "blobs", f"snapshots/{commit}"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    if main:
        (folder / "refs" / "main").write_text(commit)
    for file, text in (("config.json", "{}"), ("model.safetensors", "x" * 100)):
        blob = folder / "blobs" / f"{commit}-{file}"
        blob.write_text(text)
        (folder / "snapshots" / commit / file).symlink_to(blob)
    return folder / "snapshots" / commit


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_a_downloaded_model_is_found_by_its_name(cache: Path) -> None:
    path = downloaded(cache, "Owner/My-Model.1")
    assert hub_cache.snapshot("Owner/My-Model.1") == path
    (one,) = hub_cache.models()
    assert (one.name, one.path, one.num_bytes, one.partial) == ("Owner/My-Model.1", path, 102, False)
    assert hub_cache.snapshot("Owner/Other") is None


def test_main_wins_and_without_it_the_newest_snapshot(cache: Path) -> None:
    downloaded(cache, "a/b", commit="old", main=False)
    new = downloaded(cache, "a/b", commit="new", main=False)
    new.touch()
    assert hub_cache.snapshot("a/b") in (new, new.parent / "old")
    (cache / "models--a--b" / "refs" / "main").write_text("old")
    assert hub_cache.snapshot("a/b") == new.parent / "old"
    (cache / "models--a--b" / "refs" / "main").write_text("gone")
    assert hub_cache.snapshot("a/b") is not None


def test_a_download_under_way_is_told_apart(cache: Path) -> None:
    downloaded(cache, "a/b")
    (cache / "models--a--b" / "blobs" / "123.incomplete").write_text("x")
    assert hub_cache.models()[0].partial


def test_removing_takes_that_model_and_no_other(cache: Path) -> None:
    downloaded(cache, "a/b")
    kept = downloaded(cache, "a/c")
    hub_cache.remove("a/b")
    assert [one.name for one in hub_cache.models()] == ["a/c"] and kept.is_dir()


@pytest.mark.parametrize(
    "text", ["", "x", "/etc/passwd", "../x", "a/..", "a/b/c", "a/", "~/x", "a b/c", "./x"]
)
def test_what_is_no_name_is_never_looked_up(text: str, cache: Path) -> None:
    assert not hub_cache.is_name(text) and hub_cache.snapshot(text) is None


def test_an_empty_or_missing_cache_holds_nothing(cache: Path) -> None:
    assert hub_cache.models() == []
    (cache / "models--a--b").mkdir(parents=True)
    (cache / "version.txt").write_text("1")
    assert hub_cache.models() == []


@pytest.mark.parametrize(
    ("variables", "where"),
    [
        ({"HF_HUB_CACHE": "/x"}, "/x"),
        ({"HF_HOME": "/h"}, "/h/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({"HF_HUB_CACHE": "/x", "HF_HOME": "/h"}, "/x"),
    ],
)
def test_the_cache_is_where_the_hubs_tools_put_it(
    variables: dict[str, str], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert env.hub_cache() == Path(where)
