"""Bytes come the same by mapping, by aligned blocks past the page cache, and through it; ends are errors."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from freetoken.core.errors import WeightsError
from freetoken.core.weights import Lies, Stored
from freetoken.native.library import library
from freetoken.weights.files import ALIGN, Arena, Files, aligned, crc32

SIZE = 3 * ALIGN + 1234
MODES = ({}, {"cached": False}, {"direct": False})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "data.bin"
    path.write_bytes(os.urandom(SIZE))
    return path


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(cut=st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), mode=st.sampled_from(MODES))
def test_every_way_reads_the_same_bytes(path: Path, cut: tuple[int, int], mode: dict[str, bool]) -> None:
    start, stop = min(cut), max(cut)
    wanted = path.read_bytes()[start:stop]
    files, arena = Files(**mode), Arena()
    if wanted:
        assert bytes(files.bytes_of(path, start, stop - start).numpy()) == wanted
    for _ in range(2):  # the second time the arena has the room
        with files.reading(arena):
            assert bytes(files.bytes_of(path, start, stop - start).numpy()) == wanted
        arena.reset()
    files.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_file_that_ends_early_is_named_with_the_byte(path: Path, mode: dict[str, bool]) -> None:
    files, out = Files(**mode), aligned(4 * ALIGN)
    with pytest.raises(WeightsError, match=f"data.bin ends at byte {SIZE}, ") as e:
        files.read_into(path, ALIGN, out)
    assert e.value.code == "truncated_shard"
    files.read_into(path, ALIGN, out, least=SIZE - ALIGN)
    assert bytes(out[: SIZE - ALIGN].numpy()) == path.read_bytes()[ALIGN:]


@pytest.mark.skipif(library() is None, reason="the native library is not built")
@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(
    cuts=st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(1, 3 * ALIGN)), min_size=1, max_size=9),
    mode=st.sampled_from(MODES),
)
def test_many_pieces_are_fetched_at_once(
    path: Path, cuts: list[tuple[int, int]], mode: dict[str, bool]
) -> None:
    """Pieces in any order, neighbours or far apart, one within another."""
    pieces = [(a, min(n, SIZE - a)) for a, n in cuts]
    files, arena, data = Files(**mode), Arena(), path.read_bytes()
    some = [Stored(Lies(""), torch.uint8, n, path, a) for a, n in pieces]
    with files.reading(arena):
        fetched = files.fetch(some)
        assert fetched is not None
        base = fetched.memory.data_ptr()
        for (a, n), at in zip(pieces, fetched.addresses, strict=True):
            assert bytes(fetched.memory[at - base : at - base + n].numpy()) == data[a : a + n]
    files.close()


@pytest.mark.parametrize("mode", MODES)
def test_what_can_not_be_fetched_is_left_to_reading(path: Path, mode: dict[str, bool]) -> None:
    files = Files(**mode)
    beyond = [Stored(Lies(""), torch.uint8, 8, path, at) for at in (0, SIZE - 7)]
    assert files.fetch(beyond[:1]) is None  # no arena: a view of the mapping costs nothing
    with files.reading(Arena()):
        assert files.fetch(beyond) is None
    files.close()


def test_memory_that_is_not_aligned_is_filled_too(path: Path) -> None:
    out = torch.zeros(ALIGN + 7, dtype=torch.uint8)[7:]
    Files().read_into(path, ALIGN, out)
    assert bytes(out.numpy()) == path.read_bytes()[ALIGN : 2 * ALIGN]


def test_threads_read_into_arenas_of_their_own(path: Path) -> None:
    files = Files()

    def work(i: int) -> bool:
        arena = Arena()
        good = True
        for n in range(50):
            at = (i * 501 + n * 97) % (SIZE - 100)
            with files.reading(arena):
                one = files.bytes_of(path, at, 100)
                two = files.bytes_of(path, at // 2, 100)
            raw = path.read_bytes()
            good &= (
                bytes(one.numpy()) == raw[at : at + 100]
                and bytes(two.numpy()) == raw[at // 2 : at // 2 + 100]
            )
            arena.reset()
        return good

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


def test_an_arena_is_reused_once_it_is_large_enough() -> None:
    arena = Arena()
    arena.take(100), arena.take(ALIGN + 1)
    arena.reset()
    first = arena.take(100).data_ptr()
    assert arena.take(ALIGN + 1).data_ptr() == first + ALIGN and first % ALIGN == 0
    arena.reset()
    assert arena.take(3 * ALIGN).data_ptr() == first


def test_a_mapping_outlives_its_files(path: Path) -> None:
    files = Files()
    kept = files.bytes_of(path, 5, 1000)
    files.release()
    files.close()
    assert bytes(kept.numpy()) == path.read_bytes()[5:1005]


@pytest.mark.parametrize("size", [0, 1, 15, 64, 127, 128, 129, 1000, 4096, 70001])
def test_checksums_are_those_of_zlib(size: int) -> None:
    data = torch.randint(0, 256, (size + 3,), dtype=torch.uint8)[3:]
    assert crc32(data) == zlib.crc32(data.numpy().tobytes())
