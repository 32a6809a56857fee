"""The bank's memory is aligned whatever its size, and gathering it changes no byte."""

from __future__ import annotations

import pytest
import torch

from freetoken.experts import host_pages
from freetoken.native.library import library


@pytest.mark.parametrize("size", [0, 4096, host_pages.LEAST_BYTES, host_pages.LEAST_BYTES + 12288])
def test_memory_is_aligned_and_of_the_size_asked_for(size: int) -> None:
    memory, _ = host_pages.allocate(size, 4096)
    assert memory.numel() == size and memory.data_ptr() % 4096 == 0
    memory.fill_(7)
    assert bool((memory == 7).all())


def test_gathering_changes_no_byte_and_stops_when_told() -> None:
    if library() is None:
        pytest.skip("no native library")
    memory = torch.empty(host_pages.LEAST_BYTES, dtype=torch.uint8)
    memory.view(torch.int64).copy_(torch.arange(memory.numel() // 8))
    calls = 0

    def stopped() -> bool:
        nonlocal calls
        calls += 1
        return calls > 2

    host_pages.gather(memory, stopped)
    assert calls <= 3
    host_pages.gather(memory)
    assert torch.equal(memory.view(torch.int64), torch.arange(memory.numel() // 8))
