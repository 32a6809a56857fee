"""A decode step of the CPU as one native call: jobs written down while they run, then played again.

A `Tape` writes what one thread hands to the library; a `Program` is the finished list. Doesn't know what the
jobs mean or who owns their memory: whoever records keeps what they point to alive and says whether anything
else happened that the list lacks. Invariant: a tape that was refused becomes no program.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from freetoken.native.ops import Step


def beyond() -> Exception:
    """Why an operation of a layer fails."""
    return IndexError("a position lies beyond the table of angles or pages")


class Program:
    """Jobs with fixed addresses.

    jobs       (function, job, failure) of each
    steps      array of `ft_step`
    failures   by job, what to raise if it fails
    """

    def __init__(self, tape: Tape) -> None:
        self.steps: Any = (Step * len(tape.jobs))(*(Step(run, job) for run, job in tape.addresses()))
        self.failures: Sequence[Callable[[], Exception]] = tuple(failure for _, _, failure in tape.jobs)
        self.jobs = tuple(tape.jobs)
        self._afterwards = tuple(tape.calls)

    def finish(self) -> None:
        """Do what the recorder's callers do after a step."""
        for call in self._afterwards:
            call()


class Tape:
    """What a thread hands to the library, in order.

    refusal   why the step can't be played, empty if it can
    final     whether that will stay so
    """

    def __init__(self) -> None:
        self.jobs: list[tuple[Any, ctypes.Structure, Callable[[], Exception]]] = []
        self.calls: list[Callable[[], None]] = []
        self.refusal, self.final = "", True

    def add(self, run: Any, job: ctypes.Structure, failure: Callable[[], Exception]) -> None:
        self.jobs.append((run, job, failure))

    def afterwards(self, call: Callable[[], None]) -> None:
        """Call this after each playing."""
        self.calls.append(call)

    def refuse(self, what: str, *, final: bool = True) -> None:
        """Something happens that isn't a job."""
        if not self.refusal:
            self.refusal, self.final = what, final

    def addresses(self) -> list[tuple[int, int]]:
        """(function, job) of each."""
        cast, pointer = ctypes.cast, ctypes.c_void_p
        return [(cast(run, pointer).value or 0, ctypes.addressof(job)) for run, job, _ in self.jobs]
