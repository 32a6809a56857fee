"""What leaves the device comes back, from host memory and from disk, after a restart too; never wrong."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from freetoken.core.machine import preset
from freetoken.core.options import Options
from freetoken.core.units import MIB
from freetoken.devices.sim import SimDevice
from freetoken.engine import disk as disk_module
from freetoken.engine.build import build
from freetoken.engine.disk import DiskTier, fingerprint

from .served import Served, text_ids
from .toy import Bench, expected


def payload(seed: int, size: int = 100) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# --- files ---


def test_entries_survive_and_belong_to_one_model(tmp_path: Path) -> None:
    first = DiskTier(tmp_path, "model a", 1000)
    first.write("x", payload(1))
    again, other = DiskTier(tmp_path, "model a", 1000), DiskTier(tmp_path, "model b", 1000)
    out = torch.zeros(100, dtype=torch.uint8)
    assert again.names() == ["x"] and again.read("x", out) and torch.equal(out, payload(1))
    assert other.names() == [] and not other.read("x", out)


def test_the_limit_holds_and_the_oldest_gives_way(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "m", 350)
    for i in range(20):
        tier.write(f"e{i}", payload(i))
        assert tier.num_bytes <= 350
    assert tier.names() == ["e17", "e18", "e19"]
    assert len(list(tmp_path.rglob("e*"))) == 3
    tier.write("huge", payload(1, 400))
    assert "huge" not in tier.names()
    assert DiskTier(tmp_path, "m", 200).num_bytes <= 200


@pytest.mark.parametrize("spoil", ["flip", "cut", "empty", "other size", "gone"])
def test_a_damaged_file_is_a_miss_and_goes(tmp_path: Path, spoil: str) -> None:
    tier = DiskTier(tmp_path, "m", 1000)
    tier.write("x", payload(1))
    (file,) = tmp_path.rglob("x")
    data = bytearray(file.read_bytes())
    if spoil == "flip":
        data[-3] ^= 1
        file.write_bytes(data)
    elif spoil == "gone":
        file.unlink()
    else:
        file.write_bytes({"cut": data[:50], "empty": b"", "other size": data + b"1"}[spoil])
    out = torch.zeros(100, dtype=torch.uint8)
    assert not tier.read("x", out) and not out.any()
    assert tier.num_damaged == 1 and tier.names() == [] and not file.exists() and tier.is_on


def test_half_written_files_of_a_killed_server_are_removed(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "m", 1000)
    tier.write("x", payload(1))
    (file,) = tmp_path.rglob("x")
    file.with_name("y.tmp").write_bytes(b"half")
    assert DiskTier(tmp_path, "m", 1000).names() == ["x"]
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_full_disk_ends_the_tier_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    tier = DiskTier(tmp_path, "m", 1000)
    tier.write("x", payload(1))
    monkeypatch.setattr(disk_module.os, "replace", full)
    tier.write("y", payload(2))
    assert not tier.is_on and tier.names() == []
    assert not list(tmp_path.rglob("*.tmp")), "what was half written gives its room back"
    tier.write("z", payload(3))
    assert not tier.read("x", torch.zeros(100, dtype=torch.uint8))


def test_a_folder_that_is_emptied_meanwhile_is_filled_again(tmp_path: Path) -> None:
    tier, read = DiskTier(tmp_path, "m", 1000), torch.zeros(100, dtype=torch.uint8)
    tier.write("x", payload(1))
    shutil.rmtree(tmp_path)
    tier.write("y", payload(2))
    assert tier.is_on and tier.read("y", read) and torch.equal(read, payload(2))
    assert not tier.read("x", read)


def test_another_server_of_the_same_model_may_start_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, replace = DiskTier(tmp_path, "m", 1000), disk_module.os.replace

    def after_a_start(*args: Any) -> None:
        DiskTier(tmp_path, "m", 1000)
        replace(*args)

    tier.write("x", payload(1))
    monkeypatch.setattr(disk_module.os, "replace", after_a_start)
    tier.write("y", payload(2))
    assert tier.is_on and tier.names() == ["x"]


def test_a_folder_that_can_not_be_made_ends_the_tier(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert not DiskTier(tmp_path / "file", "m", 1000).is_on


def test_another_checkpoint_has_another_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    before = fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{ }")
    assert fingerprint(tmp_path) != before == [before[0], *before[1:]]


# --- through the engine ---


def ask_all(bench: Bench, prompts: list[list[int]], name: str) -> int:
    """Tokens reused over all prompts, each answer checked."""
    reused = 0
    for i, ids in enumerate(prompts):
        bench.submit(f"{name}{i}", ids, range(4, len(ids), 9), (7, 8, 9), group=str(i), max_tokens=4)
        bench.run()
        assert bench.tokens(f"{name}{i}") == expected(ids, 4), f"{name}{i}"
        reused += bench.outputs[f"{name}{i}"][-1].cached_tokens
        bench.scheduler.check()
    return reused


def prompts(count: int = 8, length: int = 60) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(1, 97) for _ in range(length)] for _ in range(count)]


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_prefixes_that_left_the_device_come_back(device: str) -> None:
    def bench(cold: int) -> Bench:
        sim = SimDevice(preset("4060-laptop"), memory_bytes=1 << 30, seed=3) if device == "sim" else None
        return Bench(pages=40, slots=40, device=sim, cold=cold)

    asked = prompts()
    without, with_store = bench(0), bench(1 << 20)
    for b in (without, with_store):
        ask_all(b, asked, "a")
    assert ask_all(without, asked, "b") == 0, "the pool holds all prompts, so nothing ever left"
    reused = ask_all(with_store, asked, "b")
    assert reused > 0.7 * sum(map(len, asked)), reused
    counts = with_store.cache.snapshot()
    assert counts["revived"] >= 7 and counts["cold_loaded_bytes"] > 0
    with_store.check_empty()


def test_what_is_cleared_stays_away() -> None:
    bench, asked = Bench(pages=200, slots=40, cold=1 << 20), prompts(2)
    ask_all(bench, asked, "a")
    bench.scheduler.reuse.clear()
    assert ask_all(bench, asked, "b") == 0
    assert ask_all(bench, asked, "c") > 60, "and what comes later is kept as ever"


def test_host_memory_of_the_tier_has_a_limit() -> None:
    bench = Bench(pages=40, slots=10, cold=1500)
    for i, ids in enumerate(prompts(40)):
        bench.submit(f"p{i}", ids, range(4, 60, 9), group=str(i), max_tokens=2)
        bench.run()
        assert bench.cache.snapshot()["cold_bytes"] <= 1500


def test_a_stop_without_a_disk_puts_nothing_away() -> None:
    bench = Bench(pages=40, slots=40, cold=2000)
    bench.submit("a", prompts()[0], max_tokens=2)
    bench.run()
    before = bench.cache.snapshot()
    bench.cache.flush()
    assert bench.cache.snapshot() == before and before["pages"] > 0


def test_prefixes_survive_a_restart_and_damage_costs_time_only(tmp_path: Path) -> None:
    asked = prompts()

    def bench() -> Bench:
        return Bench(pages=40, slots=40, cold=2000, disk=DiskTier(tmp_path, "toy", 1 << 20))

    first = bench()
    ask_all(first, asked, "a")
    first.cache.flush()
    second = bench()
    reused = ask_all(second, asked, "b")
    assert reused > 0.7 * sum(map(len, asked)), reused
    assert second.cache.snapshot()["disk_read_bytes"] > 0
    files = sorted(tmp_path.rglob("page-*"))
    for file in files[::9]:
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    third = bench()
    assert 0 < ask_all(third, asked, "c") < reused
    assert third.cache.snapshot()["disk_damaged"] > 0
    third.check_empty()


def test_a_disk_that_fills_while_requests_run_costs_its_tier_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    tier = DiskTier(tmp_path, "toy", 1 << 20)
    bench, asked = Bench(pages=40, slots=40, cold=2000, disk=tier), prompts()
    ask_all(bench, asked, "a")
    written = bench.cache.snapshot()["disk_written_bytes"]
    assert tier.is_on and written > 0
    monkeypatch.setattr(disk_module.os, "replace", full)
    ask_all(bench, prompts(16), "b")
    assert not tier.is_on and bench.cache.snapshot()["disk_written_bytes"] == written
    again = prompts(16)[-1:]
    assert ask_all(bench, [*asked[:2], *again, *again], "c") > 0, "host memory still keeps prefixes"
    bench.cache.flush()
    bench.check_empty()


@pytest.mark.parametrize("wishes", [{}, {"exact": True}])
def test_a_server_that_starts_again_knows_what_it_knew(tmp_path: Path, wishes: dict) -> None:
    options = {"device": "cpu", "cold_disk": 64 * MIB, "cold_path": str(tmp_path), "max_model_len": 2048}

    def serve() -> Served:
        return Served(build(Options(**options, **wishes)))

    one = serve()
    ids = text_ids(one.built, 3, 400)
    one.submit("a", ids, tokens=6)
    one.run()
    one.engine.scheduler.reuse.cache.flush()
    one.close()
    two = serve()
    two.submit("b", ids, tokens=6)
    two.run()
    assert two.outputs["b"][-1].cached_tokens >= len(ids) - 33
    if wishes:
        assert two.trace("b") == one.trace("a"), "exact mode: the same bits"
    assert two.built.snapshot()["cache"]["disk_read_bytes"] > 0
    two.close()
