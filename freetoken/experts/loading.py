"""Filling the bank: many jobs, several threads, what somebody waits for first.

A job brings one or a few neighbouring records into their final place: by reading them (FTW) or by packing
what a checkpoint has as matrices. Every thread reads into an arena of its own, so nothing large exists
twice. A layer that is complete is pinned while others still read. The first error ends it, and every wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from freetoken.core.errors import BusyError
from freetoken.core.weights import Biases, CodedMatrix, ExpertSink
from freetoken.experts.bank import ExpertBank
from freetoken.weights.files import Arena, Files, crc32
from freetoken.weights.ftw import damaged
from freetoken.weights.ftw_index import Index, record_name

BLOCK_BYTES = 8 << 20
"""Records are read about this many bytes at a time: enough for any disk, soon enough for who waits."""
THREADS = 8


@dataclass(frozen=True)
class Job:
    """`run` brings records [first, first + count)."""

    first: int
    count: int
    run: Callable[[], None]


class Loading:
    """`start` it, use the bank; `wait` for its end or `stop` it.

    pin     called with each layer's records once they are all there; gives their address on the device
    done    called once at the end, in the last thread: with None, or with what went wrong
    """

    def __init__(
        self,
        bank: ExpertBank,
        jobs: Sequence[Job],
        files: Files,
        *,
        pin: Callable[[Tensor], int] = Tensor.data_ptr,
        done: Callable[[Exception | None], None] = lambda error: None,
    ) -> None:
        self.bank, self._files, self._pin, self._done = bank, files, pin, done
        self._jobs = list(jobs)
        self._job_of = {r: i for i, job in enumerate(jobs) for r in range(job.first, job.first + job.count)}
        self._taken = bytearray(len(jobs))
        self._next = 0
        self._left = [0] * bank.num_layers
        for job in jobs:
            self._left[job.first // bank.num_experts] += job.count
        self._lock = threading.Lock()
        self._stopped = False
        self._threads: list[threading.Thread] = []
        self._working = 0

    @property
    def percent(self) -> int:
        total = self.bank.num_layers * self.bank.num_experts
        return 100 * self.bank.arrivals.num_there // max(total, 1)

    def start(self, threads: int = THREADS) -> None:
        count = self._working = max(1, min(threads, len(self._jobs)))
        for i in range(count):
            thread = threading.Thread(target=self._work, name=f"freetoken-load-{i}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def wait(self, progress: Callable[[int], None] = lambda percent: None) -> None:
        """Block until every record is there; raises what went wrong."""
        for thread in self._threads:
            while thread.is_alive():
                progress(self.percent)
                thread.join(0.1)
        if self.bank.arrivals.error is not None:
            raise self.bank.arrivals.error

    def stop(self) -> None:
        """End after the jobs under way; whoever waits for more is told so. Idempotent."""
        self._stopped = True
        if not self.bank.arrivals.complete:
            self.bank.arrivals.fail(BusyError("The model is being closed.", code="draining"))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _take(self) -> Job | None:
        """The job that somebody waits for, else the next one."""
        with self._lock:
            wanted = self.bank.arrivals.next_wanted()
            while wanted is not None:
                number = self._job_of[wanted]
                if not self._taken[number]:
                    self._taken[number] = 1
                    return self._jobs[number]
                wanted = self.bank.arrivals.next_wanted()
            while self._next < len(self._jobs) and self._taken[self._next]:
                self._next += 1
            if self._stopped or self._next == len(self._jobs):
                return None
            self._taken[self._next] = 1
            return self._jobs[self._next]

    def _work(self) -> None:
        arena = Arena()
        try:
            while not self._stopped and self.bank.arrivals.error is None:
                job = self._take()
                if job is None:
                    break
                with self._files.reading(arena):
                    job.run()
                arena.reset()
                self._arrived(job)
        except Exception as error:  # the boundary: whoever waits must hear of it
            self.bank.arrivals.fail(error)
        finally:
            with self._lock:
                self._working -= 1
                last = not self._working
            if last and not self._stopped:
                self._done(self.bank.arrivals.error)

    def _arrived(self, job: Job) -> None:
        layer = job.first // self.bank.num_experts
        self.bank.arrivals.arrived(job.first, job.count)
        with self._lock:
            self._left[layer] -= job.count
            complete = not self._left[layer]
        if complete:
            self.bank.address(layer, self._pin)


def hottest_first(jobs: Sequence[Job], order: Sequence[int]) -> list[Job]:
    """Jobs in the order of the hottest record that each brings; those without one follow as they were."""
    place = {record: i for i, record in enumerate(order)}

    def heat(job: Job) -> int:
        return min(place.get(record, len(place)) for record in range(job.first, job.first + job.count))

    return sorted(jobs, key=heat)


def record_jobs(bank: ExpertBank, index: Index, directory: Path, files: Files) -> list[Job]:
    """Jobs that read an FTW directory's records, each checked against its checksum."""
    jobs = []
    for layer, one in enumerate(index.layers):
        step = max(1, BLOCK_BYTES // one.record_bytes)
        for run in one.runs:
            path = directory / index.shards[run.shard].file
            for i in range(0, run.count, step):
                experts = range(run.first + i, run.first + min(i + step, run.count))
                offset = run.offset + i * one.record_bytes
                read = _RecordRead(bank, one.crcs, layer, experts, path, offset, files)
                jobs.append(Job(layer * bank.num_experts + experts.start, len(experts), read))
    return jobs


@dataclass(frozen=True)
class _RecordRead:
    bank: ExpertBank
    crcs: tuple[int, ...]
    layer: int
    experts: range
    path: Path
    offset: int
    files: Files

    def __call__(self) -> None:
        rows = self.bank.layer(self.layer)[self.experts.start : self.experts.stop]
        self.files.read_into(self.path, self.offset, rows.view(-1))
        for expert, record in zip(self.experts, rows, strict=True):
            if crc32(record) != self.crcs[expert]:
                name = record_name(self.layer, expert)
                raise damaged(name[0].upper() + name[1:], self.path.name)


class Deferred(ExpertSink):
    """Collects experts as jobs instead of packing them, so that threads can do the work."""

    def __init__(self, bank: ExpertBank) -> None:
        self.bank = bank
        self.jobs: list[Job] = []

    def put(
        self, layer: int, expert: int, gate: Tensor, up: Tensor, down: Tensor, biases: Biases | None = None
    ) -> None:
        self.bank.put(layer, expert, gate, up, down, biases)

    def codes(self, layer: int) -> str:
        return self.bank.codes(layer)

    def put_coded(
        self,
        layer: int,
        expert: int,
        matrices: tuple[CodedMatrix, CodedMatrix, CodedMatrix],
        biases: Biases | None = None,
    ) -> None:
        self.bank.put_coded(layer, expert, matrices, biases)

    def defer(self, layer: int, expert: int, fill: Callable[[ExpertSink], None]) -> None:
        record = layer * self.bank.num_experts + expert
        self.jobs.append(Job(record, 1, lambda: fill(self.bank)))
