"""What a start took, by part."""

from __future__ import annotations

import threading
import time

import pytest

from freetoken.core.stopwatch import Stopwatch


def test_a_part_entered_twice_is_the_sum_and_counts_when_it_fails() -> None:
    watch = Stopwatch()
    with watch.part("a"):
        time.sleep(0.01)
    with pytest.raises(ValueError), watch.part("a"):
        time.sleep(0.01)
        raise ValueError
    watch.add("b", 2.5)
    assert list(watch.seconds) == ["a", "b"] and watch.seconds["b"] == 2.5
    assert watch.seconds["a"] >= 0.02


def test_threads_add_to_one_part_without_losing_any() -> None:
    watch = Stopwatch()
    threads = [
        threading.Thread(target=lambda: [watch.add("pin", 1.0) for _ in range(2000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert watch.seconds == {"pin": 8000.0}
