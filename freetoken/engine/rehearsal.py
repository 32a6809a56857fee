"""The steps before a first token, rehearsed: their kernels are compiled beside each other, not one by one.

Runs the code of a prompt's and of a decode step's forward on the pages and states that nobody owns, while
launches are taken (`kernels._rehearsal`). Knows no request. Invariant: nothing that serving reads changes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import psutil

from freetoken.core.batch import DUMMY_PAGE, DUMMY_STATE, Segment
from freetoken.core.log import logger
from freetoken.engine.prefill import PrefillJob, split_segments
from freetoken.engine.runner import Runner
from freetoken.engine.scheduler import Scheduler
from freetoken.kernels._rehearsal import Rehearsal, most_workers, rehearse

log = logger("engine")
PREPARING = "preparing kernels for this GPU"
LEAST_FOR_HELPERS = 4
"""A quarter of each compilation holds Python's lock: of so many threads every other one has a process."""
HELPER_BYTES = 400 << 20
"""What such a process may take of the host's memory while it lasts; all of them a quarter of what is free."""


def prepare_kernels(
    runner: Runner,
    scheduler: Scheduler,
    length: int,
    tell: Callable[[str], None] = lambda what: None,
    workers: int | None = None,
    helpers: int | None = None,
) -> Rehearsal | None:
    """Have ready what prompts of `length` tokens, or any other number, and steps of all sizes need.

    Kernels differ by powers of two of their rows, so one step of each size tells of all. What one sequence
    needs is asked for first: where that is on disk, an earlier start has compiled the rest, too.

    tell      hears how many of how many kernels are ready
    workers   threads that compile (default: one a core, up to eight)
    helpers   how many of them may have a process (default: every other one)
    """
    limits = scheduler.limits

    def steps(rehearsal: Rehearsal) -> None:
        one = _dead_prompt(1, limits.page_size)
        runner.rehearse([one])
        if rehearsal.found_all():
            return
        most = max(length, min(limits.chunk_tokens, limits.max_model_len - 1))
        for size in reversed(sizes(most)):
            prompt = _dead_prompt(size, limits.page_size)
            if scheduler.wants_job(size):
                _run_job(PrefillJob(runner, [prompt], limits.chunk_tokens))
            else:
                for chunk in split_segments([prompt], limits.chunk_tokens):
                    runner.rehearse(chunk)
        for rows in sizes(limits.max_running):
            runner.rehearse([one] * rows)

    def count(done: int, of: int) -> None:
        tell(f"{PREPARING} ({done} of {of})")

    workers = workers or most_workers()
    helpers = _helpers(workers) if helpers is None else helpers
    runner.device.rehearsing = True
    try:
        done = rehearse(steps, workers, count, helpers=helpers)
    finally:
        runner.device.rehearsing = False
    if done is not None:
        what = (done.asked, done.compiled, done.helped, done.failed)
        log.debug("%d kernels were asked for ahead, %d compiled, %d by helpers, %d failed", *what)
    return done


def _helpers(workers: int) -> int:
    room: int = psutil.virtual_memory().available // (4 * HELPER_BYTES)
    return min(workers // 2, room) if workers >= LEAST_FOR_HELPERS else 0


def sizes(most: int) -> list[int]:
    """2 to `most`, one for each power of two that a number can be rounded up to."""
    return sorted(
        {size for size in (2, *(3 << power for power in range(most.bit_length())), most) if 2 <= size <= most}
    )


def _dead_prompt(tokens: int, page_size: int) -> Segment:
    """Nobody's prompt: its pages and its state are the dummies."""
    pages = (DUMMY_PAGE,) * (tokens // page_size + 1)
    return Segment(np.zeros(tokens, np.int32), 0, pages, DUMMY_STATE, row=0)


def _run_job(job: PrefillJob) -> None:
    try:
        while job.advance():
            pass
    finally:
        job.close()
