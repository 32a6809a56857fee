"""A process that eats host memory bandwidth, for measuring beside it. `python -m freetoken.bench._hammer N`.

Copies between two blocks larger than any cache, in N threads, until it is killed. Needs numpy alone.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

BLOCK_BYTES = 256 << 20


def eat(threads: int, block_bytes: int = BLOCK_BYTES) -> None:
    """Never returns."""

    def copy() -> None:
        source, target = np.ones(block_bytes, np.uint8), np.zeros(block_bytes, np.uint8)
        while True:
            np.copyto(target, source)

    workers = [threading.Thread(target=copy, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


@contextmanager
def hammering(threads: int) -> Iterator[None]:
    """Another process eats bandwidth while the block lasts; 0 threads: nobody does."""
    if not threads:
        yield
        return
    process = subprocess.Popen([sys.executable, "-m", "freetoken.bench._hammer", str(threads)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    eat(int(sys.argv[1]))
